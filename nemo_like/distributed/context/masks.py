"""Masks of a part's queries (rows) over the keys of the whole sequence (columns, in order), from global positions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_like.distributed.context import sequence_ops
from nemo_like.distributed.context.parts import CURRENT, WHOLE, Parts, StackCall
from nemo_like.distributed.document_numbers import kept_apart
from nemo_like.torch_compat import unseen
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
            **kwargs if WHOLE.get() else kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )
    masked = call.masked or call.documents is not None
    plain = mask_function is causal_mask_function()
    method = call.parts.method
    # Eager attention masks nothing by itself, flex attention neither.
    skips = implementation == "sdpa" or (implementation == "eager" and method.triangles)
    if plain and skips and not masked and kwargs.get("allow_is_causal_skip", True):
        if method.triangles:
            call.parts.make_triangles(kv_length, dtype, torch.device(device))
        return None  # padding is at the end, where no query of a token looks
    whole = q_length * call.parts.ranks
    looks = _looks(call, whole, kv_length, mask_function, attention_mask)
    if implementation == "flex_attention":
        length = whole if method.cuts_heads else q_length
        place = positions_over_whole(call.parts, length, heads=1)
        return build(lambda b, h, q, k: looks(b, h, place(h, q)[1], k), (batch_size, 1, length, kv_length), device)
    rows = torch.arange(whole, device=device) if method.cuts_heads else call.parts.positions(whole, device)
    mask = _mask(batch_size, rows, kv_length, looks)
    return additive_mask(mask, dtype) if implementation == "eager" else mask


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


# Block masks of flex attention, made anew: of a part's queries (rows) over the keys of the whole sequence (columns).
#
# A block mask is a function of two positions, and the blocks that the function leaves out. Of a part the first row is not
# position 0 and rows of its two chunks are not neighbours, so the function is given the positions of the whole sequence, and
# the blocks are found again.

Mod = Callable[..., Any]
"""A ``mask_mod(b, h, q, kv)``, or a ``score_mod(score, b, h, q, kv)``."""

FLEX = "torch.nn.attention.flex_attention"
"""The file of flex attention; models that use it have imported it."""

_DONE = "_nemo_like_over_whole"
"""Set on a ``mask_mod`` that takes positions of a part already."""
_KEPT = 8
"""Block masks of a part that are cached: one for each kind of layer, and some to spare."""
_AT_ONCE = 2**28
"""Pairs of positions that a function is asked for at a time, one byte each."""


def is_block_mask(value: Any) -> bool:
    """Return whether `value` is one of flex attention's block masks; imports nothing."""
    flex: Any = sys.modules.get(FLEX)
    return flex is not None and isinstance(value, flex.BlockMask)


def build(mask_mod: Mod, shape: tuple[int, int, int, int], device: object, block: tuple[int, int] = (128, 128)) -> Any:
    """The block mask (B, H, rows, columns) of `mask_mod`: as ``create_block_mask``, some rows at a time.

    At 128k tokens all pairs of positions at once would be gigabytes.
    """
    flex: Any = sys.modules[FLEX]
    batch, heads, rows, columns = shape
    step = max(1, _AT_ONCE // (batch * heads * columns * block[0])) * block[0]
    pieces = [
        flex.create_block_mask(
            _from_row(mask_mod, start), batch, heads, min(step, rows - start), columns, device=device, BLOCK_SIZE=block
        )
        for start in range(0, rows, step)
    ]
    if len(pieces) == 1:
        return pieces[0]
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    joined = {name: torch.cat([getattr(piece, name) for piece in pieces], 2) for name in names}
    return flex.BlockMask.from_kv_blocks(**joined, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(rows, columns))


def _from_row(mask_mod: Mod, start: int) -> Mod:
    if start == 0:
        return mask_mod
    return lambda b, h, q, kv: mask_mod(b, h, q + start, kv)


def of_part(parts: Parts, mask: Any, shape: tuple[int, int, int, int], length: int, device: object) -> Any:
    """`mask` of whole sequences, or of parts as the model sees them, for what `parts` has flex attention compute.

    Args:
        mask: a block mask, of which the function is read; None: every position looks at every other.
        shape: (B, H, rows, columns) of the scores of this rank.
        length: tokens of the whole sequence, before padding.

    Raises:
        NotImplementedError: a mask whose function excludes less than its blocks, or reads tensors of a part.
    """
    if mask is not None and getattr(mask.mask_mod, _DONE, False):
        return mask
    if mask is None and length == shape[3]:
        return None
    kept = parts.masks.blocks.get((id(mask), *shape, length))
    if kept is not None:
        return kept[1]
    with unseen():  # by what records a region: running it again finds the mask here
        mask_of_part = _make(parts, mask, shape, length, device)
    while len(parts.masks.blocks) >= _KEPT:
        parts.masks.blocks.pop(next(iter(parts.masks.blocks)))
    parts.masks.blocks[(id(mask), *shape, length)] = (mask, mask_of_part)  # which keeps the mask, and so its id, alive
    return mask_of_part


@torch.compiler.disable
def _make(parts: Parts, mask: Any, shape: tuple[int, int, int, int], length: int, device: object) -> Any:
    batch, heads, rows, columns = shape
    mask_mod, all_heads = None, heads
    if mask is None:
        batch, heads = 1, 1
    else:
        mask_mod = mask.mask_mod
        _refuse_unreadable(mask)
        _refuse_tensors_of_a_part(mask_mod, columns // parts.ranks, columns)
        batch, heads = (min(size, most) for size, most in zip(mask.shape[:2], shape[:2]))
    block = (128, 128) if mask is None or max(mask.BLOCK_SIZE) > 2**20 else tuple(mask.BLOCK_SIZE)
    return build(
        mask_over_whole(parts, mask_mod, rows, all_heads, length), (batch, heads, rows, columns), device, block
    )


def mask_over_whole(parts: Parts, mod: Mod | None, rows: int, heads: int, length: int) -> Mod:
    """`mod`, of positions in sequences of `length` tokens, as a function of this rank's `rows` and `heads`, and of
    padded columns.

    Nothing looks at padding but itself: a row without columns would be NaN.
    """
    place, padded = positions_over_whole(parts, rows, heads), length % (2 * parts.ranks) != 0

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        h, q = place(h, q)
        if not padded:
            return torch.ones_like(q == kv) if mod is None else mod(b, h, q, kv)
        seen = (q < length) & (kv < length)
        if mod is not None:  # which may read tables that end where the sequence does
            seen = seen & mod(b, h, q.clamp(max=length - 1), kv.clamp(max=length - 1))
        return seen | ((q == kv) & (kv >= length))

    setattr(mask_mod, _DONE, True)
    return mask_mod


def score_over_whole(parts: Parts, mod: Mod, rows: int, heads: int, length: int) -> Mod:
    """`mod`, a ``score_mod`` of whole sequences, as one of a part's `rows` and this rank's `heads`."""
    _refuse_tensors_of_a_part(mod, rows // parts.ranks if parts.method.cuts_heads else rows, length)
    place = positions_over_whole(parts, rows, heads)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        h, q = place(h, q)
        return mod(score, b, h, q.clamp(max=length - 1), kv.clamp(max=length - 1))

    return score_mod


def positions_over_whole(parts: Parts, rows: int, heads: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(head, row) on this rank to (head, row) of the unsplit model. Sums alone, which a kernel computes in place.

    rows, heads: of this rank, which may have some heads of all.
    """
    if parts.method.cuts_heads:
        first = parts.rank * heads
        return lambda h, q: (h + first, q)
    chunk = rows // 2
    head, tail = parts.rank * chunk, (2 * parts.ranks - 2 - parts.rank) * chunk
    return lambda h, q: (h, torch.where(q < chunk, q + head, q + tail))


def first_tokens(mask: Any, few: int) -> Any:
    """`mask` of sequences of `few` tokens, which are the first of its own."""
    batch, heads = mask.shape[:2]
    return build(mask.mask_mod, (batch, heads, few, few), mask.kv_num_blocks.device, tuple(mask.BLOCK_SIZE))


def _refuse_unreadable(mask: Any) -> None:
    """A mask whose blocks leave out more than its function does: of a part, nothing would tell which."""
    rebuilt = build(mask.mask_mod, mask.shape, mask.kv_num_blocks.device, tuple(mask.BLOCK_SIZE))
    whole_blocks = [each.full_kv_num_blocks for each in (mask, rebuilt)]
    more = whole_blocks[0] is not None and int(whole_blocks[0].sum()) > int(whole_blocks[1].sum())
    if more or not torch.equal(mask.to_dense(), rebuilt.to_dense()):
        raise NotImplementedError(
            "cp makes block masks anew from their mask_mod, and the blocks of this one are others than those of its "
            "mask_mod (BlockMask.from_kv_blocks): make it by create_block_mask(mask_mod, ...), or use cp=1."
        )


def _refuse_tensors_of_a_part(mod: Mod, part: int, whole: int) -> None:
    """A function that reads document numbers of a part would look them up at positions of the whole."""
    if part == whole:
        return
    for captured in _captured(mod, 4):
        if part in captured.shape:
            raise NotImplementedError(
                f"cp calls a mask_mod or score_mod with positions of the whole sequence, and this one reads a tensor "
                f"{tuple(captured.shape)} that is as long as this rank's part ({part} tokens): make the block mask before "
                "the call, from tensors of the whole sequence, and pass it to the model; or use cp=1."
            )


def _captured(mod: Any, depth: int) -> Iterator[Tensor]:
    """Tensors in the closure of a function, and of the functions in it."""
    if isinstance(mod, Tensor):
        yield mod
    if depth == 0:
        return
    inner: list[Any] = []
    if isinstance(mod, functools.partial):
        inner = [mod.func, *mod.args, *mod.keywords.values()]
    elif isinstance(mod, tuple | list):
        inner = list(mod)
    for cell in getattr(mod, "__closure__", None) or ():
        try:
            inner.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    for value in inner:
        yield from _captured(value, depth - 1)
