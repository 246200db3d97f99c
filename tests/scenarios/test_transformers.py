"""Scenarios by role, written anew from the three training *cases* of transformers' `tests/test_modeling_common.py` that
every model there goes through with gradient checkpointing on (its default, re-entrant, and not), and cases of our own for
the same models: adapters, hidden states, evaluation, saving. Its `tests/test_activation_offloading.py` is TRL's: see
`test_trl.py`.

Left out: none of the three.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import CheckpointConfig, apply_activation_checkpointing
from tests.models import decoders
from tests.models.adapted import with_lora

MODES: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "submodule": "submodule",
    "sequential": "sequential",
    "re-entrant": CheckpointConfig(enabled=True, strategy="full", use_reentrant=True, profile_before_apply=False),
}
each_mode = pytest.mark.parametrize("mode", MODES)
NAMES = ("llama", "gpt2", "mixtral")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(3)
    decoders.loss_of(model, decoders.batch(2, 8)).backward()
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys() and wanted
    for name, grad in wanted.items():
        assert torch.equal(got[name], grad), name


@each_mode
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_that_trains_gets_its_gradient(name: str, mode: str) -> None:
    bare = decoders.build(name)
    wanted = gradients(bare)
    assert len(wanted) == len(list(bare.parameters()))
    assert_same(gradients(apply_activation_checkpointing(bare, MODES[mode])), wanted)


@each_mode
def test_adapters_on_a_frozen_model(mode: str) -> None:
    # The embedding is frozen too, so the first layer's input needs no gradient.
    bare = with_lora(decoders.build("llama"), ["q_proj", "v_proj"])
    wanted = gradients(bare)
    assert all("lora" in name for name in wanted)
    if mode == "re-entrant":
        # The older form replays only where an input needs a gradient.
        bare.enable_input_require_grads()
    assert_same(gradients(apply_activation_checkpointing(bare, MODES[mode])), wanted)


@pytest.mark.parametrize("mode", ["full", "selective", "submodule"])
def test_hidden_states_and_attentions_can_be_asked_for_their_gradients(mode: str) -> None:
    bare = decoders.build("llama")
    bare.set_attn_implementation("eager")
    bare.model.config.attention_dropout = 0.0

    def kept(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        out = model(decoders.batch(2, 8), output_hidden_states=True, output_attentions=True)
        asked = [*out.hidden_states, *out.attentions]
        assert len(asked) == decoders.LAYERS + 1 + decoders.LAYERS
        for tensor in asked:
            tensor.retain_grad()
        out.logits.flatten()[0].backward()
        return [tensor.grad for tensor in asked]

    wanted = kept(bare)
    got = kept(apply_activation_checkpointing(copy.deepcopy(bare), mode))
    for position, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert (mine is None) == (theirs is None), position
        assert mine is None or torch.equal(mine, theirs), position


@each_mode
def test_without_gradients_and_in_evaluation_the_model_is_the_bare_one(mode: str) -> None:
    bare, ids = decoders.build("llama").eval(), decoders.batch(2, 8)
    model = apply_activation_checkpointing(copy.deepcopy(bare), MODES[mode])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, bare(ids).logits)
        assert model.generate(ids, max_new_tokens=4, do_sample=False).equal(
            bare.generate(ids, max_new_tokens=4, do_sample=False)
        )


@each_mode
def test_what_is_saved_loads_into_the_bare_model(mode: str, tmp_path: Any) -> None:
    bare = decoders.build("llama")
    model = apply_activation_checkpointing(copy.deepcopy(bare), MODES[mode])
    model.save_pretrained(tmp_path)
    loaded = type(bare).from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == bare.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in bare.state_dict().items())


def test_the_models_own_checkpointing_beside_ours_is_refused() -> None:
    model = decoders.build("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing"):
        apply_activation_checkpointing(model, "full")
    model.gradient_checkpointing_disable()
    apply_activation_checkpointing(model, "full")
