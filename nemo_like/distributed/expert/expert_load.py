"""Count the tokens that each expert of each layer gets, over all ranks; and set a router's bias that follows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like._util.module_tree import check_model
from nemo_like.distributed.expert.find_experts import EVERY, Experts, find_experts
from nemo_like.distributed.mesh import axis_size
from nemo_like.torch_compat import in_backward


@contextmanager
def watch_expert_load(model: nn.Module, plan: Mapping[str, str] | None = None) -> Iterator[dict[str, Tensor]]:
    """Count, within the context, the tokens that the router of each layer gives to each expert on this rank.

    Works with and without ``ep``, before or after `parallelize`. Recomputation counts nothing.

    Args:
        model: with experts that are called with the routing. plan: as `ExpertParallel.plan`.

    Returns:
        Name of the module with the experts → (experts,) counts on its device, filled while the model runs. Give them to
        `summed_expert_load` for the load over all ranks.

    Raises:
        ValueError: the model has no such experts.
    """
    check_model(model)
    routers = [experts for experts in find_experts(model, plan) if experts.call != EVERY]
    if not routers:
        raise ValueError(
            f"This {type(model).__name__} has no fused experts that are called with the routing: nothing can be counted."
        )
    counts: dict[str, Tensor] = {}
    hooks = [experts.module.register_forward_pre_hook(_Count(experts, counts), with_kwargs=True) for experts in routers]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


class _Count:
    def __init__(self, experts: Experts, counts: dict[str, Tensor]) -> None:
        self.fqn, self.counts = experts.fqn, counts
        split = getattr(experts.module.forward, "count", None)  # where the experts are split, all of them
        self.experts = experts.count if split is None else split

    def __call__(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if in_backward():
            return
        chosen: Tensor = (*args, *kwargs.values())[1].detach()
        new = torch.zeros(self.experts, dtype=torch.int64, device=chosen.device)
        new.scatter_add_(0, chosen.reshape(-1), torch.ones_like(chosen.reshape(-1), dtype=torch.int64))
        self.counts[self.fqn] = self.counts[self.fqn] + new if self.fqn in self.counts else new


def summed_expert_load(counts: Mapping[str, Tensor], mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    """`counts` added up over the ranks that see other tokens. A collective.

    Args:
        counts: of `watch_expert_load`; the same layers on every rank.
        mesh: as given to `parallelize`: the sum is over ``dp_replicate``, ``dp_shard`` and ``cp``, since ranks of ``tp``
            have the same tokens. None: over all ranks of the job, or this one alone.
    """
    if not counts:
        return {}
    total = torch.stack([counts[name] for name in sorted(counts)])
    groups: list[dist.ProcessGroup | None]
    if mesh is not None:
        groups = [mesh.get_group(axis) for axis in ("dp_replicate", "dp_shard", "cp") if axis_size(mesh, axis) > 1]
    else:
        groups = [None] if dist.is_initialized() else []
    for group in groups:
        dist.all_reduce(total, group=group)
    return dict(zip(sorted(counts), total.unbind(0), strict=True))


def balanced_bias(bias: Tensor, load: Tensor, rate: float = 1e-3) -> Tensor:
    """The bias of a router after one step of balancing without a loss: up by `rate` for experts with less than the mean
    load, down for those with more (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    >>> balanced_bias(torch.zeros(3), torch.tensor([1, 2, 3]), 0.1).tolist()
    [0.10000000149011612, 0.0, -0.10000000149011612]
    """
    return bias + rate * torch.sign(load.float().mean() - load).to(bias)
