"""A step is written once: it ends as it began, and both of its readers count the same bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_like import Job
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.options import FSDP2, OffloadConfig, PipelineParallel, StepSpec
from nemo_like.planning.answers.rank import RankSteps
from nemo_like.planning.program.storages import Allocations, Bytes, LogRun
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.trace.records import Recorded

transformers = pytest.importorskip("transformers")

STEPS = (
    StepSpec(), StepSpec(microbatches=3), StepSpec(microbatches=2, sync="last"), StepSpec(microbatches=4, sync="last"),
    StepSpec(zero_grad="zero"), StepSpec(microbatches=3, sync="last", zero_grad="zero"), StepSpec(keeps_output=False),
)  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "one device": {}, "ddp": {"world_size": 4, "strategy": "ddp"}, "fsdp2": {"world_size": 4},
    "bf16": {"world_size": 4, "precision": "bf16"}, "chunked": {"world_size": 4, "loss": "chunked"},
    "prefetch": {"world_size": 4, "strategy": FSDP2(forward_prefetch=2, backward_prefetch=2)},
    "gathered": {"world_size": 4, "strategy": FSDP2(reshard_after_forward=False)},
    "host": {"world_size": 4, "strategy": FSDP2(cpu_offload=True)},
    "boundary": {"world_size": 4, "offload": OffloadConfig("boundary", min_bytes=1)},
    "saved": {"world_size": 4, "offload": OffloadConfig("saved", min_bytes=1, prefetch=2, max_inflight_bytes=1 << 14)},
}  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")


def _model(tied: bool = False) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=192, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).train()


def _sample() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, 32, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _most(log: list[tuple[int, int, str]], there: dict[int, int]) -> int:
    """The most bytes alive in a log of `Allocations`, which is taken from it; `there`: bytes of what is."""
    now = most = sum(there.values())
    for storage, size, _ in log:
        now += size or -there.pop(storage)
        if size:
            there[storage] = size
        most = max(most, now)
    log.clear()
    return most


@pytest.mark.few(5)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_both_readers_count_the_same_bytes_and_a_step_ends_as_it_began(name: str, mode: str) -> None:
    traced = PlanQuery.of(_model(), _sample(), Job.of(gpu="h100-80gb", **JOBS[name]))
    for step in STEPS:
        query = traced.under(replace(traced.job, step=step))
        choices = query.uniform(mode)
        counted, listed = Bytes(), Allocations()
        loops = [RankSteps(query, 0, choices, storages) for storages in (counted, listed)]
        there: dict[int, int] = {}
        for loop in loops:
            loop.run(first=True)
        _most(listed.log, there)
        for _ in range(2):
            before, counted.best_total = counted.total, -1
            for loop in loops:
                loop.run()
            assert counted.best_total == _most(listed.log, there)
            assert counted.total == before == sum(there.values())
        assert all(size >= 0 for size in counted.now.values()), counted.now


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "job", [{"world_size": 2}, {"world_size": 4, "precision": "bf16"}, {"tied": True, "world_size": 4}]
)
def test_so_does_a_rank_of_a_pipeline(schedule: str, job: dict[str, Any]) -> None:
    job = dict(job)
    asked = Job.of(
        gpu="h100-80gb", pp=PipelineParallel(2, schedule, 4), **{k: v for k, v in job.items() if k != "tied"}
    )
    query = PlanQuery.of(_model(job.get("tied", False)), _sample(), asked)
    for mode in ("none", "full"):
        for rank in range(2):
            counted, listed = Bytes(), Allocations()
            ranks = [RankSteps(query, rank, query.uniform(mode), storages) for storages in (counted, listed)]
            there: dict[int, int] = {}
            for number in range(3):
                before, counted.best_total = counted.total, -1
                for steps in ranks:
                    steps.run(first=number == 0)
                assert max(counted.best_total, before) == _most(listed.log, there)
                assert counted.total == sum(there.values())
                assert number < 1 or counted.total == before
            assert all(size >= 0 for size in counted.now.values()), counted.now


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
    for reader in (Bytes(), Allocations()):
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
