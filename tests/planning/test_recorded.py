"""Budgets for models that read more of their layers than the outputs: routers' logits, for a loss of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like.fake.run import FakeRun
from nemo_like.layers import find_layers
from nemo_like.planning.model.capture import trace_model
from nemo_like.planning.model.outside import outer_memory
from tests.models.families import FAMILIES

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build(name: str, router_loss: bool = True) -> nn.Module:
    model = FAMILIES[name].build()
    model.config.output_router_logits = router_loss
    return model


def gradients(name: str, model: nn.Module) -> list[Tensor]:
    for _ in range(2):
        model.zero_grad()
        FAMILIES[name].step(model).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.few(1)
@pytest.mark.parametrize("compile", [False, "aot_eager"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_budget_trains_right_with_the_routers_loss(name: str, compile: bool | str) -> None:
    """Compiled, too, gradients are those of eager mode: Dynamo cannot trace transformers' recorders in a region."""
    expected = gradients(name, build(name))
    asked = {"sample_input": FAMILIES[name].inputs(), "compile": compile}
    assert all(map(torch.equal, gradients(name, parallelize(build(name), "single", "50%", **asked)), expected))


def test_a_budget_for_gpt_oss_without_it_compiled() -> None:
    expected = gradients("gpt_oss", build("gpt_oss", False))
    asked = {"sample_input": FAMILIES["gpt_oss"].inputs(), "compile": "aot_eager"}
    model = parallelize(build("gpt_oss", False), "single", "50%", **asked)
    assert all(map(torch.equal, gradients("gpt_oss", model), expected))


def test_what_the_router_keeps_for_the_loss_is_counted() -> None:
    """Every layer's logits, (24 tokens, 4 experts) in float32, wait for the loss: at the last layer's call, those before."""
    left = {}
    for router_loss in (True, False):
        model = build("mixtral", router_loss)
        layers = find_layers(model)
        traced = trace_model(model, layers, FAMILIES["mixtral"].inputs())
        events = outer_memory(model, layers, traced).events
        before = events.log[: events.calls[-1].begin]
        gone = {number for number, size in before if not size}
        left[router_loss] = sum(size for number, size in before if number not in gone)
    assert left[True] - left[False] == 24 * 4 * 4 * (len(layers) - 1)


def test_counts_of_kinds_are_planned_by_their_number() -> None:
    """The routers' loss of transformers 5.17 counts the tokens of each expert by ``bincount(..., minlength=experts)``."""
    ids = torch.tensor([3, 1, 3])
    with FakeRun() as run:
        fake = run.like(ids)
        assert (
            torch.bincount(fake, minlength=4).shape == (4,) and torch.bincount(fake, minlength=4).dtype is torch.int64
        )
        for dtype, counted in ((torch.float32, torch.float32), (torch.bfloat16, torch.float64)):
            assert torch.bincount(fake, run.like(torch.ones(3, dtype=dtype)), minlength=4).dtype is counted
        assert torch.bincount(ids).tolist() == [0, 1, 0, 2]  # small integers are really computed
        with pytest.raises(RuntimeError, match="bincount"):
            torch.bincount(fake)
