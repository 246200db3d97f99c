"""Block masks of flex attention, made anew: of a part's queries (rows) over the keys of the whole sequence (columns).

A block mask is a function of two positions, and the blocks that the function leaves out. Of a part the first row is not
position 0 and rows of its two chunks are not neighbours, so the function is given the positions of the whole sequence, and
the blocks are found again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_like.distributed.context_parallel.parts import Parts
from nemo_like.torch_compat import unseen

Mod = Callable[..., Any]
"""A ``mask_mod(b, h, q, kv)``, or a ``score_mod(score, b, h, q, kv)``."""

FLEX = "torch.nn.attention.flex_attention"
"""The file of flex attention; models that use it have imported it."""

_DONE = "_nemo_like_over_whole"
"""Set on a ``mask_mod`` that takes positions of a part already."""
_KEPT = 8
"""Block masks of a part that are kept: one for each kind of layer, and some to spare."""
_AT_ONCE = 2**28
"""Pairs of positions that a function is asked for at a time, one byte each."""


def is_block_mask(value: Any) -> bool:
    """Whether `value` is one of flex attention's block masks; imports nothing."""
    flex: Any = sys.modules.get(FLEX)
    return flex is not None and isinstance(value, flex.BlockMask)


def build(mask_mod: Mod, shape: tuple[int, int, int, int], device: Any, block: tuple[int, int] = (128, 128)) -> Any:
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
    found = {name: torch.cat([getattr(piece, name) for piece in pieces], 2) for name in names}
    return flex.BlockMask.from_kv_blocks(**found, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(rows, columns))


def _from_row(mask_mod: Mod, start: int) -> Mod:
    if start == 0:
        return mask_mod
    return lambda b, h, q, kv: mask_mod(b, h, q + start, kv)


def of_part(parts: Parts, mask: Any, shape: tuple[int, int, int, int], length: int, device: Any) -> Any:
    """`mask` of whole sequences, or of parts as the model sees them, for what `parts` has flex attention compute.

    Args:
        mask: a block mask, of which the function is read; None: every position looks at every other.
        shape: (B, H, rows, columns) of the scores of this rank.
        length: tokens of the whole sequence, before padding.

    Raises:
        NotImplementedError: a mask whose function says less than its blocks, or reads tensors of a part.
    """
    if mask is not None and getattr(mask.mask_mod, _DONE, False):
        return mask
    if mask is None and length == shape[3]:
        return None
    kept = parts.masks.blocks.get((id(mask), *shape, length))
    if kept is not None:
        return kept[1]
    with unseen():  # by what records a region: running it again finds the mask here
        made = _make(parts, mask, shape, length, device)
    while len(parts.masks.blocks) >= _KEPT:
        parts.masks.blocks.pop(next(iter(parts.masks.blocks)))
    parts.masks.blocks[(id(mask), *shape, length)] = (mask, made)  # which keeps the mask, and so its id, alive
    return made


@torch.compiler.disable
def _make(parts: Parts, mask: Any, shape: tuple[int, int, int, int], length: int, device: Any) -> Any:
    batch, heads, rows, columns = shape
    own, all_heads = None, heads
    if mask is None:
        batch, heads = 1, 1
    else:
        own = mask.mask_mod
        _refuse_unreadable(mask)
        _refuse_tensors_of_a_part(own, columns // parts.ranks, columns)
        batch, heads = (min(size, most) for size, most in zip(mask.shape[:2], shape[:2]))
    block = (128, 128) if mask is None or max(mask.BLOCK_SIZE) > 2**20 else tuple(mask.BLOCK_SIZE)
    return build(mask_over_whole(parts, own, rows, all_heads, length), (batch, heads, rows, columns), device, block)


def mask_over_whole(parts: Parts, own: Mod | None, rows: int, heads: int, length: int) -> Mod:
    """`own`, of positions in sequences of `length` tokens, as a function of this rank's `rows` and `heads`, and of
    padded columns.

    Nothing looks at padding but itself: a row without columns would be NaN.
    """
    place, padded = positions_over_whole(parts, rows, heads), length % (2 * parts.ranks) != 0

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        h, q = place(h, q)
        if not padded:
            return torch.ones_like(q == kv) if own is None else own(b, h, q, kv)
        seen = (q < length) & (kv < length)
        if own is not None:  # which may read tables that end where the sequence does
            seen = seen & own(b, h, q.clamp(max=length - 1), kv.clamp(max=length - 1))
        return seen | ((q == kv) & (kv >= length))

    setattr(mask_mod, _DONE, True)
    return mask_mod


def score_over_whole(parts: Parts, own: Mod, rows: int, heads: int, length: int) -> Mod:
    """`own`, a ``score_mod`` of whole sequences, as one of a part's `rows` and this rank's `heads`."""
    _refuse_tensors_of_a_part(own, rows // parts.ranks if parts.method.cuts_heads else rows, length)
    place = positions_over_whole(parts, rows, heads)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        h, q = place(h, q)
        return own(score, b, h, q.clamp(max=length - 1), kv.clamp(max=length - 1))

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
    """A mask whose blocks leave out more than its function does: of a part, nothing would say which."""
    own = build(mask.mask_mod, mask.shape, mask.kv_num_blocks.device, tuple(mask.BLOCK_SIZE))
    whole_blocks = [each.full_kv_num_blocks for each in (mask, own)]
    more = whole_blocks[0] is not None and int(whole_blocks[0].sum()) > int(whole_blocks[1].sum())
    if more or not torch.equal(mask.to_dense(), own.to_dense()):
        raise NotImplementedError(
            "cp makes block masks anew from their mask_mod, and the blocks of this one are others than those of its "
            "mask_mod (BlockMask.from_kv_blocks): make it by create_block_mask(mask_mod, ...), or use cp=1."
        )


def _refuse_tensors_of_a_part(mod: Mod, part: int, whole: int) -> None:
    """A function that reads document numbers of a part would look them up at positions of the whole."""
    if part == whole:
        return
    for found in _captured(mod, 4):
        if part in found.shape:
            raise NotImplementedError(
                f"cp asks a mask_mod or score_mod about positions of the whole sequence, and this one reads a tensor "
                f"{tuple(found.shape)} that is as long as this rank's part ({part} tokens): make the block mask before the "
                "call, from tensors of the whole sequence, and pass it to the model; or use cp=1."
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
