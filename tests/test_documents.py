"""The documents say what is so: the page of public names is made from the docstrings."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", *(f"reference/how-it-works/{name}.md" for name in ("design", "extending"))]
)
def test_every_name_that_the_map_or_the_design_uses_is_in_the_source(page: str) -> None:
    """Names with an underscore or of classes: words such as ``none`` say nothing."""
    files = [
        path for folder in ("nemo_like", "tests", "tests_distributed", ".ci") for path in (ROOT / folder).rglob("*.py")
    ]
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in files)))
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    named = {word for text in quoted for word in re.findall(r"\w+", text) if re.search(r"_|[a-z][A-Z]", word)}
    missing = named - words - {path.stem for path in files} - {"nemo_like", "tests_distributed"}
    assert len(named) > 20 and not missing, missing
