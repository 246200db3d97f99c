"""``all_gather``: each rank gathers the keys and values of the whole sequence, for any attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.distributed.context import masks
from nemo_like.distributed.context.attention import is_causal, over_whole, with_whole_bias, without_padding
from nemo_like.distributed.context.parts import ContextMethod, Parts, StackCall


class GatherKeys(ContextMethod):
    """This rank's queries over all keys."""

    triangles = True

    def attend(
        self,
        parts: Parts,
        implementation: str,
        function: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Any:
        keys = key.shape[2]
        key, value = parts.gather(key, 2), parts.gather(value, 2)
        causal = mask is None and is_causal(module, kwargs)
        kwargs = with_whole_bias(kwargs, keys, key.shape[2]) | {"is_causal": False}
        if causal and implementation == "sdpa" and kwargs.get("position_bias") is None:
            # With one query, transformers tests its heads: so the triangles have four dims.
            out = _in_chunks(
                parts, query, key, value, lambda q, k, v, bias: function(module, q, k, v, bias[None, None], **kwargs)[0]
            )
            return torch.cat(out, 1), None
        if causal:
            mask = masks.causal(parts, key.shape[2], query, additive=implementation == "eager")
        return function(module, query, key, value, mask, **kwargs)

    def attend_plain(
        self,
        parts: Parts,
        function: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        arguments: dict[str, Any],
    ) -> Tensor:
        key, value = parts.gather(key, key.ndim - 2), parts.gather(value, value.ndim - 2)
        if mask is not None and mask.shape[-1] != key.shape[-2]:
            raise NotImplementedError(
                f"cp cuts the sequence, and a layer brings an attention mask {tuple(mask.shape)} of its own for "
                f"{key.shape[-2]} keys. Pass the mask to the model for the whole sequence, use is_causal=True, or cp=1."
            )
        if not causal:
            return function(query, key, value, attn_mask=without_padding(key) if mask is None else mask, **arguments)
        out = _in_chunks(parts, query, key, value, lambda q, k, v, bias: function(q, k, v, attn_mask=bias, **arguments))
        return torch.cat(out, -2)

    def attend_flex(
        self,
        call: StackCall,
        function: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        arguments: dict[str, Any],
    ) -> Any:
        key, value = call.parts.gather(key, 2), call.parts.gather(value, 2)
        return function(query, key, value, **over_whole(call, query, key, arguments))


def _in_chunks(
    parts: Parts, query: Tensor, key: Tensor, value: Tensor, attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """Both chunks of queries, each over the keys up to its own end: no mask as long as the sequence is made."""
    out = []
    for part, end in zip(query.chunk(2, -2), parts.chunk_ends(key.shape[-2])):
        rows = part.shape[-2]
        out.append(
            attend(part, key[..., :end, :], value[..., :end, :], parts.triangle(rows, end, query.dtype, query.device))
        )
    return out


METHOD = GatherKeys()
