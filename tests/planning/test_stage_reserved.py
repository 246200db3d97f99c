"""What CUDA's caching allocator reserves for a pipeline's ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import Job
from nemo_like.options import PipelineParallel, StepSpec
from nemo_like.planning.answers.reserved import Reserved, StepLogs, fullest_ranks, replay
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import describe
from nemo_like.planning.query import PlanQuery
from tests.planning.queries import Text


def _query(
    schedule: str, stages: int = 2, microbatches: int = 4, tokens: int = 128, ranks: int = 2, **setup: Any
) -> PlanQuery:
    with torch.device("meta"):
        model = Text(8, 64)
    ids = torch.zeros(2, tokens, dtype=torch.long)
    job = Job.of(
        **{"step": StepSpec(optimizer="adamw-fused"), "gpu": resolve_device("h100-80gb")} | setup,
        pp=PipelineParallel(stages, schedule, microbatches), world_size=stages * ranks,
    )  # fmt: skip
    return PlanQuery.of(model, {"input_ids": ids, "labels": ids}, job)


def _replayed(query: PlanQuery, rank: int, choices: Any, **more: Any) -> Reserved:
    return replay(StepLogs(query, rank, choices, **more), query.device)


def test_outputs_that_stay_are_counted() -> None:
    query = _query("1f1b")
    choices = query.uniform("full")
    plain, kept = (_replayed(query, 1, choices, kept_outputs=more) for more in ((), (0, 1 << 20)))
    assert 3 << 20 <= kept.tensors - plain.tensors <= 4 << 20
    plan = describe(query, choices, "full")
    assert plan.reserved_bytes == max(_reserved(query, choices).values())


def _reserved(query: PlanQuery, choices: Any) -> dict[int, int]:
    found = {rank: _replayed(query, rank, choices) for rank in range(query.pp.size)}
    return {rank: one.reserved for rank, one in found.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("schedule", "counted"), [("1f1b", [0, 1, 3]), ("interleaved_1f1b", [0, 1, 3]), ("gpipe", [0, 1, 3])]
)
def test_of_ranks_that_run_the_same_layers_none_reserves_more_than_the_one_that_is_replayed(
    schedule: str, counted: list[int]
) -> None:
    query = _query(schedule, stages=4)
    for mode in ("none", "full"):
        choices = query.uniform(mode)
        every = _reserved(query, choices)
        assert fullest_ranks(query, choices) == counted
        assert len(every) == 4 and max(every.values()) == max(every[rank] for rank in counted)
    # Where each rank has choices of its own, each is replayed.
    mixed = [query.uniform(mode)[n] for n, mode in enumerate(["none", "full", "none", "full"] * 2) if n < len(choices)]
    assert fullest_ranks(query, mixed) == [0, 1, 2, 3]
