"""Offloading put on a model's layers, for good: what `parallelize(..., offload=...)` does."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any

import torch
from torch import nn

from nemo_like.activation_checkpointing.nameless import Nameless
from nemo_like.offload.backends import Backend
from nemo_like.offload.offloader import Offloader, parse_offload
from nemo_like.offload.regions import keep_on_host, moves_everything
from nemo_like.options import OffloadConfig
from nemo_like.torch_compat import ActivationWrapper
from nemo_like.torch_compat import OffloadWrapper as TorchOffloadWrapper


class OffloadWrapper(Nameless, TorchOffloadWrapper):
    """A layer whose saved activations wait on the host. Adds no name to parameters, modules or state dicts.

    It stands outside activation checkpointing and outside `torch.compile`, and inside FSDP2's unit.
    """

    def __init__(self, module: nn.Module, offloader: Offloader) -> None:
        super().__init__(module)
        self.offloader = offloader

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward; where gradients are on, what autograd saves goes through the offloader."""
        layer = self._checkpoint_wrapped_module
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return layer(*args, **kwargs)
        offloader = self.offloader
        offloader.refuse_inside_checkpointing()
        offloader.enter_layer(layer, args, kwargs, everything=moves_everything(layer, offloader.config.mode))
        try:
            with offloader.hooks():
                return layer(*args, **kwargs)
        finally:
            offloader.leave_layer()


def apply_offloading(
    model: nn.Module,
    layers: Sequence[nn.Module],
    config: OffloadConfig | str | None = None,
    *,
    backend: Backend | None = None,
) -> Offloader:
    """Make what `layers` save for backward wait on the host. Changes `model`, and `layers` where it is a list.

    Call it after activation checkpointing and compilation, and before sharding. Of several layers the last one is left
    alone: backward starts with it, so its tensors would only go and come. What is outside of layers (embedding, head,
    loss) is never moved.

    Args:
        model: holds the layers.
        layers: in the order of forward; wrapped (`CheckpointWrapper`) or not, compiled or not.
        config: an `OffloadConfig`, or its mode: ``boundary`` moves the layers' inputs, ``saved`` these and what
            checkpointing keeps inside, ``all`` everything; None: ``saved``.
        backend: see `offload_activations`.

    Returns:
        the offloader of all layers; its ``stats`` are live.

    Raises:
        TypeError, ValueError: a bad config; a layer that is not in the model, or has offloading already; ``saved``
            where nothing is checkpointed. Nothing has been changed then.
    """
    config = parse_offload(config, default="saved")
    layers = layers if isinstance(layers, MutableSequence) else list(layers)
    slots = _slots(model)
    _validate(layers, config, slots)
    offloader = Offloader(config, backend=backend, needs_layers=False)
    if config.mode == "none":
        return offloader
    moved = list(dict.fromkeys(layers))
    wrappers = {layer: OffloadWrapper(layer, offloader) for layer in (moved[:-1] if len(moved) > 1 else moved)}
    for layer, wrapper in wrappers.items():
        if config.mode in ("saved", "all"):
            keep_on_host([layer], offloader)
        for parent, name in slots[layer]:
            parent._modules[name] = wrapper  # the registered child: a property of the same name may alias it
    for index, layer in enumerate(layers):
        layers[index] = wrappers.get(layer, layer)
    return offloader


def _validate(layers: Sequence[nn.Module], config: OffloadConfig, slots: dict[nn.Module, Any]) -> None:
    if config.mode != "none" and not layers:
        raise ValueError("apply_offloading was given no layers; nemo_like.layers.find_layers(model) finds them.")
    for index, layer in enumerate(layers):
        if layer not in slots:
            raise ValueError(
                f"layers[{index}], a {type(layer).__name__}, is nothing that the model itself calls: pass its layers, "
                "and where they are wrapped, the wrappers."
            )
        if any(isinstance(module, TorchOffloadWrapper) for module in layer.modules()):
            raise ValueError(
                f"layers[{index}], a {type(layer).__name__}, has offloading already: its tensors would be moved twice. "
                "Apply offloading once."
            )
    regions = [m for layer in layers for m in layer.modules() if isinstance(m, ActivationWrapper)]
    if config.mode == "saved" and not regions:
        raise ValueError(
            "offload='saved' moves what activation checkpointing keeps, and no layer is checkpointed. Use "
            "ac='selective' (or another mode), or offload='all'."
        )


def _slots(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """For each module that a non-wrapper calls: every (parent, child name) under which it is registered."""
    slots: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        if isinstance(parent, ActivationWrapper):
            continue
        for name, child in parent._modules.items():
            if child is not None:
                slots.setdefault(child, []).append((parent, name))
    return slots


def offloader_of(model: nn.Module) -> Offloader | None:
    """The offloader that `apply_offloading` put on `model` (for its ``stats``), or None."""
    for module in model.modules():
        if isinstance(module, OffloadWrapper):
            return module.offloader
    return None
