"""The suite of public numbers: all rows are read, and some of each kind are predicted as its page says."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.tools.benchmarks.public_numbers import OOM, all_rows, compared, page, published_speed, summary

pytest.importorskip("transformers")
pytest.importorskip("torchao.float8")

ROWS = {row.id: row for row in all_rows()}


def test_every_row_of_every_file_is_read() -> None:
    assert Counter(name[0] for name in ROWS) == {"A": 18, "B": 2, "C": 31, "N": 24}
    assert sum(row.memory_kind == OOM for row in ROWS.values()) == 6
    assert all(row.dp_replicate * row.dp_shard * row.tp * row.cp * row.pp == row.gpus for row in ROWS.values())


def test_a_row_with_flops_is_turned_into_tokens() -> None:
    # 400 TFLOP/s over 6 x 405.85e9 + 6 x 126 x 16,384 x 8,192 FLOPs for a token.
    assert published_speed(ROWS["C24"]) == pytest.approx(400e12 / (6 * 405.853e9 + 6 * 126 * 16_384 * 8192), rel=1e-3)


def test_a_compiled_step_and_one_that_ran_out_of_memory() -> None:
    lines = [compared(ROWS[name]) for name in ("A2", "N5")]
    assert abs(lines[0]["memory_off"]) < 0.05 and abs(lines[0]["speed_off"]) < 0.05
    assert lines[1]["verdict"] == "too large"
    assert "Out of memory: 1 of 1 said." in summary(lines) and "| A2 |" in page(lines)


def test_a_row_that_is_refused_is_in_the_table() -> None:
    def refuse(row: object) -> None:
        raise ValueError("no such step")

    line = compared(ROWS["A2"], refuse)  # type: ignore[arg-type]
    assert line["refused"] == "ValueError: no such step" and line["published_gib"] == 77.0
