"""The modules of a model whose input is cut: the innermost that take token ids or embeddings and hold the layers."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.module_tree import bare, bare_modules
from nemo_like.distributed.context import masks, sequence_ops
from nemo_like.distributed.context.attention import attention_of, counts_along, uses_interface
from nemo_like.distributed.context.parts import CutStack, Parts, parts_of
from nemo_like.layers import Layer, find_layers
from nemo_like.layers.structure import class_of
from nemo_like.transformers_compat import (
    BUCKET,
    COUNT_IDS,
    TEMPERATURE_TUNING,
    cache_argument,
    mask_functions,
    model_base,
)

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
    members: dict[str, list[nn.Module]] = {}
    for layer in words:
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
            f"{where}cp requires attention that goes through transformers' AttentionInterface or reads its keys from a "
            f"cache, and {stack.name or 'the model'} has none. Use cp=1."
        )
    config = getattr(stack.module, "config", None)
    attention = attention_of(config)
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


# Which modules mix along the sequence otherwise than by attention that can be given the whole sequence's keys.
#
# By structure and by name, before anything is changed: a module that is not known to be right is refused.

_OPERATORS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MaxPool1d,
    nn.AvgPool1d,
    nn.AdaptiveAvgPool1d,
    nn.ZeroPad1d,
    nn.ZeroPad2d,
    nn.BatchNorm1d,
    nn.InstanceNorm1d,
    nn.GroupNorm,
)
"""Modules of torch that combine neighbours on a dim that may be the sequence, or take statistics over it."""
_WORDS = frozenset(
    (
        "mamba",
        "ssm",
        "rwkv",
        "retention",
        "lightning",
        "recurrent",
        "lstm",
        "gru",
        "slstm",
        "mlstm",
        "hyena",
        "fourier",
        "xlstm",
        "griffin",
        "lru",
        "hawk",
        "deltanet",
        "fnet",
        "xlnet",
        "longformer",
        "reformer",
    )
)
_PHRASES = (
    "linear attention",
    "delta net",
    "gated delta",
    "short conv",
    "time shift",
    "token shift",
    "time mix",
    "r wkv",
)
"""Words of class names, in lower case."""
_ATTENTION = re.compile(r"attention$|attn$|selfattention|multi_?head", re.IGNORECASE)
_STATES = ("A_log", "dt_bias", "time_decay", "time_mix_key", "time_first", "slope_rate", "conv_state")
"""Parameters and attributes that only recurrences along the sequence have."""


def sequence_mixers(
    stack: nn.Module, *, transformers: bool, cached: bool = False, masked: bool = False
) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, why) of what mixes along the sequence below `stack` and cannot be cut, or not be masked.

    Args:
        transformers: whether attention must be reached through its interface; else SDPA is replaced, and a module with
            attention of another make is seen by `nn.MultiheadAttention` alone.
        cached: keys reach attention that uses no interface through a cache.
        masked: rows are whole, and it is enough that a module takes the mask that its stack made.
    """
    for name, module in bare_modules(stack):
        cls = class_of(module).__name__
        if isinstance(module, _OPERATORS):
            yield name, module, "combines neighbours along the sequence"
        elif isinstance(module, nn.MultiheadAttention | nn.Transformer):
            yield name, module, "computes its attention inside torch, where other ranks' keys cannot be given to it"
        elif _named_mixer(cls):
            yield name, module, "passes a state along the sequence, which a part of it does not have"
        elif "Indexer" in cls:
            if not (masked and takes_a_mask(module)):
                yield name, module, "chooses among the keys of the whole sequence"
        elif getattr(module, "trigram_input", False) or cls.endswith("Compressor"):
            yield name, module, "combines neighbours along the sequence"
        elif states := [state for state in _STATES if hasattr(module, state)]:
            yield name, module, f"passes a state along the sequence ({states[0]})"
        elif transformers and uses_interface(module) and _counts(module) and not counts_positions(module):
            yield name, module, "counts the positions of its tokens itself, which are those of a part"
        elif transformers and _is_own_attention(name, module):
            if cached and any(asks_a_cache(inner) for inner in module.modules()):
                continue
            if masked and any(takes_a_mask(inner) for inner in module.modules()):
                continue
            yield name, module, "computes attention itself, not through transformers' AttentionInterface"


def takes_a_mask(module: nn.Module) -> bool:
    """Return whether the forward of `module` takes the mask that its stack made."""
    return "attention_mask" in inspect.signature(inspect.unwrap(class_of(module).forward)).parameters


def _counts_ids(stack: nn.Module) -> tuple[Callable[..., Tensor], int] | None:
    """Return the function that counts positions below `stack` over ids that are not padding (RoBERTa and its kin), and
    the id of padding."""
    for module in stack.modules():
        count = getattr(module, COUNT_IDS, None)
        count = count or getattr(sys.modules.get(class_of(module).__module__), COUNT_IDS, None)
        if count is not None and isinstance(getattr(module, "padding_idx", None), int):
            return count, module.padding_idx  # type: ignore[return-value]
    return None


def counts_ids(stack: nn.Module) -> bool:
    """Return whether positions below `stack` are counted over the ids that are not padding."""
    return _counts_ids(stack) is not None


def positions_of_ids(stack: nn.Module, ids: Tensor | None) -> Tensor | None:
    """The positions (B, S) that `stack` itself would give to `ids`, where it counts them over those that are not padding.

    Raises:
        ValueError: it would, and there are no ids.
    """
    counting = _counts_ids(stack)
    if counting is None:
        return None
    if ids is None:
        raise ValueError(
            f"{type(stack).__name__} counts its positions from the ids that are not padding, and cp counts them before the "
            "cut: pass position_ids together with inputs_embeds."
        )
    count, padding = counting
    return count(ids, padding)


def _named_mixer(class_name: str) -> bool:
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", class_name)
    spaced = " ".join(words).lower()
    return bool(_WORDS & set(spaced.split())) or any(phrase in spaced for phrase in _PHRASES)


def _counts(module: nn.Module) -> bool:
    """Return whether attention may make a range of positions; Llama 4's does only where it tunes temperatures."""
    code = getattr(inspect.unwrap(class_of(module).forward), "__code__", None)
    return code is not None and "arange" in code.co_names and TEMPERATURE_TUNING not in code.co_names


def _is_own_attention(name: str, module: nn.Module) -> bool:
    """An attention module that does not ask the interface, and does not hold one that does."""
    if not _ATTENTION.search(class_of(module).__name__) or not any(True for _ in module.parameters()):
        return False
    return not any(uses_interface(inner) for inner in module.modules())


# Relative position biases that attention modules make from lengths (T5 and its kin): of this rank's rows, over all keys.


def over_whole_sequences(module: nn.Module, parts: Parts) -> Iterator[Any]:
    """If `module` has T5's ``compute_bias``, exchange it; yields what undoes that."""
    if not hasattr(module, "compute_bias") or not hasattr(module, BUCKET):
        return
    compute = module.compute_bias

    def compute_bias(query_length: int, key_length: int, device: Any = None, **kwargs: Any) -> Tensor:
        if parts.idle:
            return compute(query_length, key_length, device=device, **kwargs)  # type: ignore[operator]
        table: Any = module.relative_attention_bias
        device = table.weight.device if device is None else device
        rows = parts.positions(query_length * parts.ranks, device)
        if parts.method.cuts_heads:
            rows = torch.arange(query_length * parts.ranks, device=device)
        columns = torch.arange(key_length * parts.ranks, device=device)
        bucket: Any = getattr(module, BUCKET)
        settings = {
            "bidirectional": not module.is_decoder,
            "num_buckets": module.relative_attention_num_buckets,
            "max_distance": module.relative_attention_max_distance,
        }
        settings_read = inspect.signature(bucket).parameters  # UMT5 reads them of itself
        buckets = bucket(
            columns[None] - rows[:, None], **{name: settings[name] for name in settings_read if name in settings}
        )
        return table(buckets).permute(2, 0, 1)[None]

    module.compute_bias = compute_bias  # type: ignore[assignment]
    yield lambda: delattr(module, "compute_bias")


# Attention that layers of transformers compute themselves: other ranks' keys and values reach it as those of a cache.
#
# Layers with linear biases (ALiBi: Bloom, MPT, Falcon) and some older ones ask no interface. They do ask a cache for the
# keys that came before, add the biases of all keys, and take the mask that their stack made. So the cache that they get
# here gathers, and the mask has a row for each token of this part and a column for each of the whole sequence.


def asks_a_cache(module: nn.Module) -> bool:
    """Return whether `module` is attention that takes the keys of a cache, and its mask from outside."""
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
    """The cache that a stack gives its layers: nothing came before, and `update` has the whole sequence's keys."""

    is_compileable = False
    keeps_nothing = True  # so a checkpointed layer may be run again with it

    def __init__(self, parts: Parts, padded: int) -> None:
        self._parts, self._padded = parts, padded

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
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
    """Return whether `module` is attention that scales its queries by positions which it counts from zero itself (Llama
    4)."""
    return bool(getattr(module, TEMPERATURE_TUNING, False)) and not getattr(module, "use_rope", True)


class _Offsets:
    """A cache for such attention, which adds what came before to where it counts: for each token of a part, the rest."""

    keeps_nothing = True

    def __init__(self, parts: Parts, length: int, device: torch.device) -> None:
        self._offsets = parts.positions(length * parts.ranks, device) - torch.arange(length, device=device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self._offsets

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
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
    return GatheringCache(parts, sequence_ops.padded_length(length, parts.ranks))


class OwnMasks:
    """While a stack runs, transformers' masks are those of parts under the names that its layers know them by."""

    def __init__(self) -> None:
        self._mapping: Any = mask_functions()
        self._before = {name: self._mapping[name] for name in ("sdpa", "eager")}
        for name in self._before:
            # Never left out: `is_causal` would mean this part's keys alone.
            self._mapping[name] = functools.partial(_never_skipped, name)

    def put_back(self) -> None:
        for name, value in self._before.items():
            self._mapping[name] = value


def _never_skipped(implementation: str, *args: Any, **kwargs: Any) -> Any:
    return masks.make(implementation, *args, **kwargs | {"allow_is_causal_skip": False})
