"""Offloading as a context manager, and put on a model's layers for good: saved tensors wait on the host.

>>> weight = torch.randn(64, 64, requires_grad=True)
>>> with offload_activations(OffloadConfig(mode="all", min_bytes=0)) as offloader:
...     loss = (weight @ weight).relu().sum()
>>> loss.backward()
>>> offloader.stats.moved_bytes
16384
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from nemo_like._util.forwards import Forward, Place, is_compiled, step_of
from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import check_model
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.apply import apply_specs
from nemo_like.activation_checkpointing.checkpointed import Checkpointed, is_checkpointed, regions_in
from nemo_like.activation_checkpointing.engine import is_recomputing
from nemo_like.activation_checkpointing.legacy import names_in
from nemo_like.activation_checkpointing.policy import HOST, SAVE, Decision, Policy
from nemo_like.activation_checkpointing.spec import CheckpointSpec
from nemo_like.offload import stays
from nemo_like.offload.backends import Backend, default_backend
from nemo_like.offload.handles import ChosenHandle, Handle, HostHandle, KeptHandle, SubclassHandle, guard_of
from nemo_like.offload.mover import HostCopy, Mover
from nemo_like.offload.stays import OffloadStats, is_wrapper_subclass, take_apart
from nemo_like.options import OffloadConfig
from nemo_like.torch_compat import OffloadWrapper as TorchOffloadWrapper
from nemo_like.torch_compat import (
    innermost_saved_tensor_hooks,
    left_to_python,
    version_of,
)


def offload_activations(
    config: OffloadConfig | str | None = None,
    *,
    model: nn.Module | None = None,
    layers: Sequence[nn.Module] = (),
    left_out: Sequence[nn.Module] = (),
    backend: Backend | None = None,
) -> Offloader:
    """A context manager: tensors that autograd saves inside it wait on the host until backward uses them.

    Make it once and enter it each step: it has the counters, and PyTorch keeps pinned CPU memory for the next step.

    Args:
        config: an `OffloadConfig`, or its mode; None: ``"all"``.
        model: its parameters and buffers never move (without it, they are known by type and by graph).
        layers: the repeated blocks, in the order of forward. They are the unit of prefetching, and the last one's
            tensors stay, because backward starts with them. Needed for the modes ``boundary`` and ``saved``.
        left_out: modules (an output head) from whose call on nothing is moved, up to the next call of `model`: backward
            starts there.
        backend: where and how bytes move; None: the accelerator, else the copying one.

    Raises:
        TypeError: `config` is neither. ValueError: an unknown mode; ``boundary`` or ``saved`` without `layers`.

    The context is entered around forward (backward may run inside or outside) and around checkpointing. Entering it
    within a checkpointed region raises RuntimeError.
    """
    config = OffloadConfig.of(config, default="all")
    if config.mode in ("boundary", "saved") and not layers:
        raise ValueError(
            f"Offloading {config.mode!r} moves layer inputs, and was not told the layers. Pass layers=[...] "
            "(nemo_like.layers.find_layers finds them), or use offload='all'."
        )
    return Offloader(config, model=model, layers=layers, left_out=left_out, backend=backend)


class Offloader:
    """Decides where each saved tensor waits, and counts: see `offload_activations`.

    `stats` are live. An engine's HOST decisions go through `to_host`, `prefetch` and `before_change` (its `Transfer`).

    The arguments are those of `offload_activations`, `Backend` and `Mover`.
    """

    def __init__(
        self,
        config: OffloadConfig,
        *,
        model: nn.Module | None = None,
        layers: Sequence[nn.Module] = (),
        left_out: Sequence[nn.Module] = (),
        backend: Backend | None = None,
        use_streams: bool = True,
        max_inflight_copies: int | None = None,
    ) -> None:
        if model is not None:
            check_model(model)
        self.config, self.model, self.layers, self.left_out = config, model, list(layers), list(left_out)
        default = partial(default_backend, pin_memory=config.pin_memory, use_streams=use_streams)
        self._mover = Mover(default if backend is None else lambda: backend, config, max_inflight_copies)
        self.stats = self._mover.stats
        self._known = stays.KnownStorages()
        self._inputs: set[torch.UntypedStorage] | None = None  # the storages that may move; None: any
        self._resting = False  # True: backward will start with tensors saved now.
        self._chosen: Callable[[], ChosenHandle | None] = lambda: None  # the tensor last chosen, if it is still wanted
        self._contexts: list[ExitStack] = []

    @left_to_python
    def pack(self, tensor: torch.Tensor) -> Handle:
        """Return a handle that replaces `tensor` in the graph: on the host where it may go there, else as it is."""
        with torch.no_grad():
            self.start_chosen()
            if torch.compiler.is_compiling():
                return KeptHandle(tensor)
            tensor = _resolved(tensor)
            reason = self._reason_to_stay(tensor)
            return self._keep(tensor, reason) if reason else self._move(tensor, (version_of(tensor),), guarded=True)

    @staticmethod
    @left_to_python
    def unpack(handle: Handle) -> torch.Tensor:
        """The tensor that `handle` replaces."""
        return handle.get()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The bare pair of hooks, for one ``with``."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def _reason_to_stay(self, tensor: torch.Tensor) -> str | None:
        """Return the reason why all of a saved tensor stays, known before it is taken apart."""
        if self._resting:
            return stays.LAST_LAYER
        if stays.is_parameter(tensor):
            return stays.PARAMETER
        if stays.is_autocast_copy(tensor, self._known):
            return "autocast's copy of a weight"
        is_other = self._inputs is not None and self._inputs.isdisjoint(stays.storages_of(tensor))
        return "not a layer's input" if is_other else None

    def _keep(self, tensor: torch.Tensor, reason: str) -> KeptHandle:
        self.stats.keep(reason, sum(storage.nbytes() for storage in stays.storages_of(tensor)))
        return KeptHandle(tensor)

    def _move(self, tensor: torch.Tensor, version: tuple[Any, ...], guarded: bool) -> Handle:
        """A handle for `tensor`, whose contents `version` tells from others of its storage (see `Mover.offload`)."""
        if not is_wrapper_subclass(tensor):
            return self._move_plain(tensor, version, guarded)
        # The inner tensors of a wrapper subclass move, and how to put it together again is kept. An operator that
        # changes it in place need not show in its inner tensors' versions: the outer ones count too.
        inner, context = take_apart(tensor)
        for name, value in inner.items():
            if isinstance(value, torch.Tensor):
                value = _resolved(value)
                inner[name] = self._move(value, (*version, version_of(value)), False)
        copies = [copy for value in inner.values() if isinstance(value, Handle) for copy in value.copies]
        if not copies:
            return KeptHandle(tensor)
        kind, shape, stride = type(tensor), tensor.shape, tensor.stride()

        def rebuilt(values: dict[str, Any]) -> torch.Tensor:
            return kind.__tensor_unflatten__(values, context, shape, stride)  # type: ignore[attr-defined]

        return SubclassHandle(rebuilt, inner, copies, guard_of(tensor) if guarded else None)

    def _move_plain(self, tensor: torch.Tensor, version: tuple[Any, ...], guarded: bool) -> Handle:
        """A handle for a plain tensor: on the host, or where it is (counted, with the reason)."""
        problem = stays.unsupported(tensor)
        if problem is not None:
            warn_once(f"Offloading leaves a saved tensor on the device: {problem}.", key=f"offload-keeps-{problem}")
            return self._keep(tensor, f"unsupported: {problem}")
        reason = self._reason_of_part(tensor, version)
        if reason is not None:
            return self._keep(tensor, reason)
        copy = self._mover.offload(tensor.untyped_storage(), version)
        if isinstance(copy, HostCopy):
            return HostHandle(tensor, copy, guard_of(tensor) if guarded else None)
        warn_once(
            f"Offloading keeps tensors on the device from here on, where they do not fit: {copy}.",
            key="offload-refused",
        )
        return self._keep(tensor, "refused by the host: " + copy.split(" of ")[0])

    def _reason_of_part(self, tensor: torch.Tensor, version: tuple[Any, ...]) -> str | None:
        storage = tensor.untyped_storage()
        if tensor.numel() == 0:
            return "empty"
        if tensor.device != self._mover.backend.device:
            return "on the host already" if tensor.device.type == "cpu" else f"on {tensor.device}"
        if storage in self._known.storages:
            return self._known.storages[storage]
        if storage.nbytes() < self.config.min_bytes:
            return "smaller than min_bytes"
        return None if stays.spans_half(tensor) or self._mover.find(storage, version) else stays.PART

    def to_host(self, tensor: torch.Tensor) -> ChosenHandle:
        """As `pack`, for an operator's output that an engine chose."""
        with torch.no_grad():
            self.start_chosen()
            if self._resting:
                return ChosenHandle(tensor, partial(self._keep, reason=stays.LAST_LAYER))
            handle = ChosenHandle(tensor, partial(self._move, version=(version_of(tensor),), guarded=False))
            self._chosen = weakref.ref(handle)
            return handle

    def start_chosen(self) -> None:
        """Move the tensor last chosen, if it is still wanted."""
        chosen, self._chosen = self._chosen(), lambda: None
        if chosen is not None:
            with torch.no_grad():
                chosen.start()

    def prefetch(self, handle: Any) -> None:
        """Start the way back of a tensor that `to_host` took."""
        handle.prefetch()

    def before_change(self, handle: Any) -> None:
        """The tensor that `to_host` took is about to be changed in place: the taken values stay as they are."""
        with torch.no_grad():
            handle.before_change()

    def __enter__(self) -> Offloader:
        stack = ExitStack()
        if self.config.mode != "none":
            self.refuse_inside_checkpointing()
            if self.model is not None:
                self._known.learn(self.model)
            self._resting = False
            self._inputs = None if self.config.mode == "all" else set()
            for module in dict.fromkeys([*self.layers, *self.left_out, *([] if self.model is None else [self.model])]):
                stack.callback(module.register_forward_pre_hook(self._enter_module, with_kwargs=True).remove)
            if self.config.mode != "boundary":
                stack.callback(keep_as_before, keep_on_host(self.layers, self))
            stack.enter_context(self.hooks())
        self._contexts.append(stack)
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.pop().close()
        self.leave_layer()
        self.collect()

    def _enter_module(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Be told, within the context, of a call of a layer, of a module left out, or of the model."""
        if torch.compiler.is_compiling():
            return
        if module in self.layers:
            self.enter_layer(module, args, kwargs)
        self._resting = module in self.left_out or (len(self.layers) > 1 and module is self.layers[-1])

    def enter_layer(self, layer: nn.Module, args: object, kwargs: object) -> None:
        """Assign tensors saved from here on to `layer`, which is called with these arguments."""
        self._known.learn(layer)
        everything = moves_everything(layer, self.config.mode)
        storages = [each for tensor in tensors_in((args, kwargs)) for each in stays.storages_of(tensor)]
        self._inputs = None if everything else set(storages)
        self._mover.open_group()

    def leave_layer(self) -> None:
        """Assign tensors saved from here on to no layer."""
        self.start_chosen()
        self._inputs = None if self.config.mode == "all" else set()

    def enclose(self, module: nn.Module) -> None:
        """Take the tensors that `module` saves from now on."""
        Offloading(module, self).put()

    def refuse_inside_checkpointing(self) -> None:
        """Raise RuntimeError where a checkpointed region is being run: its own hooks would never be called."""
        hooks = innermost_saved_tensor_hooks()
        module = getattr(hooks[0], "__module__", None) if hooks is not None else None
        if str(module).startswith(("torch.utils.checkpoint", "nemo_like.activation_checkpointing")):
            raise RuntimeError(
                "Offloading was entered inside a checkpointed region. Its hooks would take every saved tensor from the "
                "checkpointing around it, which would then recompute nothing and save no memory. Turn the two around: "
                "offload(checkpoint(module)), not checkpoint(offload(module))."
            )

    def __reduce__(self) -> Any:
        """A copy of a model gets CPU memory of its own: nothing that waits there is copied."""
        return Offloader, (self.config,)

    def collect(self) -> OffloadStats:
        """Bring `stats` up to date with graphs that have died since; returns them."""
        self._mover.retire()
        return self.stats


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`; where it is the output of a functional collective still on its way, the finished output."""
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor  # type: ignore[attr-defined]


class HostPolicy:
    """Another policy whose kept outputs wait on the host instead of on the device."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.keeps_nothing = policy.keeps_nothing
        self.tracked_ops = policy.tracked_ops

    def start(self) -> Callable[..., Decision]:
        """The other policy's decisions, with HOST for SAVE."""
        decide = self.policy.start()

        def on_host(*call: Any) -> Decision:
            decision = decide(*call)
            return HOST if decision is SAVE else decision

        vars(on_host).update(needs_call=getattr(decide, "needs_call", False), finish=getattr(decide, "finish", None))
        return on_host


def keep_on_host(layers: Iterable[nn.Module], transfer: Offloader) -> list[tuple[Checkpointed, Policy, Any]]:
    """Let the layers' regions keep their outputs on the host; return the former settings, for `keep_as_before`."""
    changed: list[tuple[Checkpointed, Policy, Any]] = []
    for region in regions_in(*layers):
        # A compiled region keeps its tensors through autograd, where hooks around it take them.
        if not region.policy.keeps_nothing and not is_compiled(region.module):
            changed.append((region, region.policy, region.transfer))
            if not isinstance(region.policy, HostPolicy):
                region.policy = HostPolicy(region.policy)
            region.transfer = transfer
    return changed


def keep_as_before(changed: Iterable[tuple[Checkpointed, Policy, Any]]) -> None:
    """Undo `keep_on_host`."""
    for region, policy, transfer in changed:
        region.policy, region.transfer = policy, transfer


def moves_everything(layer: nn.Module, mode: str) -> bool:
    """Return whether all that `layer` saves outside of regions is to move, and not only its arguments.

    In the mode ``saved``, it is where the layer is compiled, or checkpointed in pieces: only these tensors are saved.
    """
    if mode != "saved" or is_compiled(layer):
        return mode != "boundary"
    return not is_checkpointed(layer) and bool(regions_in(layer))


# Offloading put on a model's layers, for good, as `parallelize(..., offload=...)` does.


_NOTHING_SAVED = (
    "offload='saved' moves tensors that activation checkpointing keeps, and ac is 'none' or leaves every layer out: no "
    "layer is checkpointed. Use ac='selective' (or another mode), or offload='all'."
)


class Offloading(Forward):
    """A layer whose saved activations wait on the host: outside checkpointing and `torch.compile`, inside FSDP2's unit."""

    place, word = Place.OFFLOADING, "offloaded"

    def __init__(self, module: nn.Module, offloader: Offloader) -> None:
        check_model(module, "module")
        super().__init__(module)
        self.offloader = offloader

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; where gradients are on, saved tensors go through the offloader."""
        # A segment of layers calls the module again: there nothing is saved for backward.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_recomputing():
            return self.call(*args, **kwargs)
        self.offloader.refuse_inside_checkpointing()
        self.offloader.enter_layer(self.module, args, kwargs)
        try:
            with self.offloader.hooks():
                return self.call(*args, **kwargs)
        finally:
            self.offloader.leave_layer()


def apply_offloading(
    model: nn.Module,
    layers: Sequence[nn.Module],
    config: OffloadConfig | str | None = None,
    *,
    backend: Backend | None = None,
) -> Offloader:
    """Make the tensors that `layers` save for backward wait on the host. Changes `model` in place.

    Call it after activation checkpointing and compilation, and before sharding. Of several layers the last one is left
    alone: backward starts with it. Tensors saved outside of layers (embedding, head, loss) are never moved.

    Args:
        model: holds the layers.
        layers: in the order of forward; checkpointed or not, compiled or not.
        config: an `OffloadConfig`, or its mode: ``boundary`` moves the layers' inputs, ``saved`` these and the outputs
            that checkpointing keeps inside, ``all`` everything; None: ``saved``.
        backend: see `offload_activations`.

    Returns:
        the offloader of all layers; its ``stats`` are live.

    Raises:
        TypeError, ValueError: a bad config; a layer that is not in the model, or has offloading already; ``saved``
            where nothing is checkpointed. Nothing has been changed then.
    """
    check_model(model)
    config = OffloadConfig.of(config, default="saved")
    offloader = Offloader(config, backend=backend)
    names = names_in(model, layers)
    if config.mode == "none":
        return offloader
    if not layers:
        raise ValueError("apply_offloading was given no layers; nemo_like.layers.find_layers(model) finds them.")
    if any(isinstance(m, TorchOffloadWrapper) or step_of(m, Offloading) for layer in layers for m in layer.modules()):
        raise ValueError(
            "One of the layers has offloading already: its tensors would be moved twice. Apply offloading once."
        )
    if config.mode == "saved" and not regions_in(*layers):
        raise ValueError(_NOTHING_SAVED)
    moved = _moved(names)
    if config.mode in ("saved", "all"):
        keep_on_host([layer for layer, name in zip(layers, names) if name in moved], offloader)
    apply_specs(model, _placements(moved, offloader), without_cache=False)
    return offloader


def placed_on_host(
    specs: Iterable[CheckpointSpec],
    layers: Sequence[str],
    config: OffloadConfig,
    *,
    backend: Backend | None = None,
) -> list[CheckpointSpec]:
    """Return `specs` whose kept outputs wait on the host, and a placement for each of `layers` but the last.

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
    offloader = Offloader(config, backend=backend)
    moved = _moved(layers)

    def on_host(spec: CheckpointSpec) -> CheckpointSpec:
        inside = all(any(m == name or m.startswith(f"{name}.") for name in moved) for m in spec.members)
        if config.mode == "boundary" or not inside or not spec.keeps_something:
            return spec
        assert spec.policy is not None
        return dataclasses.replace(spec, policy=HostPolicy(spec.policy), transfer=offloader)

    return [on_host(spec) for spec in specs] + _placements(moved, offloader)


def _moved(layers: Sequence[str]) -> list[str]:
    """All but the last: backward starts with that one, so its tensors would only go and come."""
    names = list(dict.fromkeys(layers))
    return names[:-1] if len(names) > 1 else names


def _placements(layers: Sequence[str], offloader: Offloader) -> list[CheckpointSpec]:
    return [CheckpointSpec((name,), policy=None, transfer=offloader) for name in layers]


def offloader_of(model: nn.Module) -> Offloader | None:
    """The offloader that `apply_offloading` put on `model` (for its ``stats``), or None."""
    return next((step.offloader for module in model.modules() if (step := step_of(module, Offloading))), None)
