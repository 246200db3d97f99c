"""Tensors that the model sets on its layers before each pass (a style, an embedding of the time, a task's vector).

A second pass begins before the first one's backward, after the step that is verified: recomputation must see what the
forward saw, and gradients must reach what the tensor was made of.
"""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like.activation_checkpointing.engine import RegionError
from tests.checks import assert_bitwise
from tests.models.blocks import under

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


class Block(nn.Module):
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
        self.embed, self.blocks = nn.Embedding(4, D), nn.ModuleList(Block(style_of) for _ in range(2))

    def forward(self, x: Tensor, number: int, learned: bool) -> Tensor:
        style = self.embed.weight[number].abs() if learned else torch.full((D,), 1.0 + number)
        for block in self.blocks:
            self.set_style(block, style)
        for block in self.blocks:
            x = block(x)
        return x


def _gradients(place: Place, ac: str, learned: bool, second: str) -> list[Tensor]:
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
    expected = _gradients(PLACES[place], "original", learned, second)
    assert_bitwise(_gradients(PLACES[place], ac, learned, second), expected)


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
        match=r"attribute 'style' of a Block is or has a Tensor that was changed in place.*Put a new tensor",
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
