"""A plan and a profile run a copy of the caller's model, and change nothing of it."""

from __future__ import annotations

import contextvars
import copy
import itertools
import random
from collections.abc import Callable
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

WIDTH = 8


class Block(nn.Module):
    """Changes itself in forward in every way that Python has."""

    in_place = True
    """Changes a tensor in a container, an array and generators of its own, which a checkpointed layer may not."""

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
        self.seen.append(self.calls)
        self.plain += 1
        if self.in_place:
            self.table["a"][0].add_(1)
            self.array += 1
            self.python.random(), self.numpy.random()
        self.table["a"][1].append(2)
        torch.rand(1, generator=self.generator)
        next(self.words)
        random.random(), np.random.random(), torch.rand(1)
        return x + self.norm(self.inner(x).flatten(0, 1)).view_as(x)


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 16)
        self.steps = 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        self.steps += 1
        hidden = self.embed(input_ids)
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Reentrant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + checkpoint(self.inner, x, use_reentrant=True))


def _plain() -> nn.Module:
    return Model([Block(), Block()])


def _shared_inside() -> nn.Module:
    inner = nn.Linear(WIDTH, WIDTH)
    return Model([Block(inner), Block(inner)])


def _listed_twice() -> nn.Module:
    block = Block()
    return Model([block, Block(), block])


def _two_names() -> nn.Module:
    model = Model([Block(), Block()])
    model.again = model.embed
    return model


def _reentrant() -> nn.Module:
    return Model([Reentrant(), Reentrant()])


MODELS = {made.__name__.strip("_"): made for made in (_plain, _shared_inside, _listed_twice, _two_names, _reentrant)}


def _batch() -> dict[str, Tensor]:
    ids = torch.arange(12).view(2, 6) % 16
    return {"input_ids": ids, "labels": ids}


def _budget(model: nn.Module) -> None:
    plan_for(model, ac="60%", sample_input=_batch(), gpu="h100-80gb")


def _profiled(model: nn.Module) -> None:
    MemoryProfiler(model, "cpu").profile(_batch(), 1)


def _applied(model: nn.Module) -> None:
    parallelize(model, "single", "60%", sample_input=_batch(), device="cpu")


def _stages(model: nn.Module) -> None:
    plan_for(
        model, ac="60%", sample_input=_batch(), world_size=2, pp=PipelineParallel(2, microbatches=2), gpu="h100-80gb"
    )


def _segments(model: nn.Module) -> None:
    parallelize(model, "single", "sequential", sample_input=_batch(), device="cpu")


def _state(value: Any, seen: dict[int, Any]) -> Any:
    """Everything in `value`, as what can be compared."""
    if id(value) in seen:
        return "again"
    if isinstance(value, Tensor):
        assert not is_fake(value)
        return (type(value), value.tolist(), None if value.grad is None else value.grad.tolist())
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, itertools.cycle):
        return "".join(itertools.islice(copy.deepcopy(value), 4))
    if isinstance(value, dict):
        return {key: _state(item, seen) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_state(item, seen) for item in value]
    if isinstance(value, nn.Module):
        seen[id(value)] = value
        return _state(vars(value), seen)
    return value if isinstance(value, bool | int | float | str | type(None)) else type(value)


@pytest.mark.parametrize("plans", [_budget, _stages, _profiled], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("made", MODELS)
def test_a_plan_leaves_the_model_as_it_is(made: str, plans: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    model, called = MODELS[made](), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: called.append("before"))
        module.register_forward_hook(lambda *_: called.append("after"))
        module.register_full_backward_hook(lambda *_: called.append("backward"))
    before = _state(model, {}), random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    if plans is _stages and made in ("shared_inside", "listed_twice"):
        with pytest.raises(ValueError, match=r"is used in 2 places|is called in"):
            plans(model)
    else:
        plans(model)
    after = _state(model, {}), random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before
    assert not called


RUN_BEFORE = {
    "budget": "60%",
    "sequential": "sequential",
    "measured": CheckpointConfig(True, "selective", profile_before_apply=True, profile_num_runs=1),
}


@pytest.mark.parametrize("ac", RUN_BEFORE)
@pytest.mark.parametrize("made", MODELS)
def test_a_model_that_was_run_before_trains_as_one_that_was_not(made: str, ac: str) -> None:
    torch.manual_seed(0)
    model: Any = MODELS[made]()
    for layer in model.layers:
        layer.in_place = False
    plain = copy.deepcopy(model)
    parallelize(model, "single", RUN_BEFORE[ac], sample_input=_batch(), device="cpu")
    losses = []
    for each in (model, plain):
        torch.manual_seed(1)
        loss = each(**_batch())
        loss.backward()
        losses.append((loss, [p.grad for p in each.parameters()]))
    assert torch.equal(losses[0][0], losses[1][0])
    for ours, theirs in zip(losses[0][1], losses[1][1], strict=True):
        assert torch.equal(ours, theirs)


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

    made = {"function": forward, "method": MethodType(as_method, layer), "partial": partial(as_method, layer)}
    layer.forward = made[kind]
    _budget(model)
    assert not seen and layer.calls == 0


def test_a_generator_is_refused_by_its_name() -> None:
    model = _plain()
    model.layers[0].words = (word for word in "abc")
    with pytest.raises(ValueError, match=r"Block\.words is a generator.*'selective'"):
        _budget(model)


class _Counted:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        if isinstance(given, _Counted):
            x = x + given.hidden
        elif given is not None:
            x = x * next(given)
        return x + self.down(nn.functional.gelu(self.up(x)))


class _Giving(Model):
    """Gives each layer what `make` makes of the hidden states."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__([_Layer(), _Layer()])
        self.make = make

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        given = self.make(hidden)
        for layer in self.layers:
            hidden = layer(hidden, given)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def _sparse() -> nn.Module:
    model = Model([_Layer(), _Layer()])
    model.embed = nn.Embedding(16, WIDTH, sparse=True)
    return model


class _RandomDepth(Model):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in [*self.layers][: random.randint(1, len(self.layers) - 1)]:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class _SparseBuffer(_Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.eye(2).to_sparse_csr(), persistent=False)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return super().forward((self.mix @ x.flatten(1)).view_as(x))


class _SparseInside(_Layer):
    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return super().forward((torch.eye(2).to_sparse() @ x.flatten(1)).view_as(x))


class _Jagged(Model):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.nested.nested_tensor_from_jagged(self.embed(input_ids).flatten(0, 1), torch.tensor([0, 5, 12]))
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden.values()), labels.flatten())


class _MadeLate(_Layer):
    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(WIDTH, WIDTH)
        return super().forward(self.late(x))


class _Yielding(_Layer):
    def forward(self, x: Tensor, given: Any = None) -> Any:
        out = super().forward(x)
        return (part for part in (out, x))


class _Yielded(Model):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = sum(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class _Appending(_Layer):
    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        given.append(super().forward(x))
        return given[-1] + (given.pop(0) if len(given) > 1 else 0)


class _Entering(_Layer):
    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        given["last"] = super().forward(x)
        return given["last"]


class _Handing(_Giving):
    """Hands on one container of this kind."""

    def __init__(self, layer: type[nn.Module], kind: type) -> None:
        super().__init__(lambda _: kind())
        self.layers = nn.ModuleList([layer(), layer()])


class _Lazy(_Layer):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.LazyLinear(4 * WIDTH)


UNPLANNED = {
    "a sparse buffer": (lambda: Model([_SparseBuffer(), _SparseBuffer()]), r"No plan is made of sparse.*'selective'"),
    "a sparse tensor": (lambda: Model([_SparseInside(), _SparseInside()]), r"No plan is made of sparse.*'selective'"),
    "nested tensors": (lambda: _Jagged([_Layer(), _Layer()]), r"No plan is made of nested.*padded ones.*'selective'"),
    "a late module": (
        lambda: Model([_MadeLate(), _MadeLate()]),
        r"Model makes 'layers\.0\.late' in its first forward.*Call the model once",
    ),
    "a generator": (
        lambda: _Yielded([_Yielding(), _Yielding()]),
        r"layers\.0 of _Yielded returns a generator.*Return a list or a tuple",
    ),
    "a list": (lambda: _Handing(_Appending, list), r"layers\.0 of _Handing puts tensors into a list or.*'selective'"),
    "a dictionary": (
        lambda: _Handing(_Entering, dict),
        r"layers\.0 of _Handing puts tensors into a list or a dictionary",
    ),
    "lazy parameters": (
        lambda: Model([_Lazy(), _Lazy()]),
        r"model has 'layers\.0\.up\.weight', whose shape is not known.*Call it once",
    ),
    "an object with a graph": (
        lambda: _Giving(lambda x: _Counted(x * 2)),
        r"calls layers\.0 with a _Counted .* as an argument",
    ),
    "an iterator": (
        lambda: _Giving(lambda _: iter([1.0, 2.0])),
        r"layers\.0 \(_Layer\) cannot be planned.*StopIteration, in",
    ),
    "sparse gradients": (_sparse, r"sparse tensors, such as .*sparse=False"),
    "random depth": (lambda: _RandomDepth([_Layer() for _ in range(8)]), r"did not run.*layers run, use a mode"),
}


@pytest.mark.parametrize("name", UNPLANNED)
def test_what_cannot_be_planned_is_said_by_its_name(name: str) -> None:
    make, words = UNPLANNED[name]
    model = make()
    before = {n: type(p) for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match=words):
        _applied(model)
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
    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return _Reversible.apply(self, x, *self.parameters())


def test_a_layer_that_uses_its_own_parameters_in_backward_is_planned() -> None:
    plan = plan_for(Model([_ReversibleLayer(), _ReversibleLayer()]), ac="100%", sample_input=_batch(), gpu="h100-80gb")
    assert plan.peak_bytes


_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)


class _Counting(_Layer):
    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        _VARIABLE.set(_VARIABLE.get() + 1)
        return super().forward(x)


@pytest.mark.parametrize("plans", [_budget, _profiled, _applied, _stages, _segments], ids=lambda plans: plans.__name__)
def test_a_plan_leaves_context_variables_as_they_are(plans: Callable[[nn.Module], None]) -> None:
    plans(Model([_Counting(), _Counting()]))
    assert _VARIABLE.get() == 0


def test_a_variable_that_cannot_be_put_back_is_named(caplog: pytest.LogCaptureFixture) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("without_default")

    class Setting(_Layer):
        def forward(self, x: Tensor, given: Any = None) -> Tensor:
            variable.set(1)
            return super().forward(x)

    contextvars.copy_context().run(_budget, Model([Setting(), Setting()]))
    assert "The context variable 'without_default' was not set; a model's forward set it" in caplog.text
