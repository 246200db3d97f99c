"""What the replay reads as forward did: random numbers that are not torch's own global ones, and context variables."""

from __future__ import annotations

import contextlib
import contextvars
import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine import random_state
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.policy import SAVE, SKIP, DecisionTable, FullPolicy, SelectivePolicy
from tests.checks import assert_bitwise, gradients_of, same
from tests.models.blocks import AttentionLayer, Stack, checkpoint_region, under

np = pytest.importorskip("numpy")

MODES = ["full", "selective", "submodule", "sequential"]
GLOBAL = torch.Generator()
GLOBAL_PYTHON, GLOBAL_NUMPY = random.Random(1), np.random.default_rng(1)
Draw = Callable[[Any], float]


def scaling(draw: Callable[..., float], draws: list[float]) -> Callable[..., Tensor]:
    """A function that scales by what it draws, and notes it."""

    def fn(x: Tensor, *source: Any, **sources: Any) -> Tensor:
        draws.append(draw(*source, *sources.values()))
        return (x * draws[-1]).exp().sin()

    return fn


class Attention(nn.Module):
    """A layer's part that scales by a number drawn by `draw(self)`."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.draw = draw
        self.torch_generator = torch.Generator().manual_seed(3)
        self.python_generator = random.Random(3)
        self.numpy_generator = np.random.default_rng(3)
        self.numpy_state = np.random.RandomState(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.k((self.q(x) * (1 + self.draw(self))).sin()).tanh() * (1 + self.draw(self))

    def from_global_python(self) -> float:
        return GLOBAL_PYTHON.random()

    def from_global_numpy(self) -> float:
        return sum(float(GLOBAL_NUMPY.normal()) for _ in range(2))


DRAWS: dict[str, Draw] = {
    "python": lambda module: random.random(),
    "python's normal": lambda module: random.gauss(0, 1),
    "numpy": lambda module: float(np.random.rand()),
    "numpy's normal": lambda module: float(np.random.normal()),
    "torch generator of the module": lambda module: torch.rand((), generator=module.torch_generator).item(),
    "torch generator that is global": lambda module: torch.rand((), generator=GLOBAL).item(),
    "torch generator in place": lambda module: torch.zeros(()).uniform_(generator=GLOBAL).item(),
    "python generator that is global": lambda module: module.from_global_python(),
    "numpy generator that is global": lambda module: module.from_global_numpy(),
    "python generator of the module": lambda module: module.python_generator.random(),
    "numpy generator of the module": lambda module: float(module.numpy_generator.normal()),
    "numpy state of the module": lambda module: float(module.numpy_state.normal()),
}
RAISES = {
    **dict.fromkeys(("python generator that is global", "numpy generator that is global"), "forward disagree"),
    "python generator of the module": "has a Random that was changed",
    "numpy generator of the module": "has a Generator that was changed",
    "numpy state of the module": "forward disagree",
}
"""Sources whose state is not put back, and the words that name what differs."""


def _run(ac: str, draw: Draw) -> tuple[list[Tensor], list[Any]]:
    """Gradients of two steps, and the next number of each source."""
    random.seed(0), np.random.seed(0), GLOBAL.manual_seed(0), GLOBAL_PYTHON.seed(0)
    GLOBAL_NUMPY.bit_generator.state = np.random.default_rng(0).bit_generator.state
    model = under(ac, lambda: Stack(AttentionLayer(Attention(draw)) for _ in range(3)))
    gradients: list[Tensor] = []
    for step in range(2):
        model.zero_grad()
        loss = model(torch.full((2, 8), 0.1 * (step + 1))).square().sum()
        draw(model.layers[1].self_attn)  # somebody else draws before backward
        loss.backward()
        gradients += gradients_of(model).values()
    return gradients, [draw(layer.self_attn) for layer in model.layers]


@pytest.mark.parametrize("source", DRAWS)
@pytest.mark.parametrize("ac", MODES)
def test_the_recomputation_draws_what_forward_drew_or_it_is_named(ac: str, source: str) -> None:
    if source in RAISES:
        with pytest.raises(RegionError, match=RAISES[source]):
            _run(ac, DRAWS[source])
        return
    assert same(_run(ac, DRAWS[source]), _run("none", DRAWS[source]))


@pytest.mark.parametrize("source", ["python", "numpy"])
def test_a_layer_that_drew_once_is_looked_at_in_every_step(source: str) -> None:
    """Also after a forward that drew nothing; a layer that never drew costs no look at the generators."""
    draw, draws, used = DRAWS[source], [], [True]

    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            draws.append(draw(None) if used[0] else 1.0)
            return (x * draws[-1]).exp().sin()

    layer, x = Drawing(), torch.ones(3, requires_grad=True)
    for used[0] in (True, False, True):
        checkpoint_region(layer, x, policy=FullPolicy()).sum().backward()
    assert draws[0::2] == draws[1::2]
    with mock.patch.object(random_state, "_host_generators", side_effect=random_state._host_generators) as looks:
        for _ in range(3):
            checkpoint_region(nn.Linear(3, 3), x, policy=FullPolicy()).sum().backward()
        first = looks.call_count
        linear = nn.Linear(3, 3)
        for _ in range(3):
            checkpoint_region(linear, x, policy=FullPolicy()).sum().backward()
    assert looks.call_count == first + first // 3


def test_numpy_with_a_bit_generator_of_another_kind() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        x, draws = torch.ones(3, requires_grad=True), []

        def fn(x: Tensor) -> Tensor:  # no other test's: what is learned of a function is learned of its code
            draws.append(np.random.rand())
            return (x * draws[-1]).exp().sin()

        y = checkpoint_region(fn, x, policy=FullPolicy())
        following = np.random.RandomState(np.random.PCG64(0))
        following.set_state(np.random.get_state(legacy=False))
        y.sum().backward()
        assert draws[0] == draws[1] and np.random.rand() == following.rand()
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("policy", [FullPolicy(), SelectivePolicy()], ids=["full", "selective"])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_generator_among_the_arguments(policy: Any, by_keyword: bool) -> None:
    for generator in (torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)):
        torch_one, draws = isinstance(generator, torch.Generator), []
        fn = scaling(torch_number if torch_one else type(generator).random, draws)
        x = torch.ones(3, requires_grad=True)
        args, kwargs = ((x,), {"source": generator}) if by_keyword else ((x, generator), {})
        loss = checkpoint_region(fn, *args, policy=policy, name=str(generator), **kwargs).sum()
        with contextlib.nullcontext() if torch_one else pytest.raises(RegionError, match="disagree"):
            loss.backward()
        assert (draws[0] == draws[1]) is torch_one


def torch_number(source: torch.Generator | None) -> float:
    return torch.rand((), generator=source).item()


def test_a_generator_that_a_function_refers_to_from_its_second_call_on() -> None:
    def call(source: torch.Generator | None) -> list[float]:
        draws: list[float] = []

        def fn(x: Tensor) -> Tensor:  # refers to the generator itself
            draws.append(torch_number(source))
            return (x * draws[-1]).exp().sin()

        checkpoint_region(fn, torch.ones(3, requires_grad=True), policy=FullPolicy()).sum().backward()
        return draws

    for source in (None, torch.Generator().manual_seed(1)):
        draws = call(source)
        assert draws[0] == draws[1]


def test_a_kept_draw_moves_a_private_generator_on_for_those_that_follow() -> None:
    generator = torch.Generator().manual_seed(1)
    second: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        first = torch.bernoulli(torch.full((3,), 0.5), generator=generator)
        second.append(torch.rand(3, generator=generator))
        return (x * first * second[-1]).exp().sin()

    x = torch.ones(3, requires_grad=True)
    y = checkpoint_region(fn, x, policy=DecisionTable({"aten.bernoulli.default": [SAVE]}))
    y.sum().backward()
    assert torch.equal(second[0], second[1])


def test_without_preserve_rng_state_nothing_is_put_back() -> None:
    draws: list[float] = []
    x = torch.ones(3, requires_grad=True)
    fn = scaling(random.random, draws)
    checkpoint_region(fn, x, policy=FullPolicy(), preserve_rng_state=False).sum().backward()
    assert draws[0] != draws[1]


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        targets, lengths = torch.tensor([[1, 2], [3, 0]]), (torch.tensor([5, 4]), torch.tensor([2, 1]))
        return nn.functional.ctc_loss(self.linear(x).log_softmax(-1), targets, *lengths) * x


@pytest.mark.parametrize("ac", ["full", "sequential"])
def test_an_operator_with_another_kernel_under_modes_has_that_kernel_in_the_replay_of_a_first_forward(ac: str) -> None:
    def gradients(ac: str) -> list[Tensor]:
        model = under(ac, lambda: Stack([Loss(), Loss()]))
        x = torch.randn(5, 2, 6, requires_grad=True)
        return [torch.autograd.grad(model(x).sum(), x)[0] for _ in range(2)]

    assert_bitwise(gradients(ac), gradients("none"))


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
