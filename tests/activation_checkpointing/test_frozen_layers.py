"""Frozen layers: what runs through them holds activations as soon as an input needs a gradient, and only then."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import CheckpointConfig, apply_activation_checkpointing, parallelize
from nemo_like._util.module_tree import bare
from nemo_like.layers import find_layers
from nemo_like.profiling import MemoryProfiler
from nemo_like.resolve import config_specs
from tests.models.decoders import VOCAB, WIDTH, PlainDecoder
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


class Losing(PlainDecoder):
    """A decoder that returns its loss."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).square().mean()


def _prompt() -> nn.Module:
    return Prompted()


def _new_embeddings() -> nn.Module:
    model = Losing().requires_grad_(False)
    model.embed.requires_grad_(True)
    return model


def _upper_half() -> nn.Module:
    model = Losing().requires_grad_(False)
    model.blocks[1:].requires_grad_(True)
    return model


def _lower_half_only() -> nn.Module:
    """Frozen layers above one that trains."""
    model = Losing().requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    return model


# Layers that replay: the first one of `_upper_half` has an input that needs no gradient.
CASES: dict[str, tuple[Callable[[], nn.Module], set[int]]] = {
    "prompt tuning": (_prompt, {0, 1, 2}),
    "new embeddings": (_new_embeddings, {0, 1, 2}),
    "upper half": (_upper_half, {1, 2}),
    "lowest layer": (_lower_half_only, {0, 1, 2}),
}


def _built(case: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[case][0]().train()


def _gradients(model: nn.Module, seed: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    model(IDS).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _counting(model: nn.Module) -> Counter[int]:
    """How often each layer runs, by its index, from now on."""
    ran: Counter[int] = Counter()
    for index, layer in enumerate(find_layers(model)):
        module = bare(layer.module)
        module.forward = _counted(module.forward, ran, index)
    return ran


def _counted(forward: Callable[..., Any], ran: Counter[int], index: int) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: object, **kwargs: object) -> Any:
        ran.update([index])
        return forward(*args, **kwargs)

    return run


@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_through_frozen_layers_are_bitwise(case: str, ac: str) -> None:
    expected = _gradients(_built(case))
    assert expected
    assert _same(_gradients(parallelize(_built(case), "single", ac, device="cpu")), expected)


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
    assert _same(_gradients(model), expected)
    assert sum(ran.values()) > 3, "something is replayed"


def test_a_model_in_which_nothing_trains_passes_gradients_on_to_its_input() -> None:
    grads = []
    for ac in ("none", "full", "selective"):
        torch.manual_seed(0)
        model = parallelize(_Stack().requires_grad_(False), "single", ac, device="cpu")
        x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
        model(x).sum().backward()
        grads.append(x.grad)
    assert all(torch.equal(grad, grads[0]) for grad in grads)


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = PlainDecoder(dropout=0.0).blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_layers_that_are_thawed_or_frozen_in_the_middle_of_a_run_follow(ac: str) -> None:
    plain, model = _built("upper half"), parallelize(_built("upper half"), "single", ac, device="cpu")
    ran = _counting(model)
    for lowest in (False, True, False):
        for each in (plain, model):
            find_layers(each)[0].module.requires_grad_(lowest)
        ran.clear()
        assert _same(_gradients(model), _gradients(plain))
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
        gradients[mode] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients["none"] and _same(gradients[ac], gradients["none"])
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
        gradients[ac] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert list(gradients["none"])
    assert all(_same(gradients[ac], gradients["none"]) for ac in MODES)


def test_a_frozen_tower_takes_no_segment_of_the_layers_that_train() -> None:
    model = FAMILIES["llava"].build()
    names = {
        group: [layer.fqn for layer in find_layers(model) if layer.group == group] for group in ("vision", "language")
    }
    model.model.vision_tower.requires_grad_(False)
    found = find_layers(model)
    specs = config_specs(model, found, CheckpointConfig(enabled=True, strategy="sequential", sequential_segments=1))
    assert [list(spec.members) for spec in specs] == [names["language"], names["vision"]]
