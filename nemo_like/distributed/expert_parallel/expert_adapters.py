"""PEFT's adapters on the fused weights of experts (``LoraConfig(target_parameters=...)``), where ep splits the experts.

Such an adapter holds the low-rank factors of all experts. They stay whole, and are sharded with their layer: each rank
adds to the experts that it has what their part of the factors says, instead of PEFT's own sum over all experts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def adapters_in(model: nn.Module) -> dict[int, tuple[nn.Module, ...]]:
    """The wrappers in `model` that adapt a weight of a module, from the outside in, by the id of that module."""
    found: dict[int, tuple[nn.Module, ...]] = {}
    for module in model.modules():
        if type(module).__name__ == "ParamWrapper":
            inside = id(module.get_base_layer())  # type: ignore[operator]
            found[inside] = (*found.get(inside, ()), module)
    return found


def adapters_on(model: nn.Module, experts: nn.Module) -> tuple[nn.Module, ...]:
    """The wrappers in `model` that adapt a weight of the module `experts`, from the outside in."""
    return adapters_in(model).get(id(experts), ())


def pass_through(adapters: Iterable[nn.Module]) -> None:
    """Have `adapters` call what they wrap and add nothing: `with_adapters` does, where the weights are used."""
    for adapter in adapters:
        adapter.forward = functools.partial(_inside, adapter)


def _inside(adapter: Any, *args: Any, **kwargs: Any) -> Any:
    if adapter.merged:
        raise RuntimeError(
            "Adapters on experts that ep splits were merged: a rank has only some of the experts to merge into."
        )
    return adapter.base_layer(*args, **kwargs)


def with_adapters(weights: dict[str, Tensor], adapters: Sequence[Any], first: int) -> dict[str, Tensor]:
    """`weights` (experts here, ..., ...) of the experts from number `first` on, with what `adapters` add to them."""
    weights = dict(weights)
    for adapter in reversed(adapters):
        name = adapter.parameter_name
        for active in [] if adapter.disable_adapters else adapter.active_adapters:
            if active not in adapter.lora_A:
                continue
            lhs, rhs, scaling = adapter.get_delta_factors(active)
            here = slice(first, first + len(weights[name]))
            # The sum that PEFT makes for all experts at once.
            weights[name] = torch.baddbmm(weights[name], lhs[here], rhs[here], alpha=scaling)
    return weights
