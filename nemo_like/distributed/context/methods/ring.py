"""``ring``: keys and values go from rank to rank, and no rank ever holds those of the whole sequence.

With chunk r and the r-th chunk from the end on rank r, and a causal mask, what comes from rank o needs one of three
blocks: from the own rank a causal one; from a lower one its first chunk, seen by all queries; from a higher one both of
its chunks, seen by the second half of the queries. Softmax over blocks is put together by their log-sum-exps, so the result
is exact. In backward keys and values go round again, and their gradients with them, until they are back.

After Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), and the balanced order of
Brandon et al., "Striped Attention" (2023), in chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.distributed.context.attention import attention_of
from nemo_like.distributed.context.causal import causal_attention_of
from nemo_like.distributed.context.parts import Attention, Blocks, ContextMethod, CutStack
from nemo_like.distributed.context.sequence_ops import find_group


class Ring(ContextMethod):
    """Causal self-attention without a mask, bias or dropout."""

    word = "ring"
    takes_masks = False

    def check(self, stack: CutStack, ranks: int) -> None:
        config: Any = getattr(stack.module, "config", None)
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        implementation = attention_of(config)
        why = None
        if implementation != "sdpa":
            why = f"has the attention implementation {implementation!r} (soft caps, sinks and biases need 'eager')"
        elif kinds:
            why = f"has layers of {sorted(kinds)[0]}"
        elif "encoder_hidden_states" in stack.arguments:
            why = "may look at an encoder's states"
        if why is not None:
            raise ValueError(
                f"method='ring' has causal self-attention alone, and {stack.name or 'the model'}, a "
                f"{type(stack.module).__name__}, {why}: use method='all_gather'."
            )

    def attend(self, call: Attention) -> Any:
        states = causal_attention_of(call)
        if states is None:
            raise NotImplementedError(
                "method='ring' has causal self-attention alone, without a mask (padding, packed documents, sliding "
                "windows), bias, soft cap or dropout; this layer requires more (queries "
                f"{tuple(call.query.shape)}, values {tuple(call.value.shape)}). Use method='all_gather'."
            )
        return call.output(states)

    def blocks(self, part: Tensor, rank: int, ranks: int, group: str, backward: bool = False) -> Blocks:
        half, everything = part.shape[3] // 2, slice(None)
        sums = torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32)) if backward else None
        for step in range(ranks):
            of = (rank - step) % ranks
            works: list[Any] = []
            if step < ranks - 1:
                coming, works = _exchange(part, group)
            if sums is not None and step:  # those of the block before come back beside this block's
                sums, more = _exchange(sums, group)
                works += more
            rows = slice(half, None) if of > rank else everything
            columns = slice(None, half) if of < rank else everything
            grads = yield rows, part[:, :, :, columns], of == rank
            _wait(works)
            if sums is not None:
                for side, grad in zip(sums, grads):
                    side[:, :, columns] += grad
            if step < ranks - 1:
                part = coming
        if sums is None:
            return None
        sums, works = _exchange(sums, group)  # to the rank whose keys and values they are of
        _wait(works)
        return sums

    def held(self, part: int, ranks: int, backward: bool) -> int:
        return (8 if backward else 2) * part


METHOD = Ring()


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _exchange(sent: Tensor, group: str) -> tuple[Tensor, list[Any]]:
    """`sent` on its way to the next rank, and where that of the rank before arrives; wait for the works before reading."""
    of_group = find_group(group)
    ranks, rank, got = of_group.size(), of_group.rank(), torch.empty_like(sent)
    to, of = (dist.get_global_rank(of_group, number % ranks) for number in (rank + 1, rank - 1))
    ops = [dist.P2POp(dist.isend, sent, to, of_group), dist.P2POp(dist.irecv, got, of, of_group)]
    return got, dist.batch_isend_irecv(ops)
