"""The progress of a long command, in lines on standard error."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]  # Takes the progress so far, in words.

_SECONDS = 10.0  # Between two lines.


def silent(words: str) -> None:
    """Print nothing."""


@contextmanager
def progress() -> Iterator[Say]:
    """Give a function that prints the progress, with the seconds since the start, once in ten seconds at most."""
    start = time.monotonic()
    last = start

    def say(words: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS:
            last = now
            print(f"{words}, {now - start:.0f} s", file=sys.stderr, flush=True)

    yield say
