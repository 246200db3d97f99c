"""Segments of layers over FSDP2: the layers stay units of their own, and gradients are those without checkpointing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nemo_like import parallelize
from nemo_like.activation_checkpointing import apply_specs
from nemo_like.activation_checkpointing.spec import segments_of
from tests.checks import assert_bitwise, gradients_of
from tests_distributed.spawn import on_ranks


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x))))) * scale


class Decoder(nn.Module):
    def __init__(self, layers: int, dim: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(dim) for _ in range(layers)])
        self.head = nn.Linear(dim, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((1,), 0.5)
        for layer in self.layers:
            x = layer(x, scale=scale)
        return self.head(x)


def _train(model: nn.Module, reshard: bool, low_precision: bool, rank: int) -> dict[str, torch.Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if low_precision else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    assert all(isinstance(layer, FSDPModule) for layer in model.layers)
    torch.manual_seed(rank)
    for _ in range(2):  # the second step runs with the unit order that the first one recorded
        model(torch.randn(4, 16)).square().mean().backward()
    return gradients_of(model)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("segments", "reshard", "low_precision"), [(1, True, False), (2, True, True), (2, False, False)]
)
@on_ranks(2)
def test_segments_over_fsdp2_give_bitwise_gradients(
    rank: int, world_size: int, segments: int, reshard: bool, low_precision: bool
) -> None:
    torch.manual_seed(0)
    plain = Decoder(4)
    segmented = copy.deepcopy(plain)
    apply_specs(segmented, segments_of([f"layers.{i}" for i in range(len(segmented.layers))], segments))
    wanted = _train(plain, reshard, low_precision, rank)
    got = _train(segmented, reshard, low_precision, rank)
    dist.barrier()
    assert_bitwise(got, wanted)
    assert len(wanted) == 4 * 6 + 2


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
@on_ranks(2)
def test_the_front_door_makes_segments_too(rank: int, world_size: int, strategy: str) -> None:
    gradients = []
    for ac, offload in (("none", None), ("sequential", None), ("sequential", "boundary"), ("sequential", "all")):
        torch.manual_seed(0)
        model = parallelize(Decoder(4), strategy=strategy, ac=ac, offload=offload, device="cpu")
        torch.manual_seed(rank)
        for _ in range(2):
            model(torch.randn(4, 16)).square().mean().backward()
        gradients.append(gradients_of(model))
    assert_bitwise(gradients, [gradients[0]] * 4)
    assert len(gradients[0]) == 4 * 6 + 2
