"""``ulysses``: an all-to-all gives each rank some heads of the whole sequence, and a second one brings the result back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from nemo_like._util.words import a_or_an
from nemo_like.distributed.context.attention import (
    over_whole,
    uses_interface,
    with_whole_bias,
    without_padding,
)
from nemo_like.distributed.context.parts import ContextMethod, CutStack, Parts, StackCall
from nemo_like.distributed.context.sequence_ops import heads_for_sequence, sequence_for_heads


class Ulysses(ContextMethod):
    """All tokens of some heads inside of attention, all heads of some tokens outside."""

    cuts_heads = True

    def check(self, stack: CutStack, ranks: int) -> None:
        if stack.cached:
            raise ValueError(
                f"method='ulysses' sends queries, too, and the layers of {stack.name or 'the model'}, a "
                f"{type(stack.module).__name__}, compute their attention themselves (linear biases): use "
                "method='all_gather'."
            )
        heads = getattr(getattr(stack.module, "config", None), "num_attention_heads", None)
        if heads is None or heads % ranks:
            raise ValueError(
                f"method='ulysses' gives each of {ranks} ranks some heads, and {type(stack.module).__name__} has "
                f"{heads}: use a divisor of it, or method='all_gather'."
            )
        for name, module in stack.module.named_modules():
            if uses_interface(module) and (parameters := [name for name, _ in module.named_parameters(recurse=False)]):
                raise ValueError(
                    f"method='ulysses' gives each rank some heads, and {name}, {a_or_an(module)}, holds {parameters[0]} for "
                    "all of them (attention sinks): use method='all_gather'."
                )

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
        if query.shape[1] % parts.ranks:
            raise NotImplementedError(
                f"method='ulysses' gives each of {parts.ranks} ranks some heads, and this attention has {query.shape[1]} on "
                "each rank of tp. Use a smaller tp or cp, or method='all_gather'."
            )
        groups = query.shape[1] // key.shape[1]
        kwargs = dict(with_whole_bias(kwargs, key.shape[2], key.shape[2] * parts.ranks))
        if key.shape[1] % parts.ranks:
            key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
        query, key, value = (heads_for_sequence(states, parts.ranks, parts.group) for states in (query, key, value))
        mine = slice(parts.rank * query.shape[1], (parts.rank + 1) * query.shape[1])
        for name, dim in (("s_aux", 0), ("position_bias", 1)):
            value_of_mask = kwargs.get(name)
            if isinstance(value_of_mask, Tensor) and value_of_mask.shape[dim] > 1:
                kwargs[name] = value_of_mask[(slice(None),) * dim + (mine,)]
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask[:, mine]
        with _groups(module, query.shape[1] // key.shape[1]):
            out = function(module, query, key, value, mask, **kwargs)[0]  # (B, S, H / ranks, D)
        return sequence_for_heads(out.transpose(1, 2), parts.ranks, parts.group).transpose(1, 2).contiguous(), None

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
        if mask is not None or query.shape[1] % parts.ranks or key.shape[1] % parts.ranks:
            raise NotImplementedError(
                f"method='ulysses' needs heads that {parts.ranks} ranks divide and no mask made in the layer; this "
                f"attention has {query.shape[1]} heads. Use method='all_gather'."
            )
        query, key, value = (heads_for_sequence(states, parts.ranks, parts.group) for states in (query, key, value))
        hidden = None if causal else without_padding(key)
        attended = function(query, key, value, attn_mask=hidden, is_causal=causal, **arguments)
        return sequence_for_heads(attended, parts.ranks, parts.group)

    def attend_flex(
        self,
        call: StackCall,
        function: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        arguments: dict[str, Any],
    ) -> Any:
        ranks, group = call.parts.ranks, call.parts.group
        if query.shape[1] % ranks or key.shape[1] % ranks or arguments.get("return_lse") or arguments.get("return_aux"):
            raise NotImplementedError(
                f"method='ulysses' needs heads that {ranks} ranks divide, and flex attention that returns no more than "
                f"its output; this one has {query.shape[1]} heads, {key.shape[1]} of keys. Use method='all_gather'."
            )
        query, key, value = (heads_for_sequence(states, ranks, group) for states in (query, key, value))
        return sequence_for_heads(function(query, key, value, **over_whole(call, query, key, arguments)), ranks, group)


@contextlib.contextmanager
def _groups(module: nn.Module, groups: int) -> Iterator[None]:
    """`own` repeats keys by the module's count, which differs where they were repeated before they were sent."""
    before = getattr(module, "num_key_value_groups", None)
    if before is None or before == groups:
        yield
        return
    module.num_key_value_groups = groups  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before


METHOD = Ulysses()
