"""The documents say what is so: the page of public names is made from the docstrings."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from nemo_like.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent


def _api_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_docs", ROOT / ".ci" / "api_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_docstring_becomes_markdown() -> None:
    doc = """Scale ``x``.

    Args:
        x: any
            tensor.
        factor, bias: numbers.

    Raises:
        ValueError: never.

    >>> scale(1)
    2
    """
    assert _api_docs().markdown(doc) == (
        "Scale `x`.\n\n**Args**\n\n- `x`: any\n  tensor.\n- `factor, bias`: numbers.\n\n**Raises**\n\n"
        "- `ValueError`: never.\n\n```pycon\n>>> scale(1)\n2\n```\n"
    )


def test_signatures_are_the_same_on_every_machine() -> None:
    api_docs = _api_docs()

    def call(x: int, *, torch: str = api_docs.torch.__version__, what: object = len) -> dict[str, int]:
        return {}

    expected = (
        "call(x: int, *, torch: str = torch.__version__, what: object = <built-in function len>) -> dict[str, int]"
    )
    assert api_docs.signature("call", call) == f"```text\n{expected}\n```\n"


@pytest.mark.long
def test_a_page_that_is_not_current_is_refused(tmp_path: Path) -> None:
    script = (tmp_path / ".ci").joinpath("api_docs.py")
    script.parent.mkdir()
    script.write_text((ROOT / ".ci" / "api_docs.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "docs" / "reference").mkdir(parents=True)

    def run(*options: str) -> int:
        return subprocess.run([sys.executable, script, *options], cwd=ROOT, capture_output=True, check=False).returncode

    assert run() == 0
    page = tmp_path / "docs" / "reference" / "api" / "nemo_like.md"
    assert "## `parallelize`" in page.read_text(encoding="utf-8")
    page.write_text(page.read_text(encoding="utf-8").replace("## `plan_for`", "## `plan`"), encoding="utf-8")
    assert run("--check") == 1


def test_every_file_that_a_document_names_exists() -> None:
    missing = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"`((?:nemo_like|tests|tests_distributed|docs|\.ci)/[\w./-]*)`", text)
        if page.parent.name != "evidence":  # which names files of other projects
            short = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
            named += [f"nemo_like/{name}" for name in short if not (ROOT / name).exists()]
        named += [str(page.parent.relative_to(ROOT) / link) for link in re.findall(r"\]\((?!http|#)([\w./-]+)\)", text)]
        missing += [f"{page.name}: {name}" for name in named if not (ROOT / name).exists()]
    assert not missing


def test_no_table_is_cut_by_an_empty_line() -> None:
    """A row after an empty line, without a head of its own, is shown as text."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        cut = re.findall(r"\n\n(\|.*)\n(?!\|[-: |]+\|\n)", page.read_text(encoding="utf-8"))
        assert not cut, (page.name, cut)


def test_the_readme_names_every_command_and_every_extra_for_a_user() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert "pip install" in text
    assert not [
        name for name in extras if f"`{name}`" not in text and name not in ("hosts", "torchtitan", "test", "lint")
    ]
    assert not [name for name in COMMANDS if f"nemo-like {name}" not in text]


OF_OTHERS = {
    *("CUDACachingAllocator", "set_per_process_memory_fraction", "quantize_", "dynamo_use_regional_compilation"),
    *("fabric_model", "MixtralExperts", "x_t", "y_t"),
}
"""Names in the pages that are torch's, of other libraries, or mathematics."""


@functools.cache
def _names_in_code() -> set[str]:
    """Return the names that code defines or uses, and its strings that are names; words of comments are none."""
    files = [
        path for tree in ("nemo_like", "tests", "tests_distributed", ".ci") for path in (ROOT / tree).rglob("*.py")
    ]
    names = {path.stem for path in files} | {"nemo_like", "tests_distributed"}
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        for field in ("name", "id", "attr", "arg", "asname", "module"):
            names.update(str(getattr(node, field, None) or "").split("."))
        if isinstance(node, ast.Constant) and re.fullmatch(r"[\w.*/-]+", str(node.value)):
            names.update(re.findall(r"\w+", str(node.value)))
    return names


PAGES = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in ("evidence", "api")]
MADE = ("changelog.md", "models.md", "cli.md", "references.md")


@pytest.mark.parametrize("page", [path for path in PAGES if path.name not in MADE], ids=lambda path: path.stem)
def test_every_name_in_a_page_is_in_the_code(page: Path) -> None:
    """Names with an underscore or of classes: words such as ``none`` say nothing, variables in capitals may be others'."""
    quoted = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    words = {word for text in quoted for word in re.findall(r"[A-Za-z_]\w*", text)}
    named = {word for word in words if re.search(r"_|[a-z][A-Z]", word) and not re.fullmatch(r"[A-Z0-9_]+", word)}
    assert not named - _names_in_code() - OF_OTHERS


def _documented(doc: str) -> set[str]:
    """Return the arguments in the section ``Args:`` of a docstring."""
    section = re.search(r"^Args:\n((?: +.*\n?|\n)*)", f"{doc}\n", re.MULTILINE)
    lines = re.findall(r"^ {4}(\w+(?:, \w+)*):", section[1], re.MULTILINE) if section else []
    return {name for line in lines for name in line.split(", ")} - {"None"}


def _arguments(node: ast.AST) -> set[str] | None:
    """Return the names that a function or a class takes; None: it takes any."""
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__call__")]
        found = [_arguments(one) for one in made]
        fields = {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
        return None if None in found else fields.union(*found)  # type: ignore[arg-type]
    arguments = node.args  # type: ignore[attr-defined]
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg]
    return None if arguments.kwarg else {argument.arg for argument in every if argument is not None}


def test_every_documented_argument_exists() -> None:
    stale = []
    for path in (ROOT / "nemo_like").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            documented, taken = _documented(ast.get_docstring(node) or ""), _arguments(node)
            stale += [
                f"{path.stem}.{node.name}: {name}" for name in documented - (documented if taken is None else taken)
            ]
    assert not stale
