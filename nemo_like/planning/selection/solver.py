"""Choose the outputs to save: exact choices over plain numbers. No torch here, no tensors, no clocks.

There are three problems, smallest first:

* **Recomputation of one block** (`closure_every`): an op whose output neither backward nor a recomputed op reads is left
  out. So decisions depend on each other, since a recomputed op requires its inputs: a closure problem with a budget. It
  is solved exactly by a sweep over non-dominated (bytes, cost) states.
* **The same without skips** (`without_skips`): every op that is not saved is recomputed, up to the early stop. The cost of
  an op does not depend on the other decisions, so the choice is a 0/1 knapsack: give up bytes, save cost.
* **Many layers** (`combine`): one point per layer from the frontier of its kind, at least total cost for total bytes.
  This is a multiple-choice knapsack. Identical layers are summed by doubling, so 126 layers cost seven merges.

All results are deterministic: ties go to fewer bytes, then to the smaller bit mask.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import add, attrgetter, itemgetter
from typing import Any, TypeVar

try:  # of transformers; without it, merges of many mixes take some ten times as long
    import numpy as np
except ImportError:  # pragma: no cover
    np = None  # type: ignore[assignment]


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


def _few(states: list[State], limit: int) -> list[State]:
    return thin(states, limit) if len(states) > limit else states


def spread(points: Sequence[Each], limit: int, bytes_of: Callable[[Each], int] = attrgetter("bytes")) -> list[Each]:
    """Return at most `limit` of a frontier's points, both ends included: the best at even steps of bytes."""
    if len(points) <= limit:
        return list(points)
    sizes = list(map(bytes_of, points))
    low, high = sizes[0], sizes[-1]
    steps = (low + (high - low) * step // (limit - 1) for step in range(limit))
    return [points[index] for index in sorted({bisect_right(sizes, step) - 1 for step in steps})]


def frontier(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points that no other beats in both bytes and cost, ascending in bytes."""
    return tuple(non_dominated(sorted(points, key=attrgetter("bytes", "cost", "keep")), attrgetter("cost")))


def combine(kinds: Sequence[tuple[Sequence[tuple[int, float]], int]], max_states: int = 400) -> tuple[Mix, ...]:
    """Return the frontier of a whole stack of layers: for each total of bytes, the mix of choices with the least cost.

    Args:
        kinds: for each kind of layer, the (bytes, cost) of its points, and how many layers of it there are.
        max_states: how many mixes are carried between merges. A merge of fewer pairs than that squared is exact while
            its result fits. Past that, the cheapest of each of `max_states` equal steps of bytes is carried on;
            `combine_bound` bounds the loss by that.
    """
    total: list[State] = [(0, 0.0, ())]
    for points, count in kinds:
        single = [(b, c, tuple(int(i == j) for j in range(len(points)))) for i, (b, c) in enumerate(points)]
        summed = _times(_best(single, max_states), count, len(points), max_states)
        total = _best(
            ((b + bb, c + cc, chosen + (counts,)) for b, c, chosen in total for bb, cc, counts in summed), max_states
        )
    return tuple(Mix(b, c, counts) for b, c, counts in total)


def _times(single: list[State], count: int, width: int, limit: int) -> list[State]:
    """Return the states of `count` layers of one kind, by doubling."""
    result: list[State] = [(0, 0.0, (0,) * width)]
    power = single
    while count:
        if count & 1:
            result = _summed(result, power, limit)
        count >>= 1
        if count:
            power = _summed(power, power, limit, symmetric=True)
    return result


_FEW_PAIRS = 1 << 10  # Number of sums below which plain Python is as quick as numpy.


def _summed(a: list[State], b: list[State], limit: int, *, symmetric: bool = False) -> list[State]:
    """Return the best sums of one state of `a` and one of `b`, at most about `limit`.

    By numpy where there are many, which finds the same as plain Python.
    """
    states: list[State]
    if np is None or len(a) * len(b) < _FEW_PAIRS:
        rows = ((i, j) for i in range(len(a)) for j in range(i if symmetric else 0, len(b)))
        states = non_dominated(sorted((a[i][0] + b[j][0], a[i][1] + b[j][1], (i, j)) for i, j in rows))
    else:
        first, second = np.triu_indices(len(a)) if symmetric else np.indices((len(a), len(b))).reshape(2, -1)
        sizes, costs = (
            np.array([state[n] for state in a], dtype)[first] + np.array([state[n] for state in b], dtype)[second]
            for n, dtype in enumerate((np.int64, np.float64))
        )
        order = np.lexsort((costs, sizes))  # stable, as Python's sort is
        cheapest = np.minimum.accumulate(costs[order])
        best = order[np.concatenate(([True], costs[order][1:] < cheapest[:-1]))]
        states = [(int(sizes[k]), float(costs[k]), (int(first[k]), int(second[k]))) for k in best]
    return [(size, cost, tuple(map(add, a[i][2], b[j][2]))) for size, cost, (i, j) in _few(states, limit)]


def _best(states: Iterable[State], limit: int) -> list[State]:
    """Return the non-dominated states, at most about `limit`."""
    return _few(non_dominated(sorted(states, key=itemgetter(0, 1))), limit)


def combine_bound(kinds: Sequence[tuple[Sequence[tuple[int, float]], int]], budget: int) -> float | None:
    """Return the least cost of any mix within `budget` bytes, by the linear relaxation; None where nothing fits."""
    base_bytes, base_cost, steps = 0, 0.0, []
    for points, count in kinds:
        hull = _hull(points)
        base_bytes, base_cost = base_bytes + hull[0][0] * count, base_cost + hull[0][1] * count
        steps += [((c0 - c1) / (b1 - b0), b1 - b0, count) for (b0, c0), (b1, c1) in pairwise(hull)]
    if base_bytes > budget:
        return None
    remaining, cost = float(budget - base_bytes), base_cost
    for slope, size, count in sorted(steps, key=lambda s: -s[0]):
        taken = min(remaining, size * count)
        cost, remaining = cost - slope * taken, remaining - taken
    return cost


def _hull(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    hull: list[tuple[int, float]] = []
    for b, c in sorted(points):
        if hull and c >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (b - hull[-2][0]) >= (c - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((b, c))
    return hull


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
