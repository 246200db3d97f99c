"""Arguments and context variables of a region: recomputation finds them as forward did."""

import contextvars
import gc
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from nemo_like import apply_activation_checkpointing
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing.engine import RegionError
from nemo_like.activation_checkpointing.policy import FullPolicy
from tests.checks import assert_bitwise, backward, gradients_of, seeded
from tests.models.blocks import MODES, AttentionLayer, Layer, Stack, checkpoint_region, under


@dataclass
class State:
    hidden: Tensor
    past: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Tensor


class Named(NamedTuple):
    hidden: Tensor


class Ordered(OrderedDict):
    hidden = property(lambda self: self["hidden"])


@dataclass
class Output(ModelOutput):
    hidden: Tensor | None = None


class Plain:
    """No container: nobody can tell what a copy of it would mean."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def _block(block: Any, state: Any) -> Any:
    """Take a container and return a new one, or one that the block `changes`."""
    hidden = state.hidden + block.down(block.up(state.hidden).tanh())
    if not block.changes:
        return type(state)(hidden=hidden)
    state.past.append(state.hidden)
    state.hidden = hidden + state.past[0] / len(state.past)
    return state


def _model(kind: type, changes: bool = False, dim: int = 16) -> Stack:
    layers = (
        Layer(_block, up=nn.Linear(dim, 2 * dim), down=nn.Linear(2 * dim, dim), changes=changes) for _ in range(4)
    )
    return Stack(layers, start=lambda x: kind(hidden=x), head=lambda state: state.hidden)


KINDS = [State, Frozen, Named, Ordered, Output]


def _gradients(ac: str, kind: type, changes: bool = False) -> list[Tensor | None]:
    model = under(ac, lambda: _model(kind, changes))
    x = torch.randn(3, 16, requires_grad=True)
    model(x).square().sum().backward()
    return [x.grad, *gradients_of(model).values()]


@pytest.mark.parametrize(("kind", "changes"), [*((kind, False) for kind in KINDS), (State, True)])
@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_a_container_is_recomputed_with_as_forward_found_it(kind: type, changes: bool, ac: str) -> None:
    assert_bitwise(_gradients(ac, kind, changes), _gradients("none", kind, changes))


def test_an_object_that_is_no_container_is_named(caplog: pytest.LogCaptureFixture) -> None:
    gradients = _gradients("sequential", Plain)
    assert "a Plain on" in caplog.text
    assert_bitwise(gradients, _gradients("none", Plain))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ac", ["full", "sequential"])
def test_a_forward_without_a_backward_leaves_nothing(kind: type, ac: str) -> None:
    """A region that held a tensor of its own graph would be held by it in turn, where no collector looks."""
    model = apply_activation_checkpointing(_model(kind, dim=64), ac)
    model(torch.randn(256, 64))  # what the first call makes for good
    gc.collect()
    with LiveBytes() as live:
        for _ in range(3):
            model(torch.randn(256, 64))
        gc.collect()
        assert live.live == 0


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


def _attention(layer: Any, x: Tensor) -> Tensor:
    scale, record = SCALE.get(), RECORD.get()
    y = layer.k((layer.q(x) * (scale["factor"] if isinstance(scale, dict) else scale)).sin()).tanh()
    if record is not None:
        y = y * (1 + len(record["outputs"]))
        record["outputs"].append(y)
    return y


SCALES: dict[str, Any] = {
    "number": lambda: 3.0,
    "tensor": lambda: torch.full((8,), 3.0),
    "dict": lambda: {"factor": torch.full((8,), 3.0)},
}


@pytest.mark.parametrize("within", [True, False], ids=["backward within", "backward outside"])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("ac", MODES)
def test_variables_are_those_of_forward_and_collect_once(ac: str, kind: str, within: bool) -> None:
    def run(mode: str) -> dict[str, Tensor]:
        attention = (Layer(_attention, q=nn.Linear(8, 8), k=nn.Linear(8, 8)) for _ in range(3))
        layers = under(mode, lambda: Stack(map(AttentionLayer, attention)))
        record: dict[str, list[Tensor]] = {"outputs": []}
        tokens = SCALE.set(SCALES[kind]()), RECORD.set(record)
        loss = layers(torch.full((2, 8), 0.1)).square().sum() + sum(y.sum() for y in record["outputs"])
        if kind == "dict":
            SCALE.get()["factor"] = 7.0
        if not within:
            RECORD.reset(tokens[1])
            SCALE.set(5.0)
        present = SCALE.get()
        loss.backward()
        assert SCALE.get() is present and len(record["outputs"]) == 3
        SCALE.reset(tokens[0])
        RECORD.set(None)
        return gradients_of(layers)

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

    before = SCALE.set(1.0)
    y = checkpoint_region(fn, torch.ones(3, requires_grad=True), policy=FullPolicy())
    assert SCALE.get() == 2.0
    y.sum().backward()
    assert SCALE.get() == 2.0
    SCALE.reset(before)


@pytest.mark.parametrize(
    ("container", "fill"),
    [
        ({"a"}, lambda items: items.add("b")),
        (deque("a"), lambda items: items.append("b")),
        (defaultdict(int, a=1), lambda items: items["b"]),
    ],
)
def test_sets_queues_and_dicts_with_defaults_among_the_arguments(container: Any, fill: Callable[[Any], Any]) -> None:
    seen = []

    def fn(t: Tensor, items: Any) -> Tensor:
        seen.append(len(items))
        fill(items)
        return t.exp().sin()

    items = copy(container)
    checkpoint_region(fn, torch.ones(3, requires_grad=True), items, policy=FullPolicy()).sum().backward()
    assert seen == [1, 1] and len(items) == 2


COLLECTING = {
    "llama": (lambda hf, **sizes: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)), {}),
    "mixtral": (
        lambda hf, **sizes: hf.MixtralForCausalLM(
            hf.MixtralConfig(**sizes, num_local_experts=4, router_aux_loss_coef=0.1, router_jitter_noise=0.1)
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
        out = seeded(made, tokens, labels=tokens, output_hidden_states=True, output_attentions=True, **options)
        loss = out.loss + sum(state.square().mean() for state in out.hidden_states)
        loss = backward(loss + sum(weights.square().sum() for weights in out.attentions))
        collected = {name: out[name] for name in ("hidden_states", "attentions", "router_logits") if name in out}
        assert len(collected) == 2 + len(options) and all(collected.values())
        return {**collected, **gradients_of(made)}

    assert_bitwise(run(ac), run("none"))
