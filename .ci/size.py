"""Print the statements of each folder, and fail where the package or its tests have more than `.ci/size.json` allows.

python .ci/size.py             statements by folder, and both sums beside their limits; exit status 1 where one is above
python .ci/size.py ROOT        the same of another checkout, without limits

Statements are counted in the syntax tree, since a formatter changes lines and not statements. The limits only fall: a
commit that raises one names the issue that takes the difference away again.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = Path(__file__).with_name("size.json")
TOOLS = "tests/tools"
"""Programs that measure us, which no test run collects."""
TREES = {"package": ("nemo_like",), "tests": ("tests", "tests_distributed"), "tools": (TOOLS,)}


def statements(path: Path) -> int:
    """Return how many statements the file at `path` has, those inside of functions and classes included.

    Docstrings do not count: nobody shall gain by deleting one.
    """
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def by_folder(root: Path, trees: tuple[str, ...]) -> Counter[str]:
    """Return the statements of each folder below `trees` of `root`."""
    counts: Counter[str] = Counter()
    for tree in trees:
        for path in (root / tree).rglob("*.py"):
            folder = str(path.parent.relative_to(root))
            if tree == TOOLS or not folder.startswith(TOOLS):
                counts[folder] += statements(path)
    return counts


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    limits = {} if len(sys.argv) > 1 else json.loads(LIMITS.read_text(encoding="utf-8"))
    too_many = []
    for name, trees in TREES.items():
        counts = by_folder(root, trees)
        for folder in sorted(counts):
            print(f"{counts[folder]:7,}  {folder}")
        total, limit = sum(counts.values()), limits.get(name)
        print(f"{total:7,}  {name}" + ("" if limit is None else f", at most {limit:,}"), end="\n\n")
        if limit is not None and total > limit:
            too_many.append(f"The {name}: {total:,} statements, {total - limit:,} above the limit in .ci/size.json.")
    print("\n".join(too_many), file=sys.stderr, end="\n" if too_many else "")
    return bool(too_many)


if __name__ == "__main__":
    sys.exit(main())
