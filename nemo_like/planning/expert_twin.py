"""The model as one rank has it under expert parallelism, and how many tokens that rank's experts get."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.distributed.expert import Experts, find_experts
from nemo_like.distributed.expert.find_experts import EACH, experts_per_token
from nemo_like.distributed.expert.grouped import zero_rows_stay_zero
from nemo_like.distributed.expert.split_experts import SplitExperts, adapters_in, pass_through
from nemo_like.distributed.expert.tensor_ranks import TensorRanks
from nemo_like.fake.run import PLANNED
from nemo_like.job import Job

IMBALANCE = 1.5
"""Rows that the fullest rank's experts get, as a multiple of what they would get if all got alike, where nobody says. A
router that has not been trained yet spreads tokens badly, and its first hundred steps have the highest peak."""


def planned_imbalance(job: Job) -> float:
    """Return the imbalance that `job` is planned with."""
    return min(IMBALANCE if job.ep.imbalance is None else job.ep.imbalance, job.ep.size)


def expert_twin(
    model: nn.Module, ep: int, imbalance: float, plan: Mapping[str, str] | None = None, tp: int = 1
) -> tuple[nn.Module, tuple[Experts, ...]]:
    """A twin of `model` with the experts that one of `ep` ranks holds, on the meta device; its experts.

    Other parameters have the shapes of the whole model, and no values; buffers are the model's own. In a traced run each
    layer's experts get ``imbalance`` times the rows of a balanced router, evenly over those of the rank. `tp`: ranks with
    the same tokens, of which each sends its part; of tensor parallelism itself, `tensor_twin` makes what remains.

    Raises:
        ValueError: no experts, or a number of them that `ep` does not divide; `imbalance` below 1 or above `ep`.
    """
    if not 1 <= imbalance <= ep:
        raise ValueError(
            f"imbalance is {imbalance:g}; it must be from 1 (every rank gets as many rows) to ep, {ep} (one gets them all)."
        )
    found = find_experts(model, plan)
    if not found:
        raise ValueError(f"ep is {ep}, and no experts were found in this {type(model).__name__}: use ep=1.")
    if listed := next((experts.fqn for experts in found if experts.call == EACH), None):
        raise ValueError(
            f"ep is {ep}, and {listed!r} is a list of experts, whose block decides in Python how many rows each gets: no "
            "plan can be made. Use a mode (ac='full', 'selective'), or stack the weights of the list."
        )
    split = {id(weight): experts for experts in found for weight in experts.weights}
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = _cut(parameter, split.get(id(parameter)), ep)
    twin = copy.deepcopy(model, memo)
    here = tuple(Experts(e.fqn, twin.get_submodule(e.fqn), e.count, e.call) for e in found)
    adapted = adapters_in(twin)
    for experts in here:
        key = planned_group(model, experts, ep, imbalance)
        adapters = adapted.get(id(experts.module), ())
        pass_through(adapters)
        beside = TensorRanks(tp, 0, PLANNED) if tp > 1 else None
        experts.module.forward = _PlannedExperts(experts, ranks=ep, group=key, adapters=adapters, tp=beside)
    return twin, here


class _PlannedExperts(SplitExperts):
    """Takes its weights as a real step does, where they are DTensors: all of them before anything is computed of them, so
    that backward adds their gradients to those of the microbatch before when it is through all of that."""

    def weight_of(self, name: str) -> Tensor:
        part: Tensor = _PlannedPart.apply(super().weight_of(name))
        return part


class _PlannedPart(torch.autograd.Function):
    """`DTensor.to_local`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _cut(parameter: nn.Parameter, experts: Experts | None, ep: int) -> nn.Parameter:
    count = parameter.shape[0] if experts is None else parameter.shape[0] // ep
    if experts is not None and experts.count % ep:
        raise ValueError(f"ep is {ep}, which does not divide the {experts.count} experts of {experts.fqn!r}.")
    shape = (count, *parameter.shape[1:]) if parameter.dim() else ()
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)


def planned_group(model: nn.Module, experts: Experts, ep: int, imbalance: float) -> str:
    """The group of ranks for `planned_table`, as `nemo_like::route` is called with it."""
    # Called with a row for each expert and token, such a module sends those that the router chose.
    sent = (experts_per_token(model) or 1) / experts.count if zero_rows_stay_zero(experts.module) else 1.0
    return f"{PLANNED}:{ep}:{imbalance}:{sent}"
