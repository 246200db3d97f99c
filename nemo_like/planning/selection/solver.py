"""Choose the outputs to save: exact choices over plain numbers. No torch here, no tensors, no clocks.

There are three problems, smallest first:

* **Recomputation of one block** (`closure_every`): an op whose output neither backward nor a recomputed op reads is left
  out. So decisions depend on each other, since a recomputed op requires its inputs: a closure problem with a budget. It
  is solved exactly by a sweep over non-dominated (bytes, cost) states.
* **The same without skips** (`without_skips`): every op that is not saved is recomputed, up to the early stop. The cost of
  an op does not depend on the other decisions, so the choice is a 0/1 knapsack: give up bytes, save cost.
* **Many layers** (`path`): one point per layer from the frontier of its kind, at least total cost for total bytes. This is a
  multiple-choice knapsack; of each kind, the layers have two points at most.

All results are deterministic: ties go to fewer bytes, then to the smaller bit mask.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any, TypeVar


@dataclass(frozen=True)
class Op:
    """One op of a block, reduced to the facts that the choice needs."""

    bytes: int  # Bytes that saving its outputs costs.
    cost: float  # Cost of recomputing it, in any unit (FLOPs or seconds), >= 0. Zero behind the early stop.
    reads: tuple[int, ...] = ()  # Indices of the ops whose outputs it reads (through views too).
    needed: bool = False  # True where backward reads an output of it.
    keepable: bool = True  # True where it may be saved (an output that is changed in place later may not).
    # ``"save"``: always saved (collectives, routing); ``"replay"``: always recomputed (random or in-place ops).
    forced: str | None = None


@dataclass(frozen=True)
class Point:
    """One way to run a block: the bytes it saves and the cost of its recomputation."""

    bytes: int
    cost: float
    keep: int = 0  # Mask of ops that are saved; bit i is that of op i.
    skip: int = 0  # Mask of ops that recomputation leaves out; bit i is that of op i.

    def decisions(self, count: int) -> tuple[str, ...]:
        """Return ``"save"``, ``"skip"`` or ``"recompute"`` for each of `count` ops."""
        return tuple(
            "save" if self.keep >> i & 1 else "skip" if self.skip >> i & 1 else "recompute" for i in range(count)
        )


@dataclass(frozen=True)
class Mix:
    """Numbers of layers of each kind that use each point of their frontier."""

    bytes: int
    cost: float
    # For each kind, for each point of its frontier: the number of layers that use it.
    counts: tuple[tuple[int, ...], ...]


Each = TypeVar("Each")
State = tuple[int, float, Any]  # Bytes, cost, and the choice that has them.


def non_dominated(points: Iterable[Each], cost_of: Callable[[Any], float] = itemgetter(1)) -> list[Each]:
    """Return those of `points`, which ascend in bytes, that cost less than all before them."""
    best: list[Each] = []
    for point in points:
        if not best or cost_of(point) < cost_of(best[-1]):
            best.append(point)
    return best


def thin(states: list[State], limit: int) -> list[State]:
    """Return at most about `limit` states, spread evenly over the bytes; the cheapest of each bucket and both ends stay."""
    low, high = states[0][0], states[-1][0]
    buckets: dict[int, State] = {}
    for state in states:
        buckets[(state[0] - low) * (limit - 2) // max(1, high - low)] = state  # later states of a bucket cost less
    return sorted({states[0], *buckets.values()})


def frontier(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points that no other beats in both bytes and cost, ascending in bytes."""
    return tuple(non_dominated(sorted(points, key=attrgetter("bytes", "cost", "keep")), attrgetter("cost")))


def path(kinds: Sequence[tuple[Sequence[tuple[int, float]], int]]) -> tuple[Mix, ...]:
    """Return mixes of a whole stack of layers, ascending in bytes and descending in cost, with two points of a kind at most.

    Of one kind, the best of all pairs of points are among them. Of several, each step gives one kind its next such pair,
    where a byte saves most: the greedy order of the linear relaxation (Sinha and Zoltners, "The multiple-choice knapsack
    problem", 1979).

    Args:
        kinds: for each kind of layer, the (bytes, cost) of its points, and how many layers of it there are.
    """
    pairs = [_pairs(points, count) for points, count in kinds]
    if len(pairs) == 1:
        return tuple(Mix(size, cost, (counts,)) for size, cost, counts in pairs[0])
    hulls = [[s for s in states if (s[0], s[1]) in ends] for states, ends in zip(pairs, map(set, map(hull, pairs)))]
    steps = sorted(
        ((b[1] - a[1]) / (b[0] - a[0]), kind, at + 1)
        for kind, states in enumerate(hulls)
        for at, (a, b) in enumerate(pairwise(states))
    )
    now = [states[0] for states in hulls]
    mixes = []
    for _, kind, at in ((0.0, 0, 0), *steps):
        now[kind] = hulls[kind][at]
        mixes.append(Mix(sum(s[0] for s in now), sum(s[1] for s in now), tuple(s[2] for s in now)))
    return tuple(mixes)


_MOST = 32  # Points of a kind of layer whose pairs are looked at.


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Return at most `_MOST` points of a frontier: those on the hull, and the best of equal steps of bytes."""
    ends = hull([(point.bytes, point.cost) for point in points])
    states = [(point.bytes, point.cost, point) for point in points]
    few = states if len(states) <= _MOST else thin(states, _MOST)
    return [point for size, cost, point in states if (size, cost, point) in few or (size, cost) in ends]


def _pairs(points: Sequence[tuple[int, float]], count: int) -> list[State]:
    """Return the best ways to give `count` layers two of the points, with the layers of each point."""
    states = [
        (low[0] * (count - n) + high[0] * n, low[1] * (count - n) + high[1] * n, (i, j, n))
        for i, low in enumerate(points)
        for j, high in enumerate(points)
        if low <= high
        for n in range(count + 1)
    ]
    best = non_dominated(sorted(states, key=itemgetter(0, 1)))
    return [
        (size, cost, tuple((count - n) * (at == i) + n * (at == j) for at in range(len(points))))
        for size, cost, (i, j, n) in best
    ]


def hull(points: Iterable[tuple[Any, ...]]) -> list[tuple[int, float]]:
    """Return the lower convex hull of (bytes, cost), ascending in bytes and descending in cost, with points on its edges."""
    ends: list[tuple[int, float]] = []
    for b, c, *_ in sorted(points, key=itemgetter(0, 1)):
        if ends and c >= ends[-1][1]:
            continue
        while len(ends) > 1 and _above(ends[-1], ends[-2], (b, c)):
            ends.pop()
        ends.append((b, c))
    return ends


def _above(point: tuple[int, float], left: tuple[int, float], right: tuple[int, float]) -> bool:
    """Return whether a point is above the line between two others, by more than rounding."""
    on_line = left[1] + (right[1] - left[1]) * (point[0] - left[0]) / (right[0] - left[0])
    return point[1] > on_line * (1 + 1e-12)


# Non-dominated states that a sweep over the ops may hold before it thins them out; below this every answer is exact.
EVERY_STATES = 1 << 16


def closure_replay(ops: Sequence[Op], keep: int) -> tuple[float, int]:
    """Return cost and skip mask for `keep`, where only inputs of backward or of recomputed ops are recomputed."""
    run = [op.forced == "replay" or (op.needed and not keep >> i & 1) for i, op in enumerate(ops)]
    for i in range(len(ops) - 1, -1, -1):  # an op reads earlier ops only, so one pass backwards closes the set
        if run[i]:
            for j in ops[i].reads:
                if not keep >> j & 1:
                    run[j] = True
    skip = sum(1 << i for i in range(len(ops)) if not run[i] and not keep >> i & 1)
    return sum(op.cost for op, r in zip(ops, run) if r), skip


def closure_every(ops: Sequence[Op], max_states: int = EVERY_STATES) -> tuple[Point, ...]:
    """Return every best trade of bytes for recomputation cost with skips: ascending in bytes, descending in cost.

    Ops are gone through from the last to the first. All that matters of the choices so far is which earlier outputs
    they require, their bytes and their cost. Layers are nearly chains, so that few outputs are required at a time. Past
    `max_states` states, those that require the same outputs are thinned to an even share, spread over their bytes;
    where too many different outputs are required at a time, it is the choices without skips, with the ops they may skip.
    """
    states: dict[int, list[State]] = {0: [(0, 0.0, 0)]}
    for i in reversed(range(len(ops))):
        states = _decided(ops[i], i, states)
        if sum(map(len, states.values())) > max_states:
            if 4 * len(states) > max_states:
                return frontier(_point(ops, point.keep) for point in closure_every(without_skips(ops)))
            states = {required: thin(choices, max_states // len(states)) for required, choices in states.items()}
    best = non_dominated(sorted(state for choices in states.values() for state in choices))
    return frontier(_point(ops, keep) for _, _, keep in best)  # costs are summed afresh, in the order of the ops


def without_skips(ops: Iterable[Op]) -> list[Op]:
    """Return the ops of the problem in which each one that is not saved is recomputed."""
    return [replace(op, reads=(), needed=True) for op in ops]


def _point(ops: Sequence[Op], keep: int) -> Point:
    cost, skip = closure_replay(ops, keep)
    return Point(sum(op.bytes for i, op in enumerate(ops) if keep >> i & 1), cost, keep, skip)


def _decided(op: Op, i: int, states: dict[int, list[State]]) -> dict[int, list[State]]:
    """Return the states with `op`, number `i`, saved, recomputed or skipped; the keys: masks of required outputs."""
    bit, reads = 1 << i, sum(1 << j for j in set(op.reads))
    grown: dict[int, list[State]] = {}
    for required, choices in states.items():
        rest = required & ~bit
        saving = [(b + op.bytes, c, keep | bit) for b, c, keep in choices]
        if op.forced == "save":
            grown.setdefault(rest, []).extend(saving)
        elif required & bit or op.needed or op.forced == "replay":
            grown.setdefault(rest | reads, []).extend((b, c + op.cost, keep) for b, c, keep in choices)
            if op.keepable and op.forced is None:
                grown.setdefault(rest, []).extend(saving)
        else:
            grown.setdefault(rest, []).extend(choices)
    return {required: non_dominated(sorted(choices)) for required, choices in grown.items()}
