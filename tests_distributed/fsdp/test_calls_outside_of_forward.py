"""What FSDP2 cannot do, named; and what a phase of training changes in which parameters train."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from nemo_like import FSDP2, parallelize
from nemo_like.options import TensorParallel
from tests.checks import assert_bitwise, gradients_of, same, seeded
from tests.models.blocks import Stack
from tests.models.tiny import Block
from tests.test_unchanged import everything_of
from tests_distributed.small_model import VOCAB, WIDTH, tokens
from tests_distributed.spawn import on_ranks


class Encoding(nn.Module):
    """A model with another method than forward, whose first block may use a part of the second."""

    def __init__(self, across: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.Sequential(*(Block() for _ in range(3)))
        self.head, self.across = nn.Linear(WIDTH, 2), across

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embed(ids))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(self.blocks(self.blocks[1].norm(x) if self.across else x))


@on_ranks(2)
def test_a_method_beside_forward_is_explained_and_can_be_registered(rank: int, world: int) -> None:
    bare = Encoding()
    bare.encode(tokens(2)).square().mean().backward()
    model: Any = parallelize(Encoding(), ac="full")
    with pytest.raises(RuntimeError, match=r"Embedding was called while its weights.*register_fsdp_forward_method"):
        model.encode(tokens(2))
    register_fsdp_forward_method(model, "encode")
    model.encode(tokens(2)).square().mean().backward()
    assert_bitwise(gradients_of(model), gradients_of(bare))

    model = parallelize(Encoding(across=True), ac="full")
    with pytest.raises(RuntimeError, match=r"Encoding was called while.*name the module that holds both: parallelize"):
        model(tokens(2))


@on_ranks(2)
def test_a_gradient_of_gradients_is_refused(rank: int, world: int) -> None:
    model = parallelize(Encoding(), ac="full")
    loss = model(tokens(2)).square().mean()
    with pytest.raises(RuntimeError, match="create_graph=True was asked of a backward through a model that FSDP2"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("precision", [None, "bf16"])
@on_ranks(2)
def test_phases_that_switch_what_trains(rank: int, world: int, precision: str | None) -> None:
    """The head alone in the first step, everything in the second, the embedding alone in the third."""
    model = Encoding()
    model.blocks.requires_grad_(False)
    model.embed.requires_grad_(False)
    model = parallelize(model, ac="full", precision=precision)
    always = parallelize(Encoding(), ac="full", precision=precision)
    for phase in range(3):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_((phase > 0 or "head" in name) and (phase < 2 or "embed" in name))
        for either in (model, always):
            either.zero_grad()
            either(tokens(2)).float().square().mean().backward()
        wanted = {name: parameter.grad.full_tensor() for name, parameter in always.named_parameters()}
        trained = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad}
        assert trained and all(torch.equal(wanted[name], grad) for name, grad in trained.items())


class Scaled(Encoding):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale


@pytest.mark.parametrize("strategy", [FSDP2(), "ddp"])
@on_ranks(2)
def test_a_weight_that_no_rank_reduces_does_not_train(rank: int, world: int, strategy: Any) -> None:
    model = parallelize(Scaled(), strategy, ac="none")
    model(tokens(2)).square().mean().backward()
    next(p for name, p in model.named_parameters() if name.endswith("scale")).requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"scale was frozen when parallelize\(\) was called, and requires"):
        model(tokens(2))


AUX: list[torch.Tensor] = []


class Aux(Block):
    """Keeps a loss of what it computes, or of its weight, on itself, or in a list of this file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        loss = self.up.weight.square().sum() if self.where == "weight" else y.square().mean()
        if self.where == "list":
            AUX.append(loss)
        else:
            self.kept = [loss] if self.where == "weight" else loss  # type: ignore[assignment]
        return y


def _with_aux(where: str) -> nn.Module:
    return seeded(lambda: Stack(Aux(where=where, kept=None) for _ in range(3)))


def _aux_gradients(model: nn.Module, where: str, with_output: bool) -> dict[str, torch.Tensor]:
    AUX.clear()
    out = model(torch.ones(2, WIDTH))
    kept = AUX if where == "list" else [b.kept[0] if where == "weight" else b.kept for b in model.layers]
    (sum(kept) + out.mean() * with_output if with_output else sum(kept)).backward()  # type: ignore[union-attr]
    return gradients_of(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("ac", ["full", "sequential", "none", "selective", "submodule"])
@on_ranks(2)
def test_gradients_of_what_a_layer_keeps_on_itself(rank: int, world: int, ac: str) -> None:
    cases = [(where, with_output) for where in ("attribute", "weight", "list") for with_output in (True, False)]
    wrong = []
    for where, with_output in cases:
        model = parallelize(_with_aux(where), ac=ac)
        for _ in range(2):
            wanted = _aux_gradients(_with_aux(where), where, with_output)
            if not same(_aux_gradients(model, where, with_output), wanted):
                wrong.append((where, with_output))
            model.zero_grad()
    assert not wrong, wrong


@on_ranks(2)
def test_weights_that_are_computed_and_sparse_gradients_are_refused(rank: int, world: int) -> None:
    plan = TensorParallel(2, plan={"blocks.*.up": "colwise_gather_output"})

    def refused(model: nn.Module, message: str, **axes: Any) -> None:
        before = everything_of(model)
        with pytest.raises(ValueError, match=message):
            parallelize(model, ac="none", **axes)
        assert everything_of(model) == before

    for norm in (weight_norm, spectral_norm, nn.utils.weight_norm, lambda m: prune.l1_unstructured(m, "weight", 0.5)):
        model = Encoding()
        norm(model.blocks[0].up)
        refused(model, r"'blocks.0.up' computes its weight in each forward \(.*Take it out of the", tp=plan)
    for axes in ({}, {"tp": plan}):
        model = Encoding()
        model.embed.sparse = True
        refused(model, r"'embed' has sparse=True: FSDP2 cannot reduce sparse gradients\. Build it", **axes)
