"""Packed documents: several in one row, told apart by positions that restart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def documents_of(positions: Any, batch: int) -> Tensor | None:
    """(B, S) numbers of the documents in each row, by where `positions` do not go on by one; None where they all do.

    positions: (B, S) or (1, S), or (4, B, S) whose first stream counts tokens; other shapes say nothing.

    >>> documents_of(torch.tensor([[0, 1, 2, 0, 1]]), 1).tolist()
    [[0, 0, 0, 1, 1]]
    """
    if not isinstance(positions, Tensor):
        return None
    if positions.ndim == 3 and len(positions) == 4:
        positions = positions[0]
    if positions.ndim != 2:
        return None
    starts = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(starts.any()):
        return None
    numbers = torch.cat([torch.zeros_like(starts[:, :1]), starts], 1).cumsum(1)
    return numbers.expand(batch, -1)
