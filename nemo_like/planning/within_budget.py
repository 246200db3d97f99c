"""Which mix of choices is the fastest within a budget; and where none fits, the least and what would lower it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import BudgetError
from nemo_like.options import MemoryBudget
from nemo_like.planning import solver
from nemo_like.planning.advise import changes, helping, in_words
from nemo_like.planning.last_within import last_within
from nemo_like.planning.stack import Stack

if TYPE_CHECKING:
    from nemo_like.planning.planner import Planner


def fastest(planner: Planner, budget: MemoryBudget, asked: str = "") -> tuple[Stack, solver.Mix]:
    """The mix of choices with the least replay within `budget`, and the stack that it is of; not run by the engine yet.

    Raises:
        BudgetError: none fits.
    """
    limit, stack = _limit(planner, budget), planner.stack
    bytes_of = _held_of if budget.fraction is not None else _peak_of

    def last_that_fits(among: Stack, mixes: Sequence[solver.Mix]) -> int:
        """Both what is held and the peak grow from mix to mix. -1: none does."""
        return last_within(limit, lambda at: bytes_of(planner, among, mixes[at]), [mix.bytes for mix in mixes])

    mixes = stack.mixes
    best = len(mixes) - 1 if bytes_of(planner, stack, mixes[-1]) <= limit else last_that_fits(stack, mixes[:-1])
    if best < 0:
        raise _too_small(planner, budget, limit, asked)
    mix = mixes[best]
    if best + 1 < len(mixes):
        finer = stack.finer(mix, planner.problems, skip=planner.skip, host=planner.host)
        between = [m for m in finer.mixes if m.bytes < mixes[best + 1].bytes and m.cost < mix.cost]
        if (found := last_that_fits(finer, between)) >= 0:
            stack, mix = finer, between[found]
    return stack, mix


def _limit(planner: Planner, budget: MemoryBudget) -> int:
    """The bytes that a fraction allows the layers to hold, or that a step may peak at."""
    if budget.fraction is not None:
        return int(budget.fraction * planner.held(planner.uniform("none")))
    share = budget.device_share or 0.0
    return int(planner.device.memory_bytes * share) if budget.peak_bytes is None else budget.peak_bytes


def _held_of(planner: Planner, stack: Stack, mix: solver.Mix) -> int:
    return mix.bytes + planner.traced.shared_bytes


def _peak_of(planner: Planner, stack: Stack, mix: solver.Mix) -> int:
    return planner.peak(planner.proved_all(stack.assignment(mix))).total


def _too_small(planner: Planner, budget: MemoryBudget, limit: int, asked: str) -> BudgetError:
    stack = planner.stack
    if budget.fraction is not None:
        least, none = _held_of(planner, stack, stack.mixes[0]), planner.held(planner.uniform("none"))
        kept = "the layers' inputs" + (
            " and what says which rows go to which expert" if planner.job.ep.size > 1 else ""
        )
        return BudgetError(
            f"Budget {asked!r} allows {write_bytes(limit)} of activations, and {kept} alone take {write_bytes(least)} "
            f"({least / none:.1%} of the {write_bytes(none)} of no checkpointing). Ask for at least {least / none:.1%}, or "
            "use a smaller batch or sequence.",
            least,
        )
    peak = planner.peak(planner.proved_all(stack.assignment(stack.mixes[0])))
    return BudgetError(
        f"Budget {asked!r} is {write_bytes(limit)} per rank, and the least that any plan peaks at is "
        f"{write_bytes(peak.total)} ({peak.words}). Give it at least that, or lower it with a smaller batch or sequence, "
        f"more ranks to shard over (now {planner.job.shard_ranks})" + _lower(planner, stack, peak.total, limit) + ".",
        peak.total,
    )


def _lower(planner: Planner, stack: Stack, peak: int, limit: int) -> str:
    """The end of a sentence of ways out: which changes of the job lower the least `peak`."""
    least = planner.proved_all(stack.assignment(stack.mixes[0]))
    tried = []
    for change in changes(planner.job):
        other = planner.under(change.job)
        if other is not None and not (planner.host and change.job.offload != planner.job.offload):
            tried.append((change.words, other.peak(least).total))
    return "".join(f"; or {words}" for words in in_words(*helping(peak, limit, tried)))
