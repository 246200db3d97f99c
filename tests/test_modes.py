"""Every mode gives the loss and gradients of the original model, to the bit: models, modes of other rooms, float8."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from nemo_like import apply_activation_checkpointing, parallelize
from nemo_like._util.live_bytes import LiveBytes
from nemo_like._util.module_tree import bare_name
from nemo_like.activation_checkpointing import is_checkpointed
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.layers import find_layers
from nemo_like.offload import offloader_of
from nemo_like.options import CheckpointConfig, MemoryBudget, OffloadConfig, Precision
from nemo_like.planning.planner import plan_for
from nemo_like.precision import float8_linears
from tests.checks import assert_bitwise, seeded, step
from tests.models import decoders, kv_shared
from tests.models.decoders import batch, build
from tests.models.families import FAMILIES
from tests.models.tiny import labelled, llama


def _offloaded(ac: str, mode: str) -> dict[str, Any]:
    return {"ac": ac, "offload": OffloadConfig(mode=mode, min_bytes=0)}


WORDS: dict[str, dict[str, Any]] = {word: {"ac": word} for word in ("full", "selective", "submodule")}
SHARED: dict[str, dict[str, Any]] = WORDS | {"40%": {"ac": "40%"}, "70%": {"ac": "70%"}}
EVERY: dict[str, dict[str, Any]] = WORDS | {
    "sequential": {"ac": "sequential"},
    **{budget: {"ac": budget} for budget in ("30%", "70%", "100%", "64MiB", "auto")},
    "a budget object": {"ac": MemoryBudget(fraction=0.5)},
    **{
        f"{ac}, {mode} offloaded": _offloaded(ac, mode)
        for ac in ("full", "selective")
        for mode in ("boundary", "saved")
    },
    **{f"{ac}, all offloaded": _offloaded(ac, "all") for ac in ("none", "submodule")},
    "re-entrant": {"ac": CheckpointConfig(True, "full", use_reentrant=True, profile_before_apply=False)},
}
COMPILED: dict[str, dict[str, Any]] = {
    ac: {"ac": ac, "compile": "aot_eager"} for ac in ("none", "full", "selective", "submodule", "30%")
}


class Model(NamedTuple):
    """A model, what it is called with, and its loss after a seed."""

    build: Callable[[], nn.Module]
    sample: Mapping[str, Any]
    loss: Callable[[nn.Module], Tensor]


def _decoder(build: Callable[[], nn.Module]) -> Model:
    ids = decoders.batch(2)

    return Model(build, {"input_ids": ids}, lambda model: seeded(decoders.loss_of, model, ids, seed=3))


def _plain() -> Model:
    model = _decoder(lambda: decoders.build("plain"))
    return model._replace(sample={"ids": model.sample["input_ids"]})


MODELS: dict[str, Model] = {
    **{name: Model(family.build, family.inputs(), family.step) for name, family in FAMILIES.items()},
    **{
        f"decoder {name}": _decoder(lambda name=name: decoders.build(name))
        for name in decoders.NAMES
        if name != "plain"
    },
    "decoder plain": _plain(),
    **{f"shared {name}": _decoder(lambda name=name: kv_shared.build(name)) for name in ("gemma3n", "gemma4")},
}


def _step(model: Model, arguments: dict[str, Any]) -> tuple[dict[str, Tensor], nn.Module]:
    """The loss and each gradient by its bare name, and the model that was trained."""
    made = parallelize(model.build(), "single", sample_input=copy.deepcopy(dict(model.sample)), device="cpu", **arguments)
    loss = model.loss(made)
    loss.backward()
    found = {bare_name(name): p.grad for name, p in made.named_parameters() if p.grad is not None}
    return {"the loss": loss.detach(), **found}, made


def _differences(model: Model, modes: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    bare, _ = _step(model, {"ac": "none"})
    assert bare["the loss"].isfinite() and len(bare) > 1
    for mode, arguments in modes.items():
        got, made = _step(model, arguments)
        if arguments["ac"] in WORDS and not any(is_checkpointed(module) for module in made.modules()):
            yield f"{mode}: nothing is checkpointed"
        if "offload" in arguments and not offloader_of(made).stats.moved_bytes:
            yield f"{mode}: nothing was moved"
        if got.keys() != bare.keys():
            yield f"{mode}: {got.keys() ^ bare.keys()}"
        yield from (f"{mode}: {name}" for name in bare.keys() & got.keys() if not torch.equal(got[name], bare[name]))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_without_checkpointing(name: str) -> None:
    assert Counter(layer.group for layer in find_layers(FAMILIES[name].build())) == FAMILIES[name].layers
    assert list(_differences(MODELS[name], WORDS)) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "plain", "mixtral", "gpt2", "qwen3", "gemma3"])
def test_a_decoder_trains_alike_in_every_mode(name: str) -> None:
    assert list(_differences(MODELS[f"decoder {name}"], EVERY)) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
def test_layers_that_share_keys_and_values_train_alike(name: str) -> None:
    # Shared layers have k_proj and v_proj that get no gradient: neither in the original model.
    assert list(_differences(MODELS[f"shared {name}"], WORDS if name == "gemma4" else SHARED)) == []


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["plain", "llama", "mixtral", "gemma3", "qwen3", "gpt2"])
def test_compiled_layers_train_as_eager_ones(name: str) -> None:
    assert list(_differences(MODELS[f"decoder {name}"], COMPILED)) == []


IDS = batch(2)
SAMPLE = {"input_ids": IDS}


def test_a_budget_says_beforehand_what_it_costs(logs: pytest.LogCaptureFixture) -> None:
    logs.set_level("INFO", "nemo_like")
    parallelize(build("llama"), ac="50%", sample_input=SAMPLE)
    assert "predicted peak" in logs.text and "of a forward pass" in logs.text


def test_a_saved_plan_is_a_mode(tmp_path: Path) -> None:
    plan_for(build("llama"), ac="40%", sample_input=SAMPLE, world_size=1).save(tmp_path / "plan.json")
    model = build("llama")
    models = parallelize(model, ac=Plan.load(tmp_path / "plan.json", model)), parallelize(build("llama"), ac="none")
    assert_bitwise(*(step(each, input_ids=IDS, labels=IDS) for each in models))
    with pytest.raises(ValueError, match="plan was made for"):
        parallelize(build("gpt2"), ac=Plan.load(tmp_path / "plan.json"))


def test_a_config_that_profiles_first_checkpoints_only_large_layers() -> None:
    config = CheckpointConfig(enabled=True, strategy="full", memory_threshold_mb=1e3)
    model = parallelize(build("llama"), ac=config, sample_input=SAMPLE)
    assert not any(is_checkpointed(layer) for layer in model.model.layers)
    config = CheckpointConfig(enabled=True, strategy="full", memory_threshold_mb=1e-3)
    model = parallelize(build("llama"), ac=config, sample_input=SAMPLE)
    assert all(is_checkpointed(layer) for layer in model.model.layers)


@pytest.mark.parametrize("patterns", [((), ("model.layers.[02]",)), (("model.layers.1",), ("**",))])
def test_patterns_choose_layers_and_those_that_ask_beat_those_that_forbid(
    patterns: tuple[tuple[str, ...], ...],
) -> None:
    include, exclude = patterns
    config = CheckpointConfig(
        True, "full", profile_before_apply=False, include_patterns=include, exclude_patterns=exclude
    )
    assert [is_checkpointed(layer) for layer in parallelize(build("llama"), ac=config).model.layers] == [False, True, False]


def test_a_meta_model_is_not_measured_and_says_so(logs: pytest.LogCaptureFixture) -> None:
    parallelize(build("llama").to("meta"), ac="sequential", sample_input=SAMPLE)
    assert "is on the meta device and cannot run" in logs.text


def _model() -> Any:
    return seeded(llama, num_hidden_layers=2, max_position_embeddings=32)


def _trained(precision: Any, ac: str) -> dict[str, Tensor]:
    model = parallelize(_model(), ac=ac, precision=precision, device="cpu")
    return step(model, **labelled(torch.arange(32).reshape(2, 16)))


@pytest.mark.parametrize("word", ["fp8", "fp8-rowwise"])
def test_every_mode_gives_the_same_bits(word: str) -> None:
    expected, lowered = _trained(word, "none"), _trained("bf16", "none")["loss"]
    assert expected["loss"] != lowered and abs(expected["loss"] - lowered) < 0.05 * lowered
    for ac in ("full", "selective", "submodule", "sequential"):
        assert_bitwise(_trained(word, ac), expected, ac)


def test_linears_of_layers_alone_are_replaced_and_names_stay() -> None:
    float8 = pytest.importorskip("torchao.float8.float8_linear")
    names = [name for name, _ in _model().named_parameters()]
    model = parallelize(_model(), ac="none", precision="fp8", device="cpu")
    found = [name for name, module in model.named_modules() if isinstance(module, float8.Float8Linear)]
    assert len(found) == 2 * 7 and not any("lm_head" in name for name in found)
    assert [name for name, _ in model.named_parameters()] == names


def test_what_was_not_tried_is_refused_before_a_change() -> None:
    model = _model()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="precision is 'fp8-gather' with tp=2: torchao gathers no weights in float8"):
        parallelize(model, tp=2, precision="fp8-gather")
    with pytest.raises(ValueError, match=r"Precision\.matmuls is 'fp4'"):
        Precision("bf16", matmuls="fp4")
    assert {name: type(module) for name, module in model.named_modules()} == before


def _held(word: str | None, ac: str) -> tuple[int, list[int]]:
    """Bytes that forward leaves behind, and the sizes of those storages that have as many elements as a weight."""
    model = _model().bfloat16()
    if word is not None:
        float8_linears(list(model.model.layers), word, "cpu")
    apply_activation_checkpointing(model, ac)
    weights = {p.numel() for p in model.model.layers.parameters() if p.dim() == 2}
    with LiveBytes() as live:
        loss = model(**labelled(torch.arange(33).reshape(3, 11))).loss  # rows of no weight's size
        held = live.live
        sizes = list(live.sizes.values())
    loss.backward()
    return held, [size for size in sizes if any(size == n * bytes for n in weights for bytes in (1, 2, 4))]


@pytest.mark.parametrize("word", ["fp8", "fp8-rowwise"])
def test_nothing_of_a_weights_size_is_kept_for_backward(word: str) -> None:
    """Neither ``abs(W)``, of which a scale is the largest, nor the weight in float8."""
    for ac in ("none", "full", "selective", "submodule", "sequential"):
        held, sizes = _held(word, ac)
        plain, _ = _held(None, ac)
        assert sizes == [], ac
        scales = 2 * 7 * 4 * 2 * (64 + 33)  # at most: of each linear's rows and columns, float32
        assert held <= plain + (scales if ac == "selective" else 0), (ac, held, plain)


@pytest.mark.parametrize("word", ["fp8", "fp8-rowwise"])
def test_scales_are_no_state_that_a_replay_could_change(word: str) -> None:
    for ac in ("none", "full", "selective"):
        model = parallelize(_model(), ac=ac, precision=word, device="cpu")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert {name for name, _ in model.named_buffers()} == {name for name, _ in _model().named_buffers()}
        first, second = (model(**labelled(torch.arange(32).reshape(2, 16))).loss for _ in range(2))
        (first + second).backward()
        assert torch.equal(first, second)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
