"""Collectives that write into a tensor whose values a region keeps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_like import apply_activation_checkpointing
from nemo_like.activation_checkpointing.policy import SelectivePolicy
from tests_distributed.spawn import on_ranks


class _Summed(torch.autograd.Function):
    """As transformers sums the outputs of experts that ranks have parts of: in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts: Tensor = self.first(x).view(-1, 3, 8).sum(1)
        return self.second(_Summed.apply(parts)).sigmoid()  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_what_is_kept_is_what_was_there_before_the_sum(rank: int, world_size: int) -> None:
    found = []
    for save_ops in (None, ["aten.sum.dim_IntList"]):
        torch.manual_seed(0)
        model = nn.Sequential(*(_Layer() for _ in range(2)))
        if save_ops is not None:
            model = apply_activation_checkpointing(model, SelectivePolicy(None, save_ops=save_ops), layers=list(model))
        torch.manual_seed(rank)
        model(torch.randn(4, 8)).pow(2).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(kept, plain) for plain, kept in zip(*found, strict=True))
