"""Screens in the documents: what a command prints, run and compared. ``python -m tests.tools.screens`` writes them again.

A block of a page that begins with ``$ nemo-like`` and has a comment ``<!-- screen: 80 -->`` in front is the output of that
command in a terminal of 80 columns. ``long`` in the comment: it takes over 10 seconds. Seconds and rates differ from run to
run and are compared as ``#``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from nemo_like.cli import main

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(
    r"(<!-- screen: (\d+)( long)? -->\n```console\n\$ (nemo-like [^\n]*(?:\\\n[^\n]*)*)\n)(.*?)(```)", re.S
)
_MEASURED = re.compile(r"\d[\d,.]*(?= (?:s|ms|tokens/s|GB/s|MB/s)\b)|(?:(?<=memory )|(?<=peak ))[\d.]+(?= GiB)")


@dataclass(frozen=True)
class Screen:
    """One block of a page."""

    page: str
    columns: int
    is_long: bool
    command: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.command[:60]} ({self.columns})"

    def now(self) -> str:
        """Return what the command prints today."""
        words = shlex.split(self.command.replace("\\\n", " "))[1:]
        out = io.StringIO()
        around = {"COLUMNS": str(self.columns), "NEMO_LIKE_CACHE": "off"}
        with mock.patch.dict(os.environ, around), contextlib.redirect_stdout(out):
            main(words)
        return out.getvalue()


def screens() -> Iterator[Screen]:
    """Yield the screens of all pages."""
    for path in sorted(DOCS.rglob("*.md")):
        for found in _BLOCK.finditer(path.read_text(encoding="utf-8")):
            yield Screen(str(path.relative_to(DOCS)), int(found[2]), bool(found[3]), found[4], found[5])


def without_times(text: str) -> str:
    """Return `text` with measured numbers as ``#``.

    >>> without_times("Planned in 4.8 s.")
    'Planned in # s.'
    """
    return _MEASURED.sub("#", text)


def write() -> None:
    """Run every screen and put what it prints into its page."""
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")

        def again(found: re.Match[str], page: str = path.name) -> str:
            screen = Screen(page, int(found[2]), bool(found[3]), found[4], found[5])
            now = screen.now()
            return found[0] if without_times(now) == without_times(screen.text) else found[1] + now + found[6]

        if (new := _BLOCK.sub(again, text)) != text:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    write()
