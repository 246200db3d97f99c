"""The suite of published rows: all of them are read, and the first ones predicted within what its page says."""

from __future__ import annotations

import pytest

from nemo_like.bench.suite_published import predicted, published_device, published_rows

pytest.importorskip("transformers")


def test_every_published_row_is_read():
    rows = published_rows()
    assert len(rows) == 18 and {row["model"] for row in rows} == {"llama3-8b", "llama3-70b", "llama3-405b"}


def test_the_first_row_is_predicted():
    """8B on eight GPUs, eager, in bfloat16: nothing of it is left out of the prediction."""
    row = predicted(published_rows()[0])
    assert row["left_out"] is None
    assert abs(row["memory_off"]) <= 0.05
    assert abs(row["speed_off"]) <= 0.15


def test_rows_with_stages_are_printed_without_a_prediction():
    row = predicted(published_rows()[-1])
    assert row["left_out"] == "pp" and row["published_reserved_gib"] == 84.9 and "tokens_per_second" not in row


def test_the_device_is_that_of_the_page():
    device = published_device()
    assert device.memory_bytes == 96_000_000_000 and device.bandwidth == pytest.approx(2.4e12 * 0.84)


def test_their_eager_selective_checkpointing_keeps_a_product_that_nobody_reads():
    """Row one has two sequences of 8,192 tokens in 32 layers of 4,096 features: 128 MiB each."""
    rows = published_rows()
    eager, compiled = (predicted(row) for row in rows[:2])
    assert eager["peak_gib"] - compiled["peak_gib"] == pytest.approx(32 * 128 / 1024, abs=1e-3)
    assert eager["reserved_gib"] > compiled["reserved_gib"]
    assert all(abs(row["memory_off"]) <= 0.05 for row in (eager, compiled))
