"""Forty-two kinds of model: layers found, one training step under each mode bitwise equal to no checkpointing."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

pytest.importorskip("transformers")

from nemo_like import apply_activation_checkpointing
from nemo_like.layers import find_layers
from tests.models.adapted import k_bit, with_lora
from tests.models.families import FAMILIES

MODES = ("full", "selective", "submodule")


def plain_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


# --------------------------------------------------------------------------------------------------------------- scopes

VLMS = ("qwen2_vl", "qwen3_vl", "llava", "gemma3", "smolvlm", "mistral3")
TOWERS = {"vision": ("vision", "visual"), "language": ("language", "text")}


@pytest.mark.parametrize("name", VLMS)
@pytest.mark.parametrize("scope", ["vision", "language", "multimodal", "all"])
def test_scopes_wrap_exactly_the_named_towers(name: str, scope: str) -> None:
    """Both towers are seen; a scope touches its own and nothing else."""
    model = FAMILIES[name].build()
    wanted = {"multimodal": ("vision",), "all": ("vision", "language")}.get(scope, (scope,))
    expected = {layer.fqn for layer in find_layers(model) if layer.group in wanted}
    apply_activation_checkpointing(model, "full", scope=scope)
    wrapped = {plain_name(n) for n, module in model.named_modules() if isinstance(module, CheckpointWrapper)}
    assert wrapped == expected
    for group in ("vision", "language"):
        in_group = [fqn for fqn in wrapped if any(word in fqn for word in TOWERS[group])]
        assert bool(in_group) == (group in wanted)


def count_runs(module: nn.Module, name: str, ran: Counter[str]) -> None:
    """Count the runs of a module's forward, those in recomputation too, where a hook is not called."""
    own = module.forward

    @functools.wraps(own)
    def forward(*args: object, **kwargs: object) -> object:
        ran.update([name])
        return own(*args, **kwargs)

    module.forward = forward


@pytest.mark.parametrize("name", VLMS)
def test_frozen_towers_are_not_replayed(name: str) -> None:
    model = FAMILIES[name].build()
    towers = {
        fqn: "vision" if any(word in fqn for word in TOWERS["vision"]) else "language" for fqn, _ in _layers(model)
    }
    ran: Counter[str] = Counter()
    for fqn, module in _layers(model):
        count_runs(module, fqn, ran)
        if towers[fqn] == "vision":
            module.requires_grad_(False)
    apply_activation_checkpointing(model, "full")
    for other in model.modules():  # what stands before the tower's layers is frozen, too
        if "vision" in type(other).__name__.lower():
            other.requires_grad_(False)
    FAMILIES[name].step(model).backward()
    assert ran == {fqn: 1 if tower == "vision" else 2 for fqn, tower in towers.items()}


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(layer.fqn, layer.module) for layer in find_layers(model)]


def test_scope_on_a_model_without_that_tower_is_an_error() -> None:
    """``scope="vision"`` on a language model must not be a silent no-op."""
    model = FAMILIES["llama"].build()
    with pytest.raises(ValueError, match="'vision' selects no layer; this model has 2 language layers"):
        apply_activation_checkpointing(model, "selective", scope="vision")
    assert not any(isinstance(module, CheckpointWrapper) for module in model.modules())


def test_language_scope_on_an_unknown_plain_model() -> None:
    """A plain decoder is language, so that ``scope="language"`` does something there."""
    model = FAMILIES["module_list"].build()
    apply_activation_checkpointing(model, "full", scope="language")
    assert all(isinstance(block, CheckpointWrapper) for block in model.body)


# ------------------------------------------------------------------------------------------------- adapters and k bits


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "gemma3", "smolvlm"])
def test_peft_keeps_every_tower(name: str) -> None:
    """A vision-language model inside a PEFT wrapper still has a vision tower."""
    bare = find_layers(FAMILIES[name].build())
    adapted = with_lora(FAMILIES[name].build(), ["q_proj", "v_proj"])
    found = find_layers(adapted)
    assert [layer.fqn for layer in found] == [f"base_model.model.{layer.fqn}" for layer in bare]
    assert [layer.group for layer in found] == [layer.group for layer in bare]


@pytest.mark.parametrize("name", ["llama", "llava", "gpt2"])
def test_lora_gradients_are_bitwise_equal(name: str) -> None:
    """Adapters get gradients although the embeddings, and so a layer's input, need none."""
    family = FAMILIES[name]
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"]
    grads = {}
    for mode in ("none", *MODES):
        model = with_lora(family.build(), targets)
        apply_activation_checkpointing(model, mode)
        family.step(model).backward()
        grads[mode] = {plain_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads["none"] and all("lora_" in key for key in grads["none"])
    for mode in MODES:
        assert grads[mode].keys() == grads["none"].keys(), mode
        assert all(torch.equal(grads[mode][key], grad) for key, grad in grads["none"].items()), mode


def test_frozen_tower_with_adapters_is_checkpointed() -> None:
    """Every base weight is frozen; gradients flow through the layers above those that hold adapters."""
    model = with_lora(FAMILIES["llava"].build(), r".*vision_tower.*q_proj")
    ran: Counter[str] = Counter()
    for fqn, module in _layers(model):
        count_runs(module, fqn, ran)
    apply_activation_checkpointing(model, "full")
    FAMILIES["llava"].step(model).backward()
    assert set(ran.values()) == {2} and len(ran) == 4


def test_k_bit_weights_are_found_and_checkpointed() -> None:
    grads = {}
    for mode in ("none", *MODES):
        model = k_bit(FAMILIES["llama"].build())
        assert len(find_layers(model)) == 2
        apply_activation_checkpointing(model, mode)
        FAMILIES["llama"].step(model).backward()
        grads[mode] = [p.grad for n, p in model.named_parameters() if "q_proj" in n]
    for mode in MODES:
        assert all(torch.equal(got, expected) for got, expected in zip(grads[mode], grads["none"])), mode
