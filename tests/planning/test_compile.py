"""Plans under torch.compile: gradients as without checkpointing with the same compiler, dropout on; bytes as planned."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from nemo_like.compile import compile_layers
from nemo_like.planning import apply_plan, plan_for

HIDDEN = 32


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(HIDDEN), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, D) -> (B, S, D)
        return x + self.drop(self.down(self.drop(torch.tanh(self.up(self.norm(x))))))


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _run(budget: str | None, backend: str | None, dropout: float):
    """Gradients of a step, the bytes of activations that autograd was given to keep, and the plan."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model(dropout), torch.randn(2, 16, HIDDEN, requires_grad=True)
    plan = None
    if budget is not None:
        plan = plan_for(model, ac=budget, sample_input=x, gpu="h100-80gb")
        apply_plan(model, plan, device_type="cpu", compile=backend is not None)
    if backend is not None:
        compile_layers(model, backend, model.layers)
    torch.manual_seed(1)
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in params:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        loss = model(x)
    loss.backward()
    return [p.grad for p in [x, *model.parameters()]], sum(kept.values()), plan


def _assert_derivative(budget: str, backend: str, dropout: float) -> None:
    """The gradient along a random direction, of input and parameters at once, is the loss's central difference."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model(dropout).double(), torch.randn(2, 16, HIDDEN, dtype=torch.float64, requires_grad=True)
    apply_plan(model, plan_for(model, ac=budget, sample_input=x, gpu="h100-80gb"), device_type="cpu", compile=True)
    compile_layers(model, backend, model.layers)
    leaves = [x, *model.parameters()]
    directions = [torch.randn_like(leaf) for leaf in leaves]

    def loss_at(distance: float) -> torch.Tensor:
        with torch.no_grad():
            for leaf, direction in zip(leaves, directions, strict=True):
                leaf.add_(direction, alpha=distance)
        torch.manual_seed(1)
        return model(x)

    loss_at(0.0).backward()
    slope = sum((leaf.grad * direction).sum() for leaf, direction in zip(leaves, directions, strict=True))
    step = 1e-5
    above, below = loss_at(step), loss_at(-2 * step)
    torch.testing.assert_close(slope, ((above - below) / (2 * step)).detach(), rtol=1e-6, atol=0)


def _skip_without_a_compiler(backend: str | None) -> None:
    if backend == "inductor" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        pytest.skip("Inductor needs a C++ compiler here")


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "budgets"),
    [(None, ("25%", "50%", "75%")), ("aot_eager", ("25%", "50%", "75%")), ("inductor", ("50%",))],
    ids=["eager", "aot_eager", "inductor"],
)
def test_dropout_is_right_at_every_budget(backend, budgets):
    """Known failure 26: PyTorch's memory-budget partitioner recomputes random ops without their state (#190758).

    From 2.15 on, inductor draws other masks in a checkpointed region than outside: no other run draws those of this one,
    so gradients are compared with differences of the loss itself, whose masks hang on the seed alone.
    """
    _skip_without_a_compiler(backend)
    wanted, _, _ = _run(None, backend, 0.2)
    for budget in budgets:
        got, _, plan = _run(budget, backend, 0.2)
        assert any(layer.decisions is not None for layer in plan.layers)
        if backend == "inductor" and torch.__version__ >= (2, 15):
            _assert_derivative(budget, backend, 0.2)
            continue
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b), (budget, backend)


@pytest.mark.few(1)
@pytest.mark.parametrize(("backend", "budgets"), [("aot_eager", ("25%", "50%", "75%")), ("inductor", ("25%", "75%"))])
def test_compiled_layers_keep_what_was_planned(backend, budgets):
    """The partitioner follows the tables; besides, it keeps what costs it nothing: statistics of norms."""
    output = 2 * 16 * HIDDEN * 4  # the loss keeps the last layer's output
    statistics = 2 * 2 * 2 * 16 * 4  # mean and rstd of each layer's norm
    _skip_without_a_compiler(backend)
    for budget in budgets:
        _, kept, plan = _run(budget, backend, 0.0)
        # Inductor fuses a norm with its neighbours, and may also drop statistics that the plan counted.
        fewest = plan.held_bytes - (statistics if backend == "inductor" else 0)
        assert fewest <= kept - output <= plan.held_bytes + statistics, budget
