"""Models that look at values which a run without weights does not have: the error says where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import Job, StepSpec
from nemo_like.planning import Planner
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.halves_memory import halves_memory


class _LooksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm() if grad.abs().max() > 1 else grad


class _Block(nn.Module):
    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.inner, self.looks = nn.Linear(8, 8), looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x).relu()
        return _LooksInBackward.apply(out) if self.looks else out


class _Model(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers, self.inside = nn.ModuleList(_Block(inside) for _ in range(3)), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.inside else _LooksInBackward.apply(x)


def _planner(inside: bool, step: StepSpec | None = None) -> Planner:
    setup = Job.of(step=step or StepSpec(loss_fn=torch.sum))
    return Planner(_Model(inside), torch.randn(4, 8), setup.change(gpu=resolve_device("cpu")))


@pytest.mark.parametrize("ask", [Planner.peak, lambda planner, choices: planner.proved_all(choices)])
def test_a_layer_whose_backward_looks_at_values(ask: Callable[[Planner, Any], Any]) -> None:
    planner = _planner(inside=True)
    with pytest.raises(
        ValueError, match=r"layers\.0 \(_Block\) cannot be planned: its step depends on values"
    ) as raised:
        ask(planner, planner.uniform("full"))
    assert f"of {__name__}" in str(raised.value) and "Use a mode instead of a budget" in str(raised.value)


def test_both_halves_of_such_a_backward() -> None:
    planner = _planner(inside=True)
    kind = planner.traced.kinds[-1]  # what it is called with gets a gradient
    with pytest.raises(ValueError, match="cannot be planned: its step depends on values"):
        halves_memory(kind, None, planner.traced.run, {0}, accumulate=False)


def test_a_model_that_looks_at_values_around_its_layers() -> None:
    planner = _planner(inside=False)
    with pytest.raises(ValueError, match="_Model cannot be planned: its step around the layers depends") as raised:
        planner.outer()
    assert f"of {__name__}" in str(raised.value) and "Use a mode instead of a budget" in str(raised.value)


def test_a_loss_that_looks_at_values() -> None:
    def loss_fn(out: torch.Tensor) -> torch.Tensor:
        return out.sum() if out.sum() > 0 else -out.sum()

    model = _planner(inside=False, step=StepSpec(loss_fn=loss_fn))
    with pytest.raises(ValueError, match=r"StepSpec\.loss_fn cannot be planned for: it depends on values"):
        model.outer()
