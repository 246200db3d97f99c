"""Regions inside compiled layers that Dynamo cannot trace: the engine takes them, and gradients are those of eager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like._util.log import forget_announcements
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, DecisionTable, Policy, SelectivePolicy
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from tests.models.blocks import train

D = 16


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    forget_announcements()
    yield
    torch.compiler.reset()


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


class Stack(nn.Module):
    def __init__(self, **kwargs: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Router(**kwargs) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


@pytest.mark.few(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("ac", ["selective", "submodule", "full"])
def test_what_was_kept_may_be_changed_in_place(ac: str, breaks: bool, backend: str) -> None:
    if ac == "submodule":
        model, expected = (
            nn.Sequential(Stack(breaks=breaks), Stack(breaks=breaks)),
            train(nn.Sequential(Stack(breaks=breaks), Stack(breaks=breaks))),
        )
        model = parallelize(model, "single", ac, layers=["0", "1"], compile=backend)
    else:
        model, expected = parallelize(Stack(breaks=breaks), "single", ac, compile=backend), train(Stack(breaks=breaks))
    assert same(train(model), expected)


def test_it_is_said_once_that_a_region_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "nemo_like"):
        train(parallelize(Stack(breaks=False), "single", "selective", compile="aot_eager"))
        assert "it runs eagerly" not in caplog.text
        train(parallelize(Stack(breaks=True), "single", "selective", compile="aot_eager"))
    assert caplog.text.count("it runs eagerly") == 1
    assert "region 'layers.0' was to be compiled" in caplog.text


@pytest.mark.parametrize("policy", [SelectivePolicy(), SelectivePolicy(every_nth_matmul=None)])
def test_the_module_is_as_forward_found_it_in_the_replay(policy: Policy) -> None:
    """PyTorch's own checkpointing, to which Dynamo leaves the region, would count each call twice."""
    expected, model = train(Stack(breaks=True, counts=True)), Stack(breaks=True, counts=True)
    for index, layer in enumerate(model.layers):
        model.layers[index] = CheckpointWrapper(layer, policy=policy)
        model.layers[index].compile(backend="aot_eager")
    assert same(train(model), expected)
    assert [layer.calls for layer in model.layers] == [2, 2]


class Journal:
    """A transfer that notes what it was given."""

    def __init__(self) -> None:
        self.moved = 0

    def to_host(self, tensor: Tensor) -> object:
        self.moved += 1
        return _Waiting(tensor.clone())

    def prefetch(self, handle: object) -> None: ...


class _Waiting:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get(self) -> Tensor:
        return self.tensor


def test_the_policys_decisions_and_the_transfer_are_the_engines() -> None:
    journal, expected = Journal(), train(Stack(breaks=True), steps=1)
    table = DecisionTable({"aten.addmm.default": (SAVE, HOST, RECOMPUTE), "aten.topk.default": (SAVE,)})
    model = Stack(breaks=True)
    for index, layer in enumerate(model.layers):
        model.layers[index] = CheckpointWrapper(layer, policy=table, transfer=journal)
        model.layers[index].compile(backend="aot_eager")
    assert same(train(model, steps=1), expected)
    assert journal.moved == 2


def test_two_backwards_and_none() -> None:
    expected_model, model = (
        Stack(breaks=True),
        parallelize(Stack(breaks=True), "single", "selective", compile="aot_eager"),
    )
    for m in (expected_model, model):
        torch.manual_seed(1)
        x = torch.randn(2, 5, D)
        m(x)  # never replayed
        loss = m(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in expected_model.parameters()])


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_mixtures_of_experts_with_the_routers_loss(name: str) -> None:
    """transformers records the router's values by a hook that Dynamo cannot trace.

    Expected are the gradients of eager mode, as the layers run so. The bare model is compiled in pieces, which adds up
    gradients in another order: it differs from its own eager run by units in the last place.
    """
    pytest.importorskip("transformers")
    from tests.models.families import FAMILIES

    def gradients(**asked: str) -> list[Tensor]:
        model = FAMILIES[name].build()
        model.config.output_router_logits = True
        if asked:
            model = parallelize(model, "single", **asked)
        for _ in range(2):
            model.zero_grad()
            FAMILIES[name].step(model).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert same(gradients(ac="selective", compile="aot_eager"), gradients())
