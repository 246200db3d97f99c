"""Runs the checks one after the other, each in a process of its own, and writes the table after each."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLUMNS = ("check", "mode", "predicted", "measured", "ratio", "verdict", "seconds", "more")
MOST_LINES = 60
"""Lines of the table that is printed last: the whole is in ``table.md``."""
MISSING = 3
"""Exit code of a check after which no other one makes sense: torch has not the names that the package uses."""


@dataclass(frozen=True)
class Check:
    """One check, and the seconds that it may take on a GPU, and on a CPU that others use, too."""

    number: int
    name: str
    function: str
    """``module:function``, which is called with a `Run`."""
    seconds: int
    cpu_seconds: int = 300
    environment: Mapping[str, str] = field(default_factory=dict)
    stand_ins: bool = True
    """Put what torch 2.11 lacks in place first."""


_HERE = "tests.tools.gpu"
_SAME = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What cuBLAS requires to give the same bits in each run."""
CHECKS = (
    Check(0, "preflight", f"{_HERE}.preflight:check", 25),
    Check(1, "kernels", f"{_HERE}.kernels:check", 25),
    Check(2, "bitwise", f"{_HERE}.bitwise:check", 60, environment=_SAME),
    Check(3, "verification", f"{_HERE}.bitwise:verification", 25, environment=_SAME),
    Check(4, "plan", f"{_HERE}.memory:check", 60),
    Check(
        4,
        "plan, expandable",
        f"{_HERE}.memory:expandable",
        25,
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    ),
    Check(5, "step time", f"{_HERE}.speed:check", 85),
    Check(6, "loss", f"{_HERE}.kernels:loss", 30),
    Check(7, "offload", f"{_HERE}.speed:offload", 35, environment=_SAME),
    Check(8, "split sequences", f"{_HERE}.ranks:sequences", 30),
    Check(9, "FSDP2", f"{_HERE}.ranks:check", 30, environment=_SAME),
    Check(10, "snapshots", f"{_HERE}.memory:snapshots", 20),
)
"""The cheapest and most informative come first. The seconds on a GPU are 450 in all; each process starts in 5 to 10."""


class Run:
    """What a check is given: where it runs, and where its rows go."""

    def __init__(self, check: Check, cpu: bool, out: Path, rows: Path) -> None:
        self.check, self.cpu, self.out = check, cpu, out
        self._rows, self._since = rows, time.monotonic()

    def row(
        self,
        mode: str,
        predicted: Any = None,
        measured: Any = None,
        *,
        ratio: float | None = None,
        ok: bool = True,
        verdict: str = "",
        **more: Any,
    ) -> None:
        """Write one row. `ratio`: default measured / predicted, where both are numbers; `ok`: the prediction holds."""
        both = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (predicted, measured))
        if ratio is None and both and predicted:
            ratio = measured / predicted
        verdict = verdict or ("ok" if ok else "off")
        row = _row(self.check, self._since, verdict, mode, predicted, measured, ratio, more)
        self._since = time.monotonic()
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=str) + "\n")

    def skip(self, mode: str, why: str) -> None:
        """Write a row of something that cannot run here."""
        self.row(mode, verdict=f"skipped: {why}")

    @contextlib.contextmanager
    def guarded(self, mode: str) -> Iterator[None]:
        """An error inside is a row, and the check goes on with its next mode."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a GPU may raise
            traceback.print_exc()
            # Frames would keep the tensors of a mode that ran out of memory.
            traceback.clear_frames(error.__traceback__)
            self.row(mode, verdict=f"failed: {_last_line(error)}")


def _row(
    check: Check,
    since: float,
    verdict: str,
    mode: str = "",
    predicted: Any = None,
    measured: Any = None,
    ratio: float | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a row as it is written; `since`: when what it is about began."""
    seconds = round(time.monotonic() - since, 1)
    name = f"{check.number} {check.name}"
    return dict(zip(COLUMNS, (name, mode, predicted, measured, ratio, verdict, seconds, more or {})))


def _last_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # Dynamo's own text ends with advice
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:200]


def _child(check: Check, cpu: bool, out: Path, rows: Path) -> None:
    """Run one check: the target of its process."""
    os.setsid()  # so that processes which it starts end with it
    log = os.open(out / "log.txt", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(check.environment)  # before torch is imported, which reads the allocator's settings
    run = Run(check, cpu, out, rows)
    code = 1
    try:
        if check.stand_ins:
            importlib.import_module(f"{_HERE}.torch_2_11").put_in_place()
        module, _, name = check.function.partition(":")
        getattr(importlib.import_module(module), name)(run)
        code = 0
    except Exception as error:  # noqa: BLE001 - it is a row
        traceback.print_exc()
        run.row("", verdict=f"failed: {_last_line(error)}")
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's end: a hung NCCL or inductor worker would keep it.
    if code == 0:
        os._exit(0)
    sys.exit(code)


@dataclass
class _Started:
    check: Check
    process: Any
    rows: Path
    since: float

    def ended(self, cpu: bool) -> list[dict[str, Any]] | None:
        """Return its rows once it has ended or is over its budget; None: it still runs."""
        budget, late = (self.check.cpu_seconds if cpu else self.check.seconds), ""
        if self.process.is_alive():
            if time.monotonic() - self.since < budget:
                return None
            late = f"over its {budget} s"
            self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            # Workers of compilers; its number is not given away before `join`.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        lines = self.rows.read_text(encoding="utf-8").splitlines() if self.rows.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        code = self.process.exitcode
        if code and code != MISSING and not any(row["mode"] == "" for row in rows):
            why = late or (f"signal {-code}" if code < 0 else f"exit code {code}")
            rows.append(_row(self.check, self.since, f"failed: {why}"))
        return rows


def drive(checks: Sequence[Check], out: Path, cpu: bool) -> int:
    """Run `checks` and write their rows; return the exit code. On the CPU two run at a time, and all are forks."""
    out.mkdir(parents=True, exist_ok=True)
    if cpu:
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # two processes on two cores
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # offloading would take a GPU that is there
        # Importing takes 7 s. A process that has touched a GPU cannot be forked, so there each check imports for itself.
        importlib.import_module(f"{_HERE}.machine")
    context = multiprocessing.get_context("fork" if cpu else "spawn")
    waiting, running, table, code = list(enumerate(checks)), list[_Started](), list[dict[str, Any]](), 0
    while waiting or running:
        alone = bool(running) and running[0].check.number == 0  # without the names nothing else makes sense
        while waiting and not alone and len(running) < (2 if cpu else 1):
            index, check = waiting.pop(0)
            rows = out / f".rows-{index}"
            rows.unlink(missing_ok=True)
            process: Any = context.Process(target=_child, args=(check, cpu, out, rows))  # type: ignore[attr-defined]
            process.start()
            running.append(_Started(check, process, rows, time.monotonic()))
            alone = check.number == 0
        time.sleep(0.05)
        for started in list(running):
            ended = started.ended(cpu)
            if ended is None:
                continue
            running.remove(started)
            started.rows.unlink(missing_ok=True)
            table = sorted([*table, *ended], key=lambda row: int(row["check"].split()[0]))
            _write(out, table)
            print("\n".join(map(_line, ended)), flush=True)
            if started.process.exitcode == MISSING:
                waiting, code = [], MISSING
    print("\n".join(["", *_shortened(table)]), flush=True)
    failed = any(row["verdict"].startswith("failed") for row in table)
    return code or int(cpu and failed)


def _write(out: Path, table: list[dict[str, Any]]) -> None:
    for name, text in (("table.md", "\n".join(_lines(table))), ("results.json", json.dumps(table, indent=1))):
        (out / f".{name}").write_text(text + "\n", encoding="utf-8")
        (out / f".{name}").replace(out / name)  # whole at any moment


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).replace("|", "/")


def _line(row: Mapping[str, Any]) -> str:
    return f"| {' | '.join(_cell(row[name]) for name in COLUMNS)} |"


def _lines(table: Sequence[Mapping[str, Any]]) -> list[str]:
    return [_line({name: name for name in COLUMNS}), "|---" * len(COLUMNS) + "|", *map(_line, table)]


def _shortened(table: list[dict[str, Any]]) -> list[str]:
    """Return the table in `MOST_LINES`: what is as predicted goes first."""
    left = len(table) + 3 - MOST_LINES
    if left <= 0:
        return _lines(table)
    fine = [id(row) for row in table if row["verdict"] == "ok"][-left:]
    shown = [row for row in table if id(row) not in fine]
    return [*_lines(shown)[: MOST_LINES - 1], f"{len(table) - len(shown)} more rows are ok: see table.md"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line requests; return the exit code."""
    parser = argparse.ArgumentParser(prog="bash .ci/gpu", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--only", default="", help="numbers of checks, such as 2,5")
    parser.add_argument("--out", default=os.environ.get("OUT"), help="folder of the results; default: $OUT")
    options = parser.parse_args(arguments)
    if not options.out:
        parser.error("no folder for the results: set OUT, or use --out FOLDER.")
    wanted = {int(number) for number in options.only.split(",") if number}
    unknown = wanted - {check.number for check in CHECKS}
    if unknown:
        parser.error(f"--only names {min(unknown)}; the checks are 0 to {CHECKS[-1].number}.")
    checks = [check for check in CHECKS if not wanted or check.number in wanted]
    return drive(checks, Path(options.out).resolve(), options.cpu)
