"""A plan and a profile run a copy of the caller's model, and change nothing of it."""

import contextvars
import copy
import itertools
import random
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nemo_like import CheckpointConfig, MemoryProfiler, parallelize, plan_for
from nemo_like.options import PipelineParallel
from nemo_like.torch_compat import is_fake
from tests.checks import assert_bitwise, seeded, step
from tests.models.blocks import in_turn

WIDTH = 8


class Block(nn.Module):
    """Changes itself in forward in every way that Python has."""

    in_place = True
    """Changes containers, an array and generators of its own, which a checkpointed layer may not."""

    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH) if shared is None else shared
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
        self.calls, self.seen, self.plain = 0, [0], torch.zeros(1)
        self.table = {"a": (torch.zeros(2), [1])}
        self.generator = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(2), np.random.default_rng(3)
        self.words = itertools.cycle("ab")
        self.array = np.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.plain += 1
        if self.in_place:
            self.seen.append(self.calls)
            self.table["a"][1].append(2)
            self.table["a"][0].add_(1)
            self.array += 1
            self.python.random(), self.numpy.random(), random.random(), np.random.random()
        torch.rand(1, generator=self.generator)
        next(self.words)
        torch.rand(1)
        return x + self.norm(self.inner(x).flatten(0, 1)).view_as(x)


class Model(nn.Module):
    """Token ids to a loss; `run` takes the hidden states through the layers."""

    def __init__(self, layers: Iterable[nn.Module], run: Callable[..., Tensor] = in_turn) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 16)
        self.steps, self.run = 0, run

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.steps += 1
        hidden = self.embed(input_ids)
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        hidden = self.run(self.layers, hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Reentrant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + checkpoint(self.inner, x, use_reentrant=True))


def _plain() -> nn.Module:
    return Model([Block(), Block()])


def _two_names() -> nn.Module:
    model = _plain()
    model.again = model.embed
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": _plain,
    "shared_inside": lambda: Model(map(Block, [nn.Linear(WIDTH, WIDTH)] * 2)),
    "listed_twice": lambda: Model([Block()] * 2 + [Block()]),
    "two_names": _two_names,
    "reentrant": lambda: Model([Reentrant(), Reentrant()]),
}


def _batch() -> dict[str, Tensor]:
    ids = torch.arange(12).view(2, 6) % 16
    return {"input_ids": ids, "labels": ids}


PLANS: dict[str, Callable[[nn.Module], Any]] = {
    "budget": lambda model: plan_for(model, ac="60%", sample_input=_batch(), gpu="h100-80gb"),
    "profiled": lambda model: MemoryProfiler(model, "cpu").profile(_batch(), 1),
    "applied": lambda model: parallelize(model, "single", "60%", sample_input=_batch(), device="cpu"),
    "stages": lambda model: plan_for(
        model, ac="60%", sample_input=_batch(), world_size=2, pp=PipelineParallel(2, microbatches=2), gpu="h100-80gb"
    ),
    "segments": lambda model: parallelize(model, "single", "sequential", sample_input=_batch(), device="cpu"),
}


def _state(value: Any, seen: dict[int, Any]) -> Any:
    """Everything in `value`, as what can be compared."""
    if id(value) in seen:
        return "again"
    if isinstance(value, Tensor):
        assert not is_fake(value)
    if isinstance(value, nn.Module):
        seen[id(value)] = value
        return _state(vars(value), seen)
    if isinstance(value, dict):
        return {key: _state(item, seen) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_state(item, seen) for item in value]
    for kind, as_values in AS_VALUES.items():
        if isinstance(value, kind):
            return as_values(value)
    return type(value)


AS_VALUES: dict[Any, Callable[[Any], Any]] = {
    Tensor: lambda value: (type(value), value.tolist(), None if value.grad is None else value.grad.tolist()),
    np.ndarray: lambda value: value.tolist(),
    torch.Generator: lambda value: value.get_state().tolist(),
    random.Random: lambda value: value.getstate(),
    np.random.Generator: lambda value: str(value.bit_generator.state),
    itertools.cycle: lambda value: "".join(itertools.islice(copy.deepcopy(value), 4)),
    (bool, int, float, str, type(None)): lambda value: value,
}


def _world(model: nn.Module) -> Any:
    """The model's state and that of all global generators."""
    numbers = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return _state(model, {}), random.getstate(), *numbers


@pytest.mark.parametrize("plans", ["budget", "stages", "profiled"])
@pytest.mark.parametrize("made", MODELS)
def test_a_plan_leaves_the_model_as_it_is(made: str, plans: str) -> None:
    model, called = seeded(MODELS[made]), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: called.append("before"))
        module.register_forward_hook(lambda *_: called.append("after"))
        module.register_full_backward_hook(lambda *_: called.append("backward"))
    before = _world(model)
    if plans == "stages" and made in ("shared_inside", "listed_twice"):
        with pytest.raises(ValueError, match=r"is used in 2 places|is called in"):
            PLANS[plans](model)
    else:
        PLANS[plans](model)
    assert _world(model) == before
    assert not called


RUN_BEFORE = {
    "budget": "60%",
    "sequential": "sequential",
    "measured": CheckpointConfig(True, "selective", profile_before_apply=True, profile_num_runs=1),
}


@pytest.mark.parametrize("ac", RUN_BEFORE)
@pytest.mark.parametrize("made", MODELS)
def test_a_model_that_was_run_before_trains_as_one_that_was_not(made: str, ac: str) -> None:
    model: Any = seeded(MODELS[made])
    for layer in model.layers:
        layer.in_place = False
    plain = copy.deepcopy(model)
    parallelize(model, "single", RUN_BEFORE[ac], sample_input=_batch(), device="cpu")
    assert_bitwise(step(model, seed=1, **_batch()), step(plain, seed=1, **_batch()))


@pytest.mark.parametrize("kind", ["function", "method", "partial"])
def test_a_forward_put_on_one_module_runs_on_the_copy(kind: str) -> None:
    model = _plain()
    layer: Any = model.layers[0]
    own, seen = layer.forward, []

    def forward(x: Tensor) -> Tensor:
        seen.append(layer.calls)
        return own(x) * 2

    def as_method(_: nn.Module, x: Tensor) -> Tensor:
        return forward(x)

    layer.forward = {"function": forward, "method": MethodType(as_method, layer), "partial": partial(as_method, layer)}[kind]
    PLANS["budget"](model)
    assert not seen and layer.calls == 0


def test_a_generator_is_refused_by_its_name() -> None:
    model = _plain()
    model.layers[0].words = (word for word in "abc")
    with pytest.raises(ValueError, match=r"Block\.words is a generator.*'selective'"):
        PLANS["budget"](model)


class _Counted:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Layer(nn.Module):
    """An MLP, with something `before` it that sees the layer, and something `after` it that sees what else was given."""

    def __init__(self, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.after = before, after

    def forward(self, x: Tensor, *given: Any) -> Any:
        x = x if self.before is None else self.before(self, x)
        out = x + self.down(nn.functional.gelu(self.up(x)))
        return out if self.after is None else self.after(out, *given)


def _of(before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None, count: int = 2) -> Model:
    """A model of such layers."""
    return Model(_Layer(before, after) for _ in range(count))


def _giving(make: Callable[[Tensor], Any], after: Callable[..., Any]) -> nn.Module:
    """A model that gives all layers what `make` makes of the hidden states."""
    return Model([_Layer(None, after), _Layer(None, after)], lambda layers, x: in_turn(layers, x, make(x)))


def _sparse_embedding() -> nn.Module:
    model = _of()
    model.embed = nn.Embedding(16, WIDTH, sparse=True)
    return model


def _sparse_buffers() -> nn.Module:
    model = _of(lambda layer, x: (layer.mix @ x.flatten(1)).view_as(x))
    for layer in model.layers:
        layer.register_buffer("mix", torch.eye(2).to_sparse_csr(), persistent=False)
    return model


def _lazy() -> nn.Module:
    model = _of()
    for layer in model.layers:
        layer.up = nn.LazyLinear(4 * WIDTH)
    return model


def _make_late(layer: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(layer, "late"):
        layer.late = nn.Linear(WIDTH, WIDTH)
    return layer.late(x)


def _jagged(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor_from_jagged(hidden.flatten(0, 1), torch.tensor([0, 5, 12]))
    return layers[1](layers[0](nested)).values()[None]


def _append(out: Tensor, given: list[Tensor]) -> Tensor:
    given.append(out)
    return given[-1] + (given.pop(0) if len(given) > 1 else 0)


def _enter(out: Tensor, given: dict[str, Tensor]) -> Tensor:
    given["last"] = out
    return given["last"]


UNPLANNED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a sparse buffer": (_sparse_buffers, r"No plan is made of sparse.*'selective'"),
    "a sparse tensor": (
        lambda: _of(lambda layer, x: (torch.eye(2).to_sparse() @ x.flatten(1)).view_as(x)),
        r"No plan is made of sparse.*'selective'",
    ),
    "nested tensors": (
        lambda: Model([_Layer(), _Layer()], _jagged), r"No plan is made of nested.*padded ones.*'selective'"
    ),
    "a late module": (
        lambda: _of(_make_late), r"Model makes 'layers\.0\.late' in its first forward.*Call the model once"
    ),
    "a generator": (
        lambda: Model(
            [_Layer(None, lambda out: (part for part in (out, out))) for _ in range(2)],
            lambda layers, hidden: sum(layers[1](sum(layers[0](hidden)))),
        ),
        r"layers\.0 of Model returns a generator.*Return a list or a tuple",
    ),
    "a list": (
        lambda: _giving(lambda _: [], _append), r"layers\.0 of Model puts tensors into a list or.*'selective'"
    ),
    "a dictionary": (
        lambda: _giving(lambda _: {}, _enter), r"layers\.0 of Model puts tensors into a list or a dictionary"
    ),
    "lazy parameters": (_lazy, r"model has 'layers\.0\.up\.weight', whose shape is not known.*Call it once"),
    "an object with a graph": (
        lambda: _giving(lambda x: _Counted(x * 2), lambda out, given: out + given.hidden),
        r"calls layers\.0 with a _Counted .* as an argument",
    ),
    "an iterator": (
        lambda: _giving(lambda _: iter([1.0, 2.0]), lambda out, given: out * next(given)),
        r"layers\.0 \(_Layer\) cannot be planned.*StopIteration, in",
    ),
    "sparse gradients": (_sparse_embedding, r"sparse tensors, such as .*sparse=False"),
    "random depth": (
        lambda: Model(
            [_Layer() for _ in range(8)],
            lambda layers, hidden: in_turn([*layers][: random.randint(1, len(layers) - 1)], hidden),
        ),
        r"did not run.*layers run, use a mode",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPLANNED)
def test_what_cannot_be_planned_is_said_by_its_name(name: str) -> None:
    make, words = UNPLANNED[name]
    model = make()
    before = {n: type(p) for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match=words):
        PLANS["applied"](model)
    assert {n: type(p) for n, p in model.named_parameters()} == before


class _Reversible(torch.autograd.Function):
    """Computes in backward what it did not keep, with the layer's own parameters."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, x: Tensor, *parameters: Tensor) -> Tensor:
        with torch.no_grad():
            out = _Layer.forward(layer, x)
        ctx.layer, ctx.parameters = layer, parameters
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            out = _Layer.forward(ctx.layer, x)
            return None, *torch.autograd.grad(out, (x, *ctx.parameters), grad)


class _ReversibleLayer(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return _Reversible.apply(self, x, *self.parameters())


def test_a_layer_that_uses_its_own_parameters_in_backward_is_planned() -> None:
    plan = plan_for(Model([_ReversibleLayer(), _ReversibleLayer()]), ac="100%", sample_input=_batch(), gpu="h100-80gb")
    assert plan.peak_bytes


_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)


def _count(layer: nn.Module, x: Tensor) -> Tensor:
    _VARIABLE.set(_VARIABLE.get() + 1)
    return x


@pytest.mark.parametrize("plans", PLANS)
def test_a_plan_leaves_context_variables_as_they_are(plans: str) -> None:
    PLANS[plans](_of(_count))
    assert _VARIABLE.get() == 0


def test_a_variable_that_cannot_be_put_back_is_named(caplog: pytest.LogCaptureFixture) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("without_default")

    def put(layer: nn.Module, x: Tensor) -> Tensor:
        variable.set(1)
        return x

    contextvars.copy_context().run(PLANS["budget"], _of(put))
    assert "The context variable 'without_default' was not set; a model's forward set it" in caplog.text
