"""One name for one thing: no two files and no two classes of the package are called the same."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import nemo_like

PACKAGE = Path(nemo_like.__file__).parent


def _files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if not path.name.startswith("__")]


def _twice(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in found.items() if len(places) > 1}


def test_no_file_name_stands_for_two_things() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in _files():
        found[path.name].append(str(path.relative_to(PACKAGE)))
    assert _twice(found) == {}


def test_no_class_name_stands_for_two_things() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in _files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    assert _twice(found) == {}


def test_no_test_imports_another_test() -> None:
    root = PACKAGE.parent
    for path in [*root.glob("tests/**/*.py"), *root.glob("tests_distributed/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.rpartition(".")[2].startswith("test_") for name in names), path
