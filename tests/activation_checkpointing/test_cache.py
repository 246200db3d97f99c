"""The key/value cache in training: off for the call where something is replayed, and the model's config as it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import apply_activation_checkpointing, parallelize, plan_for
from nemo_like.planning.planner import apply_plan
from tests.checks import assert_bitwise, gradients_of, step
from tests.models.decoders import batch, loss_of
from tests.models.decoders import build as build_decoder

hf = pytest.importorskip("transformers", reason="needs the extra 'hf'")

MODES = ("full", "selective", "submodule", "sequential")


def build(name: str) -> nn.Module:
    """As transformers builds it: with a cache."""
    return build_decoder(name, use_cache=True)


def _packed_loss(model: nn.Module, ignored: int | None = None, **more: object) -> torch.Tensor:
    """Two documents of 8 tokens in one row, told apart by their positions alone; `ignored`: a place without a label."""
    torch.manual_seed(3)
    ids = batch(2)
    labels = ids.clone()
    if ignored is not None:
        labels[:, ignored] = -100
    return model(input_ids=ids, labels=labels, position_ids=torch.arange(8).repeat(2).expand(2, 16), **more).loss


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_packed_documents_are_apart_without_checkpointing_too(name: str) -> None:
    """No attention over a document's edge, though the cache is on, and no loss for a document's first token."""
    none = _packed_loss(parallelize(build(name), "single", "none"))
    assert torch.equal(none, _packed_loss(build(name), ignored=8, use_cache=False))
    assert not torch.equal(none, _packed_loss(build(name), ignored=8)), "transformers masks by position without a cache"


def _packed_step(model: nn.Module, **more: object) -> dict[str, torch.Tensor]:
    loss = _packed_loss(model, **more)
    loss.backward()
    return {"loss": loss, **gradients_of(model)}


@pytest.mark.parametrize("ac", MODES)
def test_packed_documents_train_the_same_under_every_mode(ac: str) -> None:
    """With the cache on, which keeps transformers from telling documents apart."""
    steps = [_packed_step(parallelize(build("llama"), "single", mode)) for mode in (ac, "none")]
    assert_bitwise(*steps)


@pytest.mark.parametrize("ac", MODES)
def test_a_mode_trains_what_the_bare_model_trains_without_a_cache(ac: str) -> None:
    model = apply_activation_checkpointing(build("llama"), ac)
    assert_bitwise(_packed_step(model), _packed_step(build("llama"), use_cache=False))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("ac", MODES)
def test_attention_of_every_kind_trains_to_the_bit_as_without_a_cache(ac: str, attention: str, dropout: float) -> None:
    def model() -> nn.Module:
        made: Any = build("llama")
        made.set_attn_implementation(attention)
        for layer in made.model.layers:
            layer.self_attn.attention_dropout = dropout
        return made

    ids = {"input_ids": batch(), "labels": batch()}
    assert_bitwise(step(apply_activation_checkpointing(model(), ac), **ids), step(model(), use_cache=False, **ids))


@pytest.mark.parametrize("ac", [None, "none", *MODES])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_the_config_stays_as_it_was(name: str, ac: str | None) -> None:
    model = build(name)
    before = copy.deepcopy(model.config.to_dict())
    parallelize(model, "single", ac)
    loss_of(model, batch(2)).backward()
    assert model.config.to_dict() == before
    assert model.config.use_cache is True


def test_a_plan_leaves_the_config_as_it_was() -> None:
    model, ids = build("llama"), batch(2)
    before = copy.deepcopy(model.config.to_dict())
    plan = plan_for(model, ac="50%", sample_input={"input_ids": ids, "labels": ids})
    for apply in (apply_plan, lambda m, p: apply_activation_checkpointing(m, p)):
        planned = build("llama")
        apply(planned, plan)
        loss_of(planned, batch(2)).backward()
        assert planned.config.to_dict() == before


def test_without_gradients_a_model_caches_as_its_config_says() -> None:
    model = parallelize(build("llama"), "single", "full")
    with torch.no_grad():
        assert model(batch(2)).past_key_values is not None
    assert model(batch(2)).past_key_values is None


def test_a_model_inside_another() -> None:
    model = apply_activation_checkpointing(nn.Sequential(build("llama")), "full")
    loss_of(model, batch(2)).backward()
    assert model[0].config.use_cache is True


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_trains_without_a_cache_too(way) -> None:
    model = way(apply_activation_checkpointing(build("llama"), "full"))
    loss_of(model, batch(2)).backward()


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_cache_that_was_asked_for_is_refused_however_it_is_handed_on(name: str, ac: str) -> None:
    # GPT-2 hands its cache to each block as a positional argument.
    model = apply_activation_checkpointing(build(name), ac)
    with pytest.raises(RuntimeError, match=r"\.0 was called with (past_key_values|cache)= .*use_cache=False"):
        model(batch(2), use_cache=True)
    with torch.no_grad():
        model(batch(2), use_cache=True)
