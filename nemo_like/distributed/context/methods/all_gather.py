"""``all_gather``: each rank gathers the keys and values of the whole sequence, for any attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nemo_like.distributed.context import masks
from nemo_like.distributed.context.parts import Attention, ContextMethod


class GatherKeys(ContextMethod):
    """This rank's queries over all keys."""

    triangles = True

    def attend(self, call: Attention) -> Any:
        parts, mask = call.parts, call.mask
        key, value = (parts.gather(states, states.ndim - 2) for states in (call.key, call.value))
        if call.causal and call.fused:
            return _in_chunks(call, key, value)
        if call.causal:
            mask = masks.causal(parts, key.shape[-2], call.query)
        return call.run(call.query, key, value, mask)


def _in_chunks(call: Attention, key: Tensor, value: Tensor) -> Any:
    """Both chunks of queries, each over the keys up to its own end: no mask as long as the sequence is made."""
    outputs = []
    for part, end in zip(call.query.chunk(2, -2), call.parts.chunk_ends(key.shape[-2])):
        triangle = call.parts.triangle(part.shape[-2], end, part.dtype, part.device)
        outputs.append(call.run(part, key[..., :end, :], value[..., :end, :], triangle))
    return call.joined(outputs)


METHOD = GatherKeys()
