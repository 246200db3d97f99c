"""Models that look at values which a run without weights does not have: the error says where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import Job, StepSpec
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.trace.layer_memory import halves_memory
from tests.planning.queries import part_of


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


def _query(inside: bool, step: StepSpec | None = None) -> PlanQuery:
    setup = Job.of(step=step or StepSpec(loss_fn=torch.sum))
    return PlanQuery.of(_Model(inside), torch.randn(4, 8), setup.change(gpu=resolve_device("cpu")))


@pytest.mark.parametrize("ask", [peak_of, lambda query, choices: part_of(query).proved_all(choices[0])])
def test_a_layer_whose_backward_looks_at_values(ask: Callable[[PlanQuery, Any], Any]) -> None:
    query = _query(inside=True)
    with pytest.raises(
        ValueError, match=r"layers\.0 \(_Block\) cannot be planned: its step depends on values"
    ) as raised:
        ask(query, query.uniform("full"))
    assert f"of {__name__}" in str(raised.value) and "Use a mode instead of a budget" in str(raised.value)


def test_both_halves_of_such_a_backward() -> None:
    query = _query(inside=True)
    kind = part_of(query).traced.kinds[-1]  # what it is called with gets a gradient
    with pytest.raises(ValueError, match="cannot be planned: its step depends on values"):
        halves_memory(kind, None, part_of(query).traced.run, {0}, accumulate=False)


def test_a_model_that_looks_at_values_around_its_layers() -> None:
    query = _query(inside=False)
    with pytest.raises(ValueError, match="_Model cannot be planned: its step around the layers depends") as raised:
        query.stages[0].outside()
    assert f"of {__name__}" in str(raised.value) and "Use a mode instead of a budget" in str(raised.value)


def test_a_loss_that_looks_at_values() -> None:
    def loss_fn(out: torch.Tensor) -> torch.Tensor:
        return out.sum() if out.sum() > 0 else -out.sum()

    query = _query(inside=False, step=StepSpec(loss_fn=loss_fn))
    with pytest.raises(ValueError, match=r"StepSpec\.loss_fn cannot be planned for: it depends on values"):
        query.stages[0].outside()
