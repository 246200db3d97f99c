"""Gradient accumulation without communication, right also where microbatches use different parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the following backward passes reduce gradients over the ranks: off for all microbatches but the last.

    Works on a model sharded with FSDP2 (all ranks keep whole gradients meanwhile), under `DistributedDataParallel`,
    and on a single device, where there is nothing to do. Call it before the forward of the microbatch, on every rank.

    FSDP2 keeps what it accumulates in the reduce dtype, and fails in the last backward ("uniform gradient dtype")
    when a parameter has its first gradient only then, in the compute dtype: an expert that the earlier microbatches
    did not choose. Such a parameter is given an accumulated zero here.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = enabled
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        if enabled:
            _complete_accumulated(model)


def _complete_accumulated(model: nn.Module) -> None:
    for group in _param_groups(model):
        params = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        accumulated = [p.unsharded_accumulated_grad for p in params if p.unsharded_accumulated_grad is not None]
        if not accumulated:
            continue
        for param in params:
            if param.unsharded_accumulated_grad is None:
                # Its storage may be freed by now; shape, device and (under tensor parallelism) DTensor layout are not.
                like = param._unsharded_param.detach()
                param.unsharded_accumulated_grad = torch.zeros_like(like, dtype=accumulated[0].dtype)


def _param_groups(model: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups (torch 2.11 to 2.13 have no public way to them); none where this torch is different."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = getattr(module, "_get_fsdp_state", lambda: None)()
            for group in getattr(state, "_fsdp_param_groups", ()):
                if all(
                    hasattr(p, "unsharded_accumulated_grad") and hasattr(p, "_unsharded_param")
                    for p in group.fsdp_params
                ):
                    yield group
