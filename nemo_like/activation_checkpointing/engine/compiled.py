"""Regions under `torch.compile`, and our policies as contexts for PyTorch's own checkpoint function.

Inductor's and AOTAutograd's partitioner reads recompute tags that PyTorch's selective contexts leave in the graph,
so there the region is handed over to `torch.utils.checkpoint` with an equivalent policy function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nemo_like.activation_checkpointing import ops
from nemo_like.activation_checkpointing.engine.dispatch import COPY, RANDOM, TRACKED, kinds_for
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, Decision, Policy, SelectivePolicy

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def torch_policy_fn(policy: Policy) -> Callable[..., CheckpointPolicy]:
    """`policy` as a policy function for `create_selective_checkpoint_contexts`: one fresh run of it.

    SKIP becomes "recompute": the partitioner drops what backward does not need by itself.
    """
    decide, kinds = policy.start(), kinds_for(policy)
    counts: dict[Any, int] = {}
    needs_call = getattr(decide, "needs_call", False)
    must = {
        SAVE: CheckpointPolicy.MUST_SAVE,
        # PREFER, not MUST: the partitioner may keep what costs nothing to keep.
        RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
        HOST: getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", CheckpointPolicy.MUST_SAVE),
    }

    def policy_fn(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kind = kinds.of(op)
        if kind == COPY and ops.is_device_to_host_copy(op, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        if kind not in (TRACKED, RANDOM) or getattr(context, "is_recompute", False):
            return CheckpointPolicy.PREFER_RECOMPUTE
        index = counts.get(op, 0)
        counts[op] = index + 1
        if needs_call:
            decision: Decision = decide(op, index, args, kwargs, context.op_output)  # type: ignore[call-arg]
        else:
            decision = decide(op, index)
        return must.get(decision, CheckpointPolicy.PREFER_RECOMPUTE)

    return policy_fn


def selective_contexts(policy: Policy) -> ContextPair:
    """PyTorch's own pair of contexts for one region, driven by `policy`."""
    return create_selective_checkpoint_contexts(torch_policy_fn(policy))


def compiled_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    policy: Policy,
    preserve_rng_state: bool = True,
) -> Any:
    """`run_region` for code that is being compiled. Dynamo traces this function."""
    if policy.keeps_nothing:
        return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
    return checkpoint(
        fn,
        *args,
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
        context_fn=functools.partial(selective_contexts, policy),
        **kwargs,
    )


def make_selective_checkpoint_context_fn(policy: Policy | None = None) -> Callable[[], ContextPair]:
    """A ``context_fn`` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`.

    Each call of it makes the contexts of one region, with matmul counts of their own for forward and for replay.
    In eager mode they count tracked operators only; under `torch.compile` they are PyTorch's, which the partitioner
    reads. `policy` defaults to `SelectivePolicy()`.

    >>> forward, replay = make_selective_checkpoint_context_fn()()
    """
    chosen = SelectivePolicy() if policy is None else policy

    def context_fn() -> ContextPair:
        if torch.compiler.is_compiling():
            return selective_contexts(chosen)
        from nemo_like.activation_checkpointing.engine.contexts import eager_contexts

        return eager_contexts(chosen)

    return context_fn
