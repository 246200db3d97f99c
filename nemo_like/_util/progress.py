"""The progress of a long command, on standard error: a line that changes on a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Say = Callable[[str], None]
"""Takes what has been done so far, in words."""

_SECONDS = 10.0
"""Between two lines of a log."""


def silent(words: str) -> None:
    """Print nothing."""


@contextmanager
def progress() -> Iterator[Say]:
    """Give a function that shows what has been done, with the seconds since the start.

    On a terminal, and where rich is installed, its words replace those before. Elsewhere they are lines, one in ten
    seconds at most.
    """
    start = time.monotonic()
    status = _status()
    if status is not None:
        with status:
            yield lambda words: status.update(f"{words}, {time.monotonic() - start:.0f} s")
        return
    last = start

    def say(words: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS:
            last = now
            print(f"{words}, {now - start:.0f} s", file=sys.stderr, flush=True)

    yield say


def _status() -> Any:
    """Return the changing line of rich; None: no terminal, or no rich."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=True).status("")
