"""Frozen layers: what runs through them holds activations as soon as an input needs a gradient, and only then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nemo_like import CheckpointConfig, apply_activation_checkpointing, parallelize
from nemo_like._util.module_tree import bare
from nemo_like.layers import find_layers
from nemo_like.profiling import MemoryProfiler
from nemo_like.resolve import config_specs
from tests.checks import assert_bitwise, gradients_of, step
from tests.models.blocks import Stack, count_runs, under
from tests.models.decoders import VOCAB, WIDTH, DecoderWithLoss, PlainDecoder
from tests.models.families import FAMILIES

MODES = ("full", "selective", "submodule", "sequential")
IDS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))


class Prompted(nn.Module):
    """Prompt tuning: trained vectors before the tokens, and a decoder in which nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = PlainDecoder().requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(4, WIDTH))  # registered behind the layers, as adapters are

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> ()
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.decoder.embed(ids)], dim=1)
        for block in self.decoder.blocks:
            x = block(x)
        return self.decoder.head(self.decoder.norm(x)).square().mean()


def _trained(*trained: str) -> Callable[[], nn.Module]:
    """What makes a decoder of which only these parts train."""

    def make() -> nn.Module:
        model = DecoderWithLoss().requires_grad_(False)
        for name in trained:
            model.get_submodule(name).requires_grad_(True)
        return model

    return make


# Layers that replay: the first one of "upper half" has an input that needs no gradient.
CASES: dict[str, tuple[Callable[[], nn.Module], set[int]]] = {
    "prompt tuning": (Prompted, {0, 1, 2}),
    "new embeddings": (_trained("embed"), {0, 1, 2}),
    "upper half": (_trained("blocks.1", "blocks.2"), {1, 2}),
    "lowest layer": (_trained("blocks.0"), {0, 1, 2}),
}


def _built(case: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[case][0]().train()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return step(model, IDS, seed=3)


def _counting(model: nn.Module) -> Counter[int]:
    """How often each layer runs, by its index, from now on."""
    ran: Counter[int] = Counter()
    for index, layer in enumerate(find_layers(model)):
        count_runs(bare(layer.module), index, ran)
    return ran


@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_through_frozen_layers_are_bitwise(case: str, ac: str) -> None:
    expected = _gradients(_built(case))
    assert len(expected) > 1
    assert_bitwise(_gradients(parallelize(_built(case), "single", ac, device="cpu")), expected)


@pytest.mark.parametrize("ac", ["full", "selective"])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_replayed_where_a_gradient_flows_through_it_and_only_there(case: str, ac: str) -> None:
    model = parallelize(_built(case), "single", ac, device="cpu")
    ran = _counting(model)
    _gradients(model)
    assert ran == {index: 2 if index in CASES[case][1] else 1 for index in range(3)}


@pytest.mark.parametrize("case", CASES)
def test_frozen_layers_hold_their_inputs_only(case: str) -> None:
    held = {}
    for ac in ("none", "full"):
        report = MemoryProfiler(apply_activation_checkpointing(_built(case), ac)).profile({"ids": IDS}, 1)
        held[ac] = {int(row.name.rpartition(".")[2]): row.activation_bytes for row in report}
    entered = 2 * (12 if case == "prompt tuning" else 8) * WIDTH * 4  # (B, T, D) in float32, the prompt's places too
    for index in range(3):
        if index in CASES[case][1]:
            assert held["full"][index] == entered < held["none"][index]
        else:
            assert held["full"][index] == held["none"][index] == 0


@pytest.mark.few(5)
@pytest.mark.parametrize("budget", ["20%", "60%"])
@pytest.mark.parametrize("case", CASES)
def test_a_budget_counts_frozen_layers_that_gradients_flow_through(case: str, budget: str) -> None:
    expected = _gradients(_built(case))
    model = parallelize(_built(case), "single", budget, sample_input={"ids": IDS}, device="cpu")
    ran = _counting(model)
    assert_bitwise(_gradients(model), expected)
    assert sum(ran.values()) > 3, "something is replayed"


def test_a_model_in_which_nothing_trains_passes_gradients_on_to_its_input() -> None:
    grads = []
    for ac in ("none", "full", "selective"):
        model = under(ac, lambda: Stack(PlainDecoder(dropout=0.0).blocks).requires_grad_(False))
        x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
        grads += torch.autograd.grad(model(x).sum(), x)
    assert_bitwise(grads, grads[:1] * 3)


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_layers_that_are_thawed_or_frozen_in_the_middle_of_a_run_follow(ac: str) -> None:
    plain, model = _built("upper half"), parallelize(_built("upper half"), "single", ac, device="cpu")
    ran = _counting(model)
    for lowest in (False, True, False):
        for each in (plain, model):
            find_layers(each)[0].module.requires_grad_(lowest)
        ran.clear()
        assert_bitwise(_gradients(model), _gradients(plain))
        assert ran[0] == (2 if lowest else 1)


@pytest.mark.parametrize("ac", MODES)
def test_stage_one_of_a_vision_language_model(ac: str) -> None:
    """Only the projector trains: the tower below it holds nothing, the language model above it does."""
    family, gradients = FAMILIES["llava"], {}
    for mode in ("none", ac):
        model = family.build().requires_grad_(False)
        model.model.multi_modal_projector.requires_grad_(True)
        apply_activation_checkpointing(model, mode)
        ran = _counting(model)
        family.step(model).backward()
        gradients[mode] = gradients_of(model)
    assert gradients["none"]
    assert_bitwise(gradients[ac], gradients["none"])
    groups = [layer.group for layer in find_layers(model)]
    if ac in ("full", "selective"):
        assert ran == {index: 1 if group == "vision" else 2 for index, group in enumerate(groups)}


def test_prompt_tuning_by_peft() -> None:
    peft = pytest.importorskip("peft")
    gradients = {}
    for ac in ("none", *MODES):
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        torch.manual_seed(0)
        model = peft.get_peft_model(FAMILIES["llama"].build(), config)
        apply_activation_checkpointing(model, ac)
        FAMILIES["llama"].step(model).backward()
        gradients[ac] = gradients_of(model)
        assert gradients["none"]
        assert_bitwise(gradients[ac], gradients["none"], ac)


def test_a_frozen_tower_takes_no_segment_of_the_layers_that_train() -> None:
    model = FAMILIES["llava"].build()
    names = {
        group: [layer.fqn for layer in find_layers(model) if layer.group == group] for group in ("vision", "language")
    }
    model.model.vision_tower.requires_grad_(False)
    found = find_layers(model)
    specs = config_specs(model, found, CheckpointConfig(enabled=True, strategy="sequential", sequential_segments=1))
    assert [list(spec.members) for spec in specs] == [names["language"], names["vision"]]
