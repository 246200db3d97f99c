"""What changes between forward and backward is put back for the replay, or raises and is named: no third outcome."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from nemo_like.activation_checkpointing.engine.containers import Contents
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.wrapper import unwrap_checkpoint_wrapper
from tests.checks import assert_bitwise, gradients_of, same
from tests.models.blocks import Stack, under

MODES = ["full", "selective", "submodule", "sequential"]
TWO = ["full", *(pytest.param(ac, marks=pytest.mark.long) for ac in ("selective", "submodule")), "sequential"]
"""One that replays a whole layer, and one that replays several."""


@dataclass
class Tally:
    calls: int = 0


class Block(nn.Module):
    """Looks at everything that a module can look at."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("shift", torch.full((width,), 0.5))
        self.adapter = "a"
        self.scaling = {"a": 1.0, "b": 3.0}
        self.calls = 0
        self.load = torch.zeros(())
        self.config = SimpleNamespace(gain=2.0, kinds=["tanh"])
        self.function = torch.sin
        self.seen: set[str] = set()
        self.tally = Tally()
        self.other: Any = None
        self.table = dict.fromkeys(range(500), 1.0)

    bonus = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.load = self.load + 1
        self.seen.add(str(len(self.seen)))
        self.tally.calls += 1
        y = self.attn(x + self.shift).tanh() * self.scaling[self.adapter] * self.config.gain * len(self.config.kinds)
        y = self.function(y) * self.bonus * len(self.seen) * self.tally.calls
        y = y * (2 if self.training else 1) * self.table[400] * (1 if self.other is None else 5)
        return x + (self.mlp(y).sin() * self.calls).tanh() * self.load


def _model(ac: str) -> nn.Module:
    return under(ac, lambda: Stack(Block() for _ in range(3)))


def _set(name: str, value: Any) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        for layer in model.layers:
            setattr(layer, name, value)

    return change


def _tripled(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 3


def _hooks_exchanged(model: nn.Module) -> None:
    model.layers[1].mlp._forward_hooks = OrderedDict({0: _tripled})  # as some do who take all hooks off at once


def _exchange(name: str) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        torch.manual_seed(3)
        setattr(unwrap_checkpoint_wrapper(model.layers[1]), name, nn.Linear(8, 8))

    return change


def _config(model: nn.Module) -> None:
    for layer in model.layers:
        layer.config.gain = 5.0
        layer.config.kinds.append("sin")


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "eval": lambda model: model.eval(),
    "adapter": _set("adapter", "b"),
    "scale": lambda model: [layer.scaling.update(a=7.0) for layer in model.layers],
    "hook added": lambda model: model.layers[1].mlp.register_forward_hook(_tripled),
    "table of hooks": _hooks_exchanged,
    "buffer exchanged": _set("shift", torch.full((8,), 9.0)),
    "parameter exchanged": lambda model: setattr(model.layers[1].mlp, "weight", nn.Parameter(torch.ones(8, 8))),
    "frozen": lambda model: model.layers[1].mlp.requires_grad_(False),
    "counter": _set("calls", 50),
    "sub-module exchanged": _exchange("mlp"),
    "sub-module taken out": lambda model: delattr(unwrap_checkpoint_wrapper(model.layers[1]), "attn"),
    "sub-module put in": _exchange("third"),
    "configuration": _config,
    "another configuration": _set("config", SimpleNamespace(gain=5.0, kinds=["tanh", "sin"])),
    "function": _set("function", torch.cos),
    "attribute added": _set("bonus", 9.0),
    "attribute taken away": lambda model: delattr(unwrap_checkpoint_wrapper(model.layers[1]), "calls"),
    "attribute of another type": _set("adapter", None),
    "attribute that is there": _set("other", "there"),
    "attribute that is an object": _set("other", object()),
    "table of many numbers": lambda model: [layer.table.update({400: 3.0}) for layer in model.layers],
    "set": lambda model: [layer.seen.update("xyz") for layer in model.layers],
    "counter set back": _set("calls", 0),
    "set set back": lambda model: [layer.seen.clear() for layer in model.layers],
    "dataclass": lambda model: [setattr(layer.tally, "calls", 7) for layer in model.layers],
    "load": _set("load", torch.tensor(50.0)),
}


def _run(ac: str, change: Callable[[nn.Module], Any], steps: int = 0) -> tuple[list[torch.Tensor | None], nn.Module]:
    """Gradients of a step in which `change` comes before backward, after so many others, and the model."""
    model = _model(ac)
    held = list(model.parameters())  # also what a change takes out
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for step in range(steps + 1):
        loss = model(x).square().sum()
        if step == steps:
            change(model)
        loss.backward()
    return [x.grad, *(p.grad for p in held)], model


@pytest.mark.parametrize("steps", [0, 3], ids=["first step", "later"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ac", TWO)
def test_what_can_be_put_back_is(ac: str, change: str, steps: int) -> None:
    expected, bare = _run("none", CHANGES[change], steps)
    actual, model = _run(ac, CHANGES[change], steps)
    assert_bitwise(actual, expected)
    for layer, then in zip(model.layers, bare.layers, strict=True):  # and the present is as it was before the replay
        now = unwrap_checkpoint_wrapper(layer)
        for name in (
            "training",
            "adapter",
            "scaling",
            "calls",
            "load",
            "config",
            "function",
            "seen",
            "bonus",
            "tally",
            "other",
        ):
            assert getattr(now, name, None) == getattr(then, name, None), name
        assert list(now._modules) == list(then._modules) and now.__dict__.keys() == then.__dict__.keys()
        assert torch.equal(now.shift, then.shift)
        assert [p.requires_grad for p in now.parameters()] == [p.requires_grad for p in then.parameters()]
        assert len(now.mlp._forward_hooks) == len(then.mlp._forward_hooks)
    # A second forward finds what the change has left, and nothing of the replay.
    if change not in ("sub-module taken out", "attribute taken away", "attribute of another type"):
        assert torch.equal(model(torch.ones(2, 8)), bare(torch.ones(2, 8)))


@pytest.mark.parametrize("ac", MODES)
def test_a_hook_that_is_removed_before_backward_is_in_the_replay(ac: str) -> None:
    def gradients(mode: str) -> dict[str, torch.Tensor]:
        model = _model(mode)
        handle = model.layers[1].mlp.register_forward_hook(_tripled)
        loss = model(torch.ones(2, 8)).square().sum()
        handle.remove()
        loss.backward()
        return gradients_of(model)

    assert_bitwise(gradients(ac), gradients("none"))


@pytest.mark.parametrize("ac", MODES)
def test_a_backward_outside_of_functional_call(ac: str) -> None:
    def gradients(mode: str) -> tuple[torch.Tensor, ...]:
        model = _model(mode)
        weights = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, weights, (torch.ones(2, 8),)).square().sum()
        return torch.autograd.grad(loss, list(weights.values()))

    assert_bitwise(gradients(ac), gradients("none"))


@pytest.mark.parametrize(
    "ac", ["full", "selective", "sequential"]
)  # "submodule" uses the buffer outside of its regions
@pytest.mark.parametrize("name", ["attn.bias", "shift"])
def test_what_autograd_did_not_save_and_was_changed_in_place_is_named(ac: str, name: str) -> None:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            layer = model.layers[1]
            (layer.attn.bias if name == "attn.bias" else layer.shift).add_(1)

    with pytest.raises(RegionError, match=f"'{name.rpartition('.')[2]}' of a .* was changed in place"):
        _run(ac, change)


class Late(nn.Module):
    """Makes its state when it is first called; `kind` says as what."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attn = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "load"):
            if self.kind == "buffer":
                self.register_buffer("load", torch.zeros(()))
            else:
                self.load: Any = torch.zeros(()) if self.kind == "tensor" else 0
        self.load = self.load + 1
        return (self.attn(x) * self.load).sin()


@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("kind", ["buffer", "tensor", "number"])
def test_state_that_is_made_in_the_first_forward_counts_once(ac: str, kind: str) -> None:
    def run(mode: str) -> tuple[list[torch.Tensor], list[float]]:
        model = under(mode, lambda: nn.Sequential(*(Late(kind) for _ in range(3))))
        gradients = []
        for step in range(3):
            model.zero_grad()
            x = torch.full((2, 8), 0.1 * (step + 1))
            first = model(x).square().sum()
            second = model(x).square().sum()
            second.backward()
            first.backward()
            gradients += [p.grad.clone() for p in model.parameters()]
        return gradients, [float(unwrap_checkpoint_wrapper(layer).load) for layer in model]

    found = run(ac)
    assert same(found, run("none")) and found[1] == [6, 6, 6]


class Recording(nn.Module):
    """Keeps tensors in containers of its own, as routers keep their losses and loads."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(8, 8)
        self.losses: list[torch.Tensor] = []
        self.stats = {"load": torch.zeros(8), "calls": [0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attn(x).sin() * (1 + len(self.losses))
        self.losses.append(y.square().mean())
        self.stats["load"] = self.stats["load"] + y.detach().mean(0)
        self.stats["calls"][0] += 1
        return y * self.stats["load"] * self.stats["calls"][0] + self.losses[0].detach()


@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("clear", [True, False], ids=["cleared before backward", "kept"])
def test_containers_of_tensors_are_filled_once(ac: str, clear: bool) -> None:
    def run(mode: str) -> tuple[list[torch.Tensor], list[Any]]:
        model = under(mode, lambda: nn.Sequential(*(Recording() for _ in range(3))))
        layers = [unwrap_checkpoint_wrapper(layer) for layer in model]
        gradients, seen = [], []
        for step in range(3):
            model.zero_grad()
            loss = model(torch.full((2, 8), 0.1 * (step + 1))).square().sum()
            loss = loss + sum(layer.losses[-1] for layer in layers)
            if clear:
                for layer in layers:
                    layer.losses.clear()
            loss.backward()
            gradients += [p.grad.clone() for p in model.parameters()]
            seen += [len(layer.losses) for layer in layers] + [layer.stats["calls"][0] for layer in layers]
            seen += [layer.stats["load"].tolist() for layer in layers]
        return gradients, seen

    assert same(run(ac), run("none"))


@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("second_order", [True, False])
@pytest.mark.parametrize("by", ["functional_call", "exchange"])
def test_inner_steps_of_meta_learning(ac: str, second_order: bool, by: str) -> None:
    def put(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            owner._parameters[name.rpartition(".")[2]] = weight  # type: ignore[assignment]

    def call(model: nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if by == "functional_call":
            return torch.func.functional_call(model, weights, (x,)).square().mean()
        put(model, weights)
        return model(x).square().mean()

    def gradients(mode: str) -> list[torch.Tensor]:
        model = _model(mode)
        slow: dict[str, torch.Tensor] = dict(model.named_parameters())
        losses = []
        for task in range(2):  # both tasks' graphs live until the one backward outside
            fast = slow
            for _ in range(2):
                loss = call(model, fast, torch.full((2, 8), 0.1 + task))
                steps = torch.autograd.grad(loss, list(fast.values()), create_graph=second_order)
                fast = {name: weight - 0.1 * step for (name, weight), step in zip(fast.items(), steps)}
            losses.append(call(model, fast, torch.full((2, 8), 0.7 + task)))
            put(model, slow)
        sum(losses).backward()  # type: ignore[union-attr]
        return [weight.grad for weight in slow.values()]  # type: ignore[misc]

    assert_bitwise(gradients(ac), gradients("none"))


class Table(nn.Module):
    """Makes its table in forward and keeps it, as rotary embeddings and masks are cached; `kind` says how and when."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "buffer":
            self.register_buffer("table", torch.zeros(0), persistent=False)
        elif kind == "empty buffer":
            self.register_buffer("table", None, persistent=False)
        elif kind != "late":
            self.table = None

    def forward(self, length: int) -> torch.Tensor:
        table: torch.Tensor | None = getattr(self, "table", None)
        if table is None or len(table) < length or (self.kind == "exact" and len(table) > length):
            self.table = torch.arange(1.0, length + 1).div(length).cos()  # its values depend on the length, too
        return self.table[:length]


class Rotated(nn.Module):
    def __init__(self, table: Table) -> None:
        super().__init__()
        self.attn, self.mlp, self.table = nn.Linear(8, 8), nn.Linear(8, 8), table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp((self.attn(x) * self.table(x.shape[1])[:, None]).sin())


@pytest.mark.few(42)
@pytest.mark.parametrize("lengths", [(4, 8), (8, 4), (4, 8, 6)], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("kind", ["grows", "exact", "late", "buffer", "empty buffer"])
@pytest.mark.parametrize("ac", MODES)
def test_tables_that_grow_between_forwards_of_one_backward(
    ac: str, kind: str, shared: bool, lengths: tuple[int, ...]
) -> None:
    def run(mode: str) -> list[torch.Tensor]:
        table = Table(kind)
        model = under(mode, lambda: nn.Sequential(*(Rotated(table if shared else Table(kind)) for _ in range(3))))
        found = []
        for step in range(3):
            model.zero_grad()
            generator = torch.Generator().manual_seed(step)
            inputs = [torch.randn(2, length + step, 8, generator=generator) for length in lengths]
            sum(model(x).square().sum() for x in inputs).backward()
            found += [p.grad.clone() for p in model.parameters()]
            found += [unwrap_checkpoint_wrapper(layer).table.table.clone() for layer in model]  # the newest one stays
        return found

    assert_bitwise(run(ac), run("none"))


class Pair(NamedTuple):
    count: torch.Tensor


@dataclass(slots=True)
class Slotted:
    count: float = 1.0


@dataclass
class Inner:
    tally: Tally
    history: list[float]


class Longer(list):  # type: ignore[type-arg]
    """A list with an attribute of its own."""

    factor = 1.0


def _add(value: Any) -> None:
    value += 1


def _longer(value: Longer) -> None:
    value.append(0.0)
    value.factor += 1


# How state is made, read, and changed in place; or None: it is exchanged for itself plus one.
STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any] | None]] = {
    "array": (lambda: np.ones(2), lambda v: v[0], _add),
    "array exchanged": (lambda: np.ones(2), lambda v: v[0], None),
    "array of a subclass": (lambda: np.ones(1).view(np.recarray), lambda v: v[0], _add),
    "NumPy's number": (lambda: np.float32(1), float, None),
    "fraction": (lambda: Fraction(1), float, None),
    "decimal": (lambda: Decimal(1), float, None),
    "Counter": (lambda: Counter(a=1), lambda v: v["a"], lambda v: v.update("a")),
    "bytearray": (lambda: bytearray(b"\1"), lambda v: v[0], lambda v: v.append(v.pop() + 1)),
    "array of Python": (lambda: array("d", [1.0]), lambda v: v[0], lambda v: v.append(v.pop() + 1)),
    "tuple of arrays": (lambda: (np.ones(1),), lambda v: v[0][0], lambda v: _add(v[0])),
    "tuple of a list": (lambda: ([1.0],), lambda v: len(v[0]), lambda v: v[0].append(1.0)),
    "tuple of tensors": (lambda: (torch.ones(1),), lambda v: v[0].item(), lambda v: v[0].add_(1)),
    "named tuple": (lambda: Pair(torch.ones(1)), lambda v: v.count.item(), lambda v: v.count.add_(1)),
    "dictionary of arrays": (lambda: {"a": np.ones(1)}, lambda v: v["a"][0], lambda v: _add(v["a"])),
    "dictionary of tensors": (lambda: {"a": torch.ones(1)}, lambda v: v["a"].item(), lambda v: v["a"].add_(1)),
    "dictionary of dictionaries": (
        lambda: {"a": {"b": [1.0]}}, lambda v: sum(v["a"]["b"]), lambda v: v["a"]["b"].append(1.0)
    ),
    "dictionary of dataclasses": (lambda: {"a": Slotted()}, lambda v: v["a"].count, lambda v: _count(v["a"])),
    "list of namespaces": (lambda: [SimpleNamespace(count=1.0)], lambda v: v[0].count, lambda v: _count(v[0])),
    "default dictionary": (
        lambda: defaultdict(list, a=[1.0]), lambda v: len(v["a"]) + len(v), lambda v: (v["a"].append(1.0), v[len(v)])
    ),
    "queue": (lambda: deque([1.0], maxlen=3), sum, lambda v: v.append(2.0)),
    "queue of a tensor": (lambda: deque([torch.ones(2)]), lambda v: v[0][0], lambda v: v.append(v.pop() + 1)),
    "list with an attribute": (lambda: Longer([1.0]), lambda v: v.factor * len(v), _longer),
    "user's dictionary": (lambda: UserDict(a=1.0), lambda v: v["a"], lambda v: v.update(a=v["a"] + 1)),
    "namespace of a tensor": (
        lambda: SimpleNamespace(count=torch.ones(1)), lambda v: v.count.item(), lambda v: v.count.add_(1)
    ),
    "namespace of an array": (lambda: SimpleNamespace(count=np.ones(1)), lambda v: v.count[0], lambda v: _count(v)),
    "namespace of namespaces": (
        lambda: SimpleNamespace(a=SimpleNamespace(count=1.0)), lambda v: v.a.count, lambda v: _count(v.a)
    ),
    "dataclass": (lambda: Tally(1), lambda v: v.calls, lambda v: setattr(v, "calls", v.calls + 1)),
    "dataclass with slots": (Slotted, lambda v: v.count, lambda v: _count(v)),
    "dataclass of a dataclass": (
        lambda: Inner(Tally(1), [1.0]), lambda v: v.tally.calls * sum(v.history),
        lambda v: (setattr(v.tally, "calls", v.tally.calls + 1), v.history.append(1.0)),
    ),
    "one list twice": (lambda: _twice([1.0]), lambda v: len(v["b"]), lambda v: v["a"].append(1.0)),
    "one tensor twice": (lambda: _twice(torch.ones(1)), lambda v: v["b"].item(), lambda v: v["a"].add_(1)),
    "list that contains itself": (lambda: _cycle(), len, lambda v: v[0].append(1.0)),
    "sparse tensor": (lambda: torch.eye(2).to_sparse(), lambda v: v.to_dense()[0, 0].item(), lambda v: v.mul_(2)),
}  # fmt: skip


NAMED = {
    **dict.fromkeys(("array", "dictionary of arrays", "tuple of arrays", "namespace of an array"), "ndarray"),
    **dict.fromkeys(("dictionary of tensors", "tuple of tensors", "namespace of a tensor", "named tuple"), "Tensor"),
    **dict.fromkeys(("dictionary of dataclasses", "dataclass with slots"), "Slotted"),
    **dict.fromkeys(("queue", "queue of a tensor"), "deque"),
    **{"one tensor twice": "Tensor", "bytearray": "bytearray", "array of Python": "array"},
    "array of a subclass": "recarray",
}
"""What is not put back: the class that is named in its place."""


def _twice(value: Any) -> dict[str, Any]:
    return {"a": value, "b": value}


def _cycle() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def _count(value: Any) -> None:
    value.count += 1


class Stateful(nn.Module):
    """Reads state at its start, and changes it from call number `first` on."""

    def __init__(self, kind: str, late: bool, first: int) -> None:
        super().__init__()
        self.kind, self.attn, self.calls, self.first = kind, nn.Linear(8, 8), 0, first
        if not late:
            self.state = STATES[kind][0]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        make, read, change = STATES[self.kind]
        if not hasattr(self, "state"):
            self.state = make()
        factor = float(read(self.state))
        self.calls += 1
        if self.calls >= self.first and change is None:
            self.state = self.state + 1
        elif self.calls >= self.first:
            change(self.state)
        return x + (self.attn(x) * factor).sin()


WHEN = {"made before": (False, 1), "made in forward": (True, 1), "changed after two steps": (False, 5)}


@pytest.mark.parametrize(("late", "first"), WHEN.values(), ids=WHEN)
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("ac", [TWO[0], TWO[1], TWO[3]])
def test_state_of_every_kind_counts_once_or_is_named(ac: str, kind: str, late: bool, first: int) -> None:
    found: list[Any] = []

    def run(mode: str) -> list[Any]:
        nonlocal found
        model = under(mode, lambda: nn.Sequential(*(Stateful(kind, late, first) for _ in range(3))))
        found = []
        for _ in range(4):
            model.zero_grad()
            (model(torch.full((2, 8), 0.1)) + model(torch.full((2, 8), 0.2))).square().sum().backward()
            found += [p.grad.tolist() for p in model.parameters()]
            found += [float(STATES[kind][1](unwrap_checkpoint_wrapper(layer).state)) for layer in model]
        return found

    if kind not in NAMED:
        assert run(ac) == run("none")
        return
    with pytest.raises(RegionError, match=f"'(state|count)' of a .* is or has a {NAMED[kind]} that was changed in"):
        run(ac)
    assert len(found) == (9 * 2 if first > 1 else 0)  # in the step in which it changed


def test_weights_in_a_list_are_not_copied() -> None:
    layer = nn.LSTM(4, 4)
    kept = [tensor for _, tensor, _ in Contents([(vars(layer), "_flat_weights", "LSTM")])._signed]
    assert all(tensor is weight for tensor, weight in zip(kept, layer._flat_weights, strict=True))


class Ties(nn.Module):
    """Changes a tensor by one name, and reads it by another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attn, self.other = nn.Linear(8, 8), nn.Identity()
        self.kind, count = kind, torch.ones(())
        if kind == "buffer":
            self.register_buffer("count", count)
            self.other.register_buffer("count", count)
        elif kind == "attribute":
            self.count = self.other.count = count
        else:
            self.counts, self.other.counts = [count], {"same": count}

    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind == "containers":
            return self.counts[0], self.other.counts["same"]
        return self.count, self.other.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed, read = self.both()
        if self.kind == "containers":
            y = x + (self.attn(x) * read.detach() * (2 if changed is read else 3)).sin()
            self.counts[0] = self.other.counts["same"] = y.mean()  # with a graph
            return y
        changed += 1
        return x + (self.attn(x) * read).sin()


@pytest.mark.parametrize("kind", ["buffer", "attribute", "containers"])
@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_one_tensor_under_two_names(ac: str, kind: str) -> None:
    def run(mode: str) -> list[torch.Tensor]:
        model = under(mode, lambda: nn.Sequential(*(Ties(kind) for _ in range(3))))
        found = []
        for _ in range(3):
            model.zero_grad()
            model(torch.full((2, 8), 0.1)).square().sum().backward()
            both = [unwrap_checkpoint_wrapper(layer).both() for layer in model]
            assert all(one is other for one, other in both)
            found += [p.grad.clone() for p in model.parameters()] + [one.detach().clone() for one, _ in both]
        return found

    assert_bitwise(run(ac), run("none"))
