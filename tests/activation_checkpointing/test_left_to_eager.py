"""Regions inside compiled layers that Dynamo cannot trace: the engine takes them, and gradients are those of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, DecisionTable, Policy, SelectivePolicy
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from tests.checks import assert_bitwise, gradients_of
from tests.models.blocks import NotingTransfer, Stack, train

D = 16


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Router(nn.Module):
    """Changes what top-k returned in place, as Mixtral's does; may break the graph, and may count its calls."""

    def __init__(self, breaks: bool, counts: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 4), nn.Linear(D, 4 * D), nn.Linear(D, D)
        self.breaks, self.counts, self.calls = breaks, counts, 0

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        weights /= weights.sum(-1, keepdim=True)
        if self.counts:
            self.calls += 1
        if self.breaks:
            torch._dynamo.graph_break()
        experts = self.up(x).unflatten(-1, (4, D)).gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, D))
        return x + self.down((weights.unsqueeze(-1) * experts).sum(-2)) * self.calls


def stack(**kwargs: bool) -> Stack:
    torch.manual_seed(0)
    return Stack(Router(**kwargs) for _ in range(2))


def wrapped(policy: Policy, transfer: Any = None, **kwargs: bool) -> Stack:
    """Layers that are checkpointed, and then compiled."""
    model = stack(**kwargs)
    for index, layer in enumerate(model.layers):
        model.layers[index] = CheckpointWrapper(layer, policy=policy, transfer=transfer)
        model.layers[index].compile(backend="aot_eager")
    return model


@pytest.mark.few(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("ac", ["selective", "submodule", "full"])
def test_what_was_kept_may_be_changed_in_place(ac: str, breaks: bool, backend: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(stack(breaks=breaks), stack(breaks=breaks)) if ac == "submodule" else stack(breaks=breaks)

    layers = ["0", "1"] if ac == "submodule" else None
    assert_bitwise(train(parallelize(make(), "single", ac, layers=layers, compile=backend)), train(make()))


def test_it_is_said_once_that_a_region_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "nemo_like"):
        train(parallelize(stack(breaks=False), "single", "selective", compile="aot_eager"))
        assert "it runs eagerly" not in caplog.text
        train(parallelize(stack(breaks=True), "single", "selective", compile="aot_eager"))
    assert caplog.text.count("it runs eagerly") == 1
    assert "region 'layers.0' was to be compiled" in caplog.text


@pytest.mark.parametrize("policy", [SelectivePolicy(), SelectivePolicy(every_nth_matmul=None)])
def test_the_module_is_as_forward_found_it_in_the_replay(policy: Policy) -> None:
    """PyTorch's own checkpointing, to which Dynamo leaves the region, would count each call twice."""
    model = wrapped(policy, breaks=True, counts=True)
    assert_bitwise(train(model), train(stack(breaks=True, counts=True)))
    assert [layer.calls for layer in model.layers] == [2, 2]


def test_the_policys_decisions_and_the_transfer_are_the_engines() -> None:
    transfer = NotingTransfer()
    table = DecisionTable({"aten.addmm.default": (SAVE, HOST, RECOMPUTE), "aten.topk.default": (SAVE,)})
    model = wrapped(table, transfer, breaks=True)
    assert_bitwise(train(model, steps=1), train(stack(breaks=True), steps=1))
    assert sum(move > 0 for move in transfer.moves) == 2


def test_two_backwards_and_none() -> None:
    models = parallelize(stack(breaks=True), "single", "selective", compile="aot_eager"), stack(breaks=True)
    for model in models:
        torch.manual_seed(1)
        x = torch.randn(2, 5, D)
        model(x)  # never replayed
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_bitwise(*map(gradients_of, models))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_mixtures_of_experts_with_the_routers_loss(name: str) -> None:
    """transformers records the router's values by a hook that Dynamo cannot trace.

    Expected are the gradients of eager mode, as the layers run so. The bare model is compiled in pieces, which adds up
    gradients in another order: it differs from its own eager run by units in the last place.
    """
    pytest.importorskip("transformers")
    from tests.models.families import FAMILIES

    def gradients(**asked: str) -> dict[str, Tensor]:
        model = FAMILIES[name].build()
        model.config.output_router_logits = True
        model = parallelize(model, "single", **asked) if asked else model
        for _ in range(2):
            model.zero_grad()
            FAMILIES[name].step(model).backward()
        return gradients_of(model)

    assert_bitwise(gradients(ac="selective", compile="aot_eager"), gradients())
