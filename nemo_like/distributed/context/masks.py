"""Masks of a part's queries (rows) over the keys of the whole sequence (columns, in order), from global positions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_like.distributed.context import sequence_ops
from nemo_like.distributed.context.parts import CURRENT, Parts, StackCall
from nemo_like.distributed.document_numbers import kept_apart, once_for_all_layers
from nemo_like.transformers_compat import causal_mask_function, mask_functions


def causal(parts: Parts, columns: int, query: Tensor) -> Tensor:
    """The causal mask of this rank's queries (B, H, L, D) over `columns` keys, (1, 1, L, columns), for eager attention."""
    rows = parts.positions(columns, query.device)
    mask = (torch.arange(columns, device=query.device) <= rows[:, None])[None, None]
    return additive_mask(mask, query.dtype)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is True, else the least number of `dtype`, which eager attention adds to its scores."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def make(
    implementation: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    **kwargs: object,
) -> Any:
    """Make a mask for transformers, which calls this as registered for `implementation`.

    Outside of a cut stack the mask is that of the whole sequence: the stack cuts it when it gets it.
    """
    call = CURRENT.get()
    mapping = mask_functions()
    if call is None or call.parts.idle:
        return mapping[implementation](
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            dtype=dtype,
            **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )
    masked = call.masked or call.documents is not None
    plain = mask_function is causal_mask_function()
    method = call.parts.method
    if plain and implementation == "sdpa" and not masked and kwargs.get("allow_is_causal_skip", True):
        return None  # padding is at the end, where no query of a token looks
    whole = q_length * call.parts.ranks
    looks = _looks(call, whole, kv_length, mask_function, attention_mask)
    if implementation == "flex_attention":
        length = whole if method.cuts_heads else q_length
        place = _rows_of_whole(call.parts, length)
        return build(lambda b, h, q, k: looks(b, h, place(q), k), (batch_size, 1, length, kv_length), device)
    rows = torch.arange(whole, device=device) if method.cuts_heads else call.parts.positions(whole, device)
    mask = _mask(batch_size, rows, kv_length, looks)
    return additive_mask(mask, dtype) if implementation == "eager" else once_for_all_layers(mask, dtype)


def _mask(batch: int, rows: Tensor, columns: int, looks: Callable[..., Any]) -> Tensor:
    """(B, 1, rows, columns), True where a query may look, by `looks`."""
    b, q = torch.arange(batch, device=rows.device)[:, None, None, None], rows[None, None, :, None]
    k = torch.arange(columns, device=rows.device)[None, None, None, :]
    mask = torch.as_tensor(looks(b, torch.zeros_like(b), q, k), device=rows.device)
    return mask.expand(batch, 1, len(rows), columns)


def _looks(
    call: StackCall, whole: int, columns: int, mask_function: Callable[..., Any], attention_mask: Tensor | None
) -> Callable[..., Any]:
    """Return a function of (batch, head, query, key), in positions of the whole sequence: whether that query may look
    at that key.

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

    def looks(b: Any, h: object, q: Any, k: Any) -> Any:
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
    missing = sequence_ops.padded_length(length, parts.ranks) - length
    if missing:
        mask = sequence_ops.pad(mask, mask.ndim - 1, parts.ranks, hidden)
        if mask.shape[-2] == length:
            mask = torch.cat([mask, mask[..., -1:, :].expand(*mask.shape[:-2], missing, mask.shape[-1])], -2)
    if mask.shape[-2] == 1 or parts.method.cuts_heads:
        return mask
    return sequence_ops.cut(mask, mask.ndim - 2, parts.ranks, parts.rank)


# Block masks of flex attention: of a part's queries (rows) over the keys of the whole sequence (columns).

Mod = Callable[..., Any]
"""A ``mask_mod(b, h, q, kv)``."""

_BLOCK, _AT_ONCE = 128, 2**28
"""Rows of a block in torch; pairs of positions that a function is called with at a time, one byte each."""


def build(mask_mod: Mod, shape: tuple[int, int, int, int], device: object) -> Any:
    """The block mask (B, H, rows, columns) of `mask_mod`: as ``create_block_mask``, some rows at a time.

    At 128k tokens all pairs of positions at once would be gigabytes.
    """
    flex: Any = sys.modules["torch.nn.attention.flex_attention"]  # models that use it have imported it
    batch, heads, rows, columns = shape
    step = max(1, _AT_ONCE // (batch * heads * columns * _BLOCK)) * _BLOCK
    pieces = [
        flex.create_block_mask(
            _from_row(mask_mod, start), batch, heads, min(step, rows - start), columns, device=device
        )
        for start in range(0, rows, step)
    ]
    if len(pieces) == 1:
        return pieces[0]
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    joined = {name: torch.cat([getattr(piece, name) for piece in pieces], 2) for name in names}
    return flex.BlockMask.from_kv_blocks(**joined, mask_mod=mask_mod, seq_lengths=(rows, columns))


def _from_row(mask_mod: Mod, start: int) -> Mod:
    if start == 0:
        return mask_mod
    return lambda b, h, q, kv: mask_mod(b, h, q + start, kv)


def _rows_of_whole(parts: Parts, rows: int) -> Callable[[Tensor], Tensor]:
    """Return a function of this rank's `rows` that gives those of the whole sequence. Sums alone, which a kernel computes
    in place."""
    if parts.method.cuts_heads:
        return lambda q: q
    chunk = rows // 2
    head, tail = parts.rank * chunk, (2 * parts.ranks - 2 - parts.rank) * chunk
    return lambda q: torch.where(q < chunk, q + head, q + tail)
