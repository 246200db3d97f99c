"""Which code made a row of a survey: pages that are renewed row by row say it of each."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import nemo_like


@cache
def code_version() -> str:
    """The commit of the package that runs, with ``+`` where its files, or those of the surveys, differ.

    Outside of a checkout it is the package's version.
    """
    package = Path(nemo_like.__file__).parent
    commit = _git(package, "log", "-1", "--format=%h", "--abbrev=7", "--", ".")
    if not commit:
        return nemo_like.__version__
    head = _git(package, "rev-parse", "--short=7", "HEAD")
    return head + ("+" if _git(package, "status", "--porcelain", "--", ".", str(Path(__file__).parent)) else "")


def _git(folder: Path, *words: str) -> str:
    """What git says, stripped; nothing where it is not installed or `folder` is in no checkout."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
