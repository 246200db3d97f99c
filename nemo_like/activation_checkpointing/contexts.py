"""Our policies as pairs of contexts, for callers who keep `torch.utils.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from nemo_like._util.rng import rng_state, set_rng_state
from nemo_like.activation_checkpointing.engine.compiled import ContextPair, torch_policy_fn
from nemo_like.activation_checkpointing.engine.dispatch import ForwardMode, ReplayMode, kinds_for
from nemo_like.activation_checkpointing.engine.handles import map_output
from nemo_like.activation_checkpointing.policy import SAVE, Policy, SelectivePolicy
from nemo_like.activation_checkpointing.transfer import SynchronousTransfer


def make_selective_checkpoint_context_fn(policy: Policy | None = None) -> Callable[[], ContextPair]:
    """A ``context_fn`` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`.

    Each call of it makes the contexts of one region, with matmul counts of their own for forward and for recomputation.
    In eager mode they count tracked operators only, and give recomputation forward's random numbers, since a compiled graph
    that a backend runs as it is does not; under `torch.compile` they are PyTorch's, which the partitioner reads.
    `policy` defaults to `SelectivePolicy()`.

    >>> forward, replay = make_selective_checkpoint_context_fn()()
    """
    chosen = SelectivePolicy() if policy is None else policy

    def context_fn() -> ContextPair:
        if torch.compiler.is_compiling():
            return create_selective_checkpoint_contexts(torch_policy_fn(chosen))
        forward = _ForwardContext(
            kinds_for(chosen), chosen.start(), [], SynchronousTransfer(), "torch.utils.checkpoint"
        )
        return forward, _ReplayContext(forward)

    return context_fn


# The engine's dispatch modes as a pair of contexts for `torch.utils.checkpoint`, for callers who keep that function.


class _ForwardContext(ForwardMode):
    """`ForwardMode` that needs no `Region` to cut saved outputs from the graph or to note the random state."""

    def __enter__(self) -> _ForwardContext:
        self.rng = rng_state()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for entry in self.kept:
            if entry.decision is SAVE:
                # Above autograd again: cut from the graph, version counter shared.
                entry.value = map_output(Tensor.detach, entry.value)


class _ReplayContext(ReplayMode):
    """Starts over each time it is entered, so that every recomputation of the region finds the saved outputs."""

    def __init__(self, forward: _ForwardContext) -> None:
        super().__init__(forward.kinds, forward.kept, [], forward.region_name)
        self.forward = forward

    def __enter__(self) -> _ReplayContext:
        self.position = 0
        self.values = [entry.to_hand_out() if entry.decision is SAVE else entry.value for entry in self.kept]
        # `checkpoint` does so, too, but not where Dynamo's graph calls it.
        self.rng_outside = rng_state()
        set_rng_state(self.forward.rng)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        set_rng_state(self.rng_outside)
