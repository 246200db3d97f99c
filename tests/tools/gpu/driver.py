"""Runs the checks one after the other, each in a process of its own, and writes the table after each."""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLUMNS = ("check", "mode", "unit", "predicted", "measured", "ratio", "verdict", "seconds", "more")
MOST_PRINTED = 11_000
"""Characters in all: a machine may return the last 12,000. The whole table is in ``table.md``."""
MOST_ARCHIVED = 16 << 20
"""Bytes of ``archive.tar``, which has the traces and snapshots: a machine may return 8 files of that size."""
MOST_IMPORTING = 120
"""Seconds in which a process must have imported, which is outside of its budget."""
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


_HERE = "tests.tools.gpu"
_SAME = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What cuBLAS requires to give the same bits in each run."""
WARM_UP = Check(0, "warm-up", f"{_HERE}.preflight:warm_up", 120)
"""Reads torch's libraries from a cold disk, outside of the budgets. On a CPU the driver itself has imported."""
CHECKS = (
    Check(0, "rates", f"{_HERE}.preflight:check", 30),
    Check(1, "peaks", f"{_HERE}.memory:check", 70),
    Check(2, "step time", f"{_HERE}.speed:check", 55),
    Check(3, "bitwise", f"{_HERE}.bitwise:check", 50, environment=_SAME),
    Check(4, "pretrain", f"{_HERE}.recipe:check", 40),
    Check(5, "split sequences", f"{_HERE}.ranks:sequences", 30),
    Check(6, "exchange of experts", f"{_HERE}.ranks:experts", 20),
    Check(7, "compiled", f"{_HERE}.speed:compiled", 60),
    Check(8, "offload", f"{_HERE}.speed:offload", 25, environment=_SAME),
    Check(9, "FSDP2", f"{_HERE}.ranks:check", 25, environment=_SAME),
    Check(10, "loss", f"{_HERE}.speed:loss", 25),
    Check(11, "out of memory", f"{_HERE}.memory:out_of_memory", 30),
    Check(12, "float8", f"{_HERE}.speed:float8", 15),
    Check(13, "verification", f"{_HERE}.bitwise:verification", 25, environment=_SAME),
)
"""The most valuable come first, so that a run which ends early has measured most. The seconds on a GPU are 500 in all."""


class Run:
    """What a check is given: where it runs, and where its rows and files go."""

    def __init__(self, check: Check, cpu: bool, out: Path, folder: Path) -> None:
        self.check, self.cpu, self.out, self.folder = check, cpu, out, folder
        self.since = time.monotonic()

    def keep(self, name: str, content: bytes) -> int:
        """Put a file into the archive, and return the bytes that it takes there."""
        packed = gzip.compress(content, 1)  # level 9 takes ten times as long for a tenth less
        (self.folder / f"{name}.gz").write_bytes(packed)
        return len(packed)

    def row(
        self,
        mode: str,
        predicted: Any = None,
        measured: Any = None,
        unit: str = "",
        *,
        ok: bool = True,
        verdict: str = "",
        **more: Any,
    ) -> None:
        """Write one row as soon as it is measured. `unit`: of a quantity; `ok`: the prediction holds."""
        verdict = verdict or ("ok" if ok else "off")
        row = _row(self.check, self.since, verdict, mode, unit, predicted, measured, more)
        self.since = time.monotonic()
        with (self.folder / "rows").open("a", encoding="utf-8") as file:
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
    unit: str = "",
    predicted: Any = None,
    measured: Any = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a row as it is written; `since`: when what it is about began."""
    both = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (predicted, measured))
    ratio = measured / predicted if both and predicted else None
    seconds = round(time.monotonic() - since, 1)
    name = f"{check.number} {check.name}"
    return dict(zip(COLUMNS, (name, mode, unit, predicted, measured, ratio, verdict, seconds, more or {})))


def _last_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # Dynamo's own text ends with advice
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:200]


def _child(check: Check, cpu: bool, out: Path, folder: Path, pipe: Any) -> None:
    """Run one check: the target of its process. It imports while the check before runs, and waits for its turn."""
    os.setsid()  # so that processes which it starts end with it
    log = os.open(out / "log.txt", os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(check.environment)  # before torch is imported, which reads the allocator's settings
    run = Run(check, cpu, out, folder)
    code = 1
    try:
        if check.function.startswith(_HERE):  # not of a test
            importlib.import_module(f"{_HERE}.torch_2_11").put_in_place()
        module, _, name = check.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        pipe.send("imported")
        pipe.recv()
        run.since, cpu_before = time.monotonic(), time.process_time()
        function(run)
        print(f"{check.name}: {time.process_time() - cpu_before:.1f} s of CPU time")
        code = 0
    except SystemExit as error:
        code = MISSING if error.code == MISSING else 1
    except Exception as error:  # noqa: BLE001 - it is a row
        traceback.print_exc()
        run.row("", verdict=f"failed: {_last_line(error)}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the interpreter's end: a hung NCCL or inductor worker would keep it


@dataclass
class _Started:
    check: Check
    process: Any
    folder: Path
    pipe: Any
    budget: int
    created: float = field(default_factory=time.monotonic)
    began: float | None = None

    @classmethod
    def of(cls, check: Check, cpu: bool, out: Path, folder: Path) -> _Started:
        """Start the process of `check`, which imports."""
        folder.mkdir()
        context: Any = multiprocessing.get_context("fork" if cpu else "spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=_child, args=(check, cpu, out, folder, other))
        process.start()
        other.close()  # so that a process which ends while it imports is noticed
        return cls(check, process, folder, pipe, check.cpu_seconds if cpu else check.seconds)

    @property
    def seconds(self) -> float:
        """Seconds since it began, or since its process was started."""
        return time.monotonic() - (self.began or self.created)

    def begin(self) -> None:
        """Let the check run if it has imported: its budget begins now."""
        if self.began is None and self.pipe.poll():
            with contextlib.suppress(EOFError, OSError):  # it has ended: `ended` writes the row
                self.pipe.recv()
                self.pipe.send("begin")
            self.began = time.monotonic()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows so far."""
        path = self.folder / "rows"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def ended(self) -> bool:
        """Return whether it has ended or is over its budget, with the row of that."""
        late = ""
        if self.process.is_alive():
            waits = self.began is None and self.pipe.poll()  # it has imported
            limit = MOST_IMPORTING if self.began is None else self.budget
            if waits or self.seconds < limit:
                return False
            late = f"over its {limit} s" + " of importing" * (self.began is None)
        self.kill()
        code = self.process.exitcode
        if code and code != MISSING and not any(row["mode"] == "" for row in self.rows()):
            why = late or (f"signal {-code}" if code < 0 else f"exit code {code}")
            self._add(_row(self.check, self.began or self.created, f"failed: {why}"))
        return True

    def kill(self) -> None:
        """End it, and the processes that it started."""
        if self.process.is_alive():
            self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            # Workers of compilers; its number is not given away before `join`.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

    def archive(self, out: Path) -> None:
        """Put the files that it kept into the archive; what does not fit is a row."""
        target = out / "archive.tar"
        for path in sorted(self.folder.glob("*.gz")):
            size = path.stat().st_size
            # A header and padding of 512 bytes each; the end of a tar is rounded to 10,240.
            if size + 1024 + 10_240 + (target.stat().st_size if target.exists() else 0) > MOST_ARCHIVED:
                verdict = "skipped: left out, since archive.tar is full"
                self._add(_row(self.check, time.monotonic(), verdict, path.name, "bytes", None, size))
                continue
            with tarfile.open(target, "a") as archive:
                archive.add(path, f"{self.check.number}-{path.name}")

    def _add(self, row: Mapping[str, Any]) -> None:
        with (self.folder / "rows").open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(row) + "\n")  # the last line of a killed process may be half


def drive(checks: Sequence[Check], out: Path, cpu: bool) -> int:
    """Run `checks` and write their rows; return the exit code. On the CPU two run at a time, and all are forks.

    Two processes exist at any time: on a GPU the second imports and waits for its turn.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "archive.tar").unlink(missing_ok=True)
    if cpu:
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # two processes on two cores
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # offloading would take a GPU that is there
        # Importing takes 7 s. A process that has touched a GPU cannot be forked, so there each check imports for itself.
        importlib.import_module(f"{_HERE}.machine")
        gc.freeze()  # a collection takes 0.5 s with all modules, and there are 60
    waiting, running, table, code = list(enumerate(checks)), list[_Started](), list[dict[str, Any]](), 0
    left, known = MOST_PRINTED, -1
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < 2:
                index, check = waiting.pop(0)
                running.append(_Started.of(check, cpu, out, Path(scratch, str(index))))
            # Without the names that check 0 looks for nothing else makes sense.
            for started in running[: 2 if cpu and running[0].check.number else 1]:
                started.begin()
            time.sleep(0.05)
            for started in [each for each in running if each.ended()]:
                running.remove(started)
                started.archive(out)
                rows = started.rows()
                table += rows
                bad = sum(row["verdict"] != "ok" for row in rows)
                left -= _say(f"{started.check.name}: {len(rows)} rows, {bad} not ok, {started.seconds:.0f} s")
                if started.process.exitcode == MISSING:
                    for other in running:
                        other.kill()
                    waiting, running, code = [], [], MISSING
            so_far = [*table, *(row for started in running for row in started.rows())]
            if len(so_far) != known:  # a run that is killed keeps the rows that it has measured
                known = len(so_far)
                table_now = sorted(so_far, key=lambda row: int(row["check"].split()[0]))
                _write(out, table_now)
    _say("\n".join(["", *_shortened(table_now, left - 2)]))
    failed = any(row["verdict"].startswith("failed") for row in table)
    return code or int(cpu and failed)


def _say(text: str) -> int:
    print(text, flush=True)
    return len(text) + 1


def _write(out: Path, table: list[dict[str, Any]]) -> None:
    texts = {
        "table.md": "\n".join(_lines(table)),
        "results.json": json.dumps(table, indent=1),
        "predicted.md": "\n".join(_predicted(table)),
    }
    for name, text in texts.items():
        (out / f".{name}").write_text(text + "\n", encoding="utf-8")
        (out / f".{name}").replace(out / name)  # whole at any moment


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")


def _line(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _lines(table: Sequence[Mapping[str, Any]]) -> list[str]:
    return [_line(COLUMNS), "|---" * len(COLUMNS) + "|", *(_line(row.values()) for row in table)]


def _predicted(table: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the page of the predictions beside what was measured, for ``docs/evidence/gpu``."""
    yield "# Predicted and measured"
    for row in table:
        if row["mode"] == "versions":
            yield f"\ntorch {row['measured']}, {_cell(row['more'])}; {time.strftime('%Y-%m-%d', time.gmtime())}."
    yield "\n" + _line(("check", "mode", "unit", "predicted", "measured", "measured - predicted, %"))
    yield "|---" * 6 + "|"
    for row in table:
        if row["unit"] and row["ratio"] is not None:
            yield _line((*(row[name] for name in COLUMNS[:5]), f"{100 * (row['ratio'] - 1):+.1f}"))


def _shortened(table: Sequence[Mapping[str, Any]], most: int) -> list[str]:
    """Return the table in `most` characters: quantities first, then failures; checks that are ok come last and go first."""
    order = sorted(table, key=_rank)
    lines = {id(row): _short(row) for row in order}
    left = most - 40
    shown = set[int]()
    for row in sorted(order, key=lambda row: (1, 0, 2)[_rank(row)]):  # no failure is left out for a quantity
        left -= len(lines[id(row)]) + 1
        if left >= 0:
            shown.add(id(row))
    hidden = len(order) - len(shown)
    return [lines[id(row)] for row in order if id(row) in shown] + [f"{hidden} more rows: see table.md"] * (hidden > 0)


def _rank(row: Mapping[str, Any]) -> int:
    is_measured = row["verdict"] in ("ok", "off") and row["unit"]
    return 0 if is_measured else 1 if row["verdict"] != "ok" else 2


def _short(row: Mapping[str, Any]) -> str:
    number, verdict = row["check"].split()[0], "" if row["verdict"] == "ok" else row["verdict"]
    ratio = None if row["ratio"] is None else f"x{row['ratio']:.3g}"
    cells = (verdict, row["predicted"], row["measured"], row["unit"], ratio, row["more"])
    return f"{number} {row['mode']}: {' | '.join(filter(None, map(_cell, cells)))}"[:100]


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
    return drive(checks if options.cpu else [WARM_UP, *checks], Path(options.out).resolve(), options.cpu)
