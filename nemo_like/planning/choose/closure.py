"""Choose outputs of one block to save where recomputation may leave ops out: a closure problem under a budget of bytes.

A sweep over the ops finds every best choice of most blocks (`closure_every`). For a block with too many, there are two more:

* the choices on the hull of the trade (`closure_frontier`): best for their bytes, each a linear program;
* the best one within any one budget (`closure_optimum`): a mixed-integer program, by HiGHS through scipy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nemo_like._util.extras import require
from nemo_like.planning.choose.solver import Op, Point, frontier, non_dominated

EVERY_STATES = 1 << 16
"""Non-dominated states that a sweep over the ops may hold; past it, a frontier is that of its hull."""

POINTS = 32
"""Number of choices on the hull that are looked for."""


def _running(ops: Sequence[Op], keep: int) -> list[bool]:
    """Return which ops are recomputed: what backward or a recomputed op reads, and is not saved."""
    run = [op.forced == "replay" or (op.needed and not keep >> i & 1) for i, op in enumerate(ops)]
    for i in range(len(ops) - 1, -1, -1):  # an op reads earlier ops only, so one pass backwards closes the set
        if run[i]:
            for j in ops[i].reads:
                if not keep >> j & 1:
                    run[j] = True
    return run


def closure_replay(ops: Sequence[Op], keep: int) -> tuple[float, int]:
    """Return cost and skip mask for `keep`, where only what backward or a recomputed op reads is recomputed."""
    run = _running(ops, keep)
    skip = sum(1 << i for i in range(len(ops)) if not run[i] and not keep >> i & 1)
    return sum(op.cost for op, r in zip(ops, run) if r), skip


@dataclass(frozen=True)
class _Program:
    """Two variables per op, kept and run, each 0 or 1: whatever backward or an op that runs reads is kept or run.

    Sizes and costs are scaled to about 1, because the solver's tolerances are absolute.
    """

    ops: Sequence[Op]
    left: int
    """Bytes for what may be kept. What is kept anyway, and what does not fit alone, stay out of the sum of bytes: next to
    them, a few bytes would be lost in the tolerance."""

    @cached_property
    def sizes(self) -> list[int]:
        return [op.bytes if op.forced is None and op.keepable and op.bytes <= self.left else 0 for op in self.ops]

    @property
    def byte_unit(self) -> int:
        return max(self.sizes, default=0) or 1

    @property
    def cost_unit(self) -> float:
        return max((op.cost for op in self.ops), default=0) or 1.0

    def objective(self, byte_price: float) -> Any:
        """Return the objective in cost units; `byte_price`: what one unit of bytes costs."""
        import numpy as np  # scipy's own dependency

        kept = [byte_price * size / self.byte_unit for size in self.sizes]
        return np.array(kept + [op.cost / self.cost_unit for op in self.ops])

    def bounds(self) -> tuple[Any, Any]:
        """Return the least and the most of each variable."""
        import numpy as np

        n = len(self.ops)
        lower, upper = np.zeros(2 * n), np.ones(2 * n)
        for i, op in enumerate(self.ops):
            if op.forced == "save":
                lower[i] = 1
            elif op.forced == "replay" or not op.keepable or op.bytes > self.left:
                upper[i] = 0
            if op.forced == "replay":
                lower[n + i] = 1
        return lower, upper

    @cached_property
    def rows(self) -> tuple[Any, list[float]]:
        """A sparse matrix, and the least of each row of it times the variables."""
        sparse = require("scipy.sparse", "plan", "to plan with skipped ops")
        n = len(self.ops)
        least: list[float] = []
        entries: list[tuple[float, int, int]] = []
        for i, op in enumerate(self.ops):
            if op.needed:
                entries += [(1.0, len(least), i), (1.0, len(least), n + i)]
                least.append(1.0)
            for j in set(op.reads):
                entries += [(1.0, len(least), j), (1.0, len(least), n + j), (-1.0, len(least), n + i)]
                least.append(0.0)
        values, at, columns = zip(*entries) if entries else ((), (), ())
        return sparse.csr_matrix((values, (at, columns)), shape=(len(least), 2 * n)), least


def closure_optimum(
    ops: Sequence[Op], budget: int, *, time_limit: float | None = 10.0, within: float = 0.0
) -> Point | None:
    """Return the cheapest choice that keeps at most `budget` bytes when ops may be skipped; None where none fits.

    Args:
        ops: of one block.
        budget: bytes.
        time_limit: seconds; if it strikes, the best choice found comes back with its proven gap.
        within: how much more than the least a choice may cost, as a share of it; its gap is in the point, too.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    optimize = require("scipy.optimize", "plan", "to plan with skipped ops")
    import numpy as np

    left = budget - sum(op.bytes for op in ops if op.forced == "save")
    if left < 0:
        return None
    n, program = len(ops), _Program(ops, left)
    tie = 1e-9 / max(1, n)  # fewer bytes among equal costs; too small to buy any op's cost above the solver's gap
    matrix, least = program.rows
    spent = np.array([[size / program.byte_unit for size in program.sizes] + [0.0] * n])
    limits = [optimize.LinearConstraint(spent, 0.0, left / program.byte_unit * (1 + 1e-12))]
    if least:
        limits.append(optimize.LinearConstraint(matrix, least, 2.0))
    options = {"mip_rel_gap": within} | ({"time_limit": time_limit} if time_limit is not None else {})
    result = optimize.milp(
        program.objective(tie),
        integrality=np.ones(2 * n),
        bounds=optimize.Bounds(*program.bounds()),
        constraints=limits,
        options=options,
    )
    if result.x is None:
        return None
    keep = _drop_useless(ops, sum(1 << i for i in range(n) if result.x[i] > 0.5))
    point = _point(ops, keep)
    if point.bytes > budget:  # only by the solver's tolerance: take the offending bytes off the budget and solve again
        return closure_optimum(ops, budget - (point.bytes - budget), time_limit=time_limit, within=within)
    bound = result.mip_dual_bound if result.mip_dual_bound is not None else 0.0
    gap = max(0.0, point.cost - bound * program.cost_unit) if result.status != 0 or within else 0.0
    return Point(point.bytes, point.cost, keep, point.skip, gap)


def _point(ops: Sequence[Op], keep: int) -> Point:
    cost, skip = closure_replay(ops, keep)
    return Point(sum(op.bytes for i, op in enumerate(ops) if keep >> i & 1), cost, keep, skip)


def _drop_useless(ops: Sequence[Op], keep: int) -> int:
    """Return `keep` without what buys nothing: neither backward nor a recomputed op reads it, or it costs nothing anew."""
    run = _running(ops, keep)
    read = {j for i, op in enumerate(ops) if run[i] for j in op.reads}
    keep &= sum(1 << i for i, op in enumerate(ops) if op.needed or op.forced == "save" or i in read)
    cost, _ = closure_replay(ops, keep)
    for i in sorted(range(len(ops)), key=lambda i: (-ops[i].bytes, i)):
        free = keep >> i & 1 and ops[i].forced != "save" and not ops[i].cost
        if free and closure_replay(ops, keep & ~(1 << i))[0] <= cost:
            keep &= ~(1 << i)
    return keep


def closure_frontier(ops: Sequence[Op], points: int = POINTS) -> tuple[Point, ...]:
    """Return about `points` choices with skips on the lower hull of all, those first that the hull bends most at.

    Ascending in bytes, strictly descending in cost, each optimal for its bytes. Between two of them there may be others
    above the line that joins them (`closure_optimum` answers for one exact budget).

    Raises:
        MissingExtraError: scipy is not installed.
    """
    may = _all_that_may(ops)
    free = may & sum(1 << i for i, op in enumerate(ops) if op.forced == "save" or not op.bytes)
    least, most = (_point(ops, _drop_useless(ops, keep)) for keep in (free, may))
    program = _Program(ops, sum(op.bytes for op in ops))
    hull = {least.keep: least, most.keep: most}
    waiting = [(-_area(least, most), 0, least, most)]
    solved = 0
    while waiting and solved < points:
        _, _, low, high = heapq.heappop(waiting)
        solved += 1
        middle = _priced(program, (low.cost - high.cost) / (high.bytes - low.bytes)) if _area(low, high) else None
        if middle is None or not low.bytes < middle.bytes < high.bytes:
            continue
        if (middle.cost - low.cost) * (high.bytes - low.bytes) >= (high.cost - low.cost) * (middle.bytes - low.bytes):
            continue  # on the line: nothing is below it
        hull[middle.keep] = middle
        for first, second in ((low, middle), (middle, high)):
            heapq.heappush(waiting, (-_area(first, second), len(hull) * 2 + (second is high), first, second))
    return frontier(hull.values())


def _area(low: Point, high: Point) -> float:
    return max(0, high.bytes - low.bytes) * max(0.0, low.cost - high.cost)


def _priced(program: _Program, price: float) -> Point | None:
    """Return the choice of least cost where each byte costs `price` more, by a linear program whose corners are whole."""
    optimize = require("scipy.optimize", "plan", "to plan with skipped ops")
    import numpy as np

    matrix, least = program.rows
    result = optimize.linprog(
        program.objective(price * program.byte_unit / program.cost_unit),
        bounds=np.stack(program.bounds(), axis=1),
        A_ub=-matrix if least else None,
        b_ub=[-value for value in least] if least else None,
        method="highs-ds",
    )
    if result.x is None:
        return None
    keep = sum(1 << i for i in range(len(program.ops)) if result.x[i] > 0.5)
    return _point(program.ops, _drop_useless(program.ops, keep))


def _all_that_may(ops: Sequence[Op]) -> int:
    """Return the mask of everything that may be kept."""
    return sum(1 << i for i, op in enumerate(ops) if op.forced == "save" or (op.forced is None and op.keepable))


def closure_every(ops: Sequence[Op], max_states: int = EVERY_STATES) -> tuple[Point, ...] | None:
    """Return every best trade of bytes for recomputation cost with skips; None where the sweep would exceed `max_states`.

    Ops are gone through from the last to the first. All that matters of the choices so far is which earlier outputs they
    require, what they keep and what it costs. Layers are nearly chains, so that few outputs are required at a time.
    """
    states: dict[int, list[tuple[int, float, int]]] = {0: [(0, 0.0, 0)]}
    for i in reversed(range(len(ops))):
        op, bit = ops[i], 1 << i
        reads = sum(1 << j for j in set(op.reads))
        grown: dict[int, list[tuple[int, float, int]]] = {}
        for required, choices in states.items():
            rest = required & ~bit
            kept = [(b + op.bytes, c, keep | bit) for b, c, keep in choices]
            if op.forced == "save":
                grown.setdefault(rest, []).extend(kept)
            elif required & bit or op.needed or op.forced == "replay":
                grown.setdefault(rest | reads, []).extend((b, c + op.cost, keep) for b, c, keep in choices)
                if op.keepable and op.forced is None:
                    grown.setdefault(rest, []).extend(kept)
            else:
                grown.setdefault(rest, []).extend(choices)
        states = {required: non_dominated(sorted(choices)) for required, choices in grown.items()}
        if sum(map(len, states.values())) > max_states:
            return None
    best = non_dominated(sorted(state for choices in states.values() for state in choices))
    points = []
    for size, _, keep in best:
        cost, skip = closure_replay(ops, keep)  # summed afresh, in the order of the ops
        points.append(Point(size, cost, keep, skip))
    return frontier(points)
