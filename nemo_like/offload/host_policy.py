"""The engine's HOST decisions: what a policy says to keep waits on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from nemo_like._util.module_tree import every_module
from nemo_like.activation_checkpointing.engine.handles import Transfer
from nemo_like.activation_checkpointing.policy import HOST, SAVE, Decision, Policy
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from nemo_like.torch_compat import ActivationWrapper, is_compiled


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

    def __call__(self, *call: Any) -> Decision:
        decision = self._decide(*call)
        return HOST if decision is SAVE else decision


def keep_on_host(layers: Iterable[nn.Module], transfer: Transfer) -> list[tuple[CheckpointWrapper, Policy, Any]]:
    """Let the layers' regions keep on the host what their policies say to keep.

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
    """Whether all that `layer` saves outside of regions is to move in `mode`, and not only what it was called with.

    In the mode ``saved``, it is where the layer is compiled, or checkpointed in pieces: that is what is kept of it. A
    layer that is one region saves nothing outside but its inputs.
    """
    if mode != "saved" or is_compiled(layer):
        return mode != "boundary"
    return not isinstance(layer, ActivationWrapper) and any(
        isinstance(m, ActivationWrapper) for m in every_module(layer)
    )
