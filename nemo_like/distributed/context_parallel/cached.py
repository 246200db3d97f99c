"""Attention that layers of transformers compute themselves: other ranks' keys and values reach it as those of a cache.

Layers with linear biases (ALiBi: Bloom, MPT, Falcon) and some older ones ask no interface. They do ask a cache for the
keys that came before, add the biases of all keys, and take the mask that their stack made. So the cache that they get
here gathers, and the mask has a row for each token of this part and a column for each of the whole sequence.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.distributed.context_parallel import layout, masks
from nemo_like.distributed.context_parallel.parts import Parts, parts_of
from nemo_like.layers.structure import class_of
from nemo_like.transformers_compat import TEMPERATURE_TUNING, cache_argument, mask_functions


def asks_a_cache(module: nn.Module) -> bool:
    """Whether `module` is attention that takes the keys of a cache, and its mask from outside."""
    forward = inspect.unwrap(class_of(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or "update" not in code.co_names or "attention_mask" not in code.co_varnames:
        return False
    # A triangle of its own would be read for lengths that are those of a part.
    triangle = any(
        buffer.ndim >= 2 and buffer.shape[-1] == buffer.shape[-2] for buffer in module.buffers(recurse=False)
    )
    return not triangle and cache_argument(forward, required="layer_idx" in code.co_names) is not None


class GatheringCache:
    """What a stack gives its layers for a cache: nothing came before, and `update` has the whole sequence's keys."""

    is_compileable = False
    keeps_nothing = True  # so a checkpointed layer may be run again with it

    def __init__(self, parts: Parts, padded: int) -> None:
        self._parts, self._padded = parts, padded

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """(B, heads, L, D) of this part to (B, heads, ranks * L, D), twice."""
        return self._parts.gather(key, 2), self._parts.gather(value, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys in all, and where they begin."""
        return self._padded, 0


def counts_positions(module: nn.Module) -> bool:
    """Whether `module` is attention that scales its queries by positions which it counts from zero itself (Llama 4)."""
    return bool(getattr(module, TEMPERATURE_TUNING, False)) and not getattr(module, "use_rope", True)


class _Offsets:
    """A cache for such attention, which adds what came before to where it counts: for each token of a part, the rest."""

    keeps_nothing = True

    def __init__(self, parts: Parts, length: int, device: torch.device) -> None:
        self._offsets = parts.positions(length * parts.ranks, device) - torch.arange(length, device=device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self._offsets

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key, value


def count_from_the_whole(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook of attention for which `counts_positions` holds."""
    parts = parts_of(module)
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if parts is None or not isinstance(hidden, Tensor):
        return None
    name = cache_argument(module.forward, required=True)
    return args, kwargs | {name: _Offsets(parts, hidden.shape[1], hidden.device)}


def cache_for(parts: Parts, length: int) -> GatheringCache:
    """The one for a call with sequences of `length` tokens."""
    return GatheringCache(parts, layout.padded_length(length, parts.ranks))


class OwnMasks:
    """While a stack runs, transformers' masks are those of parts under the names that its layers know them by."""

    def __init__(self) -> None:
        self._mapping: Any = mask_functions()
        self._before = {name: self._mapping[name] for name in ("sdpa", "eager")}
        for name in self._before:
            # Never left out: `is_causal` would mean this part's keys alone.
            self._mapping[name] = functools.partial(_never_skipped, name)

    def put_back(self) -> None:
        for name, own in self._before.items():
            self._mapping[name] = own


def _never_skipped(implementation: str, *args: Any, **kwargs: Any) -> Any:
    return masks.make(implementation, *args, **kwargs | {"allow_is_causal_skip": False})
