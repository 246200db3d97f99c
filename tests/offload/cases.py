"""Parts of the offloading tests: settings, stacks of layers, a step."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from nemo_like.activation_checkpointing import apply_selective_checkpointing_to_layers
from nemo_like.activation_checkpointing.policy import SelectivePolicy
from nemo_like.offload import apply_offloading, offload_activations
from nemo_like.offload.backends import Backend
from nemo_like.options import OffloadConfig
from tests.checks import gradients_of
from tests.models.blocks import Layer, Stack

MODES = ("boundary", "saved", "all", "context-all", "context-boundary", "context-saved")
"""`apply_offloading` in its three modes, and the context manager."""


def config(mode: str = "all", **fields: Any) -> OffloadConfig:
    """A configuration in which small test tensors move."""
    return OffloadConfig(mode=mode, **({"min_bytes": 0, "pin_memory": False} | fields))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by name, copied; taken away from the model."""
    found = gradients_of(model)
    model.zero_grad()
    return found


def trained(model: nn.Module, x: torch.Tensor, context: Any = None) -> dict[str, torch.Tensor]:
    """Gradients of the sum of the squared outputs, with forward inside of `context`."""
    with context or contextlib.nullcontext():
        loss = model(x).pow(2).sum()
    loss.backward()
    return gradients(model)


def _scaled(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], layer: Any, x: torch.Tensor) -> torch.Tensor:
    return function(layer.linear(x.sin()), layer.scale)


def stack_of(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], count: int = 4, width: int = 16) -> Stack:
    """`count` equal layers, seeded: each a linear map, then `function` of its result and a scale."""
    torch.manual_seed(0)
    return Stack(
        Layer(
            partial(_scaled, function),
            linear=nn.Linear(width, width),
            scale=nn.Parameter(torch.randn(width)),
        )
        for _ in range(count)
    )


def offloaded(model: nn.Module, layers: list[nn.Module], mode: str, **fields: Any) -> Any:
    """A copy of `model` with offloading in `mode` of `MODES`, and what to enter around its forward."""
    positions = [list(model.modules()).index(layer) for layer in layers]
    model = copy.deepcopy(model)
    modules = list(model.modules())
    layers = [modules[position] for position in positions]
    backend = Backend()
    if mode.endswith("saved"):
        apply_selective_checkpointing_to_layers(model, layers, False, policy=SelectivePolicy(every_nth_matmul=None))
    if mode.startswith("context-"):
        context = offload_activations(
            config(mode.removeprefix("context-"), **fields), model=model, layers=layers, backend=backend
        )
        return model, context, context
    return model, apply_offloading(model, layers, config(mode, **fields), backend=backend), offload_activations("none")
