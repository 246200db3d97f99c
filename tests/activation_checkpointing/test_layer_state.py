"""State that a layer reads at the start of its forward and changes: each recompute finds what forward found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like import parallelize

WIDTH = 8
Read, Change = Callable[[Any], float], Callable[[Any], Any]


@dataclass
class Counts:
    calls: float = 1.0


class Layer(nn.Module):
    """Multiplies by what `read` finds in `value`, and changes that; `late`: makes it in the first forward."""

    def __init__(self, make: Callable[[], Any], read: Read, change: Change, late: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.make, self.read, self.change = make, read, change
        if not late:
            self.value = make()

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "value"):
            self.value = self.make()
        factor = float(self.read(self.value))
        new = self.change(self.value)
        if new is not None:
            self.value = new
        return x + self.down(F.gelu(self.up(x) * factor))


def _add(get: Callable[[Any], Any]) -> Change:
    def change(value: Any) -> None:
        item = get(value)
        item += 1

    return change


def _more_calls(value: Any) -> None:
    value.calls += 1


def _next_byte(value: bytearray) -> None:
    value[0] += 1


STATES: dict[str, tuple[Callable[[], Any], Read, Change]] = {
    "array": (lambda: np.ones(2), lambda v: v[0], _add(lambda v: v)),
    "another array": (lambda: np.ones(2), lambda v: v[0], lambda v: v + 1),
    "scalar of NumPy": (lambda: np.float32(1), float, lambda v: v + np.float32(1)),
    "fraction": (lambda: Fraction(1), float, lambda v: v + 1),
    "decimal": (lambda: Decimal(1), float, lambda v: v + 1),
    "counter": (lambda: Counter(a=1), lambda v: v["a"], lambda v: v.update("a")),
    "bytearray": (lambda: bytearray(b"\1"), lambda v: v[0], _next_byte),
    "tuple of arrays": (lambda: (np.ones(1),), lambda v: v[0][0], _add(lambda v: v[0])),
    "dictionary of arrays": (lambda: {"a": np.ones(1)}, lambda v: v["a"][0], _add(lambda v: v["a"])),
    "tuple of tensors": (lambda: (torch.ones(1),), lambda v: v[0], _add(lambda v: v[0])),
    "list of tensors": (lambda: [torch.ones(1)], lambda v: v[0], _add(lambda v: v[0])),
    "nested tensors": (lambda: {"a": [np.ones(1), torch.ones(1)]}, lambda v: v["a"][1], _add(lambda v: v["a"][1])),
    "tensor of a namespace": (lambda: SimpleNamespace(t=torch.ones(1)), lambda v: v.t, _add(lambda v: v.t)),
    "array of a namespace": (lambda: SimpleNamespace(t=np.ones(1)), lambda v: v.t[0], _add(lambda v: v.t)),
    "number of a namespace": (lambda: SimpleNamespace(calls=1.0), lambda v: v.calls, _more_calls),
    "number of a dataclass": (Counts, lambda v: v.calls, _more_calls),
}  # fmt: skip


def _model(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(3)))


def _gradients(model: nn.Module, step: int, lengths: tuple[int, ...] = (3,)) -> list[Tensor]:
    """Of one backward for several forwards; the inputs and what is drawn are those of the step."""
    torch.manual_seed(step)
    model.zero_grad()
    torch.stack([model(torch.randn(2, length, WIDTH)).square().mean() for length in lengths]).sum().backward()
    found = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in found)
    return [grad.clone() for grad in found if grad is not None]


def _same_steps(make: Callable[[], nn.Module], ac: str, lengths: Callable[[int], tuple[int, ...]]) -> list[nn.Module]:
    models = [_model(make), parallelize(_model(make), "single", ac, layers=["*"], device="cpu")]
    for step in range(3):
        plain, ours = (_gradients(model, step, lengths(step)) for model in models)
        assert all(map(torch.equal, plain, ours)), f"step {step}"
    return models


@pytest.mark.parametrize("ac", ["full", "selective"])
@pytest.mark.parametrize("late", [False, True], ids=["there", "late"])
@pytest.mark.parametrize("state", STATES)
def test_what_a_layer_changes_is_put_back_in_every_step(state: str, late: bool, ac: str) -> None:
    models = _same_steps(lambda: Layer(*STATES[state], late=late), ac, lambda step: (3,))
    values = [[m.value for m in model.modules() if "value" in vars(m)] for model in models]
    assert str(values[0]) == str(values[1])


class Table(nn.Module):
    """Grows to the longest sequence; its values depend on how long it is."""

    rows: Tensor | None = None

    def forward(self, length: int) -> Tensor:
        if self.rows is None or len(self.rows) < length:
            self.rows = torch.arange(length)[:, None] * torch.ones(WIDTH) / length
        return self.rows[:length]


class WithTable(nn.Module):
    def __init__(self, table: Table | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = Table() if table is None else table

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x) * self.table(x.shape[1])))


@pytest.mark.parametrize("ac", ["full", "selective"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("lengths", [(4, 8), (8, 4), (4, 8, 6)], ids=str)
def test_a_table_that_grows_between_two_forwards_of_one_backward(
    lengths: tuple[int, ...], shared: bool, ac: str
) -> None:
    tables = [Table(), Table()]
    made = iter([*[tables[0]] * 3, *[tables[1]] * 3])
    models = _same_steps(
        lambda: WithTable(next(made) if shared else None), ac, lambda step: tuple(n + step for n in lengths)
    )
    rows = [[len(m.rows) for m in model.modules() if isinstance(m, Table) and m.rows is not None] for model in models]
    assert rows[0] == rows[1] and set(rows[0]) == {max(lengths) + 2}


class RandomRelu(nn.Module):
    """What its last operator saves is written by that operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(self.up(x), training=True)


class Sparse(nn.Module):
    def __init__(self, layout: torch.layout, buffer: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        neighbours = torch.eye(3).to_sparse(layout=layout)
        if buffer:
            self.register_buffer("neighbours", neighbours)
        else:
            self.neighbours = neighbours

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([torch.sparse.mm(self.neighbours, F.gelu(self.up(row))) for row in x])


@pytest.mark.parametrize("ac", ["full", "selective"])
@pytest.mark.parametrize(
    "make",
    [RandomRelu, *(lambda k=k, b=b: Sparse(k, b) for k in (torch.sparse_coo, torch.sparse_csr) for b in (False, True))],
    ids=["rrelu", "coo attribute", "coo buffer", "csr attribute", "csr buffer"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_layers_of_other_tensors_train(make: Callable[[], nn.Module], ac: str) -> None:
    _same_steps(make, ac, lambda step: (3,))
