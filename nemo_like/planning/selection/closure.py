"""Choose outputs of one block to save where recomputation may leave ops out: a closure problem under a budget of bytes.

A sweep over the ops finds every best choice (`closure_every`); of a block with too many, an even share of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.planning.selection.solver import Op, Point, frontier, linear_frontier, non_dominated, thin

EVERY_STATES = 1 << 16
"""Non-dominated states that a sweep over the ops may hold before it thins them out; below this every answer is exact."""


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


def closure_every(ops: Sequence[Op], max_states: int = EVERY_STATES) -> tuple[Point, ...]:
    """Return every best trade of bytes for recomputation cost with skips: ascending in bytes, descending in cost.

    Ops are gone through from the last to the first. All that matters of the choices so far is which earlier outputs they
    require, what they keep and what it costs. Layers are nearly chains, so that few outputs are required at a time. Past
    `max_states` states, those that require the same outputs are thinned to an even share, spread over their bytes; where
    too many different outputs are required at a time, it is the choices of `linear_frontier` with what they may skip.
    """
    states: dict[int, list[tuple[int, float, int]]] = {0: [(0, 0.0, 0)]}
    for i in reversed(range(len(ops))):
        states = _decided(ops[i], i, states)
        if sum(map(len, states.values())) > max_states:
            if 4 * len(states) > max_states:
                return frontier(_point(ops, point.keep) for point in linear_frontier(ops))
            states = {required: thin(choices, max_states // len(states)) for required, choices in states.items()}
    best = non_dominated(sorted(state for choices in states.values() for state in choices))
    return frontier(_point(ops, keep) for _, _, keep in best)  # costs are summed afresh, in the order of the ops


def _point(ops: Sequence[Op], keep: int) -> Point:
    cost, skip = closure_replay(ops, keep)
    return Point(sum(op.bytes for i, op in enumerate(ops) if keep >> i & 1), cost, keep, skip)


def _decided(
    op: Op, i: int, states: dict[int, list[tuple[int, float, int]]]
) -> dict[int, list[tuple[int, float, int]]]:
    """Return the states with `op`, number `i`, saved, recomputed or skipped; the keys: masks of required outputs."""
    bit, reads = 1 << i, sum(1 << j for j in set(op.reads))
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
    return {required: non_dominated(sorted(choices)) for required, choices in grown.items()}
