"""One `Job` for every front: what they predict of it is the same, and its line of code makes it again."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from nemo_like import FSDP2, ChunkedLoss, Job, PipelineParallel, StepSpec, fit
from nemo_like.planning import Planner
from nemo_like.planning.pipeline_report import pipeline_report
from nemo_like.planning.plan_report import make_report
from nemo_like.planning.stages import PipelinePlanner

GPU, ROWS, TOKENS = "h100-80gb", 2, 64


@functools.cache
def _model() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=512, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).train()


def _sample(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, TOKENS, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


@st.composite
def jobs(draw: Any) -> Job:
    """Jobs of which plans are made and which `fit` searches."""
    pp = draw(st.sampled_from([1, 1, 2]))
    tp, cp, replicas, shards = (draw(st.sampled_from([1, 2])) for _ in range(4))
    ac = draw(st.sampled_from(["none", "full", "selective"]))
    offload = draw(st.sampled_from(["none", "boundary"])) if ac != "none" else "none"
    optimizer = draw(st.sampled_from(["adamw", "sgd", "adamw-8bit"]))
    micro = draw(st.sampled_from([1, 2, 4]))
    reshard = draw(st.sampled_from([None, True, False]))
    loss = draw(st.sampled_from([None, ChunkedLoss()]))
    precision = draw(st.sampled_from([None, "bf16"]))
    assume(not (loss is not None and tp > 1))
    more: dict[str, Any] = {"pp": PipelineParallel(2, "1f1b", max(micro, 2))} if pp > 1 else {}
    step = StepSpec(optimizer=optimizer, microbatches=1 if pp > 1 else micro, sync="every")
    return Job.of(
        strategy=FSDP2(reshard), ac=ac, offload=offload, loss="model" if loss is None else loss, precision=precision,
        tp=tp, cp=cp, dp_replicate=replicas, world_size=pp * tp * cp * replicas * shards, step=step, gpu=GPU, **more,
    )  # fmt: skip


def _planned(job: Job, limit: int) -> tuple[Any, ...]:
    """What ``nemo-like plan`` has in the row of the job's mode."""
    assert not isinstance(job.ac, str)
    mode = job.ac.mode  # type: ignore[union-attr]
    if job.pp.size > 1:
        with PipelinePlanner(_model(), _sample(ROWS), job) as staged:
            stages = next(row for row in pipeline_report(staged, [], limit).rows if row.name == mode)
        return stages.plan.peak_bytes, stages.reserved and max(stages.reserved), stages.plan.step_seconds, stages.fits
    with Planner(_model(), _sample(ROWS), job) as planner:
        row = next(row for row in make_report(planner, [], limit).rows if row.name == mode)
    return row.plan.peak_bytes, row.need.reserved, row.plan.step_seconds, row.fits


def _searched(job: Job, limit: int) -> tuple[Any, ...]:
    """What `fit` says of it, pinned to every choice of it."""
    sharded = job.strategy if isinstance(job.strategy, FSDP2) else FSDP2()
    pins: dict[str, Any] = {
        "dp_replicate": job.dp_replicate, "dp_shard": job.dp_shard, "tp": job.tp.size, "cp": job.cp.size, "pp": job.pp.size,
        "micro_batch": ROWS, "grad_accum": (job.pp.microbatches if job.pp.size > 1 else job.step.microbatches),
        "reshard_after_forward": [sharded.reshard_after_forward], "cpu_offload": sharded.cpu_offload,
        "ac": job.ac.mode, "loss": "model" if job.loss is None else "chunked", "offload": job.offload.mode,  # type: ignore[union-attr]
    }  # fmt: skip
    if job.pp.size > 1:
        pins["schedule"] = job.pp.schedule
    found = fit(
        _model(), gpus=job.world_size or 1, gpu=GPU, seq_len=TOKENS, memory=limit, sample=_sample, count=1,
        precision=job.precision, step=StepSpec(optimizer=job.step.optimizer, sync="every"), **pins,
    )  # fmt: skip
    if not found.candidates:
        return (None, None, None, False)
    best = found.best
    return best.peak_bytes, best.reserved, best.step_seconds, best.fits


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(job=jobs(), share=st.sampled_from([0.5, 2.0]))
def test_plan_and_fit_say_the_same_of_a_job(job: Job, share: float) -> None:
    planned = _planned(job, 1 << 36)
    limit = int((planned[1] or planned[0]) * share)
    planned, searched = _planned(job, limit), _searched(job, limit)
    assert planned[3] == searched[3]
    if searched[3]:
        assert planned == searched


@settings(max_examples=200, deadline=None, derandomize=True)
@given(job=jobs())
def test_the_line_of_a_job_makes_it_again(job: Job) -> None:
    import nemo_like

    made: list[Job] = []
    names = {name: getattr(nemo_like, name) for name in nemo_like.__all__}
    line = job.as_call(sample="batch")
    exec(
        line,
        names
        | {
            "parallelize": lambda model, **asked: made.append(
                Job.of(**{n: v for n, v in asked.items() if n != "sample_input"})
            ),
            "model": None,
            "batch": None,
        },
    )
    again = made[0]
    assert again.words() == job.words()


def test_the_package_is_imported_without_planning() -> None:
    code = "import sys, nemo_like; nemo_like.parallelize; print(*[n for n in sys.modules if 'nemo_like.planning' in n])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


@pytest.mark.parametrize("name", ["sequence_parallel", "ema", "prefetch", "reshard_after_forward"])
def test_a_flag_means_the_same_with_and_without_stages(name: str) -> None:
    from nemo_like.flags import FLAGS, job_of

    values = {"sequence_parallel": True, "ema": True, "prefetch": 2, "reshard_after_forward": "no"}
    for pp in (1, 2):
        job = job_of({name: values[name], "pp": pp, "tp": 2, "world_size": 4, "grad_accum": 2})
        kind, _, field = FLAGS[name].field.partition(".")
        got = getattr(getattr(job, kind), field)
        assert got == {"no": False}.get(values[name], values[name])  # type: ignore[call-overload]
