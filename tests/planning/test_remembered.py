"""Functions of a model's code that remember tensors from step to step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import Job
from nemo_like.fake.outside_state import RememberedTables
from nemo_like.options import StepSpec
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from nemo_like.torch_compat import is_fake
from tests.allocator_events import cpu_events
from tests.planning.queries import bytes_between_steps

WIDTH, ROWS = 64, 20_000  # a table is larger than what a fake run computes
TABLE = 4 * WIDTH * ROWS


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """As models' libraries do it: the function that remembers is in a cell of the one that stands in the class."""
    found = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return found(*args)

    return wrapper


@functools.lru_cache(maxsize=1)
def of_module(rows: int, like: torch.dtype) -> Tensor:
    return torch.arange(rows * WIDTH, dtype=like).view(rows, WIDTH)


class Table(nn.Module):
    """Layers on top of a table of positions, which a function returns."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))

    @staticmethod
    @functools.lru_cache(maxsize=2)
    def of_class(rows: int, like: torch.dtype) -> Tensor:
        return torch.arange(rows * WIDTH, dtype=like).view(rows, WIDTH)

    @staticmethod
    @remembered
    def in_cell(rows: int, like: torch.dtype) -> Tensor:
        return torch.arange(rows * WIDTH, dtype=like).view(rows, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (rows, WIDTH) -> ()
        function = of_module if self.where == "of_module" else getattr(self, self.where)
        x = x + function(x.shape[0], x.dtype).flatten().view(-1, WIDTH) * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def measured_peak(model: Table, x: Tensor) -> tuple[int, int]:
    """Of the second step, with AdamW, and bytes that its function remembers."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    with RememberedTables(model) as tables:
        step()
        before = bytes_between_steps(model, optimizer, gradients=False) + tables.bytes
        return before + max(cpu_events(step)), tables.bytes


@pytest.mark.parametrize("where", ["of_class", "in_cell", "of_module"])
@pytest.mark.parametrize("warm", [False, True])
def test_what_a_function_remembers_is_counted_and_is_its_own_after_a_plan(where: str, warm: bool) -> None:
    model, x = Table(where), torch.randn(ROWS, WIDTH)
    for function in (of_module, Table.of_class, Table.in_cell.__closure__[0].cell_contents):  # type: ignore[attr-defined]
        function.cache_clear()
    if warm:
        model(x)
    setup = Job.of(step=StepSpec(keeps_output=False))
    query = PlanQuery.of(model, {"x": x}, setup.change(gpu=resolve_device("cpu")))
    peak = peak_of(query, query.uniform("none"))
    assert peak.parts["remembered tables"] == TABLE
    assert not is_fake(model(x)), "a run on fake tensors leaves none for a real step"
    measured, stays = measured_peak(model, x)
    assert stays == TABLE
    assert abs(peak.total - measured) <= 0.001 * measured


def test_each_function_remembers_as_much_as_it_did() -> None:
    model = Table("of_class")
    with RememberedTables(model) as tables:
        for rows in (1, 2, 3, 3):
            assert model.of_class(rows, torch.float32).shape == (rows, WIDTH)
        assert tables.bytes == 4 * WIDTH * (2 + 3), "maxsize=2"
        with tables:
            assert model.of_class(3, torch.float32) is model.of_class(3, torch.float32)
    assert Table.of_class.cache_info().maxsize == 2
