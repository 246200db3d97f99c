"""Every mode gives the loss and the gradients of the bare model, to the bit: one table of models and modes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from nemo_like import CheckpointConfig, CheckpointWrapper, MemoryBudget, OffloadConfig, parallelize
from nemo_like._util.module_tree import bare_name
from nemo_like.layers import find_layers
from nemo_like.offload import offloader_of
from tests.models import decoders, kv_shared
from tests.models.families import FAMILIES

pytest.importorskip("transformers")


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

    def loss(model: nn.Module) -> Tensor:
        torch.manual_seed(3)
        return decoders.loss_of(model, ids)

    return Model(build, {"input_ids": ids}, loss)


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
    sample = copy.deepcopy(dict(model.sample))
    made = parallelize(model.build(), "single", sample_input=sample, device="cpu", **arguments)
    loss = model.loss(made)
    loss.backward()
    found = {bare_name(name): p.grad for name, p in made.named_parameters() if p.grad is not None}
    return {"the loss": loss.detach(), **found}, made


def _differences(model: Model, modes: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    bare, _ = _step(model, {"ac": "none"})
    assert bare["the loss"].isfinite() and len(bare) > 1
    for mode, arguments in modes.items():
        got, made = _step(model, arguments)
        if arguments["ac"] in WORDS and not any(isinstance(module, CheckpointWrapper) for module in made.modules()):
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
    # Shared layers have k_proj and v_proj that get no gradient: neither in the bare model.
    assert list(_differences(MODELS[f"shared {name}"], WORDS if name == "gemma4" else SHARED)) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["plain", "llama", "mixtral", "gemma3", "qwen3", "gpt2"])
def test_compiled_layers_train_as_eager_ones(name: str) -> None:
    torch.compiler.reset()
    assert list(_differences(MODELS[f"decoder {name}"], COMPILED)) == []
    torch.compiler.reset()
