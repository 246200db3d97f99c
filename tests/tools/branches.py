"""Branches of the package that depend on the kind of device, and which the simulated device runs.

python -m tests.tools.branches               the table, by the tests that use the simulated device
python -m tests.tools.branches --json FILE   the same as JSON, too

`recording` notes lines and values of comparisons in the processes of `tests.gpusim.on_device`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.tools.branch_finder import ROOT, Branch, package
from tests.tools.branch_reasons import REASONS

VARIABLE = "NEMO_LIKE_BRANCHES"
"""Names the environment variable with the folder that `recording` writes to."""


@contextlib.contextmanager
def recording(folder: str | None) -> Iterator[None]:
    """Write lines that ran, and values of comparisons, to a new file in `folder`; None: do nothing.

    The engine of autograd has threads that Python did not start; each is traced from its first operator on.
    """
    if folder is None:
        yield
        return
    from tests.gpusim.device import Kernels

    at: dict[str, dict[int, list[tuple[int, Any]]]] = {}
    for branch in package():
        lines = at.setdefault(str(ROOT / branch.file), {})
        lines.setdefault(branch.line, []).append((branch.column, compile(branch.comparison, "branch", "eval")))
    seen: set[tuple[Any, ...]] = set()

    def line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            file, number = frame.f_code.co_filename, frame.f_lineno
            seen.add((file, number))
            for column, code in at[file].get(number, ()):
                with contextlib.suppress(Exception):
                    seen.add((file, number, column, bool(eval(code, frame.f_globals, frame.f_locals))))
        return line

    def call(frame: Any, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename in at else None

    def run(kernels: Kernels, *args: Any, **options: Any) -> Any:
        if sys.gettrace() is None:
            sys.settrace(call)
            frame = sys._getframe()
            while frame is not None:
                frame.f_trace = call(frame, "call", None)
                frame = frame.f_back  # type: ignore[assignment]
        return plain(kernels, *args, **options)

    plain, Kernels.run = Kernels.run, run  # type: ignore[method-assign]
    threading.settrace(call)
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(None)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", delete=False) as file:
            json.dump(sorted(seen), file)


def judge(branches: list[Branch], seen: set[tuple[Any, ...]]) -> None:
    """Set each branch's result and reason."""
    for branch in branches:
        place = str(ROOT / branch.file), branch.line
        values = {value for value in (True, False) if (*place, branch.column, value) in seen}
        lines = branch.side and range(branch.side[0], branch.side[1] + 1)
        sided = lines is None or any((place[0], line) in seen for line in lines)
        if place in seen:
            ran = sided and (branch.wanted in values or not values)
            branch.result = "ran" if ran else "CPU side only"
        branch.reason = "" if branch.result == "ran" else REASONS.get((branch.file, branch.condition), "")


def main() -> None:
    """Run the tests, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tests = [str(file) for folder in ("tests", "tests_distributed") for file in (ROOT / folder).rglob("test_*.py")]
    tests = [file for file in tests if re.search(r"\b(on_device|run_at)\(", Path(file).read_text())]
    tests = sorted({*tests, *map(str, (ROOT / "tests/gpusim").glob("test_*.py"))})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        subprocess.run(command, cwd=ROOT, env={**os.environ, VARIABLE: folder}, check=False)
        seen = {tuple(each) for file in Path(folder).iterdir() for each in json.loads(file.read_text())}
    branches = package()
    judge(branches, seen)
    for branch in sorted(branches, key=lambda each: each.result != "ran" and not each.reason):
        where = f"{branch.file}:{branch.line}"
        print(f"{where:62} {branch.condition[:60]:60} {branch.form:13} {branch.result:13} {branch.reason}")
    kinds = Counter(each.result if each.result == "ran" else "reason" if each.reason else "open" for each in branches)
    print(f"\n{len(branches)} branches: {dict(Counter(each.result for each in branches))}; {dict(kinds)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in branches], indent=1))


if __name__ == "__main__":
    main()
