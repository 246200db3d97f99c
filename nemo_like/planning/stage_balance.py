"""Layers dealt out to a pipeline's stages so that the rank which peaks highest peaks as low as it can."""

from __future__ import annotations

from nemo_like.planning.stages import Choices, PipelinePlanner


def balanced(planner: PipelinePlanner, mode: str) -> PipelinePlanner:
    """`planner` with the layers dealt out for memory under ``none``, ``full`` or ``selective``.

    From the dealing by time on, a layer goes from the highest rank's stages to another stage as long as that lowers the
    highest peak (and of those, where it lowers it most).
    """
    best = planner
    peak = _worst(best, best.uniform(mode))
    while True:
        moves = []
        for giver in best.of_rank(peak[1]):
            for taker in range(len(best.counts)):
                if taker not in best.of_rank(peak[1]) and best.counts[giver] > 1:
                    counts = list(best.counts)
                    counts[giver] -= 1
                    counts[taker] += 1
                    other = best.dealt(counts)
                    moves.append((_worst(other, other.uniform(mode)), counts, other))
        if not moves or (found := min(moves, key=lambda move: (move[0][0], move[1])))[0][0] >= peak[0]:
            return best
        peak, _, best = found


def _worst(planner: PipelinePlanner, choices: Choices) -> tuple[int, int]:
    """The highest peak, and the rank that has it."""
    peaks = planner.peaks(choices)
    return max((peak.total, rank) for rank, peak in enumerate(peaks))
