"""What the loss of each microbatch counts, so that all together are the loss of the whole batch.

Cross entropies of torch that are means are divided by what counts in all microbatches (`LossCalls`), as far as their
targets are found in the batch; whether as much counts there as was looked up is compared in every step. All else is
multiplied with a share: one (a sum), one over the number of microbatches (a mean over rows or elements, of which all have
equally many), or what counts in a microbatch over what counts in all. Which of them it is, `learn_shares` finds out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_like.distributed.pipeline.batches import Counted, counts_of_all
from nemo_like.losses.batch_means import LossCalls

SUM, MEAN = "sum", "mean"
Share = str | Counted
"""`SUM`, `MEAN`, or what counts."""
_SAME = 1e-9


@dataclass
class LossShares:
    """How the loss of a batch is made of those of its microbatches."""

    means: Sequence[Sequence[Counted]]
    """For each cross entropy that is a mean, what may count in it, the first of which is taken; where there is nothing, it
    was not found in the batch, and each microbatch has as much of it."""
    shares: Sequence[Share]
    """What the shares may be, the first of which is taken."""
    fill: Mapping[str, int] | None = None
    """Numbers that count for nothing, for rows that are missing; None: there are none."""
    class_weights: Sequence[Tensor | None] = ()
    """For each of `means`, on ranks with the last stage."""
    told: bool = False
    """Whether the loss is made of cross entropies alone: means, which are compared in every step, or sums."""

    @property
    def certain(self) -> bool:
        """Whether no later batch can tell more."""
        return len(self.shares) == 1 and isinstance(self.shares[0], str) and all(len(one) < 2 for one in self.means)

    def differ(self, microbatches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these microbatches tell apart what the first batch did not."""
        every = [counts_of_all(alternatives, microbatches) for alternatives in self.means]
        return any(
            abs(one - other) > _SAME
            for alternatives in (*every, self.of(microbatches))
            for numbers in alternatives
            for one, other in zip(numbers, alternatives[0])
        )

    def of(self, microbatches: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        """For each of `shares`, those of all microbatches."""
        counted = [share for share in self.shares if isinstance(share, Counted)]
        counts = dict(zip(counted, counts_of_all(counted, microbatches)))
        found = []
        for share in self.shares:
            if isinstance(share, Counted):
                total = sum(counts[share]) or 1
                found.append([count / total for count in counts[share]])
            else:
                found.append([1.0 if share == SUM else 1 / len(microbatches)] * len(microbatches))
        return found


class BatchShares:
    """The shares of one batch's microbatches, on a rank with the last stage."""

    def __init__(self, known: LossShares, microbatches: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> None:
        """shares: one of `known.of`."""
        self.shares = shares
        found = [(mean[0], weight) for mean, weight in zip(known.means, known.class_weights) if mean]
        counts = iter(counts_of_all([mean for mean, _ in found], microbatches, [weight for _, weight in found]))
        self._counts = [next(counts) if mean else None for mean in known.means]
        self._first: dict[int, Tensor] = {}
        self._off: list[Tensor] = []

    def calls(self, number: int) -> LossCalls:
        """The context in which the loss of microbatch `number` is computed."""
        return LossCalls(partial(self._divisor, number))

    def _divisor(self, number: int, mean: int, own: Tensor) -> Tensor | float:
        if mean >= len(self._counts):
            raise ValueError(
                f"The loss of microbatch {number} has more mean cross entropies than the {len(self._counts)} of the first "
                "batch: what counts in the whole batch is not known of the others."
            )
        counts, share = self._counts[mean], self.shares[number]
        expected = self._first.setdefault(mean, own) if counts is None else counts[number]
        self._off.append((own - expected).double().abs() / own.double().clamp(min=1e-6))
        total = own * len(self.shares) if counts is None else sum(counts) or 1
        return total * share

    def off(self, device: torch.device) -> Tensor:
        """By which part what counted in a cross entropy was off what was looked up in the batch; 0-dim float32."""
        if not self._off:
            return torch.zeros((), device=device)
        return torch.stack([off.to(device) for off in self._off]).max().float()
