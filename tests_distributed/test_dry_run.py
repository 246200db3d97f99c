"""A rank that is run on fake tensors against the real one, and the planner against it where no ranks can be started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nemo_like import parallelize
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.dry_run import dry_run
from nemo_like.job import Job
from nemo_like.options import (
    FSDP2,
    ContextParallel,
    ExpertParallel,
    MemoryBudget,
    PipelineParallel,
    StepSpec,
    TensorParallel,
)
from nemo_like.planning import PipelinePlanner
from nemo_like.planning.planner import Planner
from nemo_like.planning.program.readers import Peak
from nemo_like.planning.storage_ledger import StepMoment
from tests_distributed.allocated import loop_peak_bytes, pipeline_peak_bytes
from tests_distributed.peak_families import build, tokens
from tests_distributed.spawn import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("scipy")

FULLEST = ExpertParallel(2, imbalance=2.0)
"""All rows of `build`'s models go to the experts of one rank, which is the one that a dry run stands for."""
MICROBATCHES = 4
STAGES = PipelineParallel(2, microbatches=MICROBATCHES)
Cell = tuple[str, Any, dict[str, Any], int]
"""A family, its ``ac``, other arguments of `parallelize`, and microbatches."""

ON_TWO: tuple[Cell, ...] = (
    ("llama", "40%", {}, 2),
    ("qwen3", "full", {"strategy": FSDP2(reshard_after_forward=False)}, 1),  # a tied head
    ("mixtral", "none", {"tp": 2}, 1),
    ("smollm3", "selective", {"cp": 2}, 1),
    ("flex_olmo", "selective", {"ep": FULLEST}, 1),
    ("llama", "full", {"pp": STAGES}, 1),
)
MORE_ON_TWO: tuple[Cell, ...] = (
    ("llama", "none", {}, 1),
    ("llama", "full", {"precision": "bf16", "loss": "chunked"}, 1),
    ("llama", "submodule", {}, 1),
    ("gpt_oss", "selective", {}, 1),
    ("olmo3", "full", {"dp_replicate": 2}, 1),
    ("llama", "selective", {"tp": TensorParallel(2, sequence_parallel=True)}, 1),
    ("qwen3", "none", {"cp": ContextParallel(2, "ulysses")}, 1),
    ("deepseek_v3", "full", {"ep": FULLEST}, 1),
    ("qwen3", "selective", {"pp": PipelineParallel(2, "zbv", MICROBATCHES)}, 1),
)
ON_FOUR: tuple[Cell, ...] = (
    ("llama", "selective", {"tp": 2}, 1),
    ("qwen3_moe", "none", {"tp": 2, "ep": FULLEST}, 1),
    ("helium", "full", {"dp_replicate": 2, "cp": 2}, 1),
    ("llama", "50%", {"pp": STAGES}, 1),
)
NUMBERS = 256
"""Bytes: autograd keeps a number that a tensor was multiplied by, as a tensor of 8, which no dispatcher sees; a pipeline's
counts of what its loss is divided by are looked up in the batch, or not."""


def _batch(rows: int = 2) -> dict[str, torch.Tensor]:
    ids = tokens(rows)
    return {"input_ids": ids, "labels": ids}


def _real(rank: int, world_size: int, cells: tuple[Cell, ...]) -> list[int]:
    found = []
    for family, ac, job, microbatches in cells:
        made: Any = parallelize(build(family), ac=ac, device="cpu", sample_input=_batch(), **job)
        if isinstance(made, Pipeline):
            found.append(pipeline_peak_bytes(made, _batch(2 * MICROBATCHES)))
        else:
            found.append(loop_peak_bytes(made, _batch(), microbatches=microbatches, lr=0.0))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "cells"),
    [
        (2, ON_TWO),
        pytest.param(2, MORE_ON_TWO, marks=pytest.mark.long),
        pytest.param(4, ON_FOUR, marks=pytest.mark.long),
    ],
)
def test_a_rank_on_fake_tensors_takes_what_the_real_one_does(ranks: int, cells: tuple[Cell, ...]) -> None:
    for cell, real in zip(cells, zip(*run_ranks(ranks, _real, cells, timeout=400))):
        family, ac, job, microbatches = cell
        for rank in range(0, ranks, ranks // 2) if "pp" in job else (0,):
            found = dry_run(
                build(family),
                _batch(),
                world_size=ranks,
                rank=rank,
                ac=ac,
                step=StepSpec(microbatches=microbatches),
                **job,
            )
            wanted = max(real) if "ep" in job else real[rank]
            assert abs(wanted - found.peak_bytes) <= NUMBERS, (cell, rank, real, found.peak)


def _planned(family: str, ranks: int, rank: int, ac: str, job: dict[str, Any]) -> Peak:
    asked = Job.of(ac=ac, world_size=ranks, gpu="cpu", **job)
    planner: Any
    if asked.pp.size > 1:
        with PipelinePlanner(build(family), _batch(), asked) as planner:
            return planner.rank_peak(rank * STAGES.size // ranks, planner.uniform(ac))
    with Planner(build(family), _batch(), asked) as planner:
        budget = asked.ac if isinstance(asked.ac, MemoryBudget) else None
        return planner.peak(planner.uniform(ac) if budget is None else planner.choose(budget, ac)[0])


@pytest.mark.parametrize(
    ("family", "ac", "ranks", "rank", "job"),
    [
        ("llama", "40%", 8, 0, {"tp": 2, "precision": "bf16"}),
        pytest.param("llama", "selective", 16, 15, {"dp_replicate": 2, "cp": 2, "tp": 2}, marks=pytest.mark.long),
        ("gpt_oss", "selective", 2, 0, {}),
        pytest.param("gpt_oss", "full", 8, 3, {}, marks=pytest.mark.long),
        pytest.param("qwen3_moe", "none", 4, 0, {"ep": FULLEST}, marks=pytest.mark.long),
        # What autograd keeps for choosing experts goes once they are chosen.
        pytest.param("deepseek_v3", "none", 2, 0, {}, marks=pytest.mark.long),
        ("deepseek_v3", "selective", 8, 0, {"ep": FULLEST, "loss": "chunked"}),
        ("llama", "none", 8, 0, {"pp": STAGES}),
    ],
)
def test_the_planner_predicts_what_a_dry_run_finds(
    family: str, ac: str, ranks: int, rank: int, job: dict[str, Any]
) -> None:
    found = dry_run(build(family), _batch(), world_size=ranks, rank=rank, ac=ac, **job)
    planned = _planned(family, ranks, rank, ac, job)
    assert abs(planned.total - found.peak_bytes) <= NUMBERS, (planned, found.peak)


def _deep(layers: int) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.parametrize("ac", ["full", pytest.param("50%", marks=pytest.mark.long)])
def test_few_layers_say_what_all_of_them_take(ac: str) -> None:
    whole = dry_run(_deep(12), _batch(), world_size=2, ac=ac)
    few = dry_run(_deep(12), _batch(), world_size=2, ac=ac, depth=4)
    assert few.peak_bytes == whole.peak_bytes
    assert len(few.moments) < len(whole.moments)


def test_a_step_is_told_by_its_moments_and_what_there_is_in_each() -> None:
    model = build("llama")
    before = {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters()}
    keys = {name: set(vars(module)) for name, module in model.named_modules()}
    found = dry_run(model, _batch(), world_size=2, ac="full")
    assert all(level.total == sum(level.parts.values()) for level in found.moments.values())
    order = [moment.where for moment in found.moments]
    assert order[0] == "start of the step" and order[-1] == "optimizer step"
    layers = [f"model.layers.{i}" for i in range(4)]
    assert [where for where in order if where.startswith("forward of")] == [f"forward of {name}" for name in layers]
    backward = [f"backward of {name}" for name in layers[::-1]]
    assert list(dict.fromkeys(where for where in order if where.startswith("backward of"))) == backward
    trained = sum(p.numel() for p in model.parameters())
    start = found.moments[StepMoment("start of the step")].parts
    assert start["parameters"] == 4 * trained // 2
    assert start["optimizer"] == 2 * start["parameters"] + 4 * len(before)  # counters of steps
    # The model is as it was, and no process group is left.
    assert before == {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters()}
    assert keys == {name: set(vars(module)) for name, module in model.named_modules()}
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"world_size": 2, "rank": 2}, ValueError, "rank is 2, and the job has 2: 0 to 1"),
        ({"world_size": 0}, ValueError, "world_size is 0; it must be a whole number >= 1"),
        ({"world_size": 2, "depth": 3}, ValueError, "depth is 3; it must be a whole number >= 4"),
        ({"world_size": 2, "strategy": "ddp"}, NotImplementedError, "strategy='ddp' is not run without ranks"),
        ({"world_size": 2, "pp": STAGES, "depth": 4}, NotImplementedError, "depth=4 with pp=2 is not run"),
        ({"world_size": 2, "devices": "cpu"}, TypeError, "'devices' is not a keyword"),
    ],
)
def test_what_cannot_be_run_is_refused(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        dry_run(build("llama"), _batch(), **given)
    assert not dist.is_initialized()
