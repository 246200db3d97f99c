"""How far a device goes: the largest micro-batch that fits it, and the least number of devices for this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_like.planning.planner import Planner

MOST_RANKS = 1 << 14
MOST_TOKENS, MOST_SEQUENCES = 1 << 17, 128
"""Of a micro-batch: more are not looked for."""
_MOST_TRACES = 10


@dataclass(frozen=True)
class Reach:
    """What fits with the inputs of the layers alone kept (``ac="full"``), the least that a plan holds."""

    largest_batch: int | None
    """Sequences per rank and microbatch; 0: not even one; None: not looked for, or `problem`."""
    least_gpus: int | None
    """Of 1, 2, 4, 8 and so on, for the micro-batch that was planned; None: none up to `MOST_RANKS`, or not looked for."""
    more: bool = False
    """A larger batch than `largest_batch` may fit: it is the largest that was looked for."""
    problem: str = ""
    """Why no other batch could be planned."""


def full_peak(planner: Planner) -> int:
    """Where a step peaks that keeps the inputs of its layers alone, bytes per rank."""
    return planner.peak(planner.uniform("full")).total


def largest_batch(make: Callable[[int], Planner], batch: int, peak: int, limit: int, most: int) -> int:
    """The largest batch up to `most` whose `full_peak` is at most `limit` bytes; 0 where one sequence peaks higher.

    Peaks grow all but evenly with the batch, so that two of them say where the limit is crossed; the answer and its
    successor are both planned.

    Args:
        make: a planner for a batch.
        batch, peak: one that was planned, and where it peaks.
        limit: bytes per rank.
        most: where to stop.
    """
    if batch >= most and peak <= limit:
        return batch
    known = {batch: peak}
    fits, fails = (batch, None) if peak <= limit else (0, batch)
    guess = min(2 * batch, most) if fits else max(1, batch // 2)
    for _ in range(_MOST_TRACES):
        if fits >= most or (fails is not None and fails - fits <= 1):
            break
        guess = max(guess, fits + 1) if fails is None else min(max(guess, fits + 1), fails - 1)
        known[guess] = full_peak(make(guess))
        fits, fails = (guess, fails) if known[guess] <= limit else (fits, guess)
        low, high = sorted(known)[0], sorted(known)[-1]
        slope = (known[high] - known[low]) / (high - low)
        if slope <= 0:
            break
        at = fits or low
        guess = min(int(at + (limit - known[at]) / slope), most)
    return fits


def least_gpus(planner: Planner, whole: Callable[[], Planner], limit: int) -> int | None:
    """The least power of two of ranks on which `full_peak` is at most `limit` bytes; each tensor-parallel rank counts.

    Args:
        planner: for FSDP2, on any number of ranks.
        whole: a planner for one rank, which keeps the model whole.
        limit: bytes per rank.
    """
    tp, ranks = planner.job.tp.size, 2
    while full_peak(planner.on_ranks(ranks)) > limit:
        ranks *= 2
        if ranks > MOST_RANKS:
            return None
    if ranks == 2 and full_peak(whole()) <= limit:
        ranks = 1
    return ranks * tp
