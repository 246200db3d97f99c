"""Attention of a part's queries over the keys of the whole sequence.

Models of transformers look their attention up by a name in their config. The names registered here mean "gather,
then what the model had": so scales, soft caps, sinks, biases and dropout stay those of the model, and only keys, values
and the mask are others. In plain models, `torch.nn.functional.scaled_dot_product_attention` is replaced while forward
runs; recomputation in backward sees it again, because the engine puts back what forward saw.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like.distributed.context import masks, sequence_ops
from nemo_like.distributed.context.parts import CURRENT, Parts, StackCall, parts_of
from nemo_like.layers.structure import class_of
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
    """The implementation that a registered name means; any other name as it is."""
    return name.removeprefix(_PREFIX)


def attention_of(config: object) -> str | None:
    """The implementation that a config names, also where stages of a pipeline share it and one was cut before."""
    name = getattr(config, ATTENTION, None)
    return name if name is None else unregistered(name)


def _own_attention(implementation: str, module: nn.Module) -> Callable[..., Any]:
    if implementation == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return attention_functions()[implementation]


def _attend(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> Any:
    """`implementation`'s attention: (B, H, L, D) queries and (B, KV heads, L, D) keys and values to (B, L, H, D)."""
    attention = _own_attention(implementation, module)
    parts = parts_of(module)
    if parts is None:
        return attention(module, query, key, value, attention_mask, **kwargs)
    return parts.method.attend(parts, implementation, attention, module, query, key, value, attention_mask, kwargs)


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> Any:
    """Return whether attention of `module`, called with `kwargs`, hides what comes later where it has no mask."""
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
    def attend(*args: Any, **kwargs: object) -> Tensor:
        arguments = dict(zip(signature, args)) | kwargs
        query, key, value = arguments.pop("query"), arguments.pop("key"), arguments.pop("value")
        mask, causal = arguments.pop("attn_mask", None), arguments.pop("is_causal", False)
        if query.shape[-2] != key.shape[-2]:
            raise NotImplementedError(
                f"cp cuts the sequence, and attention got {query.shape[-2]} queries and {key.shape[-2]} keys: whether these "
                "keys are cut is not known here. Use cp=1 for this model."
            )
        return parts.method.attend_plain(parts, _SDPA, query, key, value, mask, causal, arguments)

    return attend


def without_padding(key: Tensor) -> Tensor | None:
    """(1, S), True for the keys of tokens, of whole sequences (..., S, D); None where all are."""
    call = CURRENT.get()
    if call is None or not call.padded:
        return None
    return torch.arange(key.shape[-2], device=key.device)[None] < call.length


def uses_interface(module: nn.Module) -> bool:
    """Return whether the forward of `module` looks its attention up in transformers' interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and ATTENTION_LOOKUP in code.co_names


# Torch's attention function, and learned positions that are counted from zero inside.


class AttentionHooks:
    """`scaled_dot_product_attention` is another function while the model runs; recomputation gets the one of its forward."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._attend = parts, plain_attention(parts)
        self._before: list[Any] = []

    def before(self, module: nn.Module, args: object) -> None:
        self._before.append(F.scaled_dot_product_attention)
        if not self._parts.idle:
            F.scaled_dot_product_attention = self._attend

    def after(self, module: nn.Module, args: object, output: object) -> None:
        if self._before:
            F.scaled_dot_product_attention = self._before.pop()


class PositionHook:
    """A forward pre-hook of an `nn.Embedding`: ``arange(T)``, with which models look positions up, becomes this rank's."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        call = CURRENT.get()
        if call is None or not args or not isinstance(args[0], Tensor):
            return None
        index: Tensor = args[0]
        length = index.shape[-1] if index.ndim else 0
        if (
            index.numel() != length
            or is_fake(index)
            or not torch.equal(index.reshape(-1), torch.arange(length, device=index.device, dtype=index.dtype))
        ):
            return None
        return (
            self._parts.positions(length * self._parts.ranks, index.device).view_as(index).to(index.dtype),
            *args[1:],
        )


_TABLE = re.compile(r"position\w*embeddings?$", re.IGNORECASE)


def counts_along(module: nn.Module) -> bool:
    """Return whether `module` makes the embeddings of positions, and counts these along its input where it is given
    none (BART, Marian, M2M-100)."""
    cls = class_of(module)
    return _TABLE.search(cls.__name__) is not None and cls.forward is not nn.Embedding.forward


class OwnPositions:
    """The hooks of a module for which `counts_along` holds, in a stack that takes no positions: it is given this rank's;
    where it takes none itself, it sees whole sequences, and its output is cut."""

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        self._parts = parts
        self._names = tuple(inspect.signature(class_of(module).forward).parameters)[1:]
        self._padded: list[int | None] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pre-hook."""
        call = CURRENT.get()
        self._padded.append(None)
        if call is None or self._parts.idle:
            return None
        arguments = dict(zip(self._names, args)) | kwargs
        padded = sequence_ops.padded_length(call.length, self._parts.ranks)
        if "position_ids" in self._names:
            device = next(module.parameters()).device
            return (), arguments | {"position_ids": self._parts.positions(padded, device)}
        self._padded[-1] = padded
        return (), {name: self._whole(value, padded) for name, value in arguments.items()}

    def after(self, module: nn.Module, args: object, output: object) -> Any:
        """The forward hook, also after an exception."""
        padded = self._padded.pop() if self._padded else None
        if padded is None or not isinstance(output, Tensor):
            return None
        dim = output.ndim - 2
        if dim < 0 or output.shape[dim] != padded:
            raise NotImplementedError(
                f"cp gives {type(module).__name__} whole sequences of {padded} tokens to count positions in, and its output "
                f"{tuple(output.shape)} has no such dim before its last. Use cp=1."
            )
        return self._parts.cut(output, dim)

    def _whole(self, value: object, padded: int) -> Any:
        part = padded // self._parts.ranks
        if isinstance(value, torch.Size) and len(value) > 1 and value[1] == part:
            return torch.Size((value[0], padded, *value[2:]))
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == part:
            return self._parts.gather(value.detach(), 1)
        return value


# Flex attention of plain models, which import the function itself: every place that holds it gets another one.
#
# The other function does what the first did but while a plain model runs on parts of sequences. Recomputation in
# backward is such a time, too: the engine puts back what `CURRENT` was in forward.

_OTHERS = ("torch", "transformers", "nemo_like")
"""Packages whose files are left alone: those of transformers reach flex attention by its interface."""
_OURS = "_nemo_like_flex"
_NAMES = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options")


def replace_flex(stack: nn.Module) -> Iterator[Callable[[], None]]:
    """Replace flex attention, compiled or not, in all files and in the attributes below `stack`; yields what undoes it."""
    flex: Any = sys.modules.get(masks.FLEX)
    if flex is None:
        return
    files = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] not in _OTHERS]
    inside = list(stack.modules())
    classes = {
        base for module in inside for base in type(module).__mro__ if base.__module__.partition(".")[0] not in _OTHERS
    }
    for owner in (*files, *classes, *inside):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            function = value.__func__ if isinstance(value, staticmethod) else value
            # Of functions alone: any object may be in a file, and some run code when an attribute is read.
            known = vars(function) if isinstance(function, types.FunctionType) else {}
            compiled = known.get("__wrapped__") is flex.flex_attention and _OURS not in known
            if function is flex.flex_attention or compiled:
                other = _over_parts(function)
                setattr(owner, name, staticmethod(other) if isinstance(value, staticmethod) else other)
                yield functools.partial(setattr, owner, name, value)


def _over_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, a `flex_attention`, of queries, keys and values (B, H, L, D) that are parts while a call is cut."""

    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        call = CURRENT.get()
        if call is None or call.parts.idle:
            return function(*args, **kwargs)
        arguments = dict(zip(_NAMES, args)) | kwargs
        query, key, value = arguments.pop("query"), arguments.pop("key"), arguments.pop("value")
        if query.shape[-2] != key.shape[-2]:
            raise NotImplementedError(
                f"cp cuts the sequence, and flex attention got {query.shape[-2]} queries and {key.shape[-2]} keys: whether "
                "these keys are cut is not known here. Use cp=1 for this model."
            )
        return call.parts.method.attend_flex(call, function, query, key, value, arguments)

    setattr(attend, _OURS, True)
    return attend


def over_whole(call: StackCall, query: Tensor, key: Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
    """`given`, other arguments of flex attention, for these `query` and `key`: the mask and scores of their positions."""
    batch, heads, rows, _ = query.shape
    shape = (batch, heads, rows, key.shape[2])
    arguments["block_mask"] = masks.of_part(call.parts, arguments.get("block_mask"), shape, call.length, query.device)
    if arguments.get("score_mod") is not None:
        arguments["score_mod"] = masks.score_over_whole(call.parts, arguments["score_mod"], rows, heads, call.length)
    return arguments
