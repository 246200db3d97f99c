"""Bytes of compiled layers: the planner's, against what PyTorch's allocator gives out and its compiler saves."""

from collections.abc import Iterable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from nemo_like import Job, parallelize
from nemo_like.distributed.first_rank import first_rank
from nemo_like.fake.ranks import ranks_of
from nemo_like.layers import find_layers
from nemo_like.options import MemoryBudget, PipelineParallel, TensorParallel
from nemo_like.planning.model import traced
from nemo_like.planning.planner import describe
from nemo_like.planning.predictions.budget_search import choose
from nemo_like.planning.predictions.rank import peak_of, peaks_of
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.selection.layer import eager_experts, fused
from nemo_like.planning.trace.compiled_memory import CompiledBlock, Graph, compiled_memory, traced_block
from nemo_like.torch_compat import local_part
from tests.allocator_events import cpu_events
from tests.models import tiny
from tests.models.expert_families import NAMES, build, tokens
from tests.said import said

ROWS, LENGTH = 2, 64


def _model() -> nn.Module:
    torch.manual_seed(0)
    return tiny.llama(
        hidden_size=64, intermediate_size=224, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, max_position_embeddings=LENGTH,
    )  # fmt: skip


def _batch() -> dict[str, Tensor]:
    return tiny.labelled(torch.randint(0, 32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)))


def _query(model: nn.Module, ac: str, compile: str | bool, **more: Any) -> PlanQuery:
    job = Job.of(**{"strategy": "single", "ac": ac, "compile": compile, "device": "cpu", "optimizer": "sgd"} | more)
    return PlanQuery.from_model(model, _batch(), job)


@pytest.mark.parametrize("ac", ["none", "selective", "full"])
def test_a_compiled_step_peaks_as_planned(ac: str) -> None:
    query, batch = _query(_model(), ac, "aot_eager"), _batch()
    planned = peak_of(query, query.uniform(ac))
    eager = peak_of(_query(_model(), ac, False), query.uniform(ac))
    model = parallelize(_model(), "single", ac, compile="aot_eager", device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def train() -> None:
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(out)

    kept: list[Any] = []
    for _ in range(3):  # the first ones compile, and learn what the layers draw
        del kept[:-1]
        levels = cpu_events(train)
    weights = sum(p.nbytes for p in model.parameters())
    before = sum(t.nbytes for t in (kept[0].loss, kept[0].logits))
    assert weights + max(levels) + before == pytest.approx(planned.total, rel=0.02)
    if ac == "none":
        assert planned.total < eager.total


def _saved(out: Any, old: Iterable[Tensor]) -> tuple[int, dict[int, int]]:
    """Bytes of storages that a compiled call saved but for those of `old`, and the bytes of all by their number."""
    node = (out if isinstance(out, Tensor) else out[0]).grad_fn
    while "Compiled" not in type(node).__name__:
        node = node.next_functions[0][0]
    there = {local_part(t).untyped_storage()._cdata for t in old}
    made = {t._cdata: t.nbytes() for t in (local_part(t).untyped_storage() for t in node.saved_tensors)}
    return sum(size for storage, size in made.items() if storage not in there), made


@pytest.mark.parametrize("ac", ["none", "selective", "25%"])
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_it_saves_what_the_compiler_saves(ac: str, backend: str) -> None:
    compiler = "aot_eager" if backend == "aot_eager" else "inductor"
    query = _query(_model(), "full" if ac == "25%" else ac, compiler)
    if ac == "25%":
        choices = choose(query, MemoryBudget.parse(ac))
    else:
        choices = query.uniform(ac)
    call = query.stages[0].layer_calls(choices[0], False)[1]
    model = parallelize(_model(), "single", describe(query, choices, ac) if ac == "25%" else ac, device="cpu")
    layer = find_layers(model)[1].module
    layer.compile(backend=backend)
    given = torch.randn(ROWS, LENGTH, 64, requires_grad=True)
    positions = model.model.rotary_emb(given, torch.arange(LENGTH)[None])
    out = layer(given, position_embeddings=positions)
    held, made = _saved(out, (*model.parameters(), given, *positions))
    assert held == call.events.held
    assert ((0, 0) in call.inputs) == (given.untyped_storage()._cdata in made)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_all_policies_of_a_kind_cut_one_trace(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracing = Mock(wraps=traced_block)
    monkeypatch.setattr(traced, "traced_block", tracing)
    part = _query(_model(), "none", compiler).stages[0].part
    modes = [part.uniform(mode)[0] for mode in ("selective", "none", "full")]
    choices = [*modes, *part.stack(skip=True, host=0).groups[0].choices[1:-1:4]]
    together = [part.memory(0, choice, compiler=compiler) for choice in choices]
    assert tracing.call_count == 1 and len(set(map(repr, together))) > 4
    for choice, events in zip(choices, together):
        part.cache.graphs.clear()
        part.cache.blocks.clear()
        assert part.memory(0, choice, compiler=compiler) == events
    assert tracing.call_count == 1 + len(choices)


CUT_BACKWARD = {"strategy": "fsdp2", "pp": PipelineParallel(2, "zbv", 4), "world_size": 2}


@pytest.mark.parametrize(("dropout", "more"), [(0.1, {}), (0.0, CUT_BACKWARD)])
def test_what_is_not_told_is_planned_as_eager_and_said(
    dropout: float, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = _model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    query, eager = (_query(model, "none", compile, **more) for compile in ("aot_eager", False))
    # Of a pipeline, the rank whose every backward is cut in two.
    assert peaks_of(query, query.uniform("none"))[-1].total == peaks_of(eager, eager.uniform("none"))[-1].total
    assert any("with the bytes of eager ones" in record.message for record in said(caplog))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_it_saves_what_the_compiler_saves_of_split_weights(sequence_parallel: bool) -> None:
    """One of two ranks of tensor parallelism, whose collectives do nothing."""
    tp = TensorParallel(2, sequence_parallel=sequence_parallel)
    job = Job.of(world_size=2, tp=tp, compile="inductor", device="cpu", optimizer="sgd")
    query = PlanQuery.from_model(_model(), _batch(), job)
    call = query.stages[0].layer_calls(query.uniform("none")[0], False)[1]
    model, _ = first_rank(_model(), tp)
    model.to_empty(device="cpu")
    layer = find_layers(model)[1].module
    given = torch.randn(ROWS, LENGTH // 2 if sequence_parallel else LENGTH, 64, requires_grad=True)
    positions = _model().model.rotary_emb(given, torch.arange(LENGTH)[None])
    layer.compile(backend="aot_eager_decomp_partition")
    with ranks_of(model):
        out = layer(given, position_embeddings=positions)
    held, _ = _saved(out, (*model.parameters(), given, *positions))
    assert held == call.events.held


@pytest.mark.few(1)
@pytest.mark.parametrize("family", NAMES)
def test_experts_on_other_ranks_run_eagerly_between_graphs(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Measured peaks are in `tests_distributed/planning/test_planning_ranks.py`. A region that keeps tensors is eager."""
    ids = tokens(2, 48)
    job = Job.of(world_size=2, ep=2, device="cpu", optimizer="sgd")
    eager = PlanQuery.from_model(build(family), {"input_ids": ids, "labels": ids}, job)
    compiled = eager.under(job.change(compile="inductor"))
    traces = [problem.trace.ops for problem in eager.stages[0].part.problems]
    for ac in ("none", "full", "selective"):
        choices = eager.uniform(ac)
        before, after = (each.stages[0].layer_calls(choices[0], False)[-1].events for each in (eager, compiled))
        seconds = [step_seconds(each, choices).total for each in (eager, compiled)]
        if ac == "selective":  # a dense layer is one graph, with its region
            assert after == before and (seconds[0] == seconds[1]) == all(map(eager_experts, traces))
            assert any("runs eagerly around split experts" in record.message for record in said(caplog))
        else:
            assert seconds[0] > seconds[1]
            # PyTorch's rule for a dropout of probability 0, as in gpt-oss's attention, copies in a graph.
            assert family == "gpt_oss" or (after.held <= before.held and after.backward_peak < before.backward_peak)
    inside = [traces[-1][at] for at in eager_experts(traces[-1])]
    assert inside == [fused(traces[-1])[at] for at in eager_experts(traces[-1])]
    sent = [op for op in traces[-1] if op.op.name() == "nemo_like::exchange_rows"]
    assert sent and all(op in inside for op in sent)


def test_parts_of_a_split_tensor_are_no_storages() -> None:
    graph = make_fx(lambda x: [part @ part for part in (x @ x).split(2)], tracing_mode="fake")(torch.zeros(4, 2)[:2]).graph
    log, _ = Graph(graph, True).log({}, iter(range(1, 9)))
    assert [size for _, size in log if size] == [16, 16]


def test_storages_that_one_kernel_reads_last_go_in_the_order_of_the_program() -> None:
    """The order must not depend on addresses: the bytes that the allocator reserves would differ from run to run."""
    products = 12

    def forward(x: Tensor) -> list[Tensor]:
        made = [x @ x for _ in range(products)]
        return [sum(made[1:], made[0])]

    backward = fx.Graph()
    backward.output([])
    graph = make_fx(forward, tracing_mode="fake")(torch.zeros(4, 4)).graph
    block = CompiledBlock(graph, backward, outputs=1, with_gradient=(), wanted=(), places={}, fuses=True)
    log = compiled_memory(block, around=False, accumulate=False).forward
    assert [number for number, size in log if not size] == list(range(1, products + 2))
