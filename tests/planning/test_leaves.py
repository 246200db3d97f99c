"""Tensors that a block makes and asks a gradient of: no gradient goes on from there, but the graph keeps them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nemo_like import Job
from nemo_like.options import MemoryBudget, StepSpec
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.answers.within import choose
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import apply_plan, describe
from nemo_like.planning.query import PlanQuery
from tests.allocator_events import cpu_events
from tests.planning.queries import bytes_between_steps, part_of

WIDTH, ROWS = 32, 512
LEAF = 4 * WIDTH * ROWS


class WithLeaf(nn.Module):
    """A stub for attention that no kernel is there for, as MRA's without a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (ROWS, WIDTH) -> the same
        made = torch.zeros_like(x).requires_grad_()
        return x + self.two(torch.tanh(self.one(x + 2 * made)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithLeaf() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("share", [None, 0.6, 0.8])
def test_a_leaf_that_a_block_makes_is_held_whatever_the_plan(share: float | None) -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(ROWS, WIDTH)
    setup = Job.of(step=StepSpec(keeps_output=False, optimizer="sgd"))
    query = PlanQuery.of(model, {"x": x}, setup.change(gpu=resolve_device("cpu")))
    if share is None:
        choices = query.uniform("full")
    else:
        choices, _ = choose(query, MemoryBudget(fraction=share), f"{share:.0%}")
    predicted = peak_of(query, choices)
    calls = query.stages[0].layer_calls(choices[0], accumulate=False)
    trace = part_of(query).problems[0].trace
    for choice, call in zip(choices[0], calls, strict=True):
        inputs = trace.input_bytes if choice.decisions else trace.kept_input_bytes
        assert inputs + call.events.held == choice.held_bytes + LEAF, choice.label
    apply_plan(model, describe(query, choices, "test"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x).backward()  # the first step compares each replay with its forward
    optimizer.zero_grad()
    before = bytes_between_steps(model, optimizer, gradients=False)
    out: list[Tensor] = []
    held = cpu_events(lambda: out.append(model(x)))[-1]
    out.clear()
    peak = before + max(cpu_events(lambda: model(x).backward()))
    assert abs(predicted.held - held) <= 0.002 * held
    assert abs(predicted.total - peak) <= 0.02 * peak
