"""Count the tokens that each expert of each layer gets, over all ranks; and set a router's bias that follows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like._util.module_tree import bare, bare_modules, check_model, glob_to_regex
from nemo_like._util.tensors import map_tensors, tensors_in
from nemo_like.distributed.expert.expert_lists import StackedExperts
from nemo_like.distributed.expert.find_experts import EACH, EVERY, Experts, find_experts
from nemo_like.distributed.mesh import axis_size
from nemo_like.layers.structure import is_list_of_experts
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
    routers = [
        experts
        for experts in find_experts(model, plan)
        if experts.call != EVERY and not isinstance(experts.module, nn.ModuleList | nn.ModuleDict)
    ]
    if not routers:
        raise ValueError(
            f"This {type(model).__name__} has no experts that are called with the routing (a list of experts is, once ep "
            "splits it)."
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


# Experts of a list that this rank's tokens do not come to: they get a gradient of zero, so that all ranks reduce alike.
#
# A block with a list of experts calls those that have tokens. On another rank these are others, and FSDP2 (and DDP) reduces
# the gradients of a layer in one buffer, which must be the same on all ranks: one that leaves some out fails or waits.


def reduce_idle_experts(model: nn.Module, plan: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Have all experts of the lists in `model` take part in the backward of the block that has the list. In place.

    Args:
        model: before it is checkpointed or sharded. plan: as `ExpertParallel.plan`; lists that it calls ``each`` are such
            lists, in addition to those called ``experts``.

    Returns:
        The names of these lists: those whose experts are split are none of them.
    """
    named = dict(bare_modules(model))
    lists = tuple(_lists(model, plan))
    for name in lists:
        around = bare(named[name.rpartition(".")[0]])
        state = _CalledExperts(list(bare(named[name]).children()))
        for expert in state.experts:
            bare(expert).register_forward_pre_hook(state.note)
        around.register_forward_pre_hook(state.begin)
        around.register_forward_hook(state.end)
    return lists


def _lists(model: nn.Module, plan: Mapping[str, str] | None) -> Iterator[str]:
    regexes = [glob_to_regex(pattern) for pattern, call in (plan or {}).items() if call == EACH]
    for name, module in bare_modules(model):
        if isinstance(bare(module), StackedExperts):
            continue
        if is_list_of_experts(name, bare(module)) or any(regex.fullmatch(name) for regex in regexes):
            yield name


class _CalledExperts:
    """The experts of one list that are called in a forward of the block that holds them."""

    def __init__(self, experts: list[nn.Module]) -> None:
        self.experts = experts
        self.called: set[int] = set()

    def note(self, module: nn.Module, _args: object) -> None:
        self.called.add(id(module))

    def begin(self, _block: nn.Module, _args: object) -> None:
        self.called.clear()

    def end(self, _block: nn.Module, _args: object, out: object) -> Any:
        """`out`, through which backward comes to the experts that were not called, too, with zeros."""
        idle = [expert for expert in self.experts if id(bare(expert)) not in self.called]
        weights = [p for expert in idle for p in expert.parameters() if p.requires_grad]
        floats = [tensor for tensor in tensors_in(out) if tensor.is_floating_point()]
        if not weights or not floats or not torch.is_grad_enabled():
            return out
        chosen = next((tensor for tensor in floats if tensor.requires_grad), floats[0])
        # A sum, not a view of `chosen`: whoever is around may change it in place. And -0.0, which changes no bit of it.
        tied = chosen + _ZeroGradients.apply(chosen.new_full((), -0.0), *weights)
        return map_tensors(lambda tensor: tied if tensor is chosen else tensor, out)


class _ZeroGradients(torch.autograd.Function):
    """A number as it is, whose backward gives each of the weights a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, zero: Tensor, *weights: Tensor) -> Tensor:
        ctx.like = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:
        return None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
