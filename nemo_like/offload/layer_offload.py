"""Offloading put on a model's layers, for good: what `parallelize(..., offload=...)` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from typing import Any

import torch
from torch import nn

from nemo_like._util.module_tree import check_model, every_module
from nemo_like.activation_checkpointing.apply import apply_specs
from nemo_like.activation_checkpointing.legacy import names_in
from nemo_like.activation_checkpointing.sequential import SegmentMember
from nemo_like.activation_checkpointing.spec import CheckpointSpec
from nemo_like.activation_checkpointing.wrapper import Nameless
from nemo_like.offload.backends import Backend
from nemo_like.offload.offloader import HostPolicy, Offloader, keep_on_host
from nemo_like.options import OffloadConfig
from nemo_like.torch_compat import ActivationWrapper
from nemo_like.torch_compat import OffloadWrapper as TorchOffloadWrapper

_NOTHING_SAVED = (
    "offload='saved' moves what activation checkpointing keeps, and ac is 'none' or leaves every layer out: no layer is "
    "checkpointed. Use ac='selective' (or another mode), or offload='all'."
)


class OffloadWrapper(Nameless, TorchOffloadWrapper):
    """A layer whose saved activations wait on the host: outside checkpointing and `torch.compile`, inside FSDP2's unit.

    Adds no name to parameters, modules or state dicts.
    """

    offloader: Offloader

    def __init__(self, module: nn.Module, offloader: Offloader) -> None:
        check_model(module, "module")
        super().__init__(module)
        vars(self)["offloader"] = offloader  # the wrapper's own: `__setattr__` sets others in the module inside

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the layer as any module is; a segment of layers calls this wrapper again, which has FSDP2's hooks."""
        layer, run = self._checkpoint_wrapped_module, super().__call__
        if not isinstance(layer, SegmentMember):
            return run(*args, **kwargs)
        return self._moving(lambda *args, **kwargs: layer.record(run, args, kwargs), args, kwargs)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The layer's forward; where gradients are on, what autograd saves goes through the offloader."""
        layer = self._checkpoint_wrapped_module
        if isinstance(layer, SegmentMember):
            return layer.without_segment(*args, **kwargs)
        return self._moving(layer, args, kwargs)

    def _moving(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        layer, offloader = self._checkpoint_wrapped_module, self.offloader
        offloader.refuse_inside_checkpointing()
        offloader.enter_layer(layer, args, kwargs)
        try:
            with offloader.hooks():
                return call(*args, **kwargs)
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
    alone: backward starts with it. What is outside of layers (embedding, head, loss) is never moved.

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
    check_model(model)
    config = OffloadConfig.of(config, default="saved")
    layers = layers if isinstance(layers, MutableSequence) else list(layers)
    offloader = LayerOffloader(config, backend=backend)
    names = names_in(model, layers)
    if config.mode == "none":
        return offloader
    _check(layers, config)
    moved = _moved(names)
    if config.mode in ("saved", "all"):
        keep_on_host([layer for layer, name in zip(layers, names) if name in moved], offloader)
    placed = apply_specs(model, _placements(moved, offloader), without_cache=False)
    for index, name in enumerate(names):
        layers[index] = placed.get(name, layers[index])
    return offloader


def placed_on_host(
    specs: Iterable[CheckpointSpec],
    layers: Sequence[str],
    config: OffloadConfig,
    *,
    backend: Backend | None = None,
) -> list[CheckpointSpec]:
    """Return `specs` with what they keep waiting on the host, and a placement for each of `layers` but the last.

    Args:
        specs: the regions in these layers.
        layers: names of all layers, in the order of forward.
        config, backend: see `apply_offloading`.

    Raises:
        ValueError: ``saved`` where nothing is checkpointed.
    """
    specs = list(specs)
    if config.mode == "saved" and not specs:
        raise ValueError(_NOTHING_SAVED)
    offloader = LayerOffloader(config, backend=backend)
    moved = _moved(layers)

    def on_host(spec: CheckpointSpec) -> CheckpointSpec:
        inside = all(any(m == name or m.startswith(f"{name}.") for name in moved) for m in spec.members)
        if config.mode == "boundary" or not inside or not spec.keeps_something:
            return spec
        assert spec.policy is not None
        return dataclasses.replace(spec, policy=HostPolicy(spec.policy), transfer=offloader)

    return [on_host(spec) for spec in specs] + _placements(moved, offloader)


class LayerOffloader(Offloader):
    """An `Offloader` that encloses whole layers in an `OffloadWrapper`, which hands it what they save."""

    def enclose(self, module: nn.Module) -> nn.Module:
        return OffloadWrapper(module, self)


def _moved(layers: Sequence[str]) -> list[str]:
    """All but the last: backward starts with that one, so its tensors would only go and come."""
    names = list(dict.fromkeys(layers))
    return names[:-1] if len(names) > 1 else names


def _placements(layers: Sequence[str], offloader: Offloader) -> list[CheckpointSpec]:
    return [CheckpointSpec((name,), policy=None, transfer=offloader) for name in layers]


def _check(layers: Sequence[nn.Module], config: OffloadConfig) -> None:
    if not layers:
        raise ValueError("apply_offloading was given no layers; nemo_like.layers.find_layers(model) finds them.")
    wrappers = [m for layer in layers for m in every_module(layer) if isinstance(m, ActivationWrapper)]
    if any(isinstance(wrapper, TorchOffloadWrapper) for wrapper in wrappers):
        raise ValueError(
            "One of the layers has offloading already: its tensors would be moved twice. Apply offloading once."
        )
    if config.mode == "saved" and not wrappers:
        raise ValueError(_NOTHING_SAVED)


def offloader_of(model: nn.Module) -> Offloader | None:
    """The offloader that `apply_offloading` put on `model` (for its ``stats``), or None."""
    for module in every_module(model):
        if isinstance(module, OffloadWrapper):
            return module.offloader
    return None
