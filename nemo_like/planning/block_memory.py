"""How much memory a block needs while it runs: forward, replay and backward, on fake tensors, through the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.policy import Policy
from nemo_like.planning.capture import Kind
from nemo_like.planning.fake import FakeRun
from nemo_like.planning.meter import LiveBytes
from nemo_like.tensors import map_tensors, tensors_in


@dataclass(frozen=True)
class BlockMemory:
    """Bytes above what was alive before the block ran. Its parameters and inputs are not counted."""

    forward_peak: int
    """While its forward runs, its output included."""
    held: int
    """After its forward, without its output."""
    output: int
    backward_peak: int
    """While replay and backward run: with `held`, the gradient of its output, gradients of its parameters as they
    come, and of its inputs; its output is gone by then."""
    input_grad: int
    """Gradients of its inputs, at the end of its backward."""
    param_grad: int
    """Gradients of its parameters, at the end of its backward."""


def block_memory(kind: Kind, policy: Policy | None, run: FakeRun) -> BlockMemory:
    """Run a block forward and backward on fake tensors under `policy` (None: no region) and watch its memory.

    It is the engine itself that runs, so a table that the engine would refuse is refused here.

    Raises:
        RegionError, PlanMismatchError: `policy` does not fit the block.
    """
    replaced: dict[int, torch.Tensor] = {}

    def stand_in(value: torch.Tensor) -> torch.Tensor:
        return replaced.setdefault(id(value), value.detach().requires_grad_(value.requires_grad))

    args, kwargs = map_tensors(stand_in, (kind.args, kind.kwargs))
    state = {
        name: t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.nn.Parameter) else t
        for name, t in kind.state.items()
    }

    def call(*a: Any, **k: Any) -> Any:
        return torch.func.functional_call(kind.module, state, a, k)

    meter = LiveBytes([*state.values(), *replaced.values()])
    with run, meter:
        with run.casting():
            if policy is None:
                out = call(*args, **kwargs)
            else:
                out = run_region(call, args, kwargs, policy=policy, name="planned block")
        forward_peak, after = meter.lap(), meter.live
        roots = [t for t in tensors_in(out) if t.requires_grad]
        own = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors_in(out)}
        output = sum(own.values())
        grads = [torch.empty_like(t) for t in roots]
        if not roots:
            return BlockMemory(forward_peak, after - output, output, 0, 0, 0)
        given = sum(g.untyped_storage().nbytes() for g in grads)
        # What follows sees the output freed where autograd does not keep it, as in a real backward.
        nodes = [t.grad_fn for t in roots]
        edges = [torch.autograd.graph.get_gradient_edge(t) for t in roots]
        del out, roots, nodes
        meter.lap()
        torch.autograd.backward(edges, grads)
        backward_peak = meter.lap()
        input_grad = sum(t.grad.untyped_storage().nbytes() for t in replaced.values() if t.grad is not None)
        param_grad = sum(t.grad.untyped_storage().nbytes() for t in state.values() if t.grad is not None)
    return BlockMemory(forward_peak, after - output, output, max(backward_peak, given), input_grad, param_grad)
