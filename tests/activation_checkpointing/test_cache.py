"""The key/value cache in training: off for the call where something is replayed; Gemma's sharing of keys and values."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import apply_activation_checkpointing, parallelize, plan_for
from nemo_like.activation_checkpointing import (
    apply_selective_checkpointing_to_layers,
    apply_submodule_checkpointing,
    detect_kv_sharing_and_maybe_disable_cache,
    is_checkpointed,
)
from nemo_like.activation_checkpointing.kv_sharing import has_kv_sharing, shares_states_explicitly
from nemo_like.layers import find_layers
from nemo_like.planning.planner import apply_plan
from tests.checks import assert_bitwise, backward, gradients_of, seeded, step
from tests.models.decoders import batch, loss_of
from tests.models.decoders import build as build_decoder
from tests.models.kv_shared import build as build_sharing

hf = pytest.importorskip("transformers")

MODES = ("full", "selective", "submodule", "sequential")


def build(name: str) -> nn.Module:
    """As transformers builds it: with a cache."""
    return build_decoder(name, use_cache=True)


def _packed_loss(model: nn.Module, ignored: int | None = None, **more: object) -> torch.Tensor:
    """Two documents of 8 tokens in one row, told apart by their positions alone; `ignored`: a place without a label."""
    ids = seeded(batch, 2, seed=3)
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
    return {"loss": backward(_packed_loss(model, **more)), **gradients_of(model)}


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


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_whole_layers_are_replayed_where_states_are_passed_explicitly(name: str) -> None:
    model = parallelize(build_sharing(name), "single", "full")
    layers = [layer.module for layer in find_layers(model)]
    assert shares_states_explicitly(layer for layer in layers)
    assert all(is_checkpointed(layer) for layer in layers)
    assert model.config.get_text_config().use_cache is True, "the config is not ours to change"


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_shared_states_written_by_a_replay_are_those_of_the_forward(name: str) -> None:
    """Two forwards before their backwards: each graph's replays must read that graph's own shared states."""
    reference, model = build_sharing(name), parallelize(build_sharing(name), "single", "full")
    first, second = batch(2, seed=1), batch(2, seed=2)
    for m in (reference, model):
        a, b = loss_of(m, first), loss_of(m, second)
        b.backward()
        a.backward()
    assert_bitwise(gradients_of(model), gradients_of(reference))


def test_detection_leaves_the_cache_of_shared_models_alone() -> None:
    model = build_sharing("gemma4")
    model.config.use_cache = True
    assert detect_kv_sharing_and_maybe_disable_cache(model) is True
    assert model.config.use_cache is True


@pytest.mark.parametrize("shared", [0, 2])
def test_detection_turns_the_cache_off_on_every_sub_config_unless_layers_share_it(shared: int) -> None:
    # Known failure 1: the text model reads text_config.use_cache, not the root's.
    text = SimpleNamespace(use_cache=True, num_kv_shared_layers=shared)
    vision = SimpleNamespace(hidden_size=3, model_type="clip")
    model = _holding(use_cache=True, text_config=text, vision_config=vision)
    assert detect_kv_sharing_and_maybe_disable_cache(model) is (shared > 0)
    assert model.config.use_cache is text.use_cache is (shared > 0)
    assert not hasattr(vision, "use_cache")


@dataclasses.dataclass(frozen=True, slots=True)
class _Frozen:
    use_cache: bool = True
    num_kv_shared_layers: int = 0


def _holding(**attributes: object) -> nn.Module:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(**attributes)
    return model


@pytest.mark.parametrize(
    "attributes",
    [
        dict(text_config=SimpleNamespace(num_kv_shared_layers=2)),
        dict(thinker_config=SimpleNamespace(text_config=SimpleNamespace(num_kv_shared_layers=2))),
        dict(language=SimpleNamespace(num_kv_shared_layers=2)),
        dict(text_config=_Frozen(num_kv_shared_layers=2)),
    ],
)
def test_sharing_is_seen_on_any_sub_config(attributes: dict[str, object]) -> None:
    assert has_kv_sharing(_holding(use_cache=True, **attributes))


def test_a_config_that_refuses_the_change_is_named_and_nothing_is_changed() -> None:
    model = _holding(use_cache=True, text_config=_Frozen())
    with pytest.raises(ValueError, match=r"_Frozen\.use_cache is True and cannot be set.*use_cache=False"):
        detect_kv_sharing_and_maybe_disable_cache(model)
    assert model.config.use_cache is True
    assert detect_kv_sharing_and_maybe_disable_cache(_holding(text_config=_Frozen(use_cache=False))) is False


class _WithFrozenConfig(nn.Module):
    """A decoder whose config cannot be changed, and which makes a cache unless the call says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.inner = _Frozen(), build_decoder("llama")

    def forward(self, input_ids: torch.Tensor, use_cache: bool | None = None) -> torch.Tensor:
        cached = self.config.use_cache if use_cache is None else use_cache
        return self.inner(input_ids, labels=input_ids, use_cache=cached).loss


@pytest.mark.parametrize("ac", ["full", "60%"])
def test_a_model_whose_config_refuses_changes_trains_with_modes_and_budgets(ac: str) -> None:
    sample = {"input_ids": batch(2)}
    bare, model = (
        parallelize(seeded(_WithFrozenConfig), "single", mode, sample_input=sample, device="cpu") for mode in ("none", ac)
    )
    assert_bitwise(step(model, **sample, seed=1), step(bare, **sample, use_cache=False, seed=1))


def test_shared_models_fall_back_to_sub_modules_with_a_warning(logs: pytest.LogCaptureFixture) -> None:
    model = build_sharing("gemma4")
    layers = [layer.module for layer in find_layers(model)]
    kept = list(layers)
    apply_selective_checkpointing_to_layers(model, layers, True)
    assert "share keys and values" in logs.text
    assert layers == kept
    for layer in layers:
        assert not is_checkpointed(layer.self_attn)
        assert is_checkpointed(layer.mlp)


def test_submodule_checkpointing_skips_attention_of_shared_models_only() -> None:
    for sharing in (True, False):
        layers = [layer.module for layer in find_layers(build_sharing("gemma4"))]
        apply_submodule_checkpointing(layers, sharing)
        assert {is_checkpointed(layer.self_attn) for layer in layers} == {not sharing}
