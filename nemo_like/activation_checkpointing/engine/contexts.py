"""The engine's dispatch modes as a pair of contexts for `torch.utils.checkpoint`, for callers who keep that function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nemo_like.activation_checkpointing.engine.ambient import rng_state, set_rng_state
from nemo_like.activation_checkpointing.engine.dispatch import ForwardMode, ReplayMode, kinds_for
from nemo_like.activation_checkpointing.engine.kept import map_tensors, private_copy
from nemo_like.activation_checkpointing.engine.transfer import SynchronousTransfer
from nemo_like.activation_checkpointing.policy import SAVE, Policy


class _ForwardContext(ForwardMode):
    """`ForwardMode` that needs no `Region` to cut what it kept from the graph, nor to note where random numbers are."""

    def __enter__(self) -> _ForwardContext:
        self.rng = rng_state()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for entry in self.kept:
            if entry.decision is SAVE:
                # Above autograd again: cut from the graph, version counter shared.
                entry.value = map_tensors(Tensor.detach, entry.value)


class _ReplayContext(ReplayMode):
    """Starts over each time it is entered, so that every replay of the region finds what forward kept."""

    def __init__(self, forward: _ForwardContext) -> None:
        super().__init__(forward.kinds, forward.kept, [], forward.region_name)
        self.forward = forward

    def __enter__(self) -> _ReplayContext:
        self.position = 0
        self.values = []
        for entry in self.kept:
            value = entry.value
            if entry.decision is SAVE:
                value = map_tensors(private_copy if entry.private else Tensor.detach, value)
            self.values.append(value)
        # `checkpoint` does so, too, but not where Dynamo's graph calls it.
        self.rng_outside = rng_state()
        set_rng_state(self.forward.rng)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        set_rng_state(self.rng_outside)


def eager_contexts(policy: Policy) -> tuple[ForwardMode, ReplayMode]:
    """Forward and replay contexts of one region under `policy`."""
    forward = _ForwardContext(kinds_for(policy), policy.start(), [], SynchronousTransfer(), "torch.utils.checkpoint")
    return forward, _ReplayContext(forward)
