"""The module of a model whose input is cut, the innermost that takes token ids or embeddings and holds the layers; and all
that is refused before a model is changed."""

import inspect
import itertools
import re
import sys
from collections.abc import Iterator, Sequence

from torch import nn

from nemo_like._util.code import names_in
from nemo_like._util.module_tree import bare, bare_modules
from nemo_like._util.table import grouped
from nemo_like.distributed.context.attention import attention_of, uses_interface
from nemo_like.distributed.context.parts import CutStack
from nemo_like.layers import Layer, find_layers
from nemo_like.layers.structure import class_of
from nemo_like.transformers_compat import COUNT_IDS, TEMPERATURE_TUNING, model_base, rope_follows_length

_CROSS = re.compile(r"(^|\.)(encoder_attn|EncDecAttention|cross_?attention|cross_?attn)$", re.IGNORECASE)
_INPUTS = ("input_ids", "inputs_embeds")
_FLEX = "flex_attention"
_COUNTS_ITSELF = "counts the positions of its tokens itself, which are those of a part"
_NEIGHBOURS = "combines neighbours along the sequence"
_DEEP = "deepstack_visual_embeds"  # An argument of stacks that add states of pictures between their layers (Qwen3-VL).


def find_stack(model: nn.Module, layers: Sequence[Layer] | None = None, call: nn.Module | None = None) -> CutStack:
    """The stack of `model`. Changes nothing.

    Args:
        layers: its repeated layers; None: they are found.
        call: the module whose hooks see the inputs of `model`; None: `model` itself.

    Raises:
        ValueError: nothing to cut, or something that mixes along the sequence and is not attention that can be given
            the keys of other ranks; it is named.
    """
    stacks_layers = find_layers(model) if layers is None else layers
    # A model that states nothing about itself may be called with sequences of any kind.
    words = [layer for layer in stacks_layers if layer.group == "language"] or [
        layer for layer in stacks_layers if layer.group == "other"
    ]
    if not words:
        groups = ", ".join(sorted({layer.group for layer in stacks_layers}))
        raise ValueError(
            f"cp cuts sequences of tokens, and this {type(model).__name__} has no layers of a language model (found: "
            f"{groups}). Use cp=1."
        )
    members = grouped((_stack_name(model, layer.fqn), layer.inner) for layer in words)
    stacks, base = [], model_base()
    for name, inside in members.items():
        module = bare(model.get_submodule(name))
        of_transformers = base is not None and isinstance(module, base)
        stacks.append(CutStack(name, module, tuple(inside), of_transformers, module if name or call is None else call))
    for stack in stacks:
        _check(model, stack)
    if len(stacks) > 1:
        raise ValueError(
            f"{type(model).__name__}: cp cuts the sequence of one stack of layers, and there are {len(stacks)} "
            f"({', '.join(members)}): an encoder and a decoder, or several models. Use cp=1."
        )
    return stacks[0]


def _stack_name(model: nn.Module, fqn: str) -> str:
    """The innermost ancestor of a layer that takes token ids or embeddings; empty (the model) where none does."""
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


def _check(model: nn.Module, stack: CutStack) -> None:
    where = f"{type(model).__name__}: "
    mixers = sequence_mixers(stack.module, transformers=stack.transformers)
    for name, module, why in itertools.chain(_uncut(stack), mixers):
        full = ".".join(part for part in (stack.name, name) if part)
        raise ValueError(
            f"{where}cp cuts the sequence over ranks, and {full or 'the model'}, a {class_of(module).__name__}, {why}: the "
            "result would be wrong. Use cp=1, and more of the other levers (ac, tp, offload)."
        )
    if stack.transformers:
        _check_interfaces(where, stack)


def _uncut(stack: CutStack) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, module, why) of modules below `stack` that make biases or positions from their sequence."""
    yield from _with_reason(
        "",
        stack.module,
        (_DEEP in stack.arguments, f"adds states of pictures between its layers ({_DEEP}), which stay whole"),
        (counts_ids(stack.module), "counts positions over the ids that are not padding"),
    )
    for name, module in stack.module.named_modules():
        yield from _with_reason(
            name,
            module,
            (
                hasattr(module, "compute_bias"),
                "makes relative position biases (compute_bias) for as many keys as it sees",
            ),
            (_CROSS.search(name), "looks at states of another modality or of an encoder, which are not cut"),
            ("pooler" in name.rpartition(".")[2].lower(), "reads one token of a sequence, which is on one rank only"),
            (reads_the_longest(module), "makes frequencies by the longest position of its call (longrope, dynamic)"),
            (
                not stack.transformers and _FLEX in _names(module),
                "calls flex attention itself, whose block mask is one of whole sequences",
            ),
            (counts_positions(module), f"scales queries by positions that it counts itself ({TEMPERATURE_TUNING})"),
            (stack.transformers and _counts_along(stack, name, module), _COUNTS_ITSELF),
        )


def _with_reason(name: str, module: nn.Module, *reasons: tuple[object, str]) -> list[tuple[str, nn.Module, str]]:
    """Return (name, module, why) for the first of `reasons`, (whether it holds, why), that holds; empty: none does."""
    return [(name, module, why) for holds, why in reasons if holds][:1]


def reads_the_longest(module: nn.Module) -> bool:
    """Return whether `module` makes something of positions alone, and reads the longest of them."""
    if "position_ids" not in _parameters(module) or any(True for _ in module.parameters()):
        return False
    return rope_follows_length(module) or not {"max", "amax"}.isdisjoint(_names(module))


def _names(module: nn.Module) -> frozenset[str]:
    """Return the names of functions and attributes in the forward of `module`."""
    return names_in(class_of(module).forward)


def _counts_along(stack: CutStack, name: str, module: nn.Module) -> bool:
    """Return whether `module` embeds positions that its stack does not give it (BART, Marian), or reads a mask (OPT)."""
    overrides = class_of(module).forward is not nn.Embedding.forward
    counts = overrides and re.search(r"position\w*embeddings?$", class_of(module).__name__, re.IGNORECASE) is not None
    if "position_ids" in stack.arguments:
        return counts and "attention_mask" in _parameters(module)
    return counts or (isinstance(module, nn.Embedding) and "pos" in name.lower())


def _check_interfaces(where: str, stack: CutStack) -> None:
    """Raise ValueError where attention or masks of a stack of transformers go through none of its interfaces."""
    for index, layer in enumerate(stack.layers):
        if not any(uses_interface(module) for module in layer.modules()):
            raise ValueError(
                f"{where}cp needs attention that goes through transformers' AttentionInterface, and layer {index} of "
                f"{stack.name or 'the model'}, a {class_of(layer).__name__}, has none. Use cp=1."
            )
    attention = attention_of(getattr(stack.module, "config", None))
    if attention not in ("sdpa", "eager", "flex_attention", None):
        raise ValueError(
            f"{where}cp makes masks from positions, and the attention implementation is {attention!r}, which takes none. "
            "Load the model with attn_implementation='sdpa' (or 'eager', 'flex_attention')."
        )
    file = sys.modules.get(type(stack.module).__module__)
    if not any(name.startswith("create_") and "mask" in name for name in vars(file or object)):
        raise ValueError(
            f"{where}cp needs masks that are made by transformers' masking_utils, and {type(stack.module).__name__} makes "
            "its own. Use cp=1."
        )


# Which modules mix along the sequence otherwise than by attention that can be given the whole sequence's keys.
#
# By structure and by name, before anything is changed: a module that is not known to be right is refused.

# Modules of torch that combine neighbours on a dim that may be the sequence, or take statistics over it.
_OPERATORS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.RNNBase, nn.RNNCellBase, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.ZeroPad1d, nn.ZeroPad2d),
    *(nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm),
)
# Words of class names, in lower case.
_MIXERS = re.compile(
    r"\b(mamba|ssm|rwkv|retention|lightning|recurrent|[sm]?lstm|gru|hyena|fourier|xlstm|griffin|lru|hawk|deltanet|fnet|xlnet"
    r"|longformer|reformer)\b|linear attention|delta net|gated delta|short conv|time shift|token shift|time mix|r wkv"
)
_ATTENTION = re.compile(r"attention$|attn$|selfattention|multi_?head", re.IGNORECASE)
# Parameters and attributes that only recurrences along the sequence have.
_STATES = ("A_log", "dt_bias", "time_decay", "time_mix_key", "time_first", "slope_rate", "conv_state")


def sequence_mixers(
    stack: nn.Module, *, transformers: bool, masked: bool = False
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, module, why) of modules below `stack` that mix along sequences and cannot be cut, or masked.

    Args:
        transformers: attention must be reached through its interface; else torch's functions are replaced, and a module
            with attention of another make is seen by `nn.MultiheadAttention` alone.
        masked: rows are whole, and it is enough that a module takes the mask that its stack made.
    """
    for name, module in bare_modules(stack):
        cls = class_of(module).__name__
        words = " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", cls)).lower()
        state = next((state for state in _STATES if hasattr(module, state)), None)
        yield from _with_reason(
            name,
            module,
            (isinstance(module, _OPERATORS), _NEIGHBOURS),
            (
                isinstance(module, nn.MultiheadAttention | nn.Transformer),
                "computes its attention inside torch, where other ranks' keys cannot be given to it",
            ),
            (_MIXERS.search(words), "passes a state along the sequence, which a part of it does not have"),
            (
                "Indexer" in cls and not (masked and takes_a_mask(module)),
                "chooses among the keys of the whole sequence",
            ),
            (getattr(module, "trigram_input", False) or cls.endswith("Compressor"), _NEIGHBOURS),
            (state, f"passes a state along the sequence ({state})"),
            (
                transformers and uses_interface(module) and _counts(module) and not counts_positions(module),
                _COUNTS_ITSELF,
            ),
            (
                transformers
                and _is_own_attention(module)
                and not (masked and any(map(takes_a_mask, module.modules()))),
                "computes attention itself, not by transformers' AttentionInterface, torch's fused function or flex "
                "attention",
            ),
        )


def takes_a_mask(module: nn.Module) -> bool:
    """Return whether the forward of `module` takes the mask that its stack made."""
    return "attention_mask" in inspect.signature(inspect.unwrap(class_of(module).forward)).parameters


def counts_ids(stack: nn.Module) -> bool:
    """Return whether positions below `stack` are counted over the ids that are not padding (RoBERTa and its kin)."""
    return any(
        hasattr(module, COUNT_IDS) or hasattr(sys.modules.get(class_of(module).__module__), COUNT_IDS)
        for module in stack.modules()
        if isinstance(getattr(module, "padding_idx", None), int)
    )


def counts_positions(module: nn.Module) -> bool:
    """Return whether `module` is attention that scales its queries by positions which it counts from zero itself (Llama
    4)."""
    return bool(getattr(module, TEMPERATURE_TUNING, False)) and not getattr(module, "use_rope", True)


def _counts(module: nn.Module) -> bool:
    """Return whether attention may make a range of positions; Llama 4's does only where it tunes temperatures."""
    return "arange" in _names(module) and TEMPERATURE_TUNING not in _names(module)


def _is_own_attention(module: nn.Module) -> bool:
    """An attention module that does not ask the interface, and does not hold one that does."""
    if not _ATTENTION.search(class_of(module).__name__) or not any(True for _ in module.parameters()):
        return False
    return not any(uses_interface(inner) for inner in module.modules())
