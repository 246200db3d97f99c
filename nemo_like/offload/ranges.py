"""Arithmetic on half-open byte ranges ``(lo, hi)``. Pure functions; nothing of torch in them."""

from __future__ import annotations

from collections.abc import Iterable

Range = tuple[int, int]


def gaps(covered: Iterable[Range], lo: int, hi: int) -> list[Range]:
    """The parts of ``[lo, hi)`` that no range of `covered` (disjoint, any order) covers, in order.

    >>> gaps([(2, 4), (6, 9)], 0, 8)
    [(0, 2), (4, 6)]
    """
    found, at = [], lo
    for start, end in sorted(covered):
        if end <= at:
            continue
        if start >= hi:
            break
        if start > at:
            found.append((at, start))
        at = max(at, end)
    if at < hi:
        found.append((at, hi))
    return found


def overlap(first: Range, second: Range) -> bool:
    """Whether two ranges share a byte.

    >>> overlap((0, 4), (3, 5)), overlap((0, 4), (4, 5))
    (True, False)
    """
    return first[0] < second[1] and second[0] < first[1]


def round_down(value: int, step: int) -> int:
    """The largest multiple of `step` that is not above `value`."""
    return value - value % step


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value` (at least 1).

    >>> power_of_two(5), power_of_two(8)
    (8, 8)
    """
    return 1 << max(value - 1, 0).bit_length()
