"""One logger, and the rule that a fallback is announced once and on rank zero only."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("nemo_like")

_announced: set[str] = set()
_times = 0


def is_rank_zero() -> bool:
    """True on the launcher's rank 0, and where no launcher set ``RANK``. Needs no process group."""
    return os.environ.get("RANK", "0") == "0"


def say_once(message: str, *, level: int = logging.INFO, key: str | None = None) -> None:
    """Log `message` on rank zero, once in this process for each `key` (default: the message itself)."""
    global _times
    _times += 1
    key = message if key is None else key
    if key in _announced:
        return
    _announced.add(key)
    if is_rank_zero():
        logger.log(level, message)


def times_said() -> int:
    """Return how often `say_once` was called, also with messages that were logged before."""
    return _times


def warn_once(message: str, *, key: str | None = None) -> None:
    """`say_once` at WARNING: for every fallback, with the request, the fallback, and the reason."""
    say_once(message, level=logging.WARNING, key=key)


@contextmanager
def unsaid() -> Iterator[None]:
    """Let messages that are logged once within it be logged again after it."""
    before = set(_announced)
    try:
        yield
    finally:
        _announced.intersection_update(before)


def forget_announcements() -> None:
    """Let every message be logged again (tests use this to look at each one)."""
    _announced.clear()


@contextmanager
def quiet(name: str, level: int = logging.CRITICAL) -> Iterator[None]:
    """Drop the messages of the logger `name` below `level`: its messages are handled, or would drown a report."""
    other = logging.getLogger(name)
    before = other.level
    other.setLevel(level)
    try:
        yield
    finally:
        other.setLevel(before)
