"""The engine's dispatch modes as a pair of contexts for `torch.utils.checkpoint`, for callers who keep that function."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from nemo_like.activation_checkpointing.engine.dispatch import ForwardMode, ReplayMode, kinds_for
from nemo_like.activation_checkpointing.engine.kept import map_tensors, private_copy
from nemo_like.activation_checkpointing.engine.transfer import SynchronousTransfer
from nemo_like.activation_checkpointing.policy import SAVE, Policy


class _Entered(threading.local):
    """The forward contexts that this thread is inside of, innermost last."""

    def __init__(self) -> None:
        self.contexts: list[ForwardContext] = []


_entered = _Entered()


class ForwardContext(ForwardMode):
    """`ForwardMode` that needs no `Region` to cut what it kept from the graph."""

    def __enter__(self) -> ForwardContext:
        super().__enter__()
        _entered.contexts.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _entered.contexts.remove(self)
        super().__exit__(*error)
        for entry in self.kept:
            if entry.decision is SAVE:
                # Above autograd again: cut from the graph, version counter shared.
                entry.value = map_tensors(Tensor.detach, entry.value)


def keep_nothing_here() -> None:
    """The innermost forward context of this thread keeps nothing more: somebody inside does its work."""
    if _entered.contexts:
        _entered.contexts[-1].paused = True


class _ReplayContext(ReplayMode):
    """Starts over each time it is entered, so that every replay of the region finds what forward kept."""

    def __enter__(self) -> _ReplayContext:
        self.position = 0
        self.values = []
        for entry in self.kept:
            value = entry.value
            if entry.decision is SAVE:
                value = map_tensors(private_copy if entry.private else Tensor.detach, value)
            self.values.append(value)
        return super().__enter__()


def eager_contexts(policy: Policy) -> tuple[ForwardMode, ReplayMode]:
    """Forward and replay contexts of one region under `policy`."""
    kinds = kinds_for(policy)
    forward = ForwardContext(kinds, policy.start(), [], SynchronousTransfer(), "torch.utils.checkpoint")
    return forward, _ReplayContext(kinds, forward.kept, [], "torch.utils.checkpoint")
