"""The modules of a model whose input is cut: the innermost that take token ids or embeddings and hold the layers."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence

from torch import nn

from nemo_like.distributed.context_parallel.attention import attention_of, uses_interface
from nemo_like.distributed.context_parallel.cached import asks_a_cache
from nemo_like.distributed.context_parallel.mixers import sequence_mixers
from nemo_like.distributed.context_parallel.parts import CutStack
from nemo_like.distributed.context_parallel.plain import counts_along
from nemo_like.layers import Layer, find_layers
from nemo_like.layers.structure import class_of
from nemo_like.module_tree import bare
from nemo_like.transformers_compat import model_base

_CROSS = re.compile(r"(^|\.)(encoder_attn|EncDecAttention|cross_?attention|cross_?attn)$", re.IGNORECASE)
_INPUTS = ("input_ids", "inputs_embeds")


def find_stacks(
    model: nn.Module, layers: Sequence[Layer] | None = None, call: nn.Module | None = None
) -> tuple[CutStack, ...]:
    """The stacks of `model`. Changes nothing.

    Args:
        layers: its repeated layers; None: they are found.
        call: whose hooks see what `model` is called with; None: its own.

    Raises:
        ValueError: nothing to cut, or something that mixes along the sequence and is no attention that can be given
            the keys of other ranks; it is named.
    """
    found = find_layers(model) if layers is None else layers
    language = [layer for layer in found if layer.group == "language"]
    if not language:
        groups = ", ".join(sorted({layer.group for layer in found}))
        raise ValueError(
            f"cp cuts sequences of tokens, and this {type(model).__name__} has no layers of a language model (found: "
            f"{groups}). Use cp=1."
        )
    members: dict[str, list[nn.Module]] = {}
    for layer in language:
        members.setdefault(_stack_name(model, layer.fqn), []).append(bare(layer.module))
    stacks = []
    for name, inside in members.items():
        module = bare(model.get_submodule(name))
        called = module if name or call is None else call
        transformers = _is_transformers(module)
        cached = transformers and not any(map(uses_interface, module.modules()))
        stacks.append(CutStack(name, module, tuple(inside), transformers, called, cached))
    for stack in stacks:
        _check(model, stack)
        cross = next((name for name, _ in stack.module.named_modules() if _CROSS.search(name)), None)
        if cross is not None and (len(stacks) == 1 or "encoder_hidden_states" not in stack.arguments):
            raise ValueError(
                f"{type(model).__name__}: cp cuts the sequence of {stack.name}, and {cross} looks at states of another "
                "modality, which are not cut. Use cp=1."
            )
    return tuple(stacks)


def _stack_name(model: nn.Module, fqn: str) -> str:
    """The innermost ancestor of a layer that takes token ids or embeddings; empty (the model) where none says so."""
    name = fqn
    while "." in name:
        name = name.rpartition(".")[0]
        if any(word in _parameters(model.get_submodule(name)) for word in _INPUTS):
            return name
    return ""


def _parameters(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(bare(module).forward).parameters)
    except (TypeError, ValueError):
        return ()


def _is_transformers(module: nn.Module) -> bool:
    base = model_base()
    return base is not None and isinstance(module, base)


def _check(model: nn.Module, stack: CutStack) -> None:
    where = f"{type(model).__name__}: "
    for name, module, why in sequence_mixers(stack.module, transformers=stack.transformers, cached=stack.cached):
        full = ".".join(part for part in (stack.name, name) if part)
        raise ValueError(
            f"{where}cp cuts the sequence over ranks, and {full or 'the model'}, a {class_of(module).__name__}, {why}: the "
            "result would be wrong. Use cp=1, and more of the other levers (ac, tp, offload)."
        )
    if not stack.transformers:
        return
    for index, layer in enumerate(stack.layers):
        if not stack.cached and not any(uses_interface(module) for module in layer.modules()):
            raise ValueError(
                f"{where}cp needs attention that goes through transformers' AttentionInterface, and layer {index} of "
                f"{stack.name or 'the model'}, a {class_of(layer).__name__}, has none. Use cp=1."
            )
    if stack.cached and not (any(asks_a_cache(m) for m in stack.module.modules()) and stack.cache_argument):
        raise ValueError(
            f"{where}cp needs attention that goes through transformers' AttentionInterface or asks a cache for its keys, "
            f"and {stack.name or 'the model'} has none. Use cp=1."
        )
    config = getattr(stack.module, "config", None)
    own = attention_of(config)
    if own not in ("sdpa", "eager", "flex_attention", None):
        raise ValueError(
            f"{where}cp makes masks from positions, and the attention implementation is {own!r}, which takes none such. "
            "Load the model with attn_implementation='sdpa' (or 'eager', 'flex_attention')."
        )
    file = sys.modules.get(type(stack.module).__module__)
    if not any(name.startswith("create_") and "mask" in name for name in vars(file or object)):
        raise ValueError(
            f"{where}cp needs masks that are made by transformers' masking_utils, and {type(stack.module).__name__} makes "
            "its own. Use cp=1."
        )
    _check_positions(where, stack)


def _check_positions(where: str, stack: CutStack) -> None:
    """Every rank counts from zero where a stack takes no positions."""
    if "position_ids" in stack.arguments or "cache_position" in stack.arguments:
        return
    for name, module in stack.module.named_modules():
        if isinstance(module, nn.Embedding) and "pos" in name.lower() and not counts_along(module):
            raise ValueError(
                f"{where}cp gives every rank the positions of its tokens, and {type(stack.module).__name__} takes no "
                f"position_ids, while {name} ({class_of(module).__name__}) counts them itself. Use cp=1."
            )
