"""Experts of a list that this rank's tokens do not come to: they get a gradient of zero, so that all ranks reduce alike.

A block with a list of experts calls those that have tokens. On another rank these are others, and FSDP2 (and DDP) reduces
the gradients of a layer in one buffer, which must be the same on all ranks: one that leaves some out fails or waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.module_tree import bare, bare_modules, glob_to_regex
from nemo_like._util.tensors import map_tensors, tensors_in
from nemo_like.distributed.expert_parallel.expert_lists import StackedExperts
from nemo_like.distributed.expert_parallel.find_experts import EACH
from nemo_like.layers.structure import is_list_of_experts


def reduce_idle_experts(model: nn.Module, plan: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Have all experts of the lists in `model` take part in the backward of the block that has the list. In place.

    Args:
        model: before it is checkpointed or sharded. plan: as `ExpertParallel.plan`; lists that it calls ``each`` are such
            lists, beside those called ``experts``.

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
    """Which experts of one list are called in a forward of the block around it."""

    def __init__(self, experts: list[nn.Module]) -> None:
        self.experts = experts
        self.called: set[int] = set()

    def note(self, module: nn.Module, _args: Any) -> None:
        self.called.add(id(module))

    def begin(self, _block: nn.Module, _args: Any) -> None:
        self.called.clear()

    def end(self, _block: nn.Module, _args: Any, out: Any) -> Any:
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
