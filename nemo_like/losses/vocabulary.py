"""Which part of the vocabulary a rank's logits are: all of it, or the shard of a tensor-parallel head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Vocabulary:
    """Columns `start` to `start + width` of `size`, the other columns being with the ranks of `group`."""

    size: int
    width: int
    start: int = 0
    group: Any = None
    """The process group whose ranks hold the other columns; None: there are none."""

    def local(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Labels as columns of this shard, and which of them lie in it. Both (tokens,)."""
        if self.group is None:
            return labels, torch.ones_like(labels, dtype=torch.bool)
        local = labels - self.start
        return local, (local >= 0) & (local < self.width)

    def combine(self, lse: Tensor, sums: Tensor, means: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """From those of each shard to those of the whole vocabulary, in two reductions.

        Args:
            lse: (k, tokens), logarithms of sums of exponentials.
            sums: (j, tokens).
            means: (m, tokens), of values that are weighted by the exponentials that ``lse[0]`` is the sum of.
        """
        means = lse[:0] if means is None else means
        if self.group is None:
            return lse, sums, means
        largest = lse.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        own = (lse - largest).exp()
        all_sums = torch.cat([own, sums, means * own[:1]])
        dist.all_reduce(all_sums, dist.ReduceOp.SUM, self.group)
        total, sums, means = all_sums.split([len(lse), len(sums), len(means)])
        return total.log() + largest, sums, means / total[:1]
