"""``ulysses``: an all-to-all gives each rank some heads of the whole sequence, and a second one brings the result back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nemo_like._util.words import a_or_an
from nemo_like.distributed.context.attention import OfTransformers, uses_interface
from nemo_like.distributed.context.parts import Attention, ContextMethod, CutStack
from nemo_like.distributed.context.sequence_ops import heads_for_sequence, sequence_for_heads


class Ulysses(ContextMethod):
    """All tokens of some heads inside of attention, all heads of some tokens outside."""

    word = "ulysses"
    cuts_heads = True

    def check(self, stack: CutStack, ranks: int) -> None:
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

    def attend(self, call: Attention) -> Any:
        parts, mask = call.parts, call.mask
        heads, keys = call.query.shape[1], call.key.shape[1]
        if (
            heads % parts.ranks
            or keys % parts.ranks
            or (isinstance(mask, Tensor) and not isinstance(call, OfTransformers))
        ):
            raise NotImplementedError(
                f"method='ulysses' requires heads that {parts.ranks} ranks divide, those of keys as well, and no mask that "
                f"a layer of a plain model makes; this attention has {heads} heads, {keys} of keys on each rank of tp. Use "
                "a smaller tp or cp, or method='all_gather'."
            )
        query, key, value = (
            heads_for_sequence(each, parts.ranks, parts.group) for each in (call.query, call.key, call.value)
        )
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask[:, parts.rank * query.shape[1] : (parts.rank + 1) * query.shape[1]]
        attended = call.states(call.run(query, key, value, mask, call.causal))
        return call.output(sequence_for_heads(attended, parts.ranks, parts.group))


METHOD = Ulysses()
