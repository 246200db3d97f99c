"""Finder of the branches that depend on the kind of device."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_KINDS = {"cpu", "cuda", "mps", "xpu"}
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_ASKS = re.compile(
    r"torch\.(cuda\.is_\w+|accelerator\.is_available)\(\)"
    r"|hasattr\(.*'((max_)?memory_\w+|device_count)'\)"
    r"|.*\.is_cuda\w*"
)
_MAY_HAVE = re.compile(r"cpu|cuda|mps|xpu|is_available|hasattr")


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
    found = []
    for file in sorted((ROOT / "nemo_like").rglob("*.py")):
        name, text = file.relative_to(ROOT), file.read_text()
        if name.parts[1] not in ("planning", "fake") and _MAY_HAVE.search(text):
            found += find(text, str(name))
    return found
