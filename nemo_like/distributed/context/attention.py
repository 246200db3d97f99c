"""Attention of a part's queries over the keys of the whole sequence, in the place of two functions.

Models of transformers look their attention up by a name in their config. The names registered here mean "gather,
then what the model had": so scales, soft caps, sinks and dropout stay those of the model, and only keys, values
and the mask are others. In plain models, torch's `scaled_dot_product_attention` is replaced while forward runs, and
recomputation in backward sees it again, because the engine puts back what forward saw.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like.distributed.context import masks
from nemo_like.distributed.context.parts import CURRENT, Attention, Parts, parts_of
from nemo_like.torch_compat import is_fake
from nemo_like.transformers_compat import (
    ATTENTION,
    ATTENTION_LOOKUP,
    attention_functions,
    attention_interface,
    mask_interface,
)

# ---------------------------------------------------------------------------------------------- transformers' interface

_PREFIX = "nemo_like_parts|"


def register(implementation: str) -> str:
    """Make `implementation` ("sdpa", "eager", ...) over cut sequences known to transformers; its name there."""
    name = _PREFIX + implementation
    attention = attention_interface()
    mask = mask_interface()
    attention.register(name, functools.partial(_attend, implementation))
    mask.register(name, functools.partial(masks.make, implementation))
    return name


def unregistered(name: str) -> str:
    """The implementation that a registered name means; any other name as it is."""
    return name.removeprefix(_PREFIX)


def attention_of(config: object) -> str | None:
    """The implementation that a config names, also where stages of a pipeline share it and one was cut before."""
    name = getattr(config, ATTENTION, None)
    return name if name is None else unregistered(name)


def uses_interface(module: nn.Module) -> bool:
    """Return whether the forward of `module` looks its attention up in transformers' interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and ATTENTION_LOOKUP in code.co_names


@dataclass
class OfTransformers(Attention):
    """A call through the interface, of `module`; an output is (B, L, H, D), and weights."""

    implementation: str
    module: nn.Module

    @property
    def fused(self) -> bool:  # type: ignore[override]
        return self.implementation == "sdpa"

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool = False) -> Any:
        if isinstance(mask, Tensor) and mask.ndim == 2:  # with one query, transformers tests a mask's heads
            mask = mask[None, None]
        return self.function(self.module, query, key, value, mask, **self.arguments | {"is_causal": causal})

    def states(self, output: Any) -> Tensor:
        states: Tensor = output[0]
        return states.transpose(1, 2)

    def output(self, states: Tensor) -> Any:
        return states.transpose(1, 2).contiguous(), None


def _attend(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> Any:
    """`implementation`'s attention: (B, H, L, D) queries and (B, KV heads, L, D) keys and values to (B, L, H, D)."""
    if implementation == "eager":
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = attention_functions()[implementation]
    parts = parts_of(module)
    if parts is None:
        return function(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError(
            f"cp cuts the sequence, and {type(module).__name__} brings a position bias for the keys of one rank. Use cp=1."
        )
    causal = kwargs.get("is_causal")
    causal = attention_mask is None and bool(getattr(module, "is_causal", True) if causal is None else causal)
    return parts.method.attend(
        OfTransformers(parts, function, query, key, value, attention_mask, causal, kwargs, implementation, module)
    )


# ---------------------------------------------------------------------------------- torch's function, in plain models

_SDPA = F.scaled_dot_product_attention
_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class OfTorch(Attention):
    """A call of `scaled_dot_product_attention`."""

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool = False) -> Any:
        if mask is None and not causal:
            mask = _without_padding(key)
        elif mask is not None and mask.shape[-1] != key.shape[-2]:
            raise NotImplementedError(
                f"cp cuts the sequence, and a layer brings an attention mask {tuple(mask.shape)} of its own for "
                f"{key.shape[-2]} keys. Pass the mask to the model for the whole sequence, use is_causal=True, or cp=1."
            )
        return self.function(query, key, value, attn_mask=mask, is_causal=causal, **self.arguments)


def _without_padding(key: Tensor) -> Tensor | None:
    """(1, S), True for the keys of tokens, of whole sequences (..., S, D); None where all are."""
    call = CURRENT.get()
    if call is None or not call.padded:
        return None
    return torch.arange(key.shape[-2], device=key.device)[None] < call.length


class AttentionHooks:
    """`scaled_dot_product_attention` is another function while the model runs; recomputation gets the one of its forward."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._before: list[Any] = []

    def before(self, module: nn.Module, args: object) -> None:
        """The forward pre-hook."""
        self._before.append(F.scaled_dot_product_attention)
        if not self._parts.idle:
            F.scaled_dot_product_attention = self._attend

    def after(self, module: nn.Module, args: object, output: object) -> None:
        """The forward hook, also after an exception."""
        if self._before:
            F.scaled_dot_product_attention = self._before.pop()

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        query, key, value, arguments = _named(_SDPA_NAMES, args, kwargs)
        mask, causal = arguments.pop("attn_mask", None), arguments.pop("is_causal", False)
        call = OfTorch(self._parts, _SDPA, query, key, value, mask, causal and mask is None, arguments)
        return self._parts.method.attend(call)


def _named(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return queries, keys and values of a call, and its other arguments by name."""
    arguments = dict(zip(names, args)) | kwargs
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    if query.shape[-2] != key.shape[-2]:
        raise NotImplementedError(
            f"cp cuts the sequence, and attention got {query.shape[-2]} queries and {key.shape[-2]} keys: whether these "
            "keys are cut is not known here. Use cp=1 for this model."
        )
    return query, key, value, arguments


class PositionHook:
    """A forward pre-hook of an `nn.Embedding`: ``arange(T)``, with which models look positions up, becomes this rank's."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if CURRENT.get() is None or not args or not isinstance(args[0], Tensor) or not _is_range(args[0]):
            return None
        index: Tensor = args[0]
        positions = self._parts.positions(index.numel() * self._parts.ranks, index.device)
        return (positions.view_as(index).to(index.dtype), *args[1:])


def _is_range(index: Tensor) -> bool:
    """Return whether `index`, (T,) or (1, ..., T), counts from zero; of a fake tensor that is not known."""
    length = index.shape[-1] if index.ndim else 0
    if index.numel() != length or is_fake(index):
        return False
    return torch.equal(index.reshape(-1), torch.arange(length, device=index.device, dtype=index.dtype))
