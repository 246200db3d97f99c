"""Verification catches what a replay sees otherwise than forward did, where nothing else does.

Each class is run with the protections taken out that would put its state back or name it: once with verification off,
which shows that gradients are wrong without a word, and once with it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing import sequential
from nemo_like.activation_checkpointing.engine import global_state, region
from nemo_like.activation_checkpointing.engine.handles import RegionError
from tests.models.blocks import Stack, under

AROUND: contextvars.ContextVar[float] = contextvars.ContextVar("around", default=1.0)
GLOBAL = {"calls": 0}


class _Nothing(contextlib.nullcontext):
    """Stands for a protection and protects from nothing: its methods do nothing and return one that is false."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> _Nothing:
        return self


class _ByReference(_Nothing):
    """`SavedInputs` that keeps the arguments as they are."""

    changed = False

    def __init__(self, *given: Any) -> None:
        super().__init__()
        self._given = given

    def get(self, region: str) -> Any:
        return self._given


@pytest.fixture
def unprotected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GlobalState", "BufferSnapshot", "ModuleState"):
        monkeypatch.setattr(global_state, name, _Nothing)
    for module in (region, sequential):
        monkeypatch.setattr(module, "SavedInputs", _ByReference)


@dataclasses.dataclass
class State:
    scale: Tensor


class Block(nn.Module):
    """Reads all that a layer can read."""

    def __init__(self, draws: str) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.rand(4, 8) + 0.5, requires_grad=False)
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.scaling, self.adapter = {"a": 1.0, "b": 3.0}, "a"
        self.calls, self.draws = 0, draws
        self.generator = torch.Generator().manual_seed(3)
        self.attn.register_forward_hook(_triple)

    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        self.calls += 1
        y = self.attn(x + self.shift).tanh() * self.scaling[self.adapter]
        y = (y * 2 if self.training else y) * DRAWS.get(self.draws, lambda layer, x: 1.0)(self, x)
        if isinstance(state, dict):
            y, state["scale"] = y * state["scale"], state["scale"] * 2
        elif state is not None:
            y, state.scale = y * state.scale, state.scale * 2
        return x + (self.mlp(y.sin()).tanh() * self.gain).tanh()


def _triple(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 3


def each(change: Callable[[Block], Any]) -> Callable[[nn.Module], None]:
    def to_all(model: nn.Module) -> None:
        with torch.no_grad():
            for layer in model.layers:
                change(layer)

    return to_all


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "bias": each(lambda layer: layer.attn.bias.add_(1)),
    "adapter": each(lambda layer: setattr(layer, "adapter", "b")),
    "adapter's scale": each(lambda layer: layer.scaling.update(a=3.0)),
    "hook added": each(lambda layer: layer.attn.register_forward_hook(_triple)),
    "hook removed": each(lambda layer: layer.attn._forward_hooks.clear()),
    # Of the last layer alone: one more saved tensor shifts the others, and behind it there is none of another shape.
    "requires_grad": lambda model: model.layers[-1].gain.requires_grad_(True),
    "eval": lambda model: model.eval(),
    "buffer changed": each(lambda layer: layer.shift.add_(1)),
    "buffer exchanged": each(lambda layer: setattr(layer, "shift", layer.shift + 1)),
}
"""What a program changes between forward and backward."""


def _counted(layer: Block, x: Tensor) -> float:
    GLOBAL["calls"] += 1
    return GLOBAL["calls"] / 4


DRAWS: dict[str, Callable[[Block, Tensor], Tensor | float]] = {
    "generator": lambda layer, x: torch.rand(x.shape, generator=layer.generator),
    "random": lambda layer, x: random.random(),
    "numpy": lambda layer, x: float(numpy.random.rand()),
    "context": lambda layer, x: AROUND.get(),
    "global": _counted,
    "counter": lambda layer, x: layer.calls,
}
"""What a layer's own forward draws from, or counts in."""

STATES: dict[str, Callable[[Tensor], Any]] = {"dict": lambda scale: {"scale": scale}, "dataclass": State}
"""What a layer changes among its arguments."""


def gradient(ac: str, name: str) -> Tensor:
    """The input's gradient, of a model and an input that are the same in each call."""
    model = under(ac, lambda: Stack(Block(name) for _ in range(3)))
    x = torch.randn(4, 8, requires_grad=True)
    random.seed(5)
    numpy.random.seed(5)
    GLOBAL["calls"] = 0
    before = AROUND.set(3.0)
    loss = model(x, STATES[name](torch.tensor(0.25)) if name in STATES else None).square().sum()
    AROUND.reset(before)
    if name in CHANGES:
        CHANGES[name](model)
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("ac", ["full", "selective", "submodule", "sequential"])
def test_nothing_is_raised_where_nothing_changed(ac: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_LIKE_VERIFY", "1")
    assert torch.equal(gradient(ac, "nothing"), gradient("none", "nothing"))


@pytest.mark.parametrize("ac", ["full", "sequential"])
@pytest.mark.parametrize("name", [*CHANGES, *DRAWS, *STATES])
@pytest.mark.usefixtures("unprotected")
def test_what_no_protection_holds_is_silent_without_verification_and_raises_with_it(
    name: str, ac: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = gradient("none", name)
    monkeypatch.setenv("NEMO_LIKE_VERIFY", "0")
    assert not torch.equal(gradient(ac, name), wanted)
    monkeypatch.delenv("NEMO_LIKE_VERIFY")
    numbers = r"gradients would be wrong.*: torch.float32 of shape \("
    with pytest.raises(RegionError, match=rf"(?s)Region 'layers\.\d'.*({numbers}|draws random numbers)"):
        gradient(ac, name)
