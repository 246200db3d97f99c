"""The last of an ascending row of sizes that is within a limit, where each size takes long to find."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

_GUESSES = 6
"""Guesses that may go wrong before the row is halved instead."""


def last_within(limit: int, size: Callable[[int], int], about: Sequence[int]) -> int:
    """The last position whose size is at most `limit`; -1: none is. What bisection finds, in fewer steps.

    Args:
        limit: bytes.
        size: of a position. Ascending.
        about: as many numbers, ascending, between which sizes differ about as much: one that is known says where to look
            next.

    >>> last_within(25, [11, 20, 30, 41].__getitem__, [0, 10, 20, 30])
    1
    """
    low, high, at, left = -1, len(about), len(about) // 2, _GUESSES
    while high - low > 1:
        found = size(at)
        if found <= limit:
            low = at
        else:
            high = at
        guess = bisect_right(about, limit - found + about[at]) - 1 if left else (low + high) // 2
        at, left = max(low + 1, min(high - 1, guess)), max(0, left - 1)
    return low
