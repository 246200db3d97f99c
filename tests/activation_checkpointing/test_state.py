"""State that a module holds: restored for the recomputation, or refused by name. Its judge is the plain model."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import is_recomputing, parallelize
from nemo_like.activation_checkpointing.engine import RegionError
from nemo_like.activation_checkpointing.engine.module_state import walk_of
from nemo_like.activation_checkpointing.policy import FullPolicy, SelectivePolicy
from tests.checks import assert_bitwise, gradients_of, seeded
from tests.models.blocks import MODES, Layer, Stack, checkpoint_region, under

np = pytest.importorskip("numpy")
WHOLE = ["full", "selective", "sequential"]


@dataclass
class Tally:
    calls: int = 1


class Part(nn.Module):
    """Reads state of every kind, and counts its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.calls, self.adapter, self.function = nn.Linear(8, 8), 0, "a", torch.sin
        self.config, self.tally, self.load, self.extra = SimpleNamespace(gain=1.0), Tally(), torch.ones(()), None
        self.scaling, self.history = {"a": 1.0}, [1.0]
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.load = self.load + 1
        y = self.q(x) * self.config.gain * self.calls * self.load * (2 if self.training else 1) + self.shift
        y = self.function(y) * self.scaling["a"] * self.tally.calls * len(self.history)
        return y * (3 if self.adapter == "b" else 1) * (5 if hasattr(self, "bonus") else 1) * (self.extra or 1)


def _layer() -> Any:
    return Layer(lambda layer, x: x + layer.mlp(layer.attn(x)).tanh(), attn=Part(), mlp=nn.Linear(8, 8))


def _model(ac: str) -> Any:
    return under(ac, lambda: Stack(_layer() for _ in range(3)))


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: [setattr(layer.attn, name, value) for layer in model.layers] and None


def _config(model: Any) -> None:
    for layer in model.layers:
        layer.attn.config.gain, layer.attn.tally.calls = 5.0, 7


RESTORED: dict[str, Callable[[Any], Any]] = {
    "training": lambda model: model.eval(),
    "adapter": _set("adapter", "b"),
    "attribute of another type": _set("extra", 3),
    "attribute added": _set("bonus", 9.0),
    "attribute taken away": lambda model: delattr(model.layers[1].attn, "extra"),
    "counter": _set("calls", 50),
    "function": _set("function", torch.cos),
    "tensor": _set("load", torch.tensor(50.0)),
    "configuration and dataclass": _config,
    "frozen": lambda model: model.layers[1].mlp.requires_grad_(False),
    "parameter exchanged": lambda model: setattr(model.layers[1].mlp, "weight", nn.Parameter(torch.ones(8, 8))),
    "buffer exchanged": _set("shift", torch.full((8,), 9.0)),
    "list exchanged": _set("history", [1.0, 2.0]),
    "sub-module put in": lambda model: setattr(model.layers[1], "third", nn.Linear(8, 8)),
}
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dict": (lambda model: model.layers[1].attn.scaling.update(a=7.0), "attribute 'scaling' of a Part, a dict"),
    "list": (lambda model: model.layers[1].attn.history.append(1.0), "attribute 'history' of a Part, a list"),
    "bias": (lambda model: _add(model.layers[1].attn.q.bias), "parameter 'bias'"),
    "buffer": (lambda model: _add(model.layers[1].attn.shift), "buffer 'shift' of a Part"),
    "sub-module": (lambda model: setattr(model.layers[1].attn, "q", nn.Linear(8, 8)), "sub-module 'q' of a Part"),
}


def _add(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def _run(ac: str, change: Callable[[Any], Any], steps: int) -> tuple[list[Tensor | None], Any]:
    """Return gradients of a step in which `change` comes before backward, after so many others, and the model."""
    model = _model(ac)
    held = list(model.parameters())  # also what a change takes out
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for step in range(steps + 1):
        loss = model(x).square().sum()
        if step == steps:
            seeded(change, model, seed=3)
        loss.backward()
    return [x.grad, *(p.grad for p in held)], model


@pytest.mark.parametrize("steps", [0, 3], ids=["first step", "later"])
@pytest.mark.parametrize("change", RESTORED)
@pytest.mark.parametrize("ac", MODES)
def test_restored(ac: str, change: str, steps: int) -> None:
    (expected, original), (actual, model) = (_run(mode, RESTORED[change], steps) for mode in ("none", ac))
    assert_bitwise(actual, expected)
    for one, other in zip(model.layers, original.layers, strict=True):  # and the present is as the change left it
        names = ("training", "adapter", "calls", "function", "config", "tally", "bonus", "extra", "load")
        assert [getattr(one.attn, n, None) for n in names] == [getattr(other.attn, n, None) for n in names]
        assert torch.equal(one.attn.shift, other.attn.shift) and list(one._modules) == list(other._modules)
        assert [p.requires_grad for p in one.parameters()] == [p.requires_grad for p in other.parameters()]
    if change != "attribute taken away":  # a second forward finds nothing of the recomputation
        assert torch.equal(model(torch.ones(2, 8)), original(torch.ones(2, 8)))


@pytest.mark.parametrize("ac", WHOLE)
def test_a_frozen_parameter_that_a_second_forward_writes_is_named(ac: str) -> None:
    class Averaging(nn.Linear):
        """Reads a mean, which each forward moves from the second step on."""

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.add_(self.rate)
            return (super().forward(x) + self.mean).sin()

    model: Any = under(ac, lambda: Stack(Averaging(8, 8) for _ in range(2)), layers=["layers.*"])
    for layer in model.layers:
        layer.mean, layer.rate = nn.Parameter(torch.zeros(8), requires_grad=False), 0.0
    x = torch.ones(2, 8)
    model(x).sum().backward()
    for layer in model.layers:
        layer.rate = 0.5
    with pytest.raises(RegionError, match="parameter 'mean' of a Averaging was changed in place between forward"):
        (model(x).sum() + model(2 * x).sum()).backward()


@pytest.mark.parametrize("steps", [0, 3], ids=["first step", "later"])
@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("ac", MODES)
def test_refused_by_name(ac: str, change: str, steps: int) -> None:
    with pytest.raises(RegionError, match=rf"Region 'layers\..*{REFUSED[change][1]}.* (changed|exchanged) "):
        _run(ac, REFUSED[change][0], steps)


class Recording(nn.Module):
    """Keeps something in a container in its forward, from call number `first` on."""

    def __init__(self, kind: str, first: int, asks: bool) -> None:
        super().__init__()
        self.attn, self.first, self.asks, self.calls = nn.Linear(8, 8), first, asks, 0
        self.kept: Any = {} if kind == "dict" else []
        self.keep = "update" if kind == "dict" else "extend"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.attn(x).sin()
        if self.calls >= self.first and not (self.asks and is_recomputing()):
            getattr(self.kept, self.keep)([("mean", y.detach().mean())])
        return x + y


@pytest.mark.parametrize("ac", WHOLE)
@pytest.mark.parametrize("kind", ["list", "dict"])
def test_a_container_that_forward_fills_is_refused_unless_it_asks(ac: str, kind: str) -> None:
    def run(first: int, asks: bool) -> list[int]:
        model = under(ac, lambda: nn.Sequential(*(Recording(kind, first, asks) for _ in range(3))))
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        return [len(layer.kept) for layer in model]

    assert run(1, asks=True) == ([1] * 3 if kind == "dict" else [3] * 3)
    for first in (1, 3):  # in every step: not only where the first forward does so
        with pytest.raises(RegionError, match=r"attribute 'kept' of a Rec.* a second time, in recomp.*is_recomputing"):
            run(first, asks=False)


OTHERWISE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (
        lambda layer: layer.kept.append(1.0),
        "attribute 'kept' of a Otherwise, a list, was changed a second time",
    ),
    "parameter": (lambda layer: layer.scale.add_(1), "Region 'layers"),
    "random": (lambda layer: random.random(), "draws random numbers from Python's or NumPy's generator"),
    "numpy": (lambda layer: float(np.random.random()), "draws random numbers from Python's or NumPy's generator"),
}


class Otherwise(nn.Linear):
    """Finds otherwise in recomputation what it changes, or draws, itself."""

    def __init__(self, kind: str) -> None:
        super().__init__(8, 8)
        self.kind, self.kept = kind, []
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        drawn = OTHERWISE[self.kind][0](self)
        y = super().forward(x) * self.scale * len([*self.kept, 1])
        return (y * (drawn if isinstance(drawn, float) else 1)).sin()


@pytest.mark.parametrize("kind", OTHERWISE)
@pytest.mark.parametrize("ac", WHOLE)
def test_state_that_forward_itself_changes_and_reads_is_named(ac: str, kind: str) -> None:
    model = under(
        ac, lambda: Stack(nn.Sequential(Otherwise(kind), nn.LayerNorm(8)) for _ in range(2)), layers=["layers.*"]
    )
    with pytest.raises(RegionError, match=OTHERWISE[kind][1]):
        model(torch.ones(2, 8)).square().sum().backward()


@pytest.mark.parametrize("policy", [FullPolicy(), SelectivePolicy()])
@pytest.mark.parametrize("place", ["argument", "keyword", "attribute", "closure"])
def test_a_generator_that_operators_are_given_draws_again_what_it_drew(policy: Any, place: str) -> None:
    layer: Any = nn.Linear(4, 4)
    generator = layer.generator = torch.Generator().manual_seed(3)
    drawn = []

    def fn(x: Tensor, given: Any = None, *, by_name: Any = None) -> Tensor:
        source = given or by_name or (layer.generator if place == "attribute" else generator)
        drawn.append(torch.rand(4, generator=source))
        return (layer(x) * drawn[-1]).sin() @ layer.weight

    args = (generator,) if place == "argument" else ()
    kwargs = {"by_name": generator} if place == "keyword" else {}
    for _ in range(3):
        out = checkpoint_region(fn, torch.ones(2, 4, requires_grad=True), *args, policy=policy, **kwargs)
        state = generator.get_state()
        out.sum().backward()
        assert torch.equal(drawn[-1], drawn[-2]) and torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("second_order", [True, False])
def test_inner_steps_of_meta_learning(ac: str, second_order: bool) -> None:
    def call(model: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    def gradients(mode: str) -> list[Tensor]:
        model = _model(mode)
        slow: dict[str, Tensor] = dict(model.named_parameters())
        losses = []
        for task in range(2):  # both tasks' graphs live until the one backward outside
            fast = slow
            for _ in range(2):
                loss = call(model, fast, torch.full((2, 8), 0.1 + task))
                steps = torch.autograd.grad(loss, list(fast.values()), create_graph=second_order)
                fast = {name: weight - 0.1 * step for (name, weight), step in zip(fast.items(), steps)}
            losses.append(call(model, fast, torch.full((2, 8), 0.7 + task)))
        sum(losses).backward()  # type: ignore[union-attr]
        return [weight.grad for weight in slow.values()]  # type: ignore[misc]

    assert_bitwise(gradients(ac), gradients("none"))


class Rotated(nn.Module):
    """Makes a table in forward and keeps it, as rotary embeddings and masks are cached; `kind` says how and when."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attn, self.mlp, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind
        if kind == "buffer":
            self.register_buffer("table", torch.zeros(0), persistent=False)
        elif kind != "late":
            self.table = None

    def forward(self, x: Tensor) -> Tensor:
        table, length = getattr(self, "table", None), x.shape[1]
        if table is None or len(table) < length or (self.kind == "exact" and len(table) > length):
            self.table = torch.arange(1.0, length + 1).div(length).cos()  # its values depend on the length, too
        return x + self.mlp((self.attn(x) * self.table[:length, None]).sin())


@pytest.mark.parametrize("lengths", [(4, 8), (8, 4, 6)], ids=str)
@pytest.mark.parametrize("kind", ["grows", "exact", "late", "buffer"])
@pytest.mark.parametrize("ac", WHOLE)
def test_tables_that_grow_between_forwards_of_one_backward(ac: str, kind: str, lengths: tuple[int, ...]) -> None:
    def run(mode: str) -> list[Tensor]:
        model = under(mode, lambda: nn.Sequential(*(Rotated(kind) for _ in range(3))))
        results = []
        for step in range(3):
            model.zero_grad()
            inputs = [torch.full((2, length + step, 8), 0.1 * length) for length in lengths]
            sum(model(x).square().sum() for x in inputs).backward()
            results += [p.grad.clone() for p in model.parameters()] + [layer.table.clone() for layer in model]
        return results

    assert_bitwise(run(ac), run("none"))


@pytest.mark.parametrize("ac", MODES)
def test_two_adapters_in_one_graph(ac: str) -> None:
    peft = pytest.importorskip("peft")

    def gradients(mode: str) -> dict[str, Tensor]:
        from tests.models.decoders import batch, build, loss_of

        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        model = peft.get_peft_model(build("llama").eval(), config, "a")
        model.add_adapter("b", config)
        model = parallelize(model, "single", mode, device="cpu").train()
        losses = []
        for name in ("a", "b"):
            model.set_adapter(name)
            torch.manual_seed(5)
            losses.append(loss_of(model, batch(2)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        (losses[0] + 2 * losses[1]).backward()
        return gradients_of(model)

    expected = gradients("none")
    assert len(expected) > 8 and {name.split(".")[-2] for name in expected} == {"a", "b"}
    assert_bitwise(gradients(ac), expected)


def test_the_walk_over_a_layer_is_made_once_while_its_modules_are_the_same() -> None:
    layer = _layer()
    walk = walk_of(layer)
    layer.attn.adapter, layer.attn.bonus = "b", 1.0
    assert walk_of(layer) is walk
    layer.third = nn.Linear(2, 2)
    assert walk_of(layer) is not walk
