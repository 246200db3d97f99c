"""The documents say what is so: the page of public names is made from the docstrings."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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

    expected = "call(x: int, *, torch: str = torch.__version__, what: object = <built-in function len>) -> dict[str, int]"
    assert api_docs.signature("call", call) == f"```text\n{expected}\n```\n"


def test_a_page_that_is_not_current_is_refused(tmp_path: Path) -> None:
    script = (tmp_path / ".ci").joinpath("api_docs.py")
    script.parent.mkdir()
    script.write_text((ROOT / ".ci" / "api_docs.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "docs").mkdir()

    def run(*options: str) -> int:
        return subprocess.run([sys.executable, script, *options], cwd=ROOT, capture_output=True, check=False).returncode

    assert run("--check") == 1  # there is no page
    assert run() == 0 and run("--check") == 0
    page = tmp_path / "docs" / "api.md"
    assert "### `parallelize`" in page.read_text(encoding="utf-8")
    page.write_text(page.read_text(encoding="utf-8").replace("### `plan_for`", "### `plan`"), encoding="utf-8")
    assert run("--check") == 1


def test_every_file_that_a_document_names_exists() -> None:
    missing = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"`((?:nemo_like|tests|tests_distributed|docs|\.ci)/[\w./-]*)`", text)
        named += [str(page.parent.relative_to(ROOT) / link) for link in re.findall(r"\]\((?!http|#)([\w./-]+)\)", text)]
        missing += [f"{page.name}: {name}" for name in named if not (ROOT / name).exists()]
    assert not missing
