"""Count the FLOPs that a step of a language model has to compute, against a peak speed: model FLOPs utilisation (MFU).

As in PaLM (arXiv 2204.02311, appendix B), the model's own FLOPs count, not recomputed ones. A token attends
to all tokens of its row (of its window, where a layer has one). The planner counts it the same way, without halving for the
causal mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_like.distributed.expert.split_experts import experts_per_token, find_experts
from nemo_like.fake.model_copy import numbers_of
from nemo_like.layers import find_layers
from nemo_like.layers.structure import is_list_of_experts
from nemo_like.options import Precision
from nemo_like.planning.devices import Device
from nemo_like.transformers_compat import text_config

# Kinds of attention in a config's ``layer_types`` that do not see all tokens: where the config has how many.
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of forward and backward of a causal language model, by the length of its rows."""

    # FLOPs of matrices. A matrix of N numbers takes 2 N forward, and 2 N for its own gradient if it trains. It takes
    # 2 N for its input's gradient if something that is registered before it trains. A token goes through as many
    # experts as the config states.
    per_token: int
    # FLOPs of attention, for each layer: the window (None: all tokens), and FLOPs for each pair of a token and one it
    # sees.
    per_pair: tuple[tuple[int | None, int], ...]

    def of(self, length: int) -> int:
        """Return the FLOPs of a row of so many tokens.

        >>> StepFlops(6, ((None, 4), (2, 4))).of(3)
        78
        """
        pairs = sum(flops * min(length, window or length) for window, flops in self.per_pair)
        return length * (self.per_token + pairs)

    @classmethod
    def count(cls, model: nn.Module) -> StepFlops:
        """Return the FLOPs of the bare `model`, on any device, with `requires_grad` as it trains. Nothing runs.

        Raises:
            ValueError: a part of it has FLOPs that are not known here.
        """
        return cls(sum(_matrices(model)), tuple(_attention(model)))


def _matrices(model: nn.Module) -> Iterator[int]:
    """FLOPs a token of each parameter that a token is multiplied with."""
    fused, listed, share = _experts(model)
    trains_before = False
    for name, module in model.named_modules():
        rank = 3 if module in fused else 2  # a bias of fused experts has two dims
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if parameter.dim() >= rank and not isinstance(module, nn.Embedding):
                size = numbers_of(parameter)
                passes = 1 + parameter.requires_grad + trains_before
                routed = module in fused or any(name.startswith(f"{experts}.") for experts in listed)
                yield round(2 * size * passes * (share if routed else 1.0))
        trains_before = trains_before or any(p.requires_grad for p in module._parameters.values() if p is not None)


def _experts(model: nn.Module) -> tuple[set[nn.Module], list[str], float]:
    """Modules with fused experts, names of lists of them, and the share of them that a token goes through."""
    counts = {experts.module: experts.count for experts in find_experts(model)}
    listed = {name: len(list(m.children())) for name, m in model.named_modules() if is_list_of_experts(name, m)}
    if not counts and not listed:
        return set(), [], 1.0
    chosen = experts_per_token(model)
    if chosen is None:
        raise ValueError("the model's config has no num_experts_per_tok")
    return set(counts), list(listed), chosen / next(iter([*counts.values(), *listed.values()]))


def _attention(model: nn.Module) -> Iterator[tuple[int | None, int]]:
    config: Any = getattr(model, "config", None)
    config = text_config(config)
    heads, hidden = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    if not isinstance(heads, int) or not isinstance(hidden, int):
        raise ValueError(f"{type(model).__name__} has no config with one num_attention_heads and hidden_size")
    layers = find_layers(model)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    if len(kinds) != len(layers):
        raise ValueError(f"the model has {len(layers)} layers, and its config the kinds of {len(kinds)}")
    head = getattr(config, "head_dim", None) or hidden // heads
    parts = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    query = sum(parts) if all(parts) else head  # type: ignore[arg-type]
    pair = 2 * heads * (query + (getattr(config, "v_head_dim", None) or head))
    order = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    first = min((order[id(p)] for p in model.parameters() if p.requires_grad), default=len(order))
    for layer, kind in zip(layers, kinds, strict=True):
        if kind != "full_attention" and kind not in _WINDOWS:
            raise ValueError(f"FLOPs of a layer of the kind {kind!r} are not known")
        window = getattr(config, _WINDOWS[kind], None) if kind in _WINDOWS else None
        trains = any(order[id(parameter)] >= first for parameter in layer.module.parameters())
        yield window, pair * (3 if trains else 1)


@dataclass(frozen=True)
class Utilisation:
    """The facts that MFU is counted with, or why it is not counted."""

    flops: StepFlops | None
    peak: float  # FLOP/s of one device.
    words: str  # For people, in one line: the peak that MFU is a share of, or why it is left out.

    @classmethod
    def for_model(cls, model: nn.Module, device: Device, precision: Precision) -> Utilisation:
        """For the bare `model` on devices like `device`.

        The share is of the data sheet's FLOP/s in 16 bits, whatever the precision, as `nemo_like.planning.fit` has it; on
        a device that the table does not know, of those that ``nemo-like fit --calibrate`` measured in `precision`.
        """
        if device.known_as:
            peak, words = device.peak_flops, f"that {device.known_as} has in 16 bits by its data sheet"
        elif device.rates != "the table":
            kind = "single" if precision.dtypes["param_dtype"] in (None, torch.float32) else "half"
            peak, words = device.matmul_flops[kind], f"of large matrix products by {device.rates}"
        else:
            reason = f"no peak of {device.name!r} is known; nemo-like fit --calibrate measures one"
            return cls(None, 0.0, f"MFU is left out: {reason}.")
        try:
            flops = StepFlops.count(model)
        except ValueError as error:
            return cls(None, 0.0, f"MFU is left out: {error}.")
        return cls(flops, peak, f"MFU is of the {peak / 1e12:,.4g} TFLOP/s {words}.")
