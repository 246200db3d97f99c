"""Frozen layers hold activations where an input needs a gradient; activated LoRA; models that take gradients in forward."""

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
from tests.checks import assert_bitwise, gradients_of, same, seeded, step
from tests.models.blocks import MODES, Layer, Stack, count_runs, under
from tests.models.decoders import VOCAB, WIDTH, DecoderWithLoss, PlainDecoder, Prompted
from tests.models.families import FAMILIES, text

peft = pytest.importorskip("peft")

IDS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))


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
    return seeded(CASES[case][0]).train()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return step(model, IDS, seed=3)


def _counting(model: nn.Module) -> Counter[int]:
    """How often each layer runs, by its index, from now on."""
    return count_runs((index, bare(layer.module)) for index, layer in enumerate(find_layers(model)))


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
    reports = {
        ac: MemoryProfiler(apply_activation_checkpointing(_built(case), ac)).profile({"ids": IDS}, 1)
        for ac in ("none", "full")
    }
    held = {
        ac: {int(row.name.rpartition(".")[2]): row.activation_bytes for row in report} for ac, report in reports.items()
    }
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


EXPERTS = dict(r=2, target_parameters=["mlp.experts.gate_up_proj"], init_lora_weights=False)


@pytest.mark.parametrize(
    ("name", "config", "forwards"),
    [
        ("llama", lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), 1),
        # PEFT writes a fused weight's own values into it in each forward: a schedule of a pipeline makes several of them.
        ("qwen3_moe", lambda: peft.LoraConfig(**EXPERTS), 2),
    ],
)
def test_forwards_before_a_backward_with_prompts_and_with_adapters_on_fused_experts(
    name: str, config: Callable[[], Any], forwards: int
) -> None:
    gradients = {}
    for ac in ("none", *MODES):
        model = seeded(lambda: peft.get_peft_model(FAMILIES[name].build(), config()))
        apply_activation_checkpointing(model, ac)
        for loss in [FAMILIES[name].step(model) for _ in range(forwards)]:
            loss.backward()
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


INVOCATION = [5, 7]


def batch() -> dict[str, Any]:
    """Each sequence has the invocation tokens at a place of its own."""
    made = text()
    ids = made["input_ids"].masked_fill(torch.isin(made["input_ids"], torch.tensor(INVOCATION)), 9)
    for row, at in enumerate((2, 6)):
        ids[row, at : at + 2] = torch.tensor(INVOCATION)
    return {"input_ids": ids, "labels": ids}


def adapted(invocation: list[int] | None = None) -> nn.Module:
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM",
        init_lora_weights=False, lora_dropout=0.1, alora_invocation_tokens=invocation,
    )  # fmt: skip
    torch.manual_seed(0)
    return peft.get_peft_model(FAMILIES["llama"].build(), config).train()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    step(model, seed=3, **batch())
    return step(model, seed=3, **batch())


@pytest.mark.parametrize("ac", MODES)
def test_gradients_are_those_of_the_bare_model(ac: str) -> None:
    expected = gradients(adapted(INVOCATION))
    assert not same(gradients(adapted()), expected)  # so the offsets do count
    assert_bitwise(gradients(parallelize(adapted(INVOCATION), "single", ac)), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", ["60%", "30%"])
def test_budgets_are_planned_with_the_adapters_tokens(budget: str) -> None:
    """Which tokens the adapters see hangs on the ids alone, and a run without weights has those."""
    model = parallelize(adapted(INVOCATION), "single", budget, sample_input=batch())
    assert_bitwise(gradients(model), gradients(adapted(INVOCATION)))
    bare, without = adapted(INVOCATION), batch()["input_ids"][:, 4:]  # one sequence has no invocation now
    again = {"input_ids": without, "labels": without}
    assert_bitwise(step(model, seed=3, **again), step(bare, seed=3, **again))


D = 8


def _energy(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    return layer.down(torch.tanh(layer.up(x) * positions))


def _descending(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Its gradient stays in the graph."""
    (force,) = torch.autograd.grad(_energy(layer, x, positions).square().sum(), x, create_graph=True)
    return x - 0.1 * force


def _twice(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Its gradient is a number, and its graph is used again."""
    energy = _energy(layer, x, positions).square().sum()
    (force,) = torch.autograd.grad(energy, x, retain_graph=True)
    return x - 0.1 * force + 0.01 * energy


def _from_leaf(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Its gradient is that of a leaf made inside."""
    leaf = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(_energy(layer, leaf, positions).square().sum(), leaf, create_graph=True)
    return x - 0.1 * force


class ForceField(nn.Module):
    def __init__(self, run: Callable[..., Tensor], when: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(run, up=nn.Linear(D, D), down=nn.Linear(D, D)) for _ in range(4))
        self.head, self.when = nn.Linear(D, 1), when

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.linspace(0.5, 1.5, D).repeat(3, 1).requires_grad_()
        h, forces = x.clone().requires_grad_(), torch.zeros(())
        for layer in self.layers:
            h = layer(h, positions)
            if self.when == "between":
                (force,) = torch.autograd.grad(self.head(h).sum(), positions, create_graph=True)
                forces = forces + force.square().sum()
        energy = self.head(h).sum()
        if self.when == "at the end":
            (force,) = torch.autograd.grad(energy, positions, create_graph=True)
            forces = force.square().sum()
        return energy + forces


def _own_gradients(model: nn.Module) -> dict[str, Tensor]:
    x = seeded(torch.randn, 3, D, seed=1)
    step(model, x)
    return step(model, x)


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
@pytest.mark.parametrize("when", ["never", "between", "at the end"])
@pytest.mark.parametrize("run", [lambda layer, x, at: x + _energy(layer, x, at), _descending, _twice, _from_leaf])
def test_models_that_take_gradients_in_forward(run: Callable[..., Tensor], when: str, ac: str) -> None:
    assert_bitwise(
        _own_gradients(parallelize(ForceField(run, when), "single", ac)), _own_gradients(ForceField(run, when))
    )
