"""Arguments and context variables of a region: recomputation finds them as forward did."""

from __future__ import annotations

import contextvars
import gc
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from nemo_like import apply_activation_checkpointing
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing.engine import RegionError
from nemo_like.activation_checkpointing.policy import FullPolicy
from tests.checks import assert_bitwise, gradients_of
from tests.models.blocks import AttentionLayer, Stack, checkpoint_region, under

MODES = ["full", "selective", "submodule", "sequential"]


@dataclass
class State:
    hidden: torch.Tensor
    scale: float = 1.0
    past: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: torch.Tensor
    scale: float = 1.0


class Named(NamedTuple):
    hidden: torch.Tensor
    scale: float = 1.0


class Ordered(OrderedDict):
    hidden = property(lambda self: self["hidden"])


def _next_state(value: Any, hidden: torch.Tensor) -> Any:
    if isinstance(value, Named):
        return value._replace(hidden=hidden)
    if isinstance(value, BaseModelOutput):
        return BaseModelOutput(last_hidden_state=hidden)
    if isinstance(value, Ordered):
        return Ordered(hidden=hidden)
    return replace(value, hidden=hidden)


class Block(nn.Module):
    """Takes a container and returns a new one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, state: Any) -> Any:
        hidden = state.last_hidden_state if isinstance(state, BaseModelOutput) else state.hidden
        return _next_state(state, hidden + self.down(self.up(hidden).tanh()) * getattr(state, "scale", 1.0))


class ChangingBlock(Block):
    """Changes the container that it was given."""

    def forward(self, state: State) -> State:
        state.past.append(state.hidden)
        state.hidden = state.hidden + self.down(self.up(state.hidden).tanh()) * state.scale + state.past[0]
        state.scale = state.scale * 0.5
        return state


class Model(Stack):
    def __init__(self, make: Any, block: type[Block] = Block, dim: int = 16) -> None:
        super().__init__(block(dim) for _ in range(4))
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = super().forward(self.make(x))
        return state.last_hidden_state if isinstance(state, BaseModelOutput) else state.hidden


MAKERS = {
    "dataclass": State,
    "frozen": Frozen,
    "named": Named,
    "ordered": lambda hidden: Ordered(hidden=hidden),
    "output": lambda hidden: BaseModelOutput(last_hidden_state=hidden),
}


def _gradients(make: Any, ac: str, block: type[Block] = Block) -> list[torch.Tensor]:
    model = under(ac, lambda: Model(make, block))
    x = torch.randn(3, 16, requires_grad=True)
    model(x).square().sum().backward()
    return [x.grad, *gradients_of(model).values()]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_gradients_are_those_of_no_checkpointing(kind: str, ac: str) -> None:
    assert_bitwise(_gradients(MAKERS[kind], ac), _gradients(MAKERS[kind], "none"))


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_a_container_that_layers_change_is_replayed_as_forward_found_it(ac: str) -> None:
    assert_bitwise(_gradients(State, ac, ChangingBlock), _gradients(State, "none", ChangingBlock))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("ac", ["full", "sequential"])
def test_a_forward_without_a_backward_leaves_nothing(kind: str, ac: str) -> None:
    """A region that held a tensor of its own graph would be held by it in turn, where no collector looks."""
    model = apply_activation_checkpointing(Model(MAKERS[kind], dim=64), ac)
    model(torch.randn(256, 64))  # what the first call makes for good
    gc.collect()
    with LiveBytes() as live:
        for _ in range(3):
            model(torch.randn(256, 64))
        gc.collect()
        assert live.live == 0


class Plain:
    """No container: nobody can tell what a copy of it would mean."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class PlainBlock(Block):
    def forward(self, state: Plain) -> Plain:
        return Plain(state.hidden + self.down(self.up(state.hidden).tanh()))


def test_an_object_that_is_no_container_is_named(caplog: pytest.LogCaptureFixture) -> None:
    found = _gradients(Plain, "sequential", PlainBlock)
    assert "a Plain on" in caplog.text
    assert_bitwise(found, _gradients(Plain, "none", PlainBlock))


def test_a_container_that_is_given_twice_is_one_container_in_replay_too():
    seen = []

    def fn(t, first, *, state):
        first["n"] += 1
        seen.append((state["inner"]["n"], state["self"] is state))
        return (t * state["inner"]["n"]).exp().sin()

    x, shared = torch.ones(3, requires_grad=True), {"n": 0}
    state = {"inner": shared}
    state["self"] = state
    checkpoint_region(fn, x, shared, state=state, policy=FullPolicy()).sum().backward()
    assert seen == [(1, True), (1, True)] and shared == {"n": 1}


SCALE: contextvars.ContextVar[Any] = contextvars.ContextVar("scale", default=1.0)
RECORD: contextvars.ContextVar[Any] = contextvars.ContextVar("record", default=None)


class ContextAttention(nn.Module):
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
    return Stack(AttentionLayer(ContextAttention()) for _ in range(3))


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
