"""What a model remembers within a step or from step to step: tensors of its functions, running statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like import Job, parallelize
from nemo_like.fake.outside_state import RememberedTables
from nemo_like.options import StepSpec
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.predictions.rank import parts_at_peak, peak_of
from nemo_like.planning.query import PlanQuery
from nemo_like.torch_compat import is_fake
from tests.allocator_events import cpu_events
from tests.planning.queries import bytes_between_steps, traced_block

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
    query = PlanQuery.from_model(model, {"x": x}, setup.change(gpu=resolve_device("cpu")))
    peak = peak_of(query, query.uniform("none"))
    assert parts_at_peak(query, 0, query.uniform("none"))["remembered tables"] == TABLE
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


class _Twice(nn.Module):
    """A batch norm that is called twice (TabNet's ghost batch norm, Siamese branches)."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), norm or nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inside(self.up(x)))

    def inside(self, h: torch.Tensor) -> torch.Tensor:
        a, b = h.split([2, 6])
        return torch.cat([torch.sigmoid(self.norm(a)), torch.tanh(torch.relu(self.norm(b))) * 2])


class _Chain(_Twice):
    def inside(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(torch.sigmoid(self.norm(h)).exp()))


class _Read(_Twice):
    """The layer reads the statistics itself."""

    def inside(self, h: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.norm(torch.sigmoid(h)))
        return (y - self.norm.running_mean).sigmoid() * self.norm.running_var


class _Evaluated(_Twice):
    def inside(self, h: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(h))
        return F.batch_norm(h, self.norm.running_mean, self.norm.running_var).sigmoid()


class _Instance(_Twice):
    """An instance norm moves copies of its statistics, and writes the copies' mean back."""

    def __init__(self) -> None:
        super().__init__(nn.InstanceNorm1d(4, track_running_stats=True))

    def inside(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(torch.sigmoid(self.norm(h.view(8, 4, 4))))).reshape(8, 16)


class _Once(_Twice):
    def inside(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(h)).sigmoid()


def _stack(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(kind(), kind(), kind())


def _shared() -> nn.Module:
    norm = nn.BatchNorm1d(16)
    return nn.Sequential(*[_Twice(norm) for _ in range(3)])


def _trained(build: Callable[[], nn.Module], ac: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = build()
    if ac is not None:
        model = parallelize(model, "single", ac, sample_input=torch.rand(8, 8))
    for seed in (1, 2):
        torch.manual_seed(seed)
        model(torch.rand(8, 8)).square().mean().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


MODELS = {kind.__name__.strip("_"): kind for kind in (_Twice, _Chain, _Read, _Evaluated, _Instance, _Once)}


@pytest.mark.parametrize("ac", ["75%", "30%"])
@pytest.mark.parametrize("name", [*MODELS, "shared"])
def test_gradients_and_statistics_under_a_budget(name: str, ac: str):
    def build() -> nn.Module:
        return _shared() if name == "shared" else _stack(MODELS[name])

    assert all(map(torch.equal, _trained(build, ac), _trained(build, None)))


@pytest.mark.parametrize(("name", "steers"), [("Twice", [True, False]), ("Once", [False]), ("Instance", [True, True])])
def test_only_calls_whose_statistics_are_read_again_are_always_recomputed(name: str, steers: list[bool]):
    trace = traced_block(MODELS[name](), torch.rand(8, 8, requires_grad=True))
    norms = [op for op in trace.ops if "batch_norm" in str(op.op)]
    assert [op.steers for op in norms] == steers
