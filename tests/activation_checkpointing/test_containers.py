"""What layers are given otherwise than as tensors: containers that they hand on, and tensors set on them from outside.

Those (a style, an embedding of the time, a task's vector) the model sets before each pass. A second pass begins before the
first one's backward, after the step that is verified: recomputation must see what the forward saw, and gradients must reach
what the tensor was made of.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from nemo_like import apply_activation_checkpointing, parallelize
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing.engine import RegionError
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


D = 8
MODES = ["full", "selective", "submodule", "sequential"]
Pair = namedtuple("Pair", "number style")


class Holder:
    def __init__(self, style: Tensor | None) -> None:
        self.style = style


class Slotted:
    __slots__ = ("style",)

    def __init__(self, style: Tensor | None) -> None:
        self.style = style


def _fill(block: Any, style: Tensor) -> None:
    block.table["style"] = style


def _change(block: Any, style: Tensor) -> None:
    block.holder.style = style


Place = tuple[Callable[[Any, Tensor], None], Callable[[Any], Tensor]]
PLACES: dict[str, Place] = {
    "attribute": (lambda b, t: setattr(b, "style", t), lambda b: b.style),
    "new attribute": (lambda b, t: setattr(b, "late", t), lambda b: getattr(b, "late", torch.ones(D))),
    "private attribute": (lambda b, t: setattr(b, "_late", t), lambda b: getattr(b, "_late", torch.ones(D))),
    "sub-module": (lambda b, t: setattr(b.norm, "style", t), lambda b: b.norm.style),
    "buffer": (lambda b, t: setattr(b, "buffer", t), lambda b: b.buffer),
    "list": (lambda b, t: setattr(b, "items", [t]), lambda b: b.items[0]),
    "dict": (lambda b, t: setattr(b, "items", {"style": t}), lambda b: b.items["style"]),
    "same dict": (_fill, lambda b: b.table["style"]),
    "tuple": (lambda b, t: setattr(b, "pair", Pair(1, t)), lambda b: b.pair.style),
    "namespace": (lambda b, t: setattr(b, "items", SimpleNamespace(style=t)), lambda b: b.items.style),
    "object": (lambda b, t: setattr(b, "items", Holder(t)), lambda b: b.items.style),
    "same object": (_change, lambda b: b.holder.style),
    "slots": (lambda b, t: setattr(b, "items", Slotted(t)), lambda b: b.items.style),
    "object in a list": (lambda b, t: setattr(b, "items", [Holder(t)]), lambda b: b.items[0].style),
    "function": (lambda b, t: setattr(b, "items", lambda: t), lambda b: b.items()),
}


class Fed(nn.Module):
    def __init__(self, style_of: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 16), nn.Linear(16, D)
        self.style, self.style_of, self.holder, self.table = None, style_of, Holder(None), {"style": None}
        self.register_buffer("buffer", torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x) * torch.relu(self.style_of(self)))))


class Net(nn.Module):
    def __init__(self, place: Place) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.set_style, style_of = place
        self.embed, self.blocks = nn.Embedding(4, D), nn.ModuleList(Fed(style_of) for _ in range(2))

    def forward(self, x: Tensor, number: int, learned: bool) -> Tensor:
        style = self.embed.weight[number].abs() if learned else torch.full((D,), 1.0 + number)
        for block in self.blocks:
            self.set_style(block, style)
        for block in self.blocks:
            x = block(x)
        return x


def _fed_gradients(place: Place, ac: str, learned: bool, second: str) -> list[Tensor]:
    model, x = Net(place), torch.linspace(0, 1, 2 * D).view(2, D)
    if ac != "original":
        parallelize(model, "single", ac, device="cpu")
    for step in range(3):
        model.zero_grad()
        loss = model(x, 1, learned).square().mean()
        if step == 2:
            with torch.set_grad_enabled(second == "trained"):
                other = model(x, 2, learned).square().mean()
            loss = loss + other
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("second", ["trained", "no_grad"])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "given"])
@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_recomputation_sees_what_forward_saw(place: str, ac: str, learned: bool, second: str) -> None:
    expected = _fed_gradients(PLACES[place], "original", learned, second)
    assert_bitwise(_fed_gradients(PLACES[place], ac, learned, second), expected)


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_a_tensor_that_was_changed_in_place_is_named(ac: str) -> None:
    model = parallelize(Net(PLACES["attribute"]), "single", ac, device="cpu")
    x = torch.ones(2, D)
    for _ in range(2):
        model(x, 1, False).sum().backward()
    loss = model(x, 1, False).sum()
    model.blocks[0].style.mul_(2)
    with pytest.raises(
        RegionError,
        match=r"attribute 'style' of a Fed is or has a Tensor that was changed in place.*Put a new tensor",
    ):
        loss.backward()


class Memory(nn.Module):
    """Reads a state with a graph, and leaves another one."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.state = nn.Linear(D, D), torch.zeros(D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x) * self.state
        self.state = torch.tanh(self.state + y.mean(0))
        return y + x


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_a_state_that_forward_reads_and_replaces(ac: str) -> None:
    def gradients(ac: str) -> list[Tensor]:
        model = under(ac, lambda: nn.Sequential(Memory(), Memory()), layers=["*"])
        start = nn.Parameter(torch.linspace(0.1, 1, D))
        for _ in range(3):
            model.zero_grad()
            start.grad = None
            for block in model:
                block.state = start * 2
            (model(torch.ones(2, D)) + model(torch.ones(2, D))).square().mean().backward()
        return [parameter.grad for parameter in [*model.parameters(), start]]

    assert_bitwise(gradients(ac), gradients("none"))


@pytest.mark.parametrize("ac", MODES)
def test_the_graph_of_the_tensor_lives_no_longer_than_without_checkpointing(ac: str) -> None:
    model = parallelize(Net(PLACES["attribute"]), "single", ac, device="cpu")
    model(torch.ones(2, D), 1, True)  # no backward follows
    style = weakref.ref(model.blocks[0].style)
    gc.disable()
    try:
        for block in model.blocks:
            block.style = None
        assert style() is None
    finally:
        gc.enable()
