"""The driver of `bash .ci/gpu`: what ends one check is a row, and the others go on."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.tools.gpu.driver import CHECKS, MOST_LINES, Check, Run, drive


def fine(run: Run) -> None:
    run.row("fine", 2, 3)


def wrong(run: Run) -> None:
    with run.guarded("inside"):
        raise ValueError("many\nlines")
    run.row("after", 1.0, 1.5, ok=False, place="x|y")


def raising(run: Run) -> None:
    run.row("before")
    raise RuntimeError("broken")


def crashing(run: Run) -> None:
    run.row("before")
    os.kill(os.getpid(), signal.SIGKILL)


def hanging(run: Run) -> None:
    run.row("before")
    time.sleep(60)


def without_names(run: Run) -> None:
    run.row("_name", verdict="failed: missing in this torch")
    sys.exit(3)


def many(run: Run) -> None:
    for number in range(100):
        run.row(f"row {number}", ok=number != 50)


def _checks(*functions: str) -> list[Check]:
    return [Check(n, name, f"{__name__}:{name}", 1, 1, stand_ins=False) for n, name in enumerate(functions, start=1)]


def _verdicts(out: Path) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for row in json.loads((out / "results.json").read_text(encoding="utf-8")):
        rows.setdefault(row["check"], []).append(row["verdict"])
    return rows


def test_what_ends_one_check_does_not_end_the_others(tmp_path: Path) -> None:
    assert drive(_checks("crashing", "hanging", "raising", "wrong", "fine"), tmp_path, cpu=False) == 0
    assert _verdicts(tmp_path) == {
        "1 crashing": ["ok", "failed: signal 9"],
        "2 hanging": ["ok", "failed: over its 1 s"],
        "3 raising": ["ok", "failed: RuntimeError: broken"],
        "4 wrong": ["failed: ValueError: lines", "off"],
        "5 fine": ["ok"],
    }
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| 5 fine | fine | 2 | 3 | 1.5 | ok |" in table and "place x/y" in table
    assert "RuntimeError: broken" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_without_the_names_of_torch_nothing_else_runs(tmp_path: Path) -> None:
    assert drive(_checks("without_names", "fine"), tmp_path, cpu=False) == 3
    assert list(_verdicts(tmp_path)) == ["1 without_names"]


def test_a_long_table_is_shortened_to_what_is_off(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    drive(_checks("many"), tmp_path, cpu=False)
    printed = capfd.readouterr().out.partition("\n\n")[2].splitlines()
    assert len(printed) == MOST_LINES and "| row 50 |" in "".join(printed)
    assert len((tmp_path / "table.md").read_text(encoding="utf-8").splitlines()) == 102


def test_the_budgets_are_those_of_ten_minutes_with_a_gpu() -> None:
    assert sum(check.seconds for check in CHECKS) <= 450
    assert {check.number for check in CHECKS} == set(range(11))
