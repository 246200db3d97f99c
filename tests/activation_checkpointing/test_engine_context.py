"""Context variables: the replay reads what forward read, whatever was set since, and sets nothing that others see."""

from __future__ import annotations

import contextvars
from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.policy import SKIP, DecisionTable, FullPolicy
from tests.checks import assert_bitwise, gradients_of
from tests.models.blocks import AttentionLayer, Stack, checkpoint_region, under

MODES = ["full", "selective", "submodule", "sequential"]
SCALE: contextvars.ContextVar[Any] = contextvars.ContextVar("scale", default=1.0)
RECORD: contextvars.ContextVar[Any] = contextvars.ContextVar("record", default=None)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scale, record = SCALE.get(), RECORD.get()
        y = self.k((self.q(x) * (scale["factor"] if isinstance(scale, dict) else scale)).sin()).tanh()
        if record is not None:
            y = y * (1 + len(record["outputs"]))
            record["outputs"].append(y)
        return y


def model() -> nn.Module:
    return Stack(AttentionLayer(Attention()) for _ in range(3))


SCALES: dict[str, Any] = {
    "number": lambda: 3.0,
    "tensor": lambda: torch.full((8,), 3.0),
    "dict": lambda: {"factor": torch.full((8,), 3.0)},
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("ac", MODES)
def test_a_variable_that_is_set_around_forward_only(ac: str, kind: str) -> None:
    def run(mode: str) -> dict[str, Tensor]:
        made = under(mode, model)
        token = SCALE.set(SCALES[kind]())
        loss = made(torch.full((2, 8), 0.1)).square().sum()
        if kind == "dict":
            SCALE.get()["factor"] = 7.0
        SCALE.reset(token)
        SCALE.set(5.0)
        loss.backward()
        assert SCALE.get() == 5.0
        return gradients_of(made)

    assert_bitwise(run(ac), run("none"))


@pytest.mark.parametrize("within", [True, False], ids=["backward within", "backward outside"])
@pytest.mark.parametrize("ac", MODES)
def test_what_forward_collects_in_a_variable_is_collected_once(ac: str, within: bool) -> None:
    def run(mode: str) -> dict[str, Tensor]:
        made = under(mode, model)
        record: dict[str, list[Tensor]] = {"outputs": []}
        token = RECORD.set(record)
        loss = made(torch.full((2, 8), 0.1)).square().sum()
        loss = loss + sum(y.sum() for y in record["outputs"])
        if within:
            loss.backward()
        RECORD.reset(token)
        if not within:
            loss.backward()
        assert len(record["outputs"]) == 3
        return gradients_of(made)

    assert_bitwise(run(ac), run("none"))


def test_a_tensor_in_a_variable_that_is_changed_in_place_is_an_error() -> None:
    factor, x = torch.full((3,), 3.0), torch.ones(3, requires_grad=True)
    token = SCALE.set(factor)
    y = checkpoint_region(lambda t: (t * SCALE.get()).exp().sin(), x, policy=FullPolicy(), name="layers.3")
    SCALE.reset(token)
    factor.add_(1)
    with pytest.raises(RegionError, match=r"layers\.3.*changed in place"):
        y.sum().backward()


def test_what_the_replay_sets_stays_in_the_replay() -> None:
    def fn(t: Tensor) -> Tensor:
        SCALE.set(SCALE.get() + 1)
        return (t * SCALE.get()).exp().sin()

    x = torch.ones(3, requires_grad=True)
    before = SCALE.set(1.0)
    y = checkpoint_region(fn, x, policy=FullPolicy())
    assert SCALE.get() == 2.0
    y.sum().backward()
    assert SCALE.get() == 2.0
    SCALE.reset(before)


@pytest.mark.parametrize("make", [set, deque, lambda items: defaultdict(int, dict.fromkeys(items, 1))])
def test_sets_queues_and_dicts_with_defaults_among_the_arguments(make: Any) -> None:
    seen, container = [], make(["a"])

    def fn(t: Tensor, items: Any) -> Tensor:
        seen.append(len(items))
        if isinstance(items, defaultdict):
            items["b"] += 1
        else:
            items.add("b") if isinstance(items, set) else items.append("b")
        return t.exp().sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint_region(fn, x, container, policy=FullPolicy()).sum().backward()
    assert seen == [1, 1] and len(container) == 2


COLLECTING = {
    "llama": (lambda hf, **sizes: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)), {}),
    "mixtral": (
        lambda hf, **sizes: hf.MixtralForCausalLM(
            hf.MixtralConfig(**sizes, num_local_experts=4, router_aux_loss_coef=0.1)
        ),
        {"output_router_logits": True},
    ),
}


@pytest.mark.parametrize("ac", [*MODES, "50%"])
@pytest.mark.parametrize("family", COLLECTING)
def test_outputs_that_transformers_collects(ac: str, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "use_cache": False, "attn_implementation": "eager",
    }  # fmt: skip
    tokens = torch.arange(24).reshape(2, 12) % 64
    make, options = COLLECTING[family]

    def run(mode: str) -> dict[str, Any]:
        sample = {"sample_input": {"input_ids": tokens, "labels": tokens}} if mode.endswith("%") else {}
        made = under(mode, lambda: make(transformers, **sizes), **sample)
        out = made(tokens, labels=tokens, output_hidden_states=True, output_attentions=True, **options)
        loss = out.loss + sum(state.square().mean() for state in out.hidden_states)
        loss = loss + sum(weights.square().sum() for weights in out.attentions)
        loss.backward()
        collected = {name: out[name] for name in ("hidden_states", "attentions", "router_logits") if name in out}
        assert len(collected) == 2 + len(options) and all(collected.values())
        return {**collected, **gradients_of(made)}

    assert_bitwise(run(ac), run("none"))


def test_a_replay_that_starts_anew_because_its_plan_skips_too_much_is_in_the_context_too() -> None:
    w = nn.Linear(4, 4, bias=False)
    table = DecisionTable({"aten.mm.default": [SKIP]}, strict=False)

    def gradient(run: Any) -> Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        token = SCALE.set(3.0)
        loss = run(lambda t: (w(t) * SCALE.get()).exp())(x).sum()
        SCALE.reset(token)
        return torch.autograd.grad(loss, x)[0]

    assert torch.equal(gradient(lambda fn: lambda t: checkpoint_region(fn, t, policy=table)), gradient(lambda fn: fn))
