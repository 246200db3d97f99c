"""The driver of `bash .ci/gpu`: what ends one check is a row, and the others go on."""

import json
import os
import signal
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.gpu import driver
from tests.tools.gpu.driver import CHECKS, MOST_ARCHIVED, MOST_PRINTED, WARM_UP, Check, Run, drive


def fine(run: Run) -> None:
    run.row("fine", 2, 3, "ms")


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
    for number in range(150):
        run.row(f"check {number}")
        run.row(f"time {number}", None, number, "ms", more="x" * 200)
    with run.guarded("inside"):
        raise ValueError("broken")


def seen(run: Run) -> None:
    run.row("first")
    run.row("second", ok=_until(lambda: '"first"' in (run.out / "results.json").read_text(encoding="utf-8")))


def keeping(run: Run) -> None:
    for name, size in (("a", 50_000), ("b", 50_000), ("c", 10)):
        run.keep(name, os.urandom(size))


def waiting_for_an_import(run: Run) -> None:
    run.row("imported", ok=_until((run.out.parent / "imported").exists))


def _until(condition: Callable[[], bool]) -> bool:
    ends = time.monotonic() + 20
    while not condition() and time.monotonic() < ends:
        time.sleep(0.02)
    return condition()


def _checks(*functions: str) -> list[Check]:
    return [Check(n, name, f"{__name__}:{name}", 1, 1) for n, name in enumerate(functions, start=1)]


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
    assert "| 5 fine | fine | ms | 2 | 3 | 1.5 | ok |" in table and "place x/y" in table
    assert "RuntimeError: broken" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_without_the_names_of_torch_nothing_else_runs(tmp_path: Path) -> None:
    assert drive(_checks("without_names", "fine"), tmp_path, cpu=False) == 3
    assert list(_verdicts(tmp_path)) == ["1 without_names"]


def test_of_a_long_table_the_measured_rows_are_printed_first_and_no_failure_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drive(_checks("many"), tmp_path, cpu=False)
    printed = capfd.readouterr().out
    lines = printed.partition("\n\n")[2].splitlines()
    assert MOST_PRINTED - 200 < len(printed) <= MOST_PRINTED
    assert [line.split(":")[0] for line in lines[:100]] == [f"1 time {number}" for number in range(100)]
    assert lines[-2:] == ["1 inside: failed: ValueError: broken", f"{301 - len(lines) + 1} more rows: see table.md"]
    assert len((tmp_path / "table.md").read_text(encoding="utf-8").splitlines()) == 303


def test_rows_are_in_the_results_at_once_and_what_is_as_predicted_is_printed_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drive([replace(check, seconds=30) for check in _checks("seen", "wrong", "fine")], tmp_path, cpu=False)
    assert _verdicts(tmp_path)["1 seen"] == ["ok", "ok"]
    lines = capfd.readouterr().out.partition("\n\n")[2].splitlines()
    assert [line.partition(":")[0] for line in lines] == ["3 fine", "2 inside", "2 after", "1 first", "1 second"]
    page = (tmp_path / "predicted.md").read_text(encoding="utf-8")
    assert page.endswith("| 3 fine | fine | ms | 2 | 3 | +50.0 |\n") and "after" not in page


def test_what_the_archive_cannot_take_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MOST_ARCHIVED", 80_000)
    drive(_checks("keeping", "fine"), tmp_path, cpu=False)
    with tarfile.open(tmp_path / "archive.tar") as archive:
        assert archive.getnames() == ["1-a.gz", "1-c.gz"]
    assert (tmp_path / "archive.tar").stat().st_size <= 80_000 < MOST_ARCHIVED == 16 << 20
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert (
        "| 1 keeping | b.gz | bytes |  | 50," in table and "| skipped: left out, since archive.tar is full |" in table
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        *("archive.tar", "log.txt", "predicted.md", "results.json", "table.md")  # and rates.json of check 0
    }


def test_a_check_imports_while_the_one_before_runs_and_outside_of_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "import pathlib, time; time.sleep(1.2); pathlib.Path(__file__).with_name('imported').touch()"
    (tmp_path / "slow_to_import.py").write_text(
        f"{lines}\ncheck = lambda run: (time.sleep(0.2), run.row(''))\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (first,) = _checks("waiting_for_an_import")
    drive([replace(first, seconds=30), Check(2, "late", "slow_to_import:check", seconds=1)], tmp_path / "out", cpu=False)
    assert _verdicts(tmp_path / "out") == {"1 waiting_for_an_import": ["ok"], "2 late": ["ok"]}


def test_the_checks_are_ordered_by_value_and_their_budgets_leave_room_for_a_second_run() -> None:
    assert [check.name for check in CHECKS] == [
        *("rates", "peaks", "step time", "bitwise", "pretrain", "split sequences", "exchange of experts", "compiled"),
        *("offload", "FSDP2", "loss", "out of memory", "float8", "verification"),
    ]
    assert [check.number for check in CHECKS] == list(range(len(CHECKS)))
    assert sum(check.seconds for check in CHECKS) <= 500 and WARM_UP not in CHECKS


def test_with_the_same_bits_torch_does_not_only_warn_and_the_kernel_of_attention_is_named() -> None:
    import torch  # not at the top: each process above would import it

    from tests.tools.gpu.machine import Machine

    machine = Machine(True)
    x = machine.normal(1, 2, 8, 16)
    machine.same_bits(True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        machine.same_bits(False)
    _, name = machine.attention(lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x))
    assert name == "_scaled_dot_product_flash_attention_for_cpu"
