"""The documents of packed rows as numbers, positions and lengths, and the rows of the call that runs."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_like._util.log import say_once


@dataclass
class PackedRows:
    """Documents in the rows of the call that runs."""

    numbers: Tensor
    """(B, S) of the documents."""
    apart: bool = False
    """A mask was made from the numbers, or lengths go to the kernel."""


running: contextvars.ContextVar[PackedRows | None] = contextvars.ContextVar("nemo_like_documents", default=None)
"""None: the rows of the call that runs are whole."""


def kept_apart() -> None:
    """To be called by who makes a mask that hides other documents."""
    rows = running.get()
    if rows is not None:
        rows.apart = True


def once_for_all_layers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a boolean `mask` for torch's attention is True, else -inf: of booleans attention makes these numbers in each
    layer, and keeps them for backward."""
    if mask.device.type != "cpu":
        say_once(
            "attn_implementation='sdpa' has documents and windows of attention in a mask of tokens by tokens, which kernels "
            "do not skip. Load the model with 'flex_attention' (or 'flash_attention_2' without cp), which compute less."
        )
    zero, hidden = (torch.scalar_tensor(number, dtype=dtype, device=mask.device) for number in (0.0, -torch.inf))
    return torch.where(mask, zero, hidden)


def documents_of(positions: object, batch: int) -> Tensor | None:
    """(B, S) numbers of the documents in each row, by where `positions` do not go on by one; None where they all do.

    positions: (B, S) or (1, S), or (4, B, S) whose first stream counts tokens; other shapes tell nothing.

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


def starts_of(numbers: Tensor) -> Tensor:
    """Return the places where a document of `numbers` (B, S) begins."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return starts


def since_start(starts: Tensor) -> Tensor:
    """Positions that restart where `starts` is True, (B, S)."""
    index = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return index - index.masked_fill(~starts, 0).cummax(1).values


def lengths_of(starts: Tensor) -> dict[str, Any]:
    """Return what kernels without masks are told of documents that begin at `starts`, (B, S), of all rows one after the
    other."""
    begins = starts.flatten().nonzero()[:, 0].int()
    ends = torch.cat([begins, begins.new_tensor([starts.numel()])])
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def numbers_from_lengths(ends: Tensor, batch: int, length: int) -> Tensor:
    """(B, S) from cumulative lengths over all rows one after the other: 0, end of the first document, ..."""
    total = batch * length
    if ends.ndim != 1 or int(ends[0]) != 0 or int(ends[-1]) > total:
        raise ValueError(
            f"cu_seqlens is {ends.tolist()}; it must begin with 0 and end within the {batch} x {length} tokens of the batch."
        )
    numbers = torch.searchsorted(ends[1:].contiguous(), torch.arange(total, device=ends.device), right=True) + 1
    return numbers.masked_fill(numbers > len(ends) - 1, 0).view(batch, length)


def hide(numbers: Tensor, mask: object) -> Tensor:
    """0 where a mask of ones and zeros hides a token."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape != numbers.shape:
        return numbers
    return numbers.masked_fill(mask == 0, 0)


def refuse_scattered(numbers: Tensor, starts: Tensor) -> None:
    """A document in two pieces would train as two."""
    begins = starts & (numbers != 0)
    apart = -1 - torch.arange(numbers.shape[1], device=numbers.device)
    again = (numbers.where(begins, apart).sort(1).values.diff(dim=1) == 0).any(1)
    if again.any():
        row = int(again.int().argmax())
        raise ValueError(
            f"A row has the document numbers {numbers[row][begins[row]].tolist()} one after the other: a document must be "
            "in one piece, without hidden tokens inside."
        )
