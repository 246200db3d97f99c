"""A rank that is run on fake tensors against the real one, and the planner against it where no ranks can be started."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import parallelize
from nemo_like.dry_run import dry_run
from nemo_like.options import (
    FSDP2,
    ContextParallel,
    ExpertParallel,
    StepSpec,
    TensorParallel,
)
from tests_distributed.allocated import loop_peak_bytes
from tests_distributed.peak_families import build, tokens
from tests_distributed.spawn import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("scipy")

FULLEST = ExpertParallel(2, imbalance=2.0)
"""All rows of `build`'s models go to the experts of one rank, which is the one that a dry run stands for."""
Cell = tuple[str, Any, dict[str, Any], int]
"""A family, its ``ac``, other arguments of `parallelize`, and microbatches."""

ON_TWO: tuple[Cell, ...] = (
    ("llama", "none", {}, 1),
    ("llama", "full", {"precision": "bf16", "loss": "chunked"}, 1),
    ("llama", "40%", {}, 2),
    ("qwen3", "full", {"strategy": FSDP2(reshard_after_forward=False)}, 1),  # a tied head
    ("gpt_oss", "selective", {}, 1),
    ("olmo3", "full", {"dp_replicate": 2}, 1),
    ("llama", "selective", {"tp": TensorParallel(2, sequence_parallel=True)}, 1),
    ("mixtral", "none", {"tp": 2}, 1),
    ("smollm3", "selective", {"cp": 2}, 1),
    ("qwen3", "full", {"cp": ContextParallel(2, "ulysses")}, 1),
    ("flex_olmo", "selective", {"ep": FULLEST}, 1),
    ("deepseek_v3", "full", {"ep": FULLEST}, 1),
)
ON_FOUR: tuple[Cell, ...] = (
    ("llama", "selective", {"tp": 2}, 1),
    ("qwen3_moe", "none", {"tp": 2, "ep": FULLEST}, 1),
    ("helium", "full", {"dp_replicate": 2, "cp": 2}, 1),
)
KEPT_NUMBERS = 256
"""Bytes: autograd keeps a number that a tensor was multiplied by, as a tensor of 8, which no dispatcher sees."""


def _batch(rows: int = 2) -> dict[str, torch.Tensor]:
    ids = tokens(rows)
    return {"input_ids": ids, "labels": ids}


def _real(rank: int, world_size: int, cells: tuple[Cell, ...]) -> list[int]:
    found = []
    for family, ac, job, microbatches in cells:
        model = parallelize(build(family), ac=ac, device="cpu", sample_input=_batch(), **job)
        found.append(loop_peak_bytes(model, _batch(), microbatches=microbatches, lr=0.0))
    return found


@pytest.mark.parametrize(("ranks", "cells"), [(2, ON_TWO), (4, ON_FOUR)])
def test_a_rank_on_fake_tensors_takes_what_the_real_one_does(ranks: int, cells: tuple[Cell, ...]) -> None:
    for cell, real in zip(cells, zip(*run_ranks(ranks, _real, cells, timeout=280))):
        family, ac, job, microbatches = cell
        found = dry_run(
            build(family), _batch(), world_size=ranks, ac=ac, step=StepSpec(microbatches=microbatches), **job
        )
        assert 0 <= (max(real) if "ep" in job else real[0]) - found.peak_bytes <= KEPT_NUMBERS, (cell, real, found)
        assert found.peak_bytes == sum(found.parts.values())
