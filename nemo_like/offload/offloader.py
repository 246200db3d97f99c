"""Offloading as a context manager: what autograd saves inside waits on the host.

>>> weight = torch.randn(64, 64, requires_grad=True)
>>> with offload_activations(OffloadConfig(mode="all", min_bytes=0)) as offloader:
...     loss = (weight @ weight).relu().sum()
>>> loss.backward()
>>> offloader.stats.moved_bytes
16384
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from nemo_like.config import OffloadConfig, normalise
from nemo_like.log import warn_once
from nemo_like.offload import exempt
from nemo_like.offload.backends import Backend, default_backend
from nemo_like.offload.handles import (
    ChosenHandle,
    Handle,
    InPlaceGuard,
    KeptHandle,
    SubclassHandle,
    is_wrapper_subclass,
    move_plain,
    take_apart,
)
from nemo_like.offload.mover import Mover
from nemo_like.offload.pool import HostPool
from nemo_like.offload.regions import is_compiled, keep_as_before, keep_on_host
from nemo_like.offload.stats import OffloadStats
from nemo_like.offload.torch_private import innermost_saved_tensor_hooks, version_of

CHECKPOINTING_MODULES = ("torch.utils.checkpoint", "nemo_like.activation_checkpointing")
"""Where the saved-tensor hooks of checkpointed regions are defined."""

LAST_LAYER = "where backward starts (the last layer, or what is left out, and what follows)"
NOT_ASKED = "not a layer's input"


def offload_activations(
    config: OffloadConfig | str | None = None,
    *,
    model: nn.Module | None = None,
    layers: Sequence[nn.Module] = (),
    left_out: Sequence[nn.Module] = (),
    backend: Backend | None = None,
) -> Offloader:
    """A context manager: what autograd saves inside it waits on the host until backward asks.

    Make it once and enter it each step: it owns the host memory, which is reused.

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

    The context is entered around forward (backward may run inside or outside) and around checkpointing, never within
    a checkpointed region: entering it there raises RuntimeError.
    """
    return Offloader(config, model=model, layers=layers, left_out=left_out, backend=backend)


def parse_offload(config: OffloadConfig | str | None, default: str = "all") -> OffloadConfig:
    """An `OffloadConfig` from one, from a mode, or from None (the mode `default`)."""
    if config is None:
        return OffloadConfig(mode=default)
    if isinstance(config, str):
        return OffloadConfig(mode=normalise(config))
    if isinstance(config, OffloadConfig):
        return config
    raise TypeError(
        f"offload is {config!r}, a {type(config).__name__}; it must be an OffloadConfig, or one of none, boundary, "
        "saved and all."
    )


class Offloader:
    """See `offload_activations`. `stats` are live; `transfer` is what an engine's HOST decisions go through."""

    def __init__(
        self,
        config: OffloadConfig | str | None = None,
        *,
        model: nn.Module | None = None,
        layers: Sequence[nn.Module] = (),
        left_out: Sequence[nn.Module] = (),
        backend: Backend | None = None,
        use_streams: bool = True,
        max_inflight_copies: int | None = None,
        needs_layers: bool = True,
    ) -> None:
        self.config = parse_offload(config)
        if needs_layers and self.config.mode in ("boundary", "saved") and not layers:
            raise ValueError(
                f"Offloading {self.config.mode!r} moves layer inputs, and was not told the layers. Pass layers=[...] "
                "(nemo_like.layers.find_layers finds them), or use offload='all'."
            )
        self.model = model
        self.layers = list(layers)
        self.left_out = list(left_out)
        self.stats = OffloadStats()
        self._backend = backend
        self._use_streams = use_streams
        self._max_inflight_copies = max_inflight_copies
        self._mover: Mover | None = None
        self._known = exempt.KnownStorages()
        self._inputs: dict[int, torch.UntypedStorage] | None = None
        self._resting = False
        self._contexts: list[ExitStack] = []

    # ------------------------------------------------------------------------------------------- context management
    def __enter__(self) -> Offloader:
        stack = ExitStack()
        if self.config.mode != "none":
            self.refuse_inside_checkpointing()
            if self.model is not None:
                self._known.learn([self.model])
            self._resting = False
            self._inputs = None if self.config.mode == "all" else {}
            self._watch_modules(stack)
            if self.config.mode != "boundary":
                stack.callback(keep_as_before, keep_on_host(self.layers, self))
            stack.enter_context(self.hooks())
        self._contexts.append(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().close()
        self._inputs = None
        if self._mover is not None:
            self._mover.collect()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The bare pair of hooks, for one ``with``."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def _watch_modules(self, stack: ExitStack) -> None:
        """Be told, within `stack`, of calls of the layers, of the modules left out, and of the model."""

        def before_layer(layer: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                self._resting = len(self.layers) > 1 and layer is self.layers[-1]
                self.enter_layer(layer, args, kwargs, everything=self.config.mode == "all" or is_compiled(layer))

        def rest(resting: bool) -> Any:
            def before(module: nn.Module, args: Any) -> None:
                if not torch.compiler.is_compiling():
                    self._resting = resting

            return before

        for layer in dict.fromkeys(self.layers):
            stack.callback(layer.register_forward_pre_hook(before_layer, with_kwargs=True).remove)
        for module in self.left_out:
            stack.callback(module.register_forward_pre_hook(rest(True)).remove)
        if self.model is not None:
            stack.callback(self.model.register_forward_pre_hook(rest(False)).remove)

    def enter_layer(self, layer: nn.Module, args: Any, kwargs: Any, *, everything: bool) -> None:
        """What is saved from here on belongs to `layer`, which is called with these arguments.

        `everything`: move all of it, not only what shares storage with the arguments.
        """
        self._known.learn([layer])
        self._inputs = None if everything else storages_in((args, kwargs))
        if self._mover is not None:
            self._mover.open_group()

    def leave_layer(self) -> None:
        """What is saved from here on belongs to no layer."""
        self._inputs = None if self.config.mode == "all" else {}

    def refuse_inside_checkpointing(self) -> None:
        """Raise RuntimeError where a checkpointed region is being run: its own hooks would never be called."""
        hooks = innermost_saved_tensor_hooks()
        module = getattr(hooks[0], "__module__", None) if hooks is not None else None
        if module is not None and module.startswith(CHECKPOINTING_MODULES):
            raise RuntimeError(
                "Offloading was entered inside a checkpointed region. Its hooks would take every saved tensor from the "
                "checkpointing around it, which would then recompute nothing and save no memory. Turn the two around: "
                "offload(checkpoint(module)), not checkpoint(offload(module))."
            )

    # ------------------------------------------------------------------------------------------------- pack, unpack
    def pack(self, tensor: torch.Tensor) -> Handle:
        """A handle that stands for `tensor` in the graph: on the host where it may go there, else as it is.

        Raises:
            RuntimeError: the tensor cannot be moved and the configuration says ``on_unsupported="raise"``.
        """
        with torch.no_grad():
            return self._pack(tensor)

    def to_host(self, tensor: torch.Tensor) -> ChosenHandle:
        """As `pack`, for an operator's output that an engine chose (`nemo_like.activation_checkpointing.transfer`)."""
        with torch.no_grad():
            # Not the output itself, which is about to get a graph: that would be a reference cycle.
            alias = tensor.detach()
            if self._resting:
                return ChosenHandle(tensor, self._keep(alias, LAST_LAYER))
            return ChosenHandle(tensor, self._move_any(alias, version_of(tensor), guarded=False))

    def prefetch(self, handle: Any) -> None:
        """Start the way back of a tensor that `to_host` took."""
        handle.prefetch()

    def settle(self, handle: Any) -> None:
        """The tensor that `to_host` took is about to be changed in place: what was taken stays as it is."""
        with torch.no_grad():
            handle.settle()

    @staticmethod
    def unpack(handle: Handle) -> torch.Tensor:
        """The tensor that `handle` stands for."""
        return handle.get()

    def _pack(self, tensor: torch.Tensor) -> Handle:
        if torch.compiler.is_compiling():
            return KeptHandle(tensor)
        tensor = _resolved(tensor)
        if self._resting:
            return self._keep(tensor, LAST_LAYER)
        if exempt.is_parameter(tensor):
            return self._keep(tensor, exempt.PARAMETER)
        if exempt.is_autocast_copy(tensor, self._known):
            return self._keep(tensor, exempt.AUTOCAST)
        if not self._is_asked_for(tensor):
            return self._keep(tensor, NOT_ASKED)
        return self._move_any(tensor, version_of(tensor), guarded=True)

    def _move_any(self, tensor: torch.Tensor, version: Any, *, guarded: bool) -> Handle:
        if is_wrapper_subclass(tensor):
            return self._move_subclass(tensor, (version,), guarded)
        return self._move(tensor, (version,), guarded)

    def _move_subclass(self, tensor: torch.Tensor, version: tuple[Any, ...], guarded: bool) -> Handle:
        """Move what a wrapper subclass is made of, and keep how to put it together again.

        An operator that changes it in place need not show in its inner tensors' versions: the outer ones count too.
        """
        parts, context = take_apart(tensor)
        inner: dict[str, Any] = {}
        for name, value in parts.items():
            if not isinstance(value, torch.Tensor):
                inner[name] = value
                continue
            value = _resolved(value)
            if is_wrapper_subclass(value):
                inner[name] = self._move_subclass(value, (*version, version_of(value)), False)
            else:
                inner[name] = self._move(value, (*version, version_of(value)), False)
        handles = frozenset(name for name, value in parts.items() if isinstance(value, torch.Tensor))
        if all(isinstance(inner[name], KeptHandle) for name in handles):
            return KeptHandle(tensor)
        guard = InPlaceGuard(tensor) if guarded else None
        return SubclassHandle(type(tensor), context, inner, handles, tensor.shape, tensor.stride(), guard)

    def _move(self, tensor: torch.Tensor, version: tuple[Any, ...], guarded: bool) -> Handle:
        """A handle for a plain tensor: on the host, or where it is (counted, with the reason)."""
        problem = exempt.unsupported(tensor)
        if problem is not None:
            if self.config.on_unsupported == "raise":
                raise RuntimeError(  # a TypeError inside an operator's method (`@`) would be taken for "not mine"
                    f"Offloading cannot move a saved tensor of shape {list(tensor.shape)}: {problem}. "
                    "Use OffloadConfig(on_unsupported='keep') to leave such tensors on the device."
                )
            warn_once(f"Offloading leaves a saved tensor on the device: {problem}.", key=f"offload-keeps-{problem}")
            return self._keep(tensor, f"unsupported: {problem}")
        mover = self._mover_for(tensor)
        if tensor.numel() == 0:
            return self._keep(tensor, exempt.EMPTY)
        if not mover.backend.serves(tensor):
            return self._keep(tensor, exempt.ON_HOST if tensor.device.type == "cpu" else f"on {tensor.device}")
        reason = self._known.reason(tensor)
        if reason is None and tensor.untyped_storage().nbytes() < self.config.min_bytes:
            reason = exempt.SMALL
        if reason is not None:
            return self._keep(tensor, reason)
        handle = move_plain(tensor, mover, InPlaceGuard(tensor) if guarded else None, version)
        if handle is None:
            assert mover.pool.refusal is not None
            warn_once(
                f"Offloading keeps tensors on the device from here on, where they do not fit: {mover.pool.refusal}.",
                key="offload-refused",
            )
            return self._keep(tensor, "refused by the host: " + mover.pool.refusal.split(" of ")[0])
        return handle

    def _keep(self, tensor: torch.Tensor, reason: str) -> KeptHandle:
        nbytes = sum(
            plain.untyped_storage().nbytes() for plain in exempt.plain_tensors(tensor) if exempt.has_storage(plain)
        )
        self.stats.keep(reason, nbytes)
        return KeptHandle(tensor)

    def _is_asked_for(self, tensor: torch.Tensor) -> bool:
        return self._inputs is None or any(key in self._inputs for key in storages_in(tensor))

    def _mover_for(self, tensor: torch.Tensor) -> Mover:
        if self._mover is None:
            config = self.config
            if self._backend is None:
                self._backend = default_backend(pin_memory=config.pin_memory, use_streams=self._use_streams)
            self._mover = Mover(
                self._backend,
                HostPool(self._backend.host_memory, budget_bytes=config.host_budget_bytes),
                max_inflight_bytes=config.max_inflight_bytes,
                max_inflight_copies=self._max_inflight_copies,
                prefetch=config.prefetch,
                stats=self.stats,
            )
        return self._mover

    def __reduce__(self) -> Any:
        """A copy of a model gets host memory of its own: nothing that waits there is copied."""
        return _rebuild, (self.config,)

    # ------------------------------------------------------------------------------------------------- host memory
    def collect(self) -> OffloadStats:
        """Bring `stats` up to date with graphs that have died since; returns them."""
        if self._mover is not None:
            self._mover.collect()
        return self.stats

    def release_host_memory(self) -> int:
        """Wait for copies and give host memory that no saved tensor uses back to the system; returns its bytes."""
        return 0 if self._mover is None else self._mover.trim()


def _rebuild(config: OffloadConfig) -> Offloader:
    return Offloader(config, needs_layers=False)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or what a functional collective still on its way returns: its bytes are not there before."""
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor  # type: ignore[attr-defined]


def storages_in(values: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in nested tuples, lists and dicts, by id (and held, so that the ids stay theirs)."""
    found: dict[int, torch.UntypedStorage] = {}
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            for plain in exempt.plain_tensors(value):
                if exempt.has_storage(plain):
                    storage = plain.untyped_storage()
                    found[id(storage)] = storage
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, Iterable) and isinstance(value, tuple | list):
            waiting.extend(value)
    return found
