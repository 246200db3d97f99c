"""MemoryProfiler: counted bytes with exact numbers, a model left untouched, and recommendations that hold."""

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nemo_like.layers import LayersNotFoundError
from nemo_like.profiling import BudgetUnmeetableError, MemoryProfiler
from nemo_like.profiling.profile_report import Moment, ProfiledCall, enough_layers, predict_peak
from tests.models.blocks import Layer, Stack, in_turn
from tests.models.tiny import Block

pytestmark = pytest.mark.compat


def blocks(*wide: int, dim: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(dim, w, act=nn.functional.gelu) for w in wide])


def saved_by_block(n: int, dim: int, wide: int) -> int:
    """In float32, for (N, D) inputs: x, norm(x), 2 statistics, and twice the wide one."""
    return 4 * (2 * n * dim + 2 * n + 2 * n * wide)


def test_bytes_are_those_that_autograd_saves():
    n, model = 64, blocks(32, 128, 64)
    report = MemoryProfiler(model, "cpu").profile(torch.randn(n, 16), num_runs=3)
    assert [(row.name, row.activation_bytes) for row in report] == [
        ("1", saved_by_block(n, 16, 128)),
        ("2", saved_by_block(n, 16, 64)),
        ("0", saved_by_block(n, 16, 32)),
    ]
    # An independent count: distinct storages that the pack hook sees, less parameters.
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(torch.randn(n, 16)).sum().backward()
    assert report.total_activation_bytes == sum(storage.nbytes() for storage in seen.values())
    assert report.outside_bytes == 0
    for row in report:
        # All but the block's own input is freed when the block is replayed.
        assert row.freed_bytes == row.activation_bytes - 4 * n * 16
        assert row.forward_ms > 0 and row.backward_ms > 0 and row.calls == 1
    assert report.step_ms >= sum(row.forward_ms for row in report) * 0.5 > 0


def test_a_storage_is_counted_once_and_at_the_layer_that_saves_it_first():
    def square(layer: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * layer.scale  # saves x
        return y * y + y.t().t()  # saves y, twice, and views of it never

    layers = {name: Layer(square, scale=nn.Parameter(torch.ones(4))) for name in ("one", "two")}
    report = MemoryProfiler(nn.Sequential(OrderedDict(layers)), "cpu").profile(torch.randn(8, 4), num_runs=1)
    assert {row.name: row.activation_bytes for row in report} == {"one": 2 * 128, "two": 2 * 128}
    assert report["one"].freed_bytes == 128  # x is given; y goes
    with pytest.raises(KeyError, match="three"):
        report["three"]


def test_a_layer_called_twice_is_one_row():
    model = Stack(blocks(32, 64), run=lambda layers, x: in_turn([*layers, *layers], x))
    report = MemoryProfiler(model, "cpu").profile(torch.randn(8, 16), num_runs=1)
    assert [(row.name, row.calls, row.activation_bytes) for row in report] == [
        ("layers.1", 2, 2 * saved_by_block(8, 16, 64)),
        ("layers.0", 2, 2 * saved_by_block(8, 16, 32)),
    ]


def test_report_reads_as_table_and_json():
    report = MemoryProfiler(blocks(32, 64), "cpu").profile((torch.randn(8, 16),), num_runs=1)
    first, table = report.table().split("\n\n")
    head, *rows = table.splitlines()
    assert head.startswith("layer ") and head.endswith("spread") and f"freed {report.unit.name}" in head
    assert [row[0] for row in rows] == ["1", "0"] and "2 layers" in first
    assert first.startswith(f"Peak of activations: {report.unit.word(report.peak_bytes)};")
    assert max(map(len, report.table(width=80).splitlines())) <= 80
    values = json.loads(report.to_json())
    assert values["peak_bytes"] == report.peak_bytes and [row["name"] for row in values["layers"]] == ["1", "0"]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda model: MemoryProfiler(model, "meta"), ValueError, "'meta'"),
        (
            lambda model: MemoryProfiler(model, "cpu").profile(torch.zeros(2, 16), num_runs=0),
            ValueError,
            "num_runs is 0",
        ),
        (lambda model: MemoryProfiler(model, "cpu").recommend_layers(1.0), RuntimeError, "profile"),
        (lambda model: MemoryProfiler(model, "cpu", layers=["nowhere.*"]), LayersNotFoundError, "nowhere"),
        (
            lambda model: MemoryProfiler(model.requires_grad_(False), "cpu").profile(torch.zeros(2, 16)),
            ValueError,
            "requires a gradient",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(call: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        call(blocks(32, 32))


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "1GB", True])
def test_a_wrong_budget_is_refused(wrong: Any):
    profiler = MemoryProfiler(blocks(32, 32), "cpu", loss_fn=lambda out: out.square().mean())
    profiler.profile(torch.zeros(2, 16), num_runs=1)
    with pytest.raises(ValueError, match="memory_budget_mb"):
        profiler.recommend_layers(wrong)


def test_recommendations_are_minimal_and_the_impossible_is_an_error():
    profiler = MemoryProfiler(blocks(32, 256, 64, 128, dim=8), "cpu")
    report = profiler.profile(torch.randn(64, 8), num_runs=1)
    peak = report.peak_bytes / 1e6
    assert profiler.recommend_layers(peak) == []
    best = report.predict_peak_bytes(report.call_names) / 1e6
    for budget in (peak * 0.99, (peak + best) / 2, best):
        chosen = profiler.recommend_layers(budget)
        assert report.predict_peak_bytes(chosen) <= budget * 1e6
        for left_out in chosen:
            assert report.predict_peak_bytes([name for name in chosen if name != left_out]) > budget * 1e6
    with pytest.raises(BudgetUnmeetableError, match=f"{best:.3f} MB"):
        profiler.recommend_layers(best * 0.99)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_layers_that_are_enough_have_none_that_is_not_needed(data):
    count = data.draw(st.integers(1, 6))
    whole = st.integers(0, 30)
    calls = [
        ProfiledCall(data.draw(st.integers(0, count - 1)), data.draw(st.integers(-2, 9)), data.draw(st.integers(1, 5)))
        for _ in range(count)
    ]
    moments = [Moment(data.draw(st.integers(0, count)), data.draw(whole)) for _ in range(4)]
    budget = data.draw(whole)
    chosen = enough_layers(moments, calls, budget)
    if chosen is None:
        useful = {n for n in range(count) if sum(call.freed for call in calls if call.layer == n) > 0}
        assert predict_peak(moments, calls, useful) > budget
        return
    assert predict_peak(moments, calls, chosen) <= budget
    if all(call.freed >= 0 for call in calls):
        assert all(predict_peak(moments, calls, {*chosen} - {left_out}) > budget for left_out in chosen)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the allocator's numbers cannot be read")
def test_on_cuda_the_allocator_is_read():
    model = blocks(512, 2048, 1024, dim=256).to("cuda")
    profiler = MemoryProfiler(model, "cuda")
    report = profiler.profile(torch.randn(4096, 256), num_runs=3)
    assert [row.name for row in report] == ["1", "2", "0"]
    assert report["1"].activation_bytes == saved_by_block(4096, 256, 2048)
    # Saved bytes are counted as on the CPU; the peak comes from the allocator, which also sees what kernels borrow.
    assert report.peak_bytes >= report.total_activation_bytes - 4 * 4096 * 256
    assert all(row.forward_ms > 0 and row.backward_ms > 0 for row in report)
    assert next(model.parameters()).grad is None
    assert set(profiler.recommend_layers(report.predict_peak_bytes(report.call_names) / 1e6)) <= {"0", "1", "2"}
