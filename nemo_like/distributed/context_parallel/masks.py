"""Masks of a part's queries (rows) over the keys of the whole sequence (columns, in order), from global positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_like.distributed.context_parallel import block_masks, layout
from nemo_like.distributed.context_parallel.parts import CURRENT, WHOLE, Parts, StackCall
from nemo_like.distributed.document_numbers import kept_apart
from nemo_like.transformers_compat import causal_mask_function, mask_functions


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
    mapping = mask_functions()
    if call is None or call.parts.idle:
        return mapping[implementation](
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, mask_function=mask_function,
            attention_mask=attention_mask, device=device, dtype=dtype,
            **kwargs if WHOLE.get() else kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )  # fmt: skip
    own = call.masked or call.documents is not None
    plain = mask_function is causal_mask_function()
    method = call.parts.method
    # Eager attention masks nothing by itself, flex attention neither.
    skips = implementation == "sdpa" or (implementation == "eager" and method.triangles)
    if plain and skips and not own and kwargs.get("allow_is_causal_skip", True):
        if method.triangles:
            call.parts.make_triangles(kv_length, dtype, torch.device(device))
        return None  # padding is at the end, where no query of a token looks
    whole = q_length * call.parts.ranks
    looks = _looks(call, whole, kv_length, mask_function, attention_mask)
    if implementation == "flex_attention":
        length = whole if method.cuts_heads else q_length
        place = block_masks.positions_over_whole(call.parts, length, heads=1)
        return block_masks.build(
            lambda b, h, q, k: looks(b, h, place(h, q)[1], k), (batch_size, 1, length, kv_length), device
        )
    rows = torch.arange(whole, device=device) if method.cuts_heads else call.parts.positions(whole, device)
    mask = _mask(batch_size, rows, kv_length, looks)
    return additive_mask(mask, dtype) if implementation == "eager" else mask


def _mask(batch: int, rows: Tensor, columns: int, looks: Callable[..., Any]) -> Tensor:
    """(B, 1, rows, columns), True where `looks` says that a query may look."""
    b, q = torch.arange(batch, device=rows.device)[:, None, None, None], rows[None, None, :, None]
    k = torch.arange(columns, device=rows.device)[None, None, None, :]
    mask = torch.as_tensor(looks(b, torch.zeros_like(b), q, k), device=rows.device)
    return mask.expand(batch, 1, len(rows), columns)


def _looks(
    call: StackCall, whole: int, columns: int, mask_function: Callable[..., Any], attention_mask: Tensor | None
) -> Callable[..., Any]:
    """Of (batch, head, query, key), in positions of the whole sequence: whether that query may look at that key.

    whole: rows of the whole sequence, columns: its keys, both with padding.
    """
    # Where the caller gave none, it only hides the padding at the end, which is the same in every row of the batch.
    each_row = call.masked or columns != whole
    real = None if attention_mask is None else attention_mask[:, :columns].to(torch.bool)
    documents = call.documents
    if documents is not None and documents.shape[-1] != columns:
        documents = None
    if documents is not None:
        kept_apart()

    def looks(b: Any, h: Any, q: Any, k: Any) -> Any:
        mask = mask_function(b, h, q, k)
        if real is not None:
            mask = mask & (real[b, k] if each_row else real[0, k])
        if documents is not None:
            mask = mask & (documents[b, q] == documents[b, k])
        if call.padded:
            mask = mask | ((q == k) & (k >= call.length))  # padding looks at itself: an empty row would be NaN
        return mask

    return looks


def cut_given(parts: Parts, mask: Tensor, length: int) -> Tensor:
    """A caller's own mask (B, 1 or H, S, S) to the rows of this rank (to all, if it has some heads), over padded keys."""
    # Padding is never looked at; its own rows are not empty, or their softmax would be NaN.
    hidden = torch.finfo(mask.dtype).min if mask.is_floating_point() else 0
    missing = layout.padded_length(length, parts.ranks) - length
    if missing:
        mask = layout.pad(mask, mask.ndim - 1, parts.ranks, hidden)
        if mask.shape[-2] == length:
            mask = torch.cat([mask, mask[..., -1:, :].expand(*mask.shape[:-2], missing, mask.shape[-1])], -2)
    if mask.shape[-2] == 1 or parts.method.cuts_heads:
        return mask
    return layout.cut(mask, mask.ndim - 2, parts.ranks, parts.rank)
