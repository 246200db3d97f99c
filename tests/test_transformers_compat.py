"""What is known of transformers' inside: caches are told by what they are, and what is absent is named."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import apply_activation_checkpointing, transformers_compat
from nemo_like.activation_checkpointing import CheckpointWrapper
from nemo_like.transformers_compat import given_cache, is_cache

SAID = (
    r"transformers 5\.25\.0 .*\. nemo_like was tested with transformers 5\.23\.0 and 5\.24\.0: pip install "
    r"'transformers==5\.24\.0', or report this\."
)


class Cache:
    """What all of transformers' caches can do."""

    def update(self, key: Any, value: Any, layer: int) -> tuple[Any, Any]:
        return key, value

    def get_seq_length(self) -> int:
        return 0


class RecurrentCache:
    """One that can do less, as xLSTM's."""


@pytest.fixture(scope="module")
def hf() -> Any:
    found = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    _ = found.GPT2LMHeadModel  # imports what it needs, which takes seconds
    return found


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers 5.25.0 without anything inside."""
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.25.0"))
    for name in ("modeling_utils", "masking_utils"):
        monkeypatch.setitem(sys.modules, f"transformers.{name}", ModuleType(name))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("a_name_of_2030", Cache(), True),
        ("a_name_of_2030", RecurrentCache(), False),
        ("cache", RecurrentCache(), True),
        ("cache", torch.ones(2), False),  # a table of the model's own
        ("cache", True, False),
        ("cache", (torch.ones(2), torch.ones(2)), False),
        ("past_key_values", (torch.ones(2), torch.ones(2)), True),
        ("past_key_values", torch.ones(2), True),
        ("past_key_values", None, False),
        ("attention_mask", torch.ones(2), False),
        ("kwargs", {}, False),
    ],
)
def test_a_cache_is_what_it_can_do_or_what_its_name_says(name: str, value: Any, expected: bool) -> None:
    assert is_cache(value, name) is expected


def test_a_cache_is_found_by_position_and_by_keyword() -> None:
    names = ("hidden_states", "layer_past")
    assert given_cache(names, (torch.ones(1), Cache()), {}) == "layer_past"
    assert given_cache(names, (torch.ones(1), None, Cache()), {}) == "argument 2"
    assert given_cache(names, (torch.ones(1),), {"anything": Cache()}) == "anything"
    assert given_cache(names, (torch.ones(1),), {"anything": None, "layer_past": None}) is None


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("model_base", "PreTrainedModel in transformers.modeling_utils"),
        ("attention_functions", "ALL_ATTENTION_FUNCTIONS in transformers.modeling_utils"),
        ("attention_interface", "AttentionInterface in transformers.modeling_utils"),
        ("mask_functions", "ALL_MASK_ATTENTION_FUNCTIONS in transformers.masking_utils"),
        ("mask_interface", "AttentionMaskInterface in transformers.masking_utils"),
        ("causal_mask_function", "causal_mask_function in transformers.masking_utils"),
    ],
)
def test_what_is_absent_is_named_with_the_releases_that_were_tested(
    next_release: None, function: str, name: str
) -> None:
    with pytest.raises(RuntimeError, match=SAID) as raised:
        getattr(transformers_compat, function)()
    assert f"has no {name}. " in str(raised.value)


def test_a_program_without_transformers_has_none_of_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    assert transformers_compat.model_base() is None


@pytest.mark.parametrize(
    "function",
    ["model_base", "attention_functions", "attention_interface", "mask_functions", "mask_interface"]
    + ["causal_mask_function"],
)
def test_the_installed_transformers_has_each(hf: Any, function: str) -> None:
    assert getattr(transformers_compat, function)() is not None


@pytest.mark.parametrize("by_position", [False, True])
def test_a_region_refuses_a_cache_under_a_name_that_nobody_knows(by_position: bool) -> None:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor, memory: Any = None) -> torch.Tensor:
            return super().forward(x)

    wrapped, cache, x = CheckpointWrapper(Layer(2, 2), name="layers.3"), Cache(), torch.ones(1, 2)
    with pytest.raises(RuntimeError, match=r"layers\.3 was called with memory= while gradients are on"):
        wrapped(x, cache) if by_position else wrapped(x, memory=cache)


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_gpt2_never_gives_back_a_cache_that_was_written_twice(hf: Any, ac: str) -> None:
    config = hf.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model, ids = apply_activation_checkpointing(hf.GPT2LMHeadModel(config), ac), torch.arange(16)[None]
    with pytest.raises(RuntimeError, match=r"transformer\.h\.0 was called with (past_key_values|cache)="):
        model(ids, use_cache=True)
    cache = hf.DynamicCache(config=config)
    with pytest.raises(RuntimeError, match="a second time"):
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        assert model(ids, use_cache=True).past_key_values.get_seq_length() == 16


@pytest.mark.parametrize(
    ("family", "name"), [("gpt2", "GPT2Block"), ("llama", "LlamaDecoderLayer"), ("bloom", "BloomBlock")]
)
def test_layers_of_the_installed_transformers_take_a_cache_that_is_known(hf: Any, family: str, name: str) -> None:
    layer = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    names = transformers_compat.parameter_names(layer.forward)
    assert not set(names).isdisjoint(transformers_compat.CACHE_ARGUMENTS)


def test_cut_attention_is_refused_where_no_configuration_has_a_name_for_it(next_release: None) -> None:
    from nemo_like.distributed.context import _reroute

    stack: Any = SimpleNamespace(module=nn.Linear(1, 1))
    with pytest.raises(
        RuntimeError, match=r"5\.25\.0 has no _attn_implementation_internal in .* of Linear\. nemo_like"
    ):
        list(_reroute(stack))
