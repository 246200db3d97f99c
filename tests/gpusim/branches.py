"""Branches of the package that depend on the kind of device, and which the simulated device runs.

python -m tests.gpusim.branches               the table, by the tests that use the simulated device
python -m tests.gpusim.branches --json FILE   the same as JSON, too

`recording` notes lines and values of comparisons in the processes of `tests.gpusim.on_device`.
"""

from __future__ import annotations

import argparse
import ast
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpusim.reasons import REASONS

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "NEMO_LIKE_BRANCHES"
"""Names the environment variable with the folder that `recording` writes to."""
_KINDS = {"cpu", "cuda", "mps", "xpu"}
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_ASKS = re.compile(r"torch\.(cuda\.is_\w+|accelerator\.is_available)\(\)|hasattr\(.*'((max_)?memory_\w+|device_count)'\)|.*\.is_cuda\w*")


@dataclass
class Branch:
    """One comparison, and what it decides."""

    file: str
    line: int
    column: int
    comparison: str
    condition: str
    """The whole condition that the comparison is a part of."""
    form: str
    """``if``, ``conditional``, ``operand``, ``comprehension`` or ``value``."""
    wanted: bool
    """The comparison's value on the accelerator that it is about."""
    side: tuple[int, int] | None
    """First and last line of an ``if``'s accelerator side; None: there are none, or it is a part of a line."""
    result: str = "not reached"
    reason: str = ""


def _wanted(node: ast.AST) -> bool | None:
    """Return the value of a comparison on the accelerator that it is about; None: it is not about devices."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for each in (node.left, node.comparators[0]):
            items = each.elts if isinstance(each, ast.Tuple | ast.Set | ast.List) else [each]
            kinds = {item.value if isinstance(item, ast.Constant) else None for item in items}
            if kinds and kinds <= _KINDS:
                return isinstance(node.ops[0], ast.Eq | ast.In) != (kinds == {"cpu"})
    asks = isinstance(node, ast.Call | ast.Attribute) and _ASKS.fullmatch(ast.unparse(node))
    return True if asks else None


def find(source: str, file: str) -> list[Branch]:
    """Return the branches in the source of a module, by line."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for node in ast.walk(tree):
        wanted = _wanted(node)
        if wanted is None or not isinstance(node, ast.expr):
            continue
        top, sense, operand = node, wanted, False
        while isinstance(parents[top], ast.BoolOp) or isinstance(getattr(parents[top], "op", None), ast.Not):
            top = parents[top]  # type: ignore[assignment]
            operand |= isinstance(top, ast.BoolOp)
            sense ^= isinstance(top, ast.UnaryOp)
        holder, side = parents[top], None
        if isinstance(holder, ast.If):
            form, side = "if", _side(holder, parents[holder], sense)
        elif isinstance(holder, ast.IfExp) and holder.test is top:
            form = "conditional"
        elif isinstance(holder, ast.comprehension):
            form = "comprehension"
        else:
            form = "operand" if operand else "value"
        texts = ast.unparse(node), ast.unparse(top)
        found.append(Branch(file, node.lineno, node.col_offset, *texts, form, wanted, side))
    return sorted(found, key=lambda each: (each.line, each.column))


def _side(node: ast.If, parent: ast.AST, taken: bool) -> tuple[int, int] | None:
    """Return the lines of ``if``'s body or of what comes else."""
    lines: list[Any] = node.body if taken else node.orelse
    if not lines and isinstance(node.body[-1], _LEAVES):
        blocks = [value for value in vars(parent).values() if isinstance(value, list) and node in value]
        lines = blocks[0][blocks[0].index(node) + 1 :][:1]
    return (lines[0].lineno, lines[-1].end_lineno) if lines else None


def package() -> list[Branch]:
    """Return the branches of the package, without planning and the fake device."""
    files = [file.relative_to(ROOT) for file in sorted((ROOT / "nemo_like").rglob("*.py"))]
    files = [file for file in files if file.parts[1] not in ("planning", "fake")]
    return [branch for file in files for branch in find((ROOT / file).read_text(), str(file))]


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
