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

    def combine(self, parts: Tensor) -> Tensor:
        """From each shard's (logsumexp, sums, ...), (k, tokens), to those of the whole vocabulary: two reductions."""
        if self.group is None:
            return parts
        largest = parts[0].clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        sums = torch.cat([(parts[:1] - largest).exp(), parts[1:]])
        dist.all_reduce(sums, dist.ReduceOp.SUM, self.group)
        return torch.cat([sums[:1].log() + largest, sums[1:]])
