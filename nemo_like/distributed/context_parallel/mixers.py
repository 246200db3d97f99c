"""Which modules mix along the sequence otherwise than by attention that can be given the whole sequence's keys.

By structure and by name, before anything is changed: a module that is not known to be right is refused.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from nemo_like.distributed.context_parallel.attention import uses_interface
from nemo_like.distributed.context_parallel.cached import asks_a_cache, counts_positions
from nemo_like.layers.structure import class_of
from nemo_like.module_tree import bare_modules
from nemo_like.transformers_compat import COUNT_IDS, TEMPERATURE_TUNING

_OPERATORS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.RNNBase,
    nn.RNNCellBase, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.ZeroPad1d, nn.ZeroPad2d, nn.BatchNorm1d,
    nn.InstanceNorm1d, nn.GroupNorm,
)  # fmt: skip
"""Modules of torch that combine neighbours on a dim that may be the sequence, or take statistics over it."""
_WORDS = frozenset((
    "mamba", "ssm", "rwkv", "retention", "lightning", "recurrent", "lstm", "gru", "slstm", "mlstm", "hyena",
    "fourier", "xlstm", "griffin", "lru", "hawk", "deltanet", "fnet", "xlnet", "longformer", "reformer",
))  # fmt: skip
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
        cached: keys reach attention that asks no interface through a cache.
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
        elif found := [state for state in _STATES if hasattr(module, state)]:
            yield name, module, f"passes a state along the sequence ({found[0]})"
        elif transformers and uses_interface(module) and _counts(module) and not counts_positions(module):
            yield name, module, "counts the positions of its tokens itself, which are those of a part"
        elif transformers and _is_own_attention(name, module):
            if cached and any(asks_a_cache(inner) for inner in module.modules()):
                continue
            if masked and any(takes_a_mask(inner) for inner in module.modules()):
                continue
            yield name, module, "computes attention itself, not through transformers' AttentionInterface"


def takes_a_mask(module: nn.Module) -> bool:
    """Whether the forward of `module` takes the mask that its stack made."""
    return "attention_mask" in inspect.signature(inspect.unwrap(class_of(module).forward)).parameters


def _counts_ids(stack: nn.Module) -> tuple[Callable[..., Tensor], int] | None:
    """How positions below `stack` are counted over ids that are no padding (RoBERTa and its kin), and the id of padding."""
    for module in stack.modules():
        count = getattr(module, COUNT_IDS, None)
        count = count or getattr(sys.modules.get(class_of(module).__module__), COUNT_IDS, None)
        if count is not None and isinstance(getattr(module, "padding_idx", None), int):
            return count, module.padding_idx  # type: ignore[return-value]
    return None


def counts_ids(stack: nn.Module) -> bool:
    """Whether positions below `stack` are counted over the ids that are no padding."""
    return _counts_ids(stack) is not None


def positions_of_ids(stack: nn.Module, ids: Tensor | None) -> Tensor | None:
    """The positions (B, S) that `stack` itself would give to `ids`, where it counts them over those that are no padding.

    Raises:
        ValueError: it would, and there are no ids.
    """
    found = _counts_ids(stack)
    if found is None:
        return None
    if ids is None:
        raise ValueError(
            f"{type(stack).__name__} counts its positions from the ids that are no padding, and cp counts them before the "
            "cut: pass position_ids together with inputs_embeds."
        )
    count, padding = found
    return count(ids, padding)


def _named_mixer(class_name: str) -> bool:
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", class_name)
    spaced = " ".join(words).lower()
    return bool(_WORDS & set(spaced.split())) or any(phrase in spaced for phrase in _PHRASES)


def _counts(module: nn.Module) -> bool:
    """Whether attention may make a range of positions; Llama 4's does only where it tunes temperatures."""
    code = getattr(inspect.unwrap(class_of(module).forward), "__code__", None)
    return code is not None and "arange" in code.co_names and TEMPERATURE_TUNING not in code.co_names


def _is_own_attention(name: str, module: nn.Module) -> bool:
    """An attention module that does not ask the interface, and does not hold one that does."""
    if not _ATTENTION.search(class_of(module).__name__) or not any(True for _ in module.parameters()):
        return False
    return not any(uses_interface(inner) for inner in module.modules())
