"""The suite of published rows: all of them are read, and predicted within what its page says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.tools.benchmarks.published import predicted, published_device, published_rows

pytest.importorskip("transformers")


def test_every_published_row_is_read():
    rows = published_rows()
    assert len(rows) == 18 and {row["model"] for row in rows} == {"llama3-8b", "llama3-70b", "llama3-405b"}
    assert len(published_rows("h200")) == 2


def test_the_device_is_that_of_the_page():
    device = published_device()
    assert device.memory_bytes == 96_000_000_000 and device.bandwidth == pytest.approx(2.4e12 * 0.84)


def test_their_eager_selective_checkpointing_keeps_a_product_that_nobody_reads():
    """Row one has two sequences of 8,192 tokens in 32 layers of 4,096 features: 128 MiB each."""
    eager, compiled = (predicted(row) for row in published_rows()[:2])
    assert eager["left_out"] is None
    assert eager["peak_gib"] - compiled["peak_gib"] == pytest.approx(32 * 128 / 1024, abs=1e-3)
    _assert_near([eager, compiled], memory=0.05, speed=0.15)
    _assert_order([eager, compiled], "tokens_per_second")
    _assert_order([eager, compiled], "reserved_gib")


@pytest.mark.long
def test_sums_that_run_beside_products_are_faster():
    """70B with sequences, norms and logits in parts: theirs, and ours."""
    rows = [predicted(row) for row in published_rows()[10:12]]
    _assert_near(rows, memory=0.08, speed=0.15)
    _assert_order(rows, "tokens_per_second")


@pytest.mark.long
def test_stages_that_share_sequences_between_hosts_are_predicted():
    """405B with `cp` of 1 and 4: under `torch.compile` the ring runs beside nothing."""
    rows = [predicted(published_rows()[number]) for number in (14, 16)]
    _assert_near(rows, memory=0.05, speed=0.05)
    _assert_order(rows, "tokens_per_second")


@pytest.mark.long
def test_two_stages_on_a_rank_take_less_than_one():
    """405B: gradients of a rank's second stage are reduced before those of its first one come."""
    rows = [predicted(row) for row in published_rows()[12:14]]
    _assert_order(rows, "tokens_per_second")
    _assert_order(rows, "reserved_gib")
    _assert_near(rows, memory=0.11, speed=0.06)


@pytest.mark.long
def test_all_rows_are_near_and_the_speeds_in_order():
    """The bounds are what the page says is left over."""
    rows = [predicted(row) for row in published_rows()]
    _assert_near(rows, memory=0.13, speed=0.28)
    for table in (rows[:3], rows[3:7], rows[7:10], rows[10:12], rows[12:14], rows[14:]):
        _assert_order(table, "tokens_per_second")
        by_memory = sorted(table, key=lambda row: row["published_reserved_gib"])
        for less, more in itertools.pairwise(by_memory):  # equal ones are not told apart
            assert less["reserved_gib"] <= more["reserved_gib"] + 0.1, (less, more)
    _assert_near([*rows[:4], *rows[7:10]], memory=0.05, speed=0.05)  # one model on one axis
    _assert_near([*rows[:5], *rows[7:]], memory=0.13, speed=0.15)  # all but long rings within a host
    _assert_near([predicted(row, "h200") for row in published_rows("h200")], memory=0.11, speed=0.18)


def _assert_near(rows: list[dict[str, Any]], *, memory: float, speed: float) -> None:
    for row in rows:
        assert abs(row["memory_off"]) <= memory, row
        assert abs(row["speed_off"]) <= speed, row


def _assert_order(rows: list[dict[str, Any]], what: str) -> None:
    """The rows stand in the same order by what is predicted as by what was published."""
    numbers = range(len(rows))
    assert sorted(numbers, key=lambda n: rows[n][what]) == sorted(numbers, key=lambda n: rows[n][f"published_{what}"])
