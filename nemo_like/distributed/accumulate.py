"""Gradient accumulation without communication, right also where microbatches use different parameters."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from nemo_like._util.module_tree import check_model
from nemo_like._util.words import check_bool
from nemo_like.torch_compat import accumulate_zeros, accumulated_gradient, fsdp_param_groups


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the following backward passes reduce gradients over the ranks: off for all microbatches but the last.

    Works on a model sharded with FSDP2 (all ranks keep whole gradients meanwhile), under `DistributedDataParallel`,
    and on a single device, where there is nothing to do. Call it before the forward of the microbatch, on every rank.

    FSDP2 keeps what it accumulates in the reduce dtype, and fails in the last backward ("uniform gradient dtype")
    when a parameter has its first gradient only then, in the compute dtype: an expert that the earlier microbatches
    did not choose. Such a parameter is given an accumulated zero here.
    """
    check_model(model)
    check_bool("enabled", enabled)
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = enabled
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        if enabled:
            _complete_accumulated(model)


def _complete_accumulated(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_param_groups(module):
                params = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
                known = [grad for grad in map(accumulated_gradient, params) if grad is not None]
                for param in params:
                    if known and accumulated_gradient(param) is None:
                        accumulate_zeros(param, known[0].dtype)
