"""What CUDA's caching allocator reserves for a pipeline's ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import Job
from nemo_like.options import PipelineParallel, StepSpec
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.reserved import Reserved, StepLogs, ranks_to_replay, replay
from nemo_like.planning.stage_plans import describe
from nemo_like.planning.stages import PipelinePlanner

transformers = pytest.importorskip("transformers")


def _planner(
    schedule: str, stages: int = 2, microbatches: int = 4, tokens: int = 128, ranks: int = 2, **setup: Any
) -> PipelinePlanner:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=384, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    ids = torch.zeros(2, tokens, dtype=torch.long)
    job = Job.of(
        **{"step": StepSpec(optimizer="adamw-fused"), "gpu": resolve_device("h100-80gb")} | setup,
        pp=PipelineParallel(stages, schedule, microbatches), world_size=stages * ranks,
    )  # fmt: skip
    return PipelinePlanner(model, {"input_ids": ids, "labels": ids}, job)


def _replayed(planner: PipelinePlanner, rank: int, choices: Any, **more: Any) -> Reserved:
    return replay(StepLogs.of_rank(planner, rank, choices, **more), planner.device)


def test_outputs_that_stay_are_counted() -> None:
    planner = _planner("1f1b")
    choices = planner.uniform("full")
    plain, kept = (_replayed(planner, 1, choices, kept_outputs=more) for more in ((), (0, 1 << 20)))
    assert 3 << 20 <= kept.tensors - plain.tensors <= 4 << 20
    plan = describe(planner, choices, "full")
    assert plan.reserved_bytes == max(_reserved(planner, choices).values())


def _reserved(planner: PipelinePlanner, choices: Any) -> dict[int, int]:
    found = {rank: _replayed(planner, rank, choices) for rank in range(planner.pp.size)}
    return {rank: one.reserved for rank, one in found.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("schedule", "counted"), [("1f1b", [0, 1, 3]), ("interleaved_1f1b", [0, 1, 3]), ("gpipe", [0, 1, 3])]
)
def test_of_ranks_that_run_the_same_layers_none_reserves_more_than_the_one_that_is_replayed(
    schedule: str, counted: list[int]
) -> None:
    planner = _planner(schedule, stages=4)
    for mode in ("none", "full"):
        choices = planner.uniform(mode)
        every = _reserved(planner, choices)
        assert ranks_to_replay(planner, choices) == counted
        assert len(every) == 4 and max(every.values()) == max(every[rank] for rank in counted)
    # Where each rank has choices of its own, each is replayed.
    mixed = [
        planner.uniform(mode)[n] for n, mode in enumerate(["none", "full", "none", "full"] * 2) if n < len(choices)
    ]
    assert ranks_to_replay(planner, mixed) == [0, 1, 2, 3]
