"""Offloading as a context manager: what autograd saves inside waits on the host.

>>> weight = torch.randn(64, 64, requires_grad=True)
>>> with offload_activations(OffloadConfig(mode="all", min_bytes=0)) as offloader:
...     loss = (weight @ weight).relu().sum()
>>> loss.backward()
>>> offloader.stats.moved_bytes
16384
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from nemo_like._util.module_tree import check_model, every_module
from nemo_like.activation_checkpointing.engine.handles import Transfer
from nemo_like.activation_checkpointing.policy import HOST, SAVE, Decision, Policy
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from nemo_like.offload.backends import Backend
from nemo_like.offload.copies import OffloadStats
from nemo_like.offload.packing import Packer, storages_in
from nemo_like.options import OffloadConfig
from nemo_like.torch_compat import ActivationWrapper, innermost_saved_tensor_hooks, is_compiled

CHECKPOINTING_MODULES = ("torch.utils.checkpoint", "nemo_like.activation_checkpointing")
"""Modules that define the saved-tensor hooks of checkpointed regions."""


def offload_activations(
    config: OffloadConfig | str | None = None,
    *,
    model: nn.Module | None = None,
    layers: Sequence[nn.Module] = (),
    left_out: Sequence[nn.Module] = (),
    backend: Backend | None = None,
) -> Offloader:
    """A context manager: what autograd saves inside it waits on the host until backward uses it.

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


class Offloader(Packer):
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
        if model is not None:
            check_model(model)
        super().__init__(
            OffloadConfig.of(config, default="all"),
            backend=backend,
            use_streams=use_streams,
            max_inflight_copies=max_inflight_copies,
        )
        if needs_layers and self.config.mode in ("boundary", "saved") and not layers:
            raise ValueError(
                f"Offloading {self.config.mode!r} moves layer inputs, and was not told the layers. Pass layers=[...] "
                "(nemo_like.layers.find_layers finds them), or use offload='all'."
            )
        self.model = model
        self.layers = list(layers)
        self.left_out = list(left_out)
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

    def __exit__(self, *error: object) -> None:
        self._contexts.pop().close()
        self._inputs = None
        with torch.no_grad():
            self.start_chosen()
        if self._mover is not None:
            self._mover.collect()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The bare pair of hooks, for one ``with``."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def _watch_modules(self, stack: ExitStack) -> None:
        """Be told, within `stack`, of calls of the layers, of the modules left out, and of the model."""

        def before_layer(layer: nn.Module, args: object, kwargs: object) -> None:
            if not torch.compiler.is_compiling():
                self._resting = len(self.layers) > 1 and layer is self.layers[-1]
                self.enter_layer(layer, args, kwargs, everything=moves_everything(layer, self.config.mode))

        def rest(resting: bool) -> Any:
            def before(module: nn.Module, args: object) -> None:
                if not torch.compiler.is_compiling():
                    self._resting = resting

            return before

        for layer in dict.fromkeys(self.layers):
            stack.callback(layer.register_forward_pre_hook(before_layer, with_kwargs=True).remove)
        for module in self.left_out:
            stack.callback(module.register_forward_pre_hook(rest(True)).remove)
        if self.model is not None:
            stack.callback(self.model.register_forward_pre_hook(rest(False)).remove)

    def enter_layer(self, layer: nn.Module, args: object, kwargs: object, *, everything: bool) -> None:
        """Assign what is saved from here on to `layer`, which is called with these arguments.

        `everything`: move all of it, not only what shares storage with the arguments.
        """
        self._known.learn([layer])
        self._inputs = None if everything else storages_in((args, kwargs))
        if self._mover is not None:
            self._mover.open_group()

    def leave_layer(self) -> None:
        """Assign what is saved from here on to no layer."""
        with torch.no_grad():
            self.start_chosen()
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


# The engine's HOST decisions: what a policy decides to keep waits on the host.


class HostPolicy:
    """Another policy, with what it keeps waiting on the host instead of on the device."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.keeps_nothing = policy.keeps_nothing

    def tracked_ops(self) -> Collection[Any] | None:
        """As the other policy."""
        return self.policy.tracked_ops()

    def start(self) -> Callable[..., Decision]:
        """The other policy's decisions, with HOST for SAVE."""
        return _HostDecide(self.policy.start())


class _HostDecide:
    def __init__(self, decide: Callable[..., Decision]) -> None:
        self._decide = decide
        self.needs_call = getattr(decide, "needs_call", False)
        self.finish = getattr(decide, "finish", None)

    def __call__(self, *call: object) -> Decision:
        decision = self._decide(*call)
        return HOST if decision is SAVE else decision


def keep_on_host(layers: Iterable[nn.Module], transfer: Transfer) -> list[tuple[CheckpointWrapper, Policy, Any]]:
    """Let the layers' regions keep on the host what their policies decide to keep.

    Returns:
        each region that was changed, with what it had before, for `keep_as_before`.
    """
    changed: list[tuple[CheckpointWrapper, Policy, Any]] = []
    for region in dict.fromkeys(module for layer in layers for module in every_module(layer)):
        # A compiled region keeps its tensors through autograd, where hooks around it take them.
        if isinstance(region, CheckpointWrapper) and not region.policy.keeps_nothing and not is_compiled(region):
            changed.append((region, region.policy, region.transfer))
            if not isinstance(region.policy, HostPolicy):
                region.policy = HostPolicy(region.policy)
            region.transfer = transfer
    return changed


def keep_as_before(changed: Iterable[tuple[CheckpointWrapper, Policy, Any]]) -> None:
    """Undo `keep_on_host`."""
    for region, policy, transfer in changed:
        region.policy, region.transfer = policy, transfer


def moves_everything(layer: nn.Module, mode: str) -> bool:
    """Return whether all that `layer` saves outside of regions is to move in `mode`, and not only what it was called
    with.

    In the mode ``saved``, it is where the layer is compiled, or checkpointed in pieces: that is what is saved of it. A
    layer that is one region saves nothing outside but its inputs.
    """
    if mode != "saved" or is_compiled(layer):
        return mode != "boundary"
    return not isinstance(layer, ActivationWrapper) and any(
        isinstance(m, ActivationWrapper) for m in every_module(layer)
    )
