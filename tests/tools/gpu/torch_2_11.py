"""Stand-ins for the private names that torch 2.11 lacks and the package uses: for `bash .ci/gpu` alone.

A machine with a GPU may have this release. The package supports torch 2.13 to 2.15, and knows nothing of this file.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
NO_POLICIES = "this torch does not hand policies to the partitioner"
"""Why modes that keep something cannot be compiled by an older torch."""


class _Save(torch.autograd.Function):
    """A node that keeps a tensor the way autograd keeps one, hooks and version check included."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise AssertionError("no gradient flows through a saved tensor")


class _SavedTensor:
    """``torch._C._autograd.SavedTensor``, as far as it is used."""

    def __init__(self, tensor: Tensor, is_output: bool = False) -> None:
        with torch.enable_grad():
            # The output is kept, not its node: the node frees what it saved as soon as the output goes.
            self._output = _Save.apply(torch.empty(0, requires_grad=True), tensor)

    def unpack(self) -> Tensor:
        return self._output.grad_fn.saved_tensors[0]


def put_in_place() -> list[str]:
    """Put the stand-ins in place where this torch is older; return their names. Call it before nemo_like is imported."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.pipelining import PipelineStage

    def groups(state: Any) -> list[Any]:
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]

    stand_ins: list[tuple[Any, str, Any]] = [
        (torch._C._autograd, "_make_saved_tensor", _SavedTensor),
        (dist, "all_gather_single", dist.all_gather_into_tensor),
        (dist, "reduce_scatter_single", dist.reduce_scatter_tensor),
        (FSDPState, "_fsdp_param_groups", property(groups)),
        # With one rank no other one can have another list of gradients.
        (FSDPModule, "set_reduce_scatter_unused_params", lambda self, *args, **kwargs: None),
        (PipelineStage, "_warmup_backward_result", lambda self, result=None: torch.ones(1, dtype=torch.int32)),
    ]
    # FSDP2's states of later releases set the name on each object: only the release tells.
    missing = [(owner, name, value) for owner, name, value in stand_ins if OLDER and not hasattr(owner, name)]
    for owner, name, value in missing:
        setattr(owner, name, value)
    return [name for _, name, _ in missing]
