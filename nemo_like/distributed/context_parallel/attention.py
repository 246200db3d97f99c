"""Attention of a part's queries over the keys of the whole sequence.

Models of transformers look their attention up by a name in their config. The names registered here stand for "gather,
then what the model had": so scales, soft caps, sinks, biases and dropout stay those of the model, and only keys, values
and the mask are others. In plain models, `torch.nn.functional.scaled_dot_product_attention` is replaced while forward
runs; a replay in backward sees it again, because the engine puts back what forward saw.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like.distributed.context_parallel import masks
from nemo_like.distributed.context_parallel.parts import CURRENT, Parts, parts_of
from nemo_like.distributed.context_parallel.ring import ring_attention
from nemo_like.distributed.context_parallel.sequence_ops import heads_for_sequence, sequence_for_heads
from nemo_like.torch_compat import is_fake

_PREFIX = "nemo_like_parts|"
_BESIDE_RING = ("s_aux", "softcap", "position_bias")
_SDPA = F.scaled_dot_product_attention


def register(implementation: str) -> str:
    """Make `implementation` ("sdpa", "eager", ...) over cut sequences known to transformers; its name there."""
    name = _PREFIX + implementation
    attention = sys.modules["transformers.modeling_utils"].AttentionInterface
    mask = sys.modules["transformers.masking_utils"].AttentionMaskInterface
    attention.register(name, functools.partial(_attend, implementation))
    mask.register(name, functools.partial(masks.make, implementation))
    return name


def unregistered(name: str) -> str:
    """The implementation that a registered name stands for; any other name as it is."""
    return name.removeprefix(_PREFIX)


def attention_of(config: Any) -> str | None:
    """The implementation that a config names, also where stages of a pipeline share it and one was cut before."""
    name = getattr(config, "_attn_implementation", None)
    return name if name is None else unregistered(name)


def _own_attention(implementation: str, module: nn.Module) -> Callable[..., Any]:
    if implementation == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS[implementation]


def _attend(
    implementation: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """`implementation`'s attention: (B, H, L, D) queries and (B, KV heads, L, D) keys and values to (B, L, H, D)."""
    own = _own_attention(implementation, module)
    parts = parts_of(module)
    if parts is None:
        return own(module, query, key, value, attention_mask, **kwargs)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if parts.method == "ulysses":
        return _in_heads(own, parts, module, query, key, value, attention_mask, kwargs)
    if parts.method == "ring":
        beside = [name for name in _BESIDE_RING if kwargs.get(name) is not None]
        causal = causal and attention_mask is None and implementation == "sdpa" and not beside
        attended = _in_a_ring(parts, query, key, value, bool(causal), kwargs.get("dropout"), kwargs.get("scaling"))
        return attended.transpose(1, 2).contiguous(), None
    keys = key.shape[2]
    key, value = parts.gather(key, 2), parts.gather(value, 2)
    kwargs = _with_whole_bias(kwargs, keys, key.shape[2])
    if attention_mask is None and causal:
        if implementation == "sdpa" and kwargs.get("position_bias") is None:
            return _causal_in_chunks(own, parts, module, query, key, value, kwargs)
        attention_mask = masks.causal(parts, key.shape[2], query, additive=implementation == "eager")
    return own(module, query, key, value, attention_mask, **kwargs | {"is_causal": False})


def _in_a_ring(
    parts: Parts, query: Tensor, key: Tensor, value: Tensor, plain: bool, dropout: float | None, scale: float | None
) -> Tensor:
    """(B, H, L, D); plain: the mask is causal, and nothing else is asked for."""
    if (
        not plain
        or dropout
        or query.shape[2] != key.shape[2]
        or key.shape != value.shape
        or query.shape[1] % key.shape[1]
    ):
        raise NotImplementedError(
            "method='ring' has causal self-attention alone, without a mask (padding, packed documents, sliding windows), "
            f"bias, soft cap or dropout, with values as wide as keys; this layer asks for more (queries {tuple(query.shape)}"
            f", values {tuple(value.shape)}). Use method='all_gather'."
        )
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return ring_attention(query, key, value, scale, parts.rank, parts.ranks, parts.group)[0]


def _with_whole_bias(kwargs: dict[str, Any], part: int, whole: int) -> dict[str, Any]:
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


def _causal_in_chunks(
    own: Callable[..., Any], parts: Parts, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:  # fmt: skip
    """Both chunks of queries, each over the keys up to its own end: no mask as long as the sequence is needed."""
    heads, tails = query.chunk(2, 2)
    chunk = heads.shape[2]
    ends = parts.chunk_ends(key.shape[2])
    out = [
        own(
            module, part, key[:, :, :end], value[:, :, :end],
            parts.triangle(chunk, end, query.dtype, query.device)[None, None],  # of one query, transformers asks its heads
            **kwargs | {"is_causal": False},
        )[0]
        for part, end in zip((heads, tails), ends)
    ]  # fmt: skip
    return torch.cat(out, 1), None


def _in_heads(
    own: Callable[..., Any], parts: Parts, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, kwargs: dict[str, Any],
) -> tuple[Tensor, None]:  # fmt: skip
    """Ulysses: all tokens of some heads here, all heads of some tokens outside."""
    groups = query.shape[1] // key.shape[1]
    kwargs = dict(_with_whole_bias(kwargs, key.shape[2], key.shape[2] * parts.ranks))
    if key.shape[1] % parts.ranks:
        key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    query, key, value = (heads_for_sequence(states, parts.ranks, parts.group) for states in (query, key, value))
    mine = slice(parts.rank * query.shape[1], (parts.rank + 1) * query.shape[1])
    for name, dim in (("s_aux", 0), ("position_bias", 1)):
        given = kwargs.get(name)
        if isinstance(given, Tensor) and given.shape[dim] > 1:
            kwargs[name] = given[(slice(None),) * dim + (mine,)]
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1:
        mask = mask[:, mine]
    with _groups(module, query.shape[1] // key.shape[1]):
        out = own(module, query, key, value, mask, **kwargs)[0]  # (B, S, H / ranks, D)
    return sequence_for_heads(out.transpose(1, 2), parts.ranks, parts.group).transpose(1, 2).contiguous(), None


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
        if parts.method == "ring":
            return _in_a_ring(
                parts, query, key, value, causal and mask is None, given.get("dropout_p"), given.get("scale")
            )
        if parts.method == "ulysses":
            if mask is not None or query.shape[1] % parts.ranks or key.shape[1] % parts.ranks:
                raise NotImplementedError(
                    f"method='ulysses' needs heads that {parts.ranks} ranks divide and no mask made in the layer; this "
                    f"attention has {query.shape[1]} heads. Use method='all_gather'."
                )
            query, key, value = (heads_for_sequence(states, parts.ranks, parts.group) for states in (query, key, value))
            hidden = None if causal else _without_padding(key)
            attended = _SDPA(query, key, value, attn_mask=hidden, is_causal=causal, **given)
            return sequence_for_heads(attended, parts.ranks, parts.group)
        key, value = parts.gather(key, key.ndim - 2), parts.gather(value, value.ndim - 2)
        if mask is not None and mask.shape[-1] != key.shape[-2]:
            raise NotImplementedError(
                f"cp cuts the sequence, and a layer brings an attention mask {tuple(mask.shape)} of its own for "
                f"{key.shape[-2]} keys. Pass the mask to the model for the whole sequence, use is_causal=True, or cp=1."
            )
        if not causal:
            return _SDPA(query, key, value, attn_mask=_without_padding(key) if mask is None else mask, **given)
        heads, tails = query.chunk(2, -2)
        chunk = heads.shape[-2]
        out = []
        for part, end in zip((heads, tails), parts.chunk_ends(key.shape[-2])):
            bias = parts.triangle(chunk, end, query.dtype, query.device)
            out.append(_SDPA(part, key[..., :end, :], value[..., :end, :], attn_mask=bias, **given))
        return torch.cat(out, -2)

    return attend


def _without_padding(key: Tensor) -> Tensor | None:
    """(1, S), True for the keys of tokens, of whole sequences (..., S, D); None where all are."""
    call = CURRENT.get()
    if call is None or not call.padded:
        return None
    return torch.arange(key.shape[-2], device=key.device)[None] < call.length


def uses_interface(module: nn.Module) -> bool:
    """Whether the forward of `module` looks its attention up in transformers' interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
