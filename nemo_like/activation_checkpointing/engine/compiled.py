"""Regions under `torch.compile`.

Inductor's and AOTAutograd's partitioner reads recompute tags that PyTorch's selective contexts leave in the graph,
so there the region is passed to `torch.utils.checkpoint` with an equivalent policy function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nemo_like._util.log import warn_once
from nemo_like.activation_checkpointing import ops
from nemo_like.activation_checkpointing.engine.dispatch import COPY, RANDOM, TRACKED, kinds_for
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.policy import (
    HOST,
    RECOMPUTE,
    SAVE,
    Decision,
    FullPolicy,
    Policy,
)
from nemo_like.torch_compat import without_innermost_saved_tensor_hooks

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


_NOTHING = FullPolicy()


def torch_policy_fn(policy: Policy) -> Callable[..., CheckpointPolicy]:
    """`policy` as a policy function for `create_selective_checkpoint_contexts`: one fresh run of it.

    SKIP becomes "recompute": the partitioner drops outputs that backward does not need by itself.
    """
    decide, kinds = policy.start(), kinds_for(policy)
    counts: dict[Any, int] = {}
    needs_call = getattr(decide, "needs_call", False)
    must = {
        SAVE: CheckpointPolicy.MUST_SAVE,
        # PREFER, not MUST: the partitioner may keep outputs that cost nothing to keep.
        RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
        HOST: CheckpointPolicy.MUST_CPU_OFFLOAD,
    }

    def policy_fn(context: Any, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        kind, _ = kinds.of(op)
        if kind == COPY and ops.is_device_to_host_copy(op, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        if kind not in (TRACKED, RANDOM) or context.is_recompute:
            return CheckpointPolicy.PREFER_RECOMPUTE
        index = counts.get(op, 0)
        counts[op] = index + 1
        if needs_call:
            decision: Decision = decide(op, index, args, kwargs, context.op_output)  # type: ignore[call-arg]
        else:
            decision = decide(op, index)
        return must.get(decision, CheckpointPolicy.PREFER_RECOMPUTE)

    return policy_fn


class _LeftToEager(AbstractContextManager[None]):
    """Around the forward of a region that Dynamo was to trace, where `checkpoint` runs outside of a graph in the making.

    Then a region of ours takes over inside. Else a backend runs Dynamo's graph as it is, and PyTorch would recompute
    with other random numbers (the graph never preserves them), and update running statistics twice. It isn't told the
    region's name: Dynamo would make a graph for each layer.
    """

    inside: ClassVar[ContextVar[_LeftToEager | None]] = ContextVar("inside", default=None)
    taken_over = False

    def __enter__(self) -> None:
        self.token = self.inside.set(self)

    def __exit__(self, kind: object, *error: object) -> None:
        self.inside.reset(self.token)
        if kind is None and not self.taken_over:
            raise RegionError(
                "A checkpointed region was compiled by a backend that runs the graph as it is (eager, a function of your "
                "own): its recompute would draw other random numbers, so gradients would be wrong. Use inductor or "
                "aot_eager, whose partitioner follows ac=; or parallelize(compile='eager'), which compiles inside "
                "of regions."
            )


def _contexts_under_dynamo(policy: Policy) -> ContextPair:
    """The pair of contexts for one region: PyTorch's own while it is traced, since the partitioner reads their tags."""
    if torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(torch_policy_fn(policy))
    return _LeftToEager(), nullcontext()


def _contexts_of_nothing() -> ContextPair:
    return _contexts_under_dynamo(_NOTHING)


def compiled_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy,
    preserve_rng_state: bool,
    run_eagerly: Callable[..., Any],
) -> Any:
    """`run_region` for code that is being compiled. Dynamo traces this function.

    Where Dynamo cannot trace the region, it calls `checkpoint` as it is here, from code that is not
    compiled. Then `run_eagerly` makes a region of ours of the call, and PyTorch's around it sees none of the tensors saved
    there: it has nothing to recompute.
    """

    def body(*args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        if (around := _LeftToEager.inside.get()) is not None:
            around.taken_over = True
        with without_innermost_saved_tensor_hooks():
            return run_eagerly(*args, **kwargs)

    # Dynamo may trace where a partial function is made, and then it is not a constant.
    contexts = _contexts_of_nothing if policy.keeps_nothing else functools.partial(_contexts_under_dynamo, policy)
    return checkpoint(
        body, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, context_fn=contexts, **kwargs
    )


def warn_of_eager(name: str) -> None:
    """Warn once that a region which was to be compiled runs eagerly."""
    warn_once(
        f"The layer of checkpointed region {name!r} was to be compiled. Dynamo cannot trace its code "
        "(run with TORCH_LOGS=graph_breaks to see why), and a checkpointed region is traced whole or not at all: it "
        "runs eagerly. ac='full' recomputes from outside of the compiled layer, and compiles its pieces.",
        key="checkpointed region left to eager",
    )
