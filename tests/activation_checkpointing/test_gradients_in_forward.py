"""Models that take a gradient in their own forward, as force fields and score models do, between layers or inside one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nemo_like import parallelize
from tests.checks import assert_bitwise, step

D = 8


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def energy(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x) * positions))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.energy(x, positions)


class Descending(Plain):
    """Its gradient stays in the graph."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.energy(x, positions).square().sum(), x, create_graph=True)
        return x - 0.1 * force


class Twice(Plain):
    """Its gradient is a number, and its graph is used again."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        energy = self.energy(x, positions).square().sum()
        (force,) = torch.autograd.grad(energy, x, retain_graph=True)
        return x - 0.1 * force + 0.01 * energy


class FromLeaf(Plain):
    """Its gradient is that of a leaf made inside."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(leaf, positions).square().sum(), leaf, create_graph=True)
        return x - 0.1 * force


class ForceField(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], when: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head, self.when = nn.ModuleList(make() for _ in range(4)), nn.Linear(D, 1), when

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.linspace(0.5, 1.5, D).repeat(3, 1).requires_grad_()
        h, forces = x.clone().requires_grad_(), torch.zeros(())
        for layer in self.layers:
            h = layer(h, positions)
            if self.when == "between":
                (force,) = torch.autograd.grad(self.head(h).sum(), positions, create_graph=True)
                forces = forces + force.square().sum()
        energy = self.head(h).sum()
        if self.when == "at the end":
            (force,) = torch.autograd.grad(energy, positions, create_graph=True)
            forces = force.square().sum()
        return energy + forces


def gradients(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, D)
    step(model, x)
    return step(model, x)


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
@pytest.mark.parametrize("when", ["never", "between", "at the end"])
@pytest.mark.parametrize("make", [Plain, Descending, Twice, FromLeaf])
def test_gradients_are_those_of_the_bare_model(make: Callable[[], nn.Module], when: str, ac: str) -> None:
    assert_bitwise(gradients(parallelize(ForceField(make, when), "single", ac)), gradients(ForceField(make, when)))
