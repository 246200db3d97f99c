"""Every Python block of README.md and docs/ runs as it stands, or the line above it says why it does not.

The blocks of one file run in order, in one namespace. An HTML comment right above a block, which readers of the page do
not see, may say one of two things:

    <!-- given:
    what the reader has by then: a model, a batch
    -->

    <!-- not run: needs a GPU -->

Above a block of another language, ``<!-- file: NAME -->`` writes it to a file that the Python blocks read.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:^<!--(?P<comment>(?:(?!-->).)*)-->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^<!-- file: (?P<name>\S+) -->\n```\w*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    path: str
    line: int
    code: str
    given: str
    """Code that runs before, from the comment above."""
    reason: str | None
    """Why it is not run; None: it is."""


def blocks(text: str, path: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        comment = (match["comment"] or "").strip()
        kind, _, rest = comment.partition(":")
        if comment and kind not in ("given", "not run"):
            raise ValueError(
                f"{path}:{line}: the comment above a block starts with 'given:' or 'not run:', not {kind!r}"
            )
        if kind == "not run" and len(rest.split()) < 2:
            raise ValueError(f"{path}:{line}: 'not run:' without a reason")
        given, reason = (rest, None) if kind == "given" else ("", rest.strip() if comment else None)
        found.append(Block(path, line, match["code"], given, reason))
    if len(found) != len(re.findall(r"^\s*```python", text, re.MULTILINE)):
        raise ValueError(f"{path}: a Python block that is indented or never ends")
    return found


def run(block: Block, namespace: dict) -> None:
    exec(compile(block.given, f"{block.path}:{block.line} (given)", "exec"), namespace)
    # Empty lines in front, so that a traceback names the line of the document.
    exec(compile("\n" * (block.line - 1) + block.code, block.path, "exec"), namespace)


def _with_blocks() -> list[Path]:
    return [path for path in FILES if "```python" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", _with_blocks(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_document_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)  # dataclasses look their module up
    text = path.read_text(encoding="utf-8")
    for file in FILE.finditer(text):
        Path(file["name"]).write_text(file["text"], encoding="utf-8")
    for block in blocks(text, str(path.relative_to(ROOT))):
        if block.reason is None:
            run(block, vars(module))


def test_most_blocks_run() -> None:
    all_blocks = [block for path in _with_blocks() for block in blocks(path.read_text(encoding="utf-8"), str(path))]
    assert sum(block.reason is None for block in all_blocks) >= 9


def test_blocks_are_found_with_what_stands_above_them() -> None:
    text = (
        "a\n<!-- given:\nx = 1\n-->\n```python\ny = x + 1\n```\n\n<!-- not run: needs a GPU -->\n```python\nno()\n```\n"
    )
    first, second = blocks(text, "page.md")
    assert (first.line, first.reason, second.line, second.reason) == (6, None, 11, "needs a GPU")
    namespace: dict = {}
    run(first, namespace)
    assert namespace["y"] == 2


def test_a_failing_block_names_the_line_of_the_document() -> None:
    (block,) = blocks("one\n\n```python\nfine = 1\nraise KeyError(fine)\n```\n", "page.md")
    with pytest.raises(KeyError) as error:
        run(block, {})
    last = error.traceback[-1]
    assert (last.frame.code.raw.co_filename, last.lineno + 1) == ("page.md", 5)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not run: -->\n```python\n1\n```\n",  # no reason
        "<!-- not run: GPU -->\n```python\n1\n```\n",  # a word is no reason
        "<!-- skip: needs a GPU -->\n```python\n1\n```\n",  # unknown
        "- item\n  ```python\n  1\n  ```\n",  # indented: would be left out silently
        "```python\n1\n",  # never ends
    ],
)
def test_bad_comments_and_blocks_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"page\.md"):
        blocks(text, "page.md")
