"""Layers that hand a container of their own on: a dataclass, a frozen one, a model library's output, a named tuple."""

from __future__ import annotations

import gc
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from nemo_like import apply_activation_checkpointing
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing.policy import FullPolicy
from tests.checks import assert_bitwise, gradients_of
from tests.models.blocks import Stack, checkpoint_region, under


@dataclass
class State:
    hidden: torch.Tensor
    scale: float = 1.0
    past: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: torch.Tensor
    scale: float = 1.0


class Named(NamedTuple):
    hidden: torch.Tensor
    scale: float = 1.0


class Ordered(OrderedDict):
    hidden = property(lambda self: self["hidden"])


def _next_state(value: Any, hidden: torch.Tensor) -> Any:
    if isinstance(value, Named):
        return value._replace(hidden=hidden)
    if isinstance(value, BaseModelOutput):
        return BaseModelOutput(last_hidden_state=hidden)
    if isinstance(value, Ordered):
        return Ordered(hidden=hidden)
    return replace(value, hidden=hidden)


class Block(nn.Module):
    """Takes a container and returns a new one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, state: Any) -> Any:
        hidden = state.last_hidden_state if isinstance(state, BaseModelOutput) else state.hidden
        return _next_state(state, hidden + self.down(self.up(hidden).tanh()) * getattr(state, "scale", 1.0))


class ChangingBlock(Block):
    """Changes the container that it was given."""

    def forward(self, state: State) -> State:
        state.past.append(state.hidden)
        state.hidden = state.hidden + self.down(self.up(state.hidden).tanh()) * state.scale + state.past[0]
        state.scale = state.scale * 0.5
        return state


class Model(Stack):
    def __init__(self, make: Any, block: type[Block] = Block, dim: int = 16) -> None:
        super().__init__(block(dim) for _ in range(4))
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = super().forward(self.make(x))
        return state.last_hidden_state if isinstance(state, BaseModelOutput) else state.hidden


MAKERS = {
    "dataclass": State,
    "frozen": Frozen,
    "named": Named,
    "ordered": lambda hidden: Ordered(hidden=hidden),
    "output": lambda hidden: BaseModelOutput(last_hidden_state=hidden),
}


def _gradients(make: Any, ac: str, block: type[Block] = Block) -> list[torch.Tensor]:
    model = under(ac, lambda: Model(make, block))
    x = torch.randn(3, 16, requires_grad=True)
    model(x).square().sum().backward()
    return [x.grad, *gradients_of(model).values()]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_gradients_are_those_of_no_checkpointing(kind: str, ac: str) -> None:
    assert_bitwise(_gradients(MAKERS[kind], ac), _gradients(MAKERS[kind], "none"))


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_a_container_that_layers_change_is_replayed_as_forward_found_it(ac: str) -> None:
    assert_bitwise(_gradients(State, ac, ChangingBlock), _gradients(State, "none", ChangingBlock))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("ac", ["full", "sequential"])
def test_a_forward_without_a_backward_leaves_nothing(kind: str, ac: str) -> None:
    """A region that held a tensor of its own graph would be held by it in turn, where no collector looks."""
    model = apply_activation_checkpointing(Model(MAKERS[kind], dim=64), ac)
    model(torch.randn(256, 64))  # what the first call makes for good
    gc.collect()
    with LiveBytes() as live:
        for _ in range(3):
            model(torch.randn(256, 64))
        gc.collect()
        assert live.live == 0


class Plain:
    """No container: nobody can tell what a copy of it would mean."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class PlainBlock(Block):
    def forward(self, state: Plain) -> Plain:
        return Plain(state.hidden + self.down(self.up(state.hidden).tanh()))


def test_an_object_that_is_no_container_is_named(caplog: pytest.LogCaptureFixture) -> None:
    found = _gradients(Plain, "sequential", PlainBlock)
    assert "a Plain on" in caplog.text
    assert_bitwise(found, _gradients(Plain, "none", PlainBlock))


def test_a_container_that_is_given_twice_is_one_container_in_replay_too():
    seen = []

    def fn(t, first, *, state):
        first["n"] += 1
        seen.append((state["inner"]["n"], state["self"] is state))
        return (t * state["inner"]["n"]).exp().sin()

    x, shared = torch.ones(3, requires_grad=True), {"n": 0}
    state = {"inner": shared}
    state["self"] = state
    checkpoint_region(fn, x, shared, state=state, policy=FullPolicy()).sum().backward()
    assert seen == [(1, True), (1, True)] and shared == {"n": 1}
