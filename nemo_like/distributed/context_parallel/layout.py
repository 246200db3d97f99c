"""Which part of a sequence a rank holds: pure functions of its length, the number of ranks and the rank.

A sequence is padded to a multiple of 2 * ranks and cut into 2 * ranks chunks; rank r holds chunk r and, after it, chunk
2 * ranks - 1 - r. Under a causal mask the chunks at the end see most keys, so a pair from both ends is the same work on
every rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def padded_length(length: int, ranks: int) -> int:
    """`length` rounded up to what `ranks` ranks can be given equal parts of.

    >>> padded_length(13, 2), padded_length(16, 2), padded_length(13, 1)
    (16, 16, 13)
    """
    step = 2 * ranks if ranks > 1 else 1
    return -(-length // step) * step


def positions(length: int, ranks: int, rank: int, device: torch.device | str | None = None) -> Tensor:
    """Where the tokens of `rank`'s part stand in the whole sequence, (length / ranks,); `length` is padded already.

    >>> positions(8, 2, 0).tolist(), positions(8, 2, 1).tolist()
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    if ranks == 1:
        return torch.arange(length, device=device)
    chunk = length // (2 * ranks)
    last = 2 * ranks - 1 - rank
    return torch.cat([
        torch.arange(rank * chunk, (rank + 1) * chunk, device=device),
        torch.arange(last * chunk, (last + 1) * chunk, device=device),
    ])  # fmt: skip


def pad(whole: Tensor, dim: int, ranks: int, value: float = 0) -> Tensor:
    """`whole` with `value` after its end on `dim`, so that `ranks` ranks can be given equal parts."""
    missing = padded_length(whole.shape[dim], ranks) - whole.shape[dim]
    if not missing:
        return whole
    return F.pad(whole, [0, 0] * (whole.ndim - 1 - dim % whole.ndim) + [0, missing], value=value)


def cut(whole: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    """`rank`'s part of a padded sequence on `dim`: its two chunks one after the other."""
    if ranks == 1:
        return whole
    chunks = whole.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)


def join(parts: Tensor, dim: int) -> Tensor:
    """The whole sequence on `dim` from the parts of all ranks, stacked in front: (ranks, ...) to (...)."""
    ranks = len(parts)
    if ranks == 1:
        return parts[0]
    heads, tails = zip(*(part.chunk(2, dim) for part in parts))
    return torch.cat([*heads, *reversed(tails)], dim)


def in_chunks(whole: Tensor, dim: int, ranks: int) -> Tensor:
    """The chunks of a whole sequence in the order of the ranks that hold them, stacked in front."""
    chunks = whole.chunk(2 * ranks, dim)
    return torch.stack([chunks[at] for rank in range(ranks) for at in (rank, 2 * ranks - 1 - rank)])


def split(whole: Tensor, dim: int, ranks: int) -> Tensor:
    """The parts of all ranks, stacked in front: the opposite of `join`. (...) to (ranks, ...)."""
    return torch.stack([cut(whole, dim, ranks, rank) for rank in range(ranks)])
