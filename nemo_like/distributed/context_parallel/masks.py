"""Masks of a part's queries (rows) over the keys of the whole sequence (columns, in order), from global positions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_like.distributed.context_parallel import layout
from nemo_like.distributed.context_parallel.parts import CURRENT, Parts, StackCall


def causal(parts: Parts, columns: int, query: Tensor, *, additive: bool) -> Tensor:
    """The causal mask of this rank's queries (B, H, L, D) over `columns` keys, (1, 1, L, columns)."""
    rows = parts.positions(columns, query.device)
    mask = (torch.arange(columns, device=query.device) <= rows[:, None])[None, None]
    return additive_mask(mask, query.dtype) if additive else mask


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is True, else the least number of `dtype`, which eager attention adds to its scores."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def make(
    implementation: str, batch_size: int, q_length: int, kv_length: int, *, mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None, device: Any = "cpu", dtype: torch.dtype = torch.float32, **kwargs: Any,
) -> Any:  # fmt: skip
    """What transformers calls to make a mask, registered for `implementation`.

    Outside of a cut stack the mask is that of the whole sequence: the stack cuts it when it gets it.
    """
    call = CURRENT.get()
    mapping = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS
    if call is None or call.parts.idle:
        return mapping[implementation](
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, mask_function=mask_function,
            attention_mask=attention_mask, device=device, dtype=dtype,
            **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )  # fmt: skip
    own = call.masked or call.documents is not None
    plain = mask_function is sys.modules["transformers.masking_utils"].causal_mask_function
    skips = implementation == "sdpa" or call.parts.method == "all_gather"  # eager attention masks nothing by itself
    if plain and skips and not own and kwargs.get("allow_is_causal_skip", True):
        if call.parts.method == "all_gather":
            call.parts.make_triangles(kv_length, dtype, torch.device(device))
        return None  # padding is at the end, where no query of a token looks
    mask = _mask(call, batch_size, q_length, kv_length, mask_function, attention_mask, device)
    return additive_mask(mask, dtype) if implementation == "eager" else mask


def _mask(
    call: StackCall, batch: int, q_length: int, kv_length: int, mask_function: Callable[..., Any],
    attention_mask: Tensor | None, device: Any,
) -> Tensor:  # fmt: skip
    """(B, 1, rows, kv_length), True where a query may look."""
    parts = call.parts
    if parts.method == "ulysses":
        rows = torch.arange(q_length * parts.ranks, device=device)
    else:
        rows = parts.positions(q_length * parts.ranks, device)
    b, q = torch.arange(batch, device=device)[:, None, None, None], rows[None, None, :, None]
    k = torch.arange(kv_length, device=device)[None, None, None, :]
    mask = mask_function(b, torch.zeros_like(b), q, k)
    mask = torch.as_tensor(mask, device=device).expand(-1, 1, len(rows), kv_length)
    if attention_mask is not None:
        # Where the caller gave none, it only hides the padding at the end, which is the same in every row of the batch.
        rows_of_batch = attention_mask if call.masked or kv_length != q_length * parts.ranks else attention_mask[:1]
        mask = mask & rows_of_batch.to(torch.bool)[:, None, None, :kv_length]
    if call.documents is not None and call.documents.shape[-1] == kv_length:
        documents = call.documents
        mask = mask & (documents[:, None, rows, None] == documents[:, None, None, :])
    if call.padded:
        mask = mask | ((q == k) & (k >= call.length))  # padding looks at itself: an empty row would be NaN
    return mask.expand(batch, -1, -1, -1)


def cut_given(parts: Parts, mask: Tensor, length: int) -> Tensor:
    """A caller's own mask (B, 1 or H, S, S) to the rows of this rank (under Ulysses to all), over padded keys."""
    # Padding is never looked at; its own rows are not empty, or their softmax would be NaN.
    hidden = torch.finfo(mask.dtype).min if mask.is_floating_point() else 0
    missing = layout.padded_length(length, parts.ranks) - length
    if missing:
        mask = layout.pad(mask, mask.ndim - 1, parts.ranks, hidden)
        if mask.shape[-2] == length:
            mask = torch.cat([mask, mask[..., -1:, :].expand(*mask.shape[:-2], missing, mask.shape[-1])], -2)
    if mask.shape[-2] == 1 or parts.method == "ulysses":
        return mask
    return layout.cut(mask, mask.ndim - 2, parts.ranks, parts.rank)
