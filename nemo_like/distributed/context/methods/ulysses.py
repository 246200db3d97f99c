"""``ulysses``: an all-to-all gives each rank some heads of the whole sequence, and a second one brings the result back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from nemo_like._util.words import a_or_an
from nemo_like.distributed.context.attention import OfTransformers, uses_interface
from nemo_like.distributed.context.parts import Attention, ContextMethod, CutStack
from nemo_like.distributed.context.sequence_ops import heads_for_sequence, sequence_for_heads


class Ulysses(ContextMethod):
    """All tokens of some heads inside of attention, all heads of some tokens outside."""

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
        self._check_call(call, isinstance(call, OfTransformers))
        query, key, value = _exchanged(call)
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask[:, parts.rank * query.shape[1] : (parts.rank + 1) * query.shape[1]]
        with _groups(getattr(call, "module", None), query.shape[1] // key.shape[1]):
            attended = call.states(call.run(query, key, value, mask, call.causal))
        return call.output(sequence_for_heads(attended, parts.ranks, parts.group))

    def _check_call(self, call: Attention, in_layers: bool) -> None:
        ranks, heads, keys = call.parts.ranks, call.query.shape[1], call.key.shape[1]
        more = isinstance(call.mask, Tensor) or call.arguments.get("return_lse") or call.arguments.get("return_aux")
        if heads % ranks or (not in_layers and (keys % ranks or more)):
            raise NotImplementedError(
                f"method='ulysses' needs heads that {ranks} ranks divide, no mask made in the layer of a plain model, and "
                f"flex attention that returns no more than its output; this attention has {heads} heads, {keys} of keys on "
                "each rank of tp. Use a smaller tp or cp, or method='all_gather'."
            )


def _exchanged(call: Attention) -> list[Tensor]:
    """Return queries, keys and values (B, H / ranks, S, D) of some heads; keys are repeated where too few to share."""
    parts, states = call.parts, [call.query, call.key, call.value]
    if call.key.shape[1] % parts.ranks:
        groups = call.query.shape[1] // call.key.shape[1]
        states[1:] = [each.repeat_interleave(groups, 1) for each in states[1:]]
    return [heads_for_sequence(each, parts.ranks, parts.group) for each in states]


@contextlib.contextmanager
def _groups(module: nn.Module | None, groups: int) -> Iterator[None]:
    """Attention repeats keys by the module's count, which differs where they were repeated before they were sent."""
    before = getattr(module, "num_key_value_groups", None)
    if module is None or before is None or before == groups:
        yield
        return
    module.num_key_value_groups = groups  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before


METHOD = Ulysses()
