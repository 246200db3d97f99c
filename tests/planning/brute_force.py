"""The best ways to run a block by trying all of them: independent of `nemo_like.planning.selection.solver` and libraries.

Ops are gone through from the last to the first. What matters of the choices made so far is which earlier outputs they
ask for, the bytes they keep and the cost of what they run; of two that ask for the same, one that is worse in both is
dropped, which loses nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence

from nemo_like.planning.selection import solver
from nemo_like.planning.selection.solver import Op

Point = tuple[int, float]
"""Bytes kept, cost of replay."""


def all_best(ops: Sequence[Op], most: int | None = None) -> list[Point]:
    """Every point that no other choice beats, ascending in bytes; those of at most `most` bytes, if given."""
    limit = sum(op.bytes for op in ops) if most is None else most
    states: dict[int, list[Point]] = {0: [(0, 0.0)]}
    for i in reversed(range(len(ops))):
        op, bit = ops[i], 1 << i
        reads = sum(1 << j for j in set(op.reads))
        grown: dict[int, list[Point]] = {}
        for asked, points in states.items():
            wanted, rest = bool(asked & bit) or op.needed or op.forced == "replay", asked & ~bit
            if op.forced == "save":
                choices = [(rest, op.bytes, 0.0)]
            elif not wanted:
                choices = [(rest, 0, 0.0)]
            else:
                choices = [(rest | reads, 0, op.cost)]
                if op.keepable and op.forced is None:
                    choices.append((rest, op.bytes, 0.0))
            for then, size, cost in choices:
                moved = [(b + size, c + cost) for b, c in points if b + size <= limit]
                grown.setdefault(then, []).extend(moved)
        states = {asked: _best(points) for asked, points in grown.items() if points}
    return _best([point for points in states.values() for point in points])


def _best(points: list[Point]) -> list[Point]:
    kept: list[Point] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def least_cost(points: Sequence[Point], budget: int) -> float | None:
    """Of the cheapest point within `budget` bytes; None: there is none."""
    index = bisect_right(points, budget, key=lambda point: point[0])
    return points[index - 1][1] if index else None


def least_cost_of_two(first: Sequence[Point], second: Sequence[Point], budget: int) -> float:
    """Of two blocks together within `budget` bytes: every pair of their points, each list ascending in bytes."""
    return min(c + other for b, c in first if (other := least_cost(second, budget - b)) is not None)


def at_budget(points: Sequence[solver.Point], budget: int) -> solver.Point | None:
    """The cheapest of the points that keep at most `budget` bytes; None: there is none."""
    return min((p for p in points if p.bytes <= budget), key=lambda p: (p.cost, p.bytes), default=None)
