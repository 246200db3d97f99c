"""``all_gather``: each rank gathers the keys and values of the whole sequence, for any attention.

Causal attention runs its own keys first, while those of the others are on their way. They come in the order of the ranks,
chunks from the front and chunks from the back apart, and stay in it: no query minds the order of the keys before its chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like._util.log import say_once
from nemo_like.distributed.context import masks
from nemo_like.distributed.context.causal import causal_attention_of
from nemo_like.distributed.context.parts import Attention, Blocks, ContextMethod
from nemo_like.distributed.context.sequence_ops import find_group


class GatherKeys(ContextMethod):
    """This rank's queries over all keys."""

    word = "all_gather"
    rows = 0.5

    def attend(self, call: Attention) -> Any:
        if (states := causal_attention_of(call)) is not None:
            return call.output(states)
        parts, mask = call.parts, call.mask
        widths = call.key.shape[-1], call.value.shape[-1]
        whole = parts.gather(torch.cat([call.key, call.value], -1), call.key.ndim - 2)
        if call.causal:
            if call.fused:
                say_once(
                    "Attention with dropout under cp makes a mask of a rank's tokens by all: it takes memory and time."
                )
            mask = masks.causal(parts, whole.shape[-2], call.query)
        key, value = whole.split(widths, -1)
        return call.run(call.query, key, value, mask)

    def blocks(self, part: Tensor, rank: int, ranks: int, group: str, backward: bool = False) -> Blocks:
        half = part.shape[3] // 2
        halves = slice(None, half), slice(half, None)
        sent = [part[:, :, :, rows].permute(3, 0, 1, 2, 4).contiguous() for rows in halves]  # (chunk, 2, B, heads, D)
        got = [chunk.new_empty((ranks * half, *chunk.shape[1:])) for chunk in sent]
        ranks_of = find_group(group)
        works = [dist.all_gather_into_tensor(*pair, ranks_of, async_op=True) for pair in zip(got, sent)]
        of_own = []
        for rows in halves:
            of_own.append((yield rows, part[:, :, :, rows], True))
        # The chunks from the front: before this rank's first one are `rank` of them, before its second one all. From the
        # back: before its second one are those of the higher ranks.
        front, back = slice(None, rank * half), slice((rank + 1) * half, None)
        seen = [[(halves[0], front), (halves[1], slice(None))], [(halves[1], back)]]
        parts, reduced = [], []
        for number, blocks in enumerate(seen):
            works[number].wait()
            chunks = got.pop(0)
            whole, sums = chunks.permute(1, 2, 3, 0, 4), torch.zeros_like(chunks) if backward else None
            for rows, columns in blocks:
                if not whole[:, :, :, columns].shape[3]:
                    continue
                if sums is None:
                    yield rows, whole[:, :, :, columns], False
                else:
                    _add(sums[columns], (yield rows, whole[:, :, :, columns], False))
            if sums is not None:
                _add(sums[rank * half : (rank + 1) * half], of_own.pop(0))
                parts.append(torch.empty_like(sent[number]))
                reduced.append(dist.reduce_scatter_tensor(parts[-1], sums, group=ranks_of, async_op=True))
            del chunks, whole, sums
        if not backward:
            return None
        for work in reduced:
            work.wait()
        return torch.cat(parts).permute(1, 2, 3, 0, 4)

    def held(self, part: int, ranks: int, backward: bool) -> int:
        return (3 + 2 * ranks if backward else 2 + ranks) * part


def _add(sums: Tensor, grads: Any) -> None:
    """Add gradients of keys and of values, (B, heads, M, D) each, to sums (M, 2, B, heads, D)."""
    for number, grad in enumerate(grads):
        sums[:, number] += grad.permute(2, 0, 1, 3)


METHOD = GatherKeys()
