"""What a model remembers within a step or from step to step: tensors of its functions, running statistics."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like import Job
from nemo_like.fake.outside_state import RememberedTables
from nemo_like.options import StepSpec
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.predictions.rank import parts_at_peak, peak_of
from nemo_like.planning.query import PlanQuery
from nemo_like.torch_compat import is_fake
from tests.allocator_events import cpu_events
from tests.checks import same
from tests.models.blocks import Layer, in_turn
from tests.models.tiny import Block
from tests.planning.queries import bytes_between_steps, traced_block, trained_under

WIDTH, ROWS = 64, 20_000  # a table is larger than what a fake run computes
TABLE = 4 * WIDTH * ROWS


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """As models' libraries do it: the function that remembers is in a cell of the one that stands in the class."""
    found = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return found(*args)

    return wrapper


def table(rows: int, like: torch.dtype) -> Tensor:
    return torch.arange(rows * WIDTH, dtype=like).view(rows, WIDTH)


of_module = functools.lru_cache(maxsize=1)(table)


class Table(nn.Module):
    """Layers on top of a table of positions, which a function returns."""

    of_class = staticmethod(functools.lru_cache(maxsize=2)(table))
    in_cell = staticmethod(remembered(table))

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # (rows, WIDTH) -> ()
        function = of_module if self.where == "of_module" else getattr(self, self.where)
        x = x + function(x.shape[0], x.dtype).flatten().view(-1, WIDTH) * self.scale
        return in_turn(self.layers, x).square().mean()


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


def _twice(norm: Any, h: Tensor) -> Tensor:
    a, b = h.split([2, 6])
    return torch.cat([torch.sigmoid(norm(a)), torch.tanh(torch.relu(norm(b))) * 2])


def _read(norm: Any, h: Tensor) -> Tensor:
    """The layer reads the statistics itself."""
    y = torch.tanh(norm(torch.sigmoid(h)))
    return (y - norm.running_mean).sigmoid() * norm.running_var


MODELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "Twice": _twice,  # TabNet's ghost batch norm, Siamese branches
    "Chain": lambda norm, h: torch.tanh(norm(torch.sigmoid(norm(h)).exp())),
    "Read": _read,
    "Evaluated": lambda norm, h: F.batch_norm(torch.tanh(norm(h)), norm.running_mean, norm.running_var).sigmoid(),
    # An instance norm moves copies of its statistics, and writes the copies' mean back.
    "Instance": lambda norm, h: torch.tanh(norm(torch.sigmoid(norm(h.view(8, 4, 4))))).reshape(8, 16),
    "Once": lambda norm, h: torch.tanh(norm(h)).sigmoid(),
    "shared": _twice,
}
"""A batch norm, how it is called within a layer."""


def _stack(name: str) -> nn.Sequential:
    norms = [
        nn.InstanceNorm1d(4, track_running_stats=True) if name == "Instance" else nn.BatchNorm1d(16) for _ in range(3)
    ]
    shared = norms[:1] * 3 if name == "shared" else norms
    inside = [Layer(lambda layer, h: MODELS[name](layer.norm, h), norm=norm) for norm in shared]
    return nn.Sequential(*(Block(8, norm=False, act=act) for act in inside))


@pytest.mark.parametrize("ac", ["75%", "30%"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_statistics_under_a_budget(name: str, ac: str):
    assert same(*(trained_under(each, functools.partial(_stack, name), (8, 8), steps=2) for each in (ac, None)))


@pytest.mark.parametrize(("name", "steers"), [("Twice", [True, False]), ("Once", [False]), ("Instance", [True, True])])
def test_only_calls_whose_statistics_are_read_again_are_always_recomputed(name: str, steers: list[bool]):
    trace = traced_block(_stack(name)[0], torch.rand(8, 8, requires_grad=True))
    assert [op.steers for op in trace.ops if "batch_norm" in str(op.op)] == steers
