"""Layers that are compiled by themselves inside a region, and frames that Dynamo leaves to eager around our hooks.

What such a frame calls runs under Dynamo's eye. Up to torch 2.13 the frames of PyTorch's own classes (`nn.Sequential`) are
such; frames with a graph break in a loop are in every release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like.activation_checkpointing import SelectivePolicy
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from nemo_like.offload import offload_activations
from nemo_like.options import OffloadConfig
from tests.checks import assert_bitwise
from tests.models.blocks import Stack, train

D = 16
POLICIES: dict[str, Policy] = {"full": FullPolicy(), "selective": SelectivePolicy()}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Mlp(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(h.tanh())


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.0, batch_first=True)


def mixed() -> nn.Module:
    """PyTorch's own class around one of ours: Dynamo compiles the piece inside."""
    return nn.Sequential(nn.Linear(D, D), Mlp(), nn.Tanh())


class Looping(nn.Module):
    """Dynamo leaves the whole frame to eager."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(D, D) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            torch._dynamo.graph_break()
            x = (x @ weight).tanh()
        return x


def breaking() -> nn.Module:
    return Mlp(breaks=True)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sequential": sequential, "encoder": encoder, "mixed": mixed, "breaking": breaking, "looping": Looping,
}  # fmt: skip


def stack(make: Callable[[], nn.Module]) -> Stack:
    torch.manual_seed(0)
    return Stack(make() for _ in range(4))


def wrapped_compiled(make: Callable[[], nn.Module], policy: str, backend: Any) -> Stack:
    """Each layer compiled by itself, and then checkpointed."""
    model = stack(make)
    for index, layer in enumerate(model.layers):
        layer.compile(backend=backend)
        model.layers[index] = CheckpointWrapper(layer, policy=POLICIES[policy])
    return model


@pytest.mark.few(6)
@pytest.mark.parametrize("ac", ["full", "sequential", "selective"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_dynamo_leaves_to_eager_train_right(name: str, ac: str) -> None:
    expected = train(stack(LAYERS[name]))
    assert_bitwise(train(parallelize(stack(LAYERS[name]), "single", ac, compile="aot_eager")), expected)


@pytest.mark.few(4)
@pytest.mark.parametrize("ac", ["full", "sequential"])
@pytest.mark.parametrize("name", ["sequential", "encoder", "mixed", "looping"])
def test_so_they_do_under_inductor(name: str, ac: str) -> None:
    """With the wrapper outside of what is compiled, each piece is compiled as without it: to the bit the same."""
    expected = train(parallelize(stack(LAYERS[name]), "single", "none", compile="inductor"))
    torch.compiler.reset()
    assert_bitwise(train(parallelize(stack(LAYERS[name]), "single", ac, compile="inductor")), expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_wrapper_around_a_module_that_was_compiled_by_itself(name: str, policy: str) -> None:
    assert_bitwise(train(wrapped_compiled(LAYERS[name], policy, "aot_eager")), train(stack(LAYERS[name])))


class Graphs:
    """A backend that compiles nothing and counts what it was asked to compile."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.count += 1
        return graph


@pytest.mark.parametrize("policy", POLICIES)
def test_dynamo_compiles_nothing_of_the_engine(policy: str) -> None:
    graphs = Graphs()
    train(wrapped_compiled(Looping, policy, graphs))
    assert graphs.count == 0


def test_nor_of_offloading_which_would_then_move_nothing() -> None:
    graphs, moved = Graphs(), []
    for backend in (None, graphs):
        model = stack(Looping)
        for layer in model.layers:
            if backend is not None:
                layer.compile(backend=backend)
        with offload_activations(OffloadConfig(mode="all", min_bytes=0), model=model) as offloader:
            loss = model(torch.ones(2, 5, D)).sum()
        loss.backward()
        moved.append(offloader.collect().moved_bytes)
    assert graphs.count == 0
    assert moved[0] == moved[1] > 0
