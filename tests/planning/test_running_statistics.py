"""A budget for layers whose running statistics are read again in the same call: bitwise as without checkpointing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nemo_like import parallelize
from nemo_like.planning.trace.block import trace_block


class _Twice(nn.Module):
    """A batch norm that is called twice (TabNet's ghost batch norm, Siamese branches)."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), norm or nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inside(self.up(x)))

    def inside(self, h: torch.Tensor) -> torch.Tensor:
        a, b = h.split([2, 6])
        return torch.cat([torch.sigmoid(self.norm(a)), torch.tanh(torch.relu(self.norm(b))) * 2])


class _Chain(_Twice):
    def inside(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(torch.sigmoid(self.norm(h)).exp()))


class _Read(_Twice):
    """The layer reads the statistics itself."""

    def inside(self, h: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.norm(torch.sigmoid(h)))
        return (y - self.norm.running_mean).sigmoid() * self.norm.running_var


class _Evaluated(_Twice):
    def inside(self, h: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(h))
        return F.batch_norm(h, self.norm.running_mean, self.norm.running_var).sigmoid()


class _Instance(_Twice):
    """An instance norm moves copies of its statistics, and writes the copies' mean back."""

    def __init__(self) -> None:
        super().__init__(nn.InstanceNorm1d(4, track_running_stats=True))

    def inside(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(torch.sigmoid(self.norm(h.view(8, 4, 4))))).reshape(8, 16)


class _Once(_Twice):
    def inside(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(h)).sigmoid()


def _stack(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(kind(), kind(), kind())


def _shared() -> nn.Module:
    norm = nn.BatchNorm1d(16)
    return nn.Sequential(*[_Twice(norm) for _ in range(3)])


def _trained(build: Callable[[], nn.Module], ac: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = build()
    if ac is not None:
        model = parallelize(model, "single", ac, sample_input=torch.rand(8, 8))
    for seed in (1, 2):
        torch.manual_seed(seed)
        model(torch.rand(8, 8)).square().mean().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


MODELS = {kind.__name__.strip("_"): kind for kind in (_Twice, _Chain, _Read, _Evaluated, _Instance, _Once)}


@pytest.mark.parametrize("ac", ["75%", "30%"])
@pytest.mark.parametrize("name", [*MODELS, "shared"])
def test_gradients_and_statistics_under_a_budget(name: str, ac: str):
    def build() -> nn.Module:
        return _shared() if name == "shared" else _stack(MODELS[name])

    assert all(map(torch.equal, _trained(build, ac), _trained(build, None)))


@pytest.mark.parametrize(("name", "steers"), [("Twice", [True, False]), ("Once", [False]), ("Instance", [True, True])])
def test_only_calls_whose_statistics_are_read_again_are_always_recomputed(name: str, steers: list[bool]):
    trace = trace_block(MODELS[name](), (torch.rand(8, 8, requires_grad=True),))
    norms = [op for op in trace.ops if "batch_norm" in str(op.op)]
    assert [op.steers for op in norms] == steers
