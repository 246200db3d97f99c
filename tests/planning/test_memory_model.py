"""A step is written once, and both of its readers count the same bytes; ranks where FSDP2 shards nothing; autocast."""

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_like import Job, dry_run, parallelize
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.fake_rank import SAME
from nemo_like.layers import find_layers
from nemo_like.options import FSDP2, OffloadConfig, PipelineParallel, Precision, StepSpec, TensorParallel
from nemo_like.planning import plan_for
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.memory_model.storages import Bytes, Event, Events, LogRun
from nemo_like.planning.model.capture import trace_model
from nemo_like.planning.predictions.rank import (
    RankSteps,
    fullest_rank,
    later_step,
    parts_at_peak,
    peak_of,
    rank_peak,
)
from nemo_like.planning.predictions.reserved import reserved_on
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.trace.block import record
from nemo_like.planning.trace.records import Recorded
from tests.checks import assert_bitwise, step
from tests.models.decoders import batch, build
from tests.models.tiny import labelled, made
from tests.planning.queries import call_of, computing, part_of
from tests.said import said

STEPS = (
    StepSpec(), StepSpec(microbatches=3), StepSpec(microbatches=2, sync="last"), StepSpec(microbatches=4, sync="last"),
    StepSpec(zero_grad="zero"), StepSpec(microbatches=3, sync="last", zero_grad="zero"), StepSpec(keeps_output=False),
)  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "one device": {}, "ddp": {"world_size": 4, "strategy": "ddp"}, "fsdp2": {"world_size": 4},
    "bf16": {"world_size": 4, "precision": "bf16"}, "chunked": {"world_size": 4, "loss": "chunked"},
    "prefetch": {"world_size": 4, "strategy": FSDP2(forward_prefetch=2, backward_prefetch=2)},
    "gathered": {"world_size": 4, "strategy": FSDP2(reshard_after_forward=False)},
    "one root": {"world_size": 4, "strategy": FSDP2(ends="root")},
    "host": {"world_size": 4, "strategy": FSDP2(cpu_offload=True)},
    "boundary": {"world_size": 4, "offload": OffloadConfig("boundary", min_bytes=1)},
    "saved": {"world_size": 4, "offload": OffloadConfig("saved", min_bytes=1, prefetch=2, max_inflight_bytes=1 << 14)},
}  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")


def _model(tied: bool = False) -> Any:
    return made(
        "Llama", device="meta", hidden_size=32, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=192, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip


def _sample(tokens: int = 32) -> dict[str, torch.Tensor]:
    return labelled(torch.zeros(2, tokens, dtype=torch.long))


def _most(log: list[Event], there: dict[int, int]) -> int:
    """The most bytes alive in a log of `Events`, which is taken from it; `there`: bytes of each storage."""
    levels = [sum(there.values())]
    for storage, size, *_ in log:
        levels.append(levels[-1] + size)
        there[storage] = there.get(storage, 0) + size
        assert there[storage] >= 0
    log.clear()
    return max(levels)


def _check(query: PlanQuery, rank: int, mode: str) -> None:
    """Both readers count the same bytes of three steps, and a step ends as it began."""
    counted, listed = Bytes(), Events()
    loops = [RankSteps(query, rank, query.uniform(mode), storages) for storages in (counted, listed)]
    there: dict[int, int] = {}
    for number in range(3):
        before, counted.best_total = counted.total, -1
        for loop in loops:
            loop.run(first=number == 0)
        assert max(counted.best_total, before if query.is_pipeline else 0) == _most(listed.log, there)
        assert counted.total == sum(there.values())
        assert number < 1 or counted.total == before


@pytest.mark.few(5)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_both_readers_count_the_same_bytes_and_a_step_ends_as_it_began(name: str, mode: str) -> None:
    traced = PlanQuery.from_model(_model(), _sample(), Job.of(gpu="h100-80gb", **JOBS[name]))
    for each in STEPS:
        _check(traced.under(replace(traced.job, step=each)), 0, mode)


@pytest.mark.parametrize("more", [{}, {"pp": PipelineParallel(2, "zbv", 4)}], ids=["whole", "stages"])
def test_parts_of_a_peak_are_those_of_a_later_step_wherever_they_are_read(more: dict[str, Any]) -> None:
    """From the steps that are replayed in the allocator, and from a step of their own; they add up to the counted peak."""
    traced = PlanQuery.from_model(_model(), _sample(), Job.of(gpu="h100-80gb", world_size=4, precision="bf16", **more))
    for each in STEPS[:1] if more else STEPS[1:4]:
        query = traced.under(replace(traced.job, step=each))
        choices = query.uniform("selective")
        rank = fullest_rank(query, choices)
        reserved_on(query, rank, choices)
        noted = parts_at_peak(query, rank, choices)
        query.written.clear()
        assert noted == parts_at_peak(query, rank, choices)
        assert sum(noted.values()) == rank_peak(query, rank, choices).total


def test_attention_with_several_outputs_waits_in_cpu_memory_by_both_readers() -> None:
    """A GPU's fused attention saves its output and statistics: two storages, of which each is moved in each layer."""
    offload = OffloadConfig("saved", min_bytes=1, max_inflight_bytes=1)  # the copies have ended
    job = Job.of(gpu="h100-80gb", precision="bf16", offload=offload, world_size=4)
    query = PlanQuery.from_model(_model(), _sample(), job)
    alive: list[list[int]] = []
    for reader in (Bytes(), Events()):
        levels: list[int] = []
        with mock.patch.object(reader, "mark", lambda where: levels.append(_alive(reader))):  # noqa: B023
            later_step(query, 0, query.uniform("selective"), reader)
        alive.append(levels)
    assert alive[0] == alive[1] and len(alive[0]) > 10


def _alive(reader: Bytes | Events) -> int:
    return reader.total if isinstance(reader, Bytes) else sum(reader.sizes.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("job", "tied"),
    [({"world_size": 2}, False), ({"world_size": 4, "precision": "bf16"}, False), ({"world_size": 4}, True)],
)
def test_so_does_a_rank_of_a_pipeline(schedule: str, job: dict[str, Any], tied: bool) -> None:
    asked = Job.of(gpu="h100-80gb", pp=PipelineParallel(2, schedule, 4), **job)
    query = PlanQuery.from_model(_model(tied), _sample(), asked)
    for mode in ("none", "full"):
        for rank in range(2):
            _check(query, rank, mode)


@given(st.data())
def test_a_folded_log_comes_to_what_its_entries_do(data: st.DataObject) -> None:
    """Storages that were there or are made and freed, of which some are exposed, held by others too, or there already."""
    count = data.draw(st.integers(1, 6))
    sizes = {number: data.draw(st.integers(1, 100)) for number in range(1, count + 1)}
    exposed = frozenset(data.draw(st.sets(st.sampled_from(sorted(sizes)))))
    entries: list[tuple[int, int]] = []
    for number in sizes:
        at = data.draw(st.integers(0, len(entries)))
        entries.insert(at, (number, sizes[number]))
        if data.draw(st.booleans()):
            entries.insert(data.draw(st.integers(at + 1, len(entries))), (number, 0))
    log = Recorded(tuple(entries), exposed, sizes, frozenset())
    there, shared = data.draw(st.sets(st.sampled_from(sorted(exposed)))) if exposed else set(), data.draw(st.booleans())
    levels = []
    for reader in (Bytes(), Events()):
        run = LogRun({number: reader.make(sizes[number], Part.GRADIENTS) for number in sorted(there)})
        for storage in run.alive.values() if shared else ():
            reader.hold(storage)
        reader.run_log(log, run, Part.SAVED_ACTIVATIONS)
        if isinstance(reader, Bytes):
            levels.append((reader.best_total if entries else 0, reader.total))
        else:
            alive: dict[int, int] = {}
            levels.append((_most(reader.log, alive), sum(alive.values())))
    assert levels[0][1] == levels[1][1]
    assert max(levels[0][0], 0) == levels[1][0]


def _tiny(name: str = "Llama", layers: int = 2, **more: Any) -> Any:
    return made(
        name, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, **more,
    )  # fmt: skip


def _query(**setup: Any) -> PlanQuery:
    made = Job.of(step=StepSpec(keeps_output=False), **setup)
    return PlanQuery.from_model(_tiny(), _sample(16), made.change(gpu=resolve_device("cpu")))


def test_replicas_reduce_also_where_nothing_is_sharded() -> None:
    alone, replicas = _query(), _query(dp_replicate=2, world_size=2)
    assert not alone.stages[0].sharding.on and replicas.stages[0].sharding.on
    none = [parts_at_peak(query, 0, query.uniform("full")) for query in (alone, replicas)]
    assert "reduce buffers" not in none[0] and none[1]["reduce buffers"] > 0
    # Nobody shards: a single device, or DDP.
    assert not _query(dp_replicate=2, world_size=2, strategy="ddp").stages[0].sharding.on


def test_one_rank_gathers_into_no_buffer() -> None:
    """FSDP2 copies parameter by parameter there: nothing is fetched ahead."""
    one, two = _query(dp_replicate=2, world_size=2), _query(world_size=2)
    assert {unit.flat for unit in one.stages[0].sharding.all} == {0}
    assert all(unit.flat == unit.gathered for unit in two.stages[0].sharding.all)
    sizes = {id(p): p.numel() * 4 for p in part_of(one).model.parameters()}
    layer = sum(sizes[id(p)] for p in part_of(one).model.model.layers[0].parameters())
    for fsdp in (FSDP2(), FSDP2(forward_prefetch=1)):
        query = _query(dp_replicate=2, world_size=2, strategy=fsdp)
        assert "backward of layer" in peak_of(query, query.uniform("full")).at
        assert parts_at_peak(query, 0, query.uniform("full"))["gathered layers"] == layer


# What transformers splits by code of its own, or torch by an input that it splits; the loss of a head that stays split, in
# chunks; stages of parts of sequences, and in float8. Each as a rank of 8 runs it (3 s each).
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "more", "asked"),
    [
        ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, {"tp": 2}),
        ("Llama", {}, {"tp": TensorParallel(2, loss_parallel=True), "loss": "chunked"}),
        ("Olmo3", {"sliding_window": 8}, {"tp": 2}),
        ("Llama", {}, {"tp": TensorParallel(2, sequence_parallel=True), "pp": 2}),
        ("Llama", {}, {"precision": "fp8", "pp": 2}),
    ],
    ids=["experts", "a loss in chunks", "an input that is split", "stages", "float8 in stages"],
)
def test_a_budget_is_planned_to_the_byte(name: str, more: dict[str, Any], asked: dict[str, Any]) -> None:
    job = Job.of(ac="50%", world_size=8, gpu="h100-80gb", **asked)
    found = dry_run(_tiny(name, 2 if "pp" in asked else 1, **more), job, _sample(16), layers=None)
    assert found.against is not None and abs(found.peak_bytes - found.against) <= SAME


def _batch() -> dict[str, torch.Tensor]:
    return {"input_ids": batch(2), "labels": batch(2)}


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["bf16", Precision("bf16", output_dtype="float32")])
@pytest.mark.parametrize("budget", ["45%", "80%"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_whole_model_in_mixed_precision_fits_its_plan(
    name: str, budget: str, precision: str | Precision, logs: pytest.LogCaptureFixture
) -> None:
    options = dict(precision=precision, device="cpu", sample_input=_batch())
    expected = step(parallelize(build(name), "single", "none", **options), seed=3, **_batch())
    found = step(parallelize(build(name), "single", budget, **options), seed=3, **_batch())
    assert not said(logs), "each region runs the operators of its plan"
    assert_bitwise(found, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_trace_of_a_layer_under_autocast_is_what_runs(name: str) -> None:
    model = build(name)
    layers = find_layers(model)
    traced = trace_model(model, layers, _batch(), autocast=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        args, kwargs = call_of(layers[0].module, lambda: model(**_batch(), use_cache=False))
    shared = {id(t) for t in tensors_in((args[1:], kwargs)) if t.dtype != torch.float32 or t.shape[0] != 2}
    inputs = tensors_in((args, kwargs))

    def call():
        with torch.autocast("cpu", torch.bfloat16):
            return layers[0].module(*args, **kwargs)

    real = record(
        call, name="real", params=[*layers[0].module.parameters(), *layers[0].module.buffers()],
        inputs={(0, i): t for i, t in enumerate(inputs) if id(t) not in shared},
        shared=[t for t in inputs if id(t) in shared],
    )  # fmt: skip
    planned = traced.kinds[0].trace
    assert len(traced.kinds) == 1 and planned is not None
    assert computing(planned) == computing(real)
    assert planned.none_bytes == real.none_bytes


def test_precision_counts_in_the_plan_of_a_whole_model() -> None:
    """Weights stay float32, unlike FSDP2's; autograd keeps the bfloat16 copies that autocast makes of them."""
    model = build("llama")
    plain, whole, sharded = (
        plan_for(copy.deepcopy(model), ac="100%", sample_input=_batch(), gpu="cpu", **more)
        for more in ({}, dict(precision="bf16"), dict(precision="bf16", world_size=2))
    )
    assert sharded.none_bytes < whole.none_bytes
    assert plain.peak["parameters"] == whole.peak["parameters"]
