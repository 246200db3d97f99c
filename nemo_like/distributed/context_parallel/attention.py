"""Attention of a part's queries over the keys of the whole sequence.

Models of transformers look their attention up by a name in their config. The names registered here stand for "gather,
then what the model had": so scales, soft caps, sinks, biases and dropout stay those of the model, and only keys, values
and the mask are others. In plain models, `torch.nn.functional.scaled_dot_product_attention` is replaced while forward
runs; a replay in backward sees it again, because the engine puts back what forward saw.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like.distributed.context_parallel import masks
from nemo_like.distributed.context_parallel.parts import CURRENT, Parts, parts_of
from nemo_like.torch_compat import is_fake
from nemo_like.transformers_compat import (
    ATTENTION,
    ATTENTION_LOOKUP,
    attention_functions,
    attention_interface,
    mask_interface,
)

_PREFIX = "nemo_like_parts|"
_SDPA = F.scaled_dot_product_attention


def register(implementation: str) -> str:
    """Make `implementation` ("sdpa", "eager", ...) over cut sequences known to transformers; its name there."""
    name = _PREFIX + implementation
    attention = attention_interface()
    mask = mask_interface()
    attention.register(name, functools.partial(_attend, implementation))
    mask.register(name, functools.partial(masks.make, implementation))
    return name


def unregistered(name: str) -> str:
    """The implementation that a registered name stands for; any other name as it is."""
    return name.removeprefix(_PREFIX)


def attention_of(config: Any) -> str | None:
    """The implementation that a config names, also where stages of a pipeline share it and one was cut before."""
    name = getattr(config, ATTENTION, None)
    return name if name is None else unregistered(name)


def _own_attention(implementation: str, module: nn.Module) -> Callable[..., Any]:
    if implementation == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return attention_functions()[implementation]


def _attend(
    implementation: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """`implementation`'s attention: (B, H, L, D) queries and (B, KV heads, L, D) keys and values to (B, L, H, D)."""
    own = _own_attention(implementation, module)
    parts = parts_of(module)
    if parts is None:
        return own(module, query, key, value, attention_mask, **kwargs)
    return parts.method.attend(parts, implementation, own, module, query, key, value, attention_mask, kwargs)


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> Any:
    """Whether attention of `module`, called with `kwargs`, hides what comes later where it has no mask."""
    causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def with_whole_bias(kwargs: dict[str, Any], part: int, whole: int) -> dict[str, Any]:
    """A position bias made for a part's keys fits if it is zero, as T5 gives it to cross attention."""
    bias = kwargs.get("position_bias")
    if bias is None or bias.shape[-1] == whole:
        return kwargs
    if bias.shape[-1] == part and (is_fake(bias) or not bool(bias.any())):
        return kwargs | {"position_bias": None}
    raise NotImplementedError(
        f"cp cuts the sequence, and a layer brings a position bias {tuple(bias.shape)} for {whole} keys: it was made for "
        f"the {part} keys of one rank. Use cp=1 for this model."
    )


# ---------------------------------------------------------------------------------------------------------- plain models


def plain_attention(parts: Parts) -> Callable[..., Tensor]:
    """`scaled_dot_product_attention` whose inputs (B, H, L, D) are parts of sequences."""
    signature = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    @functools.wraps(_SDPA, assigned=("__doc__", "__name__"))
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(signature, args)) | kwargs
        query, key, value = given.pop("query"), given.pop("key"), given.pop("value")
        mask, causal = given.pop("attn_mask", None), given.pop("is_causal", False)
        if query.shape[-2] != key.shape[-2]:
            raise NotImplementedError(
                f"cp cuts the sequence, and attention got {query.shape[-2]} queries and {key.shape[-2]} keys: whether these "
                "keys are cut is not known here. Use cp=1 for this model."
            )
        return parts.method.attend_plain(parts, _SDPA, query, key, value, mask, causal, given)

    return attend


def without_padding(key: Tensor) -> Tensor | None:
    """(1, S), True for the keys of tokens, of whole sequences (..., S, D); None where all are."""
    call = CURRENT.get()
    if call is None or not call.padded:
        return None
    return torch.arange(key.shape[-2], device=key.device)[None] < call.length


def uses_interface(module: nn.Module) -> bool:
    """Whether the forward of `module` looks its attention up in transformers' interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and ATTENTION_LOOKUP in code.co_names
