"""Verification on two ranks: weights that FSDP2 gathers and frees again, and DTensors, of which each rank sees its part."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from nemo_like.activation_checkpointing.engine import RegionError, verification
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy, SelectivePolicy
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from tests_distributed.spawn import run_ranks

POLICIES = (FullPolicy(), SelectivePolicy())
ALWAYS = {"NEMO_LIKE_VERIFY": "1"}


class Elsewhere:
    """An object of the program's, into which nobody looks."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.program = object()  # an object with nothing but values would be looked into


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.elsewhere = Elsewhere()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(self.norm(x)).sin()) * self.elsewhere.factor).tanh()


def _compared(step: object) -> int:
    """How many tensors `step` compares."""
    found = []
    compare = verification.Verification.compare

    def counting(self: verification.Verification) -> None:
        found.append(len(self._rebuilt))
        compare(self)

    verification.Verification.compare = counting  # type: ignore[method-assign]
    try:
        step()  # type: ignore[operator]
    finally:
        verification.Verification.compare = compare  # type: ignore[method-assign]
    return sum(found)


def _sharded(world_size: int, policy: Policy, inside: bool, half: bool) -> tuple[nn.Module, list[Mlp]]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None)
    layers = [Mlp() for _ in range(2)]
    units = []
    for layer in layers:
        if inside:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        unit = CheckpointWrapper(layer, policy=policy, name="layer")
        units.append(unit if inside else fully_shard(unit, mesh=mesh, mp_policy=precision))
    return fully_shard(nn.Sequential(*units), mesh=mesh, mp_policy=precision), layers


def _fsdp(rank: int, world_size: int, inside: bool, half: bool) -> list[int]:
    compared = []
    for policy in POLICIES:
        model, layers = _sharded(world_size, policy, inside, half)
        x = torch.randn(3, 16)
        for _ in range(2):
            compared.append(_compared(lambda: model(x).float().sum().backward()))  # noqa: B023
        loss = model(x).float().sum()
        for layer in layers:
            layer.elsewhere.factor = 2.0
        with pytest.raises(RegionError, match=r"Region 'layer'.*gradients would be wrong"):
            loss.backward()
    return compared


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_layers_that_fsdp_shards(inside: bool, half: bool) -> None:
    first, second = run_ranks(2, _fsdp, inside, half, env=ALWAYS)
    assert first == second and min(first) >= 2 * 6


def _tensor_parallel(rank: int, world_size: int, sequence: bool) -> list[int]:
    compared = []
    for policy in POLICIES:
        torch.manual_seed(0)
        mlp = Mlp()
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        if sequence:
            plan["norm"] = SequenceParallel(sequence_dim=0)
        parallelize_module(mlp, init_device_mesh("cpu", (world_size,)), plan)
        region = CheckpointWrapper(mlp, policy=policy, name="cut")
        x = torch.randn(4, 16, requires_grad=True)
        for _ in range(2):
            compared.append(_compared(lambda: region(x).sum().backward()))  # noqa: B023
        loss = region(x).sum()
        mlp.elsewhere.factor = 2.0
        with pytest.raises(RegionError, match=r"Region 'cut'.*gradients would be wrong"):
            loss.backward()
    return compared


@pytest.mark.parametrize("sequence", [False, True])
def test_dtensors(sequence: bool) -> None:
    first, second = run_ranks(2, _tensor_parallel, sequence, env=ALWAYS)
    assert first == second and min(first) >= 6
