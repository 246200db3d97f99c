"""One `Job` for every front: what they predict of it is the same, and its line of code makes it again."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from torch import nn

import nemo_like
from nemo_like import FSDP2, ChunkedLoss, Job, PipelineParallel, StepSpec, fit, flags
from nemo_like.models import text_batch
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import make_report
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.fitted import best_of
from nemo_like.recipes.options import PretrainOptions
from tests.models.tiny import llama

GPU, ROWS, TOKENS = "h100-80gb", 2, 64


@functools.cache
def _model() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": TOKENS}
    with torch.device("meta"):
        return llama(**sizes, **heads).train()


def _sample(rows: int) -> dict[str, torch.Tensor]:
    return text_batch(rows, TOKENS)


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


def _planned(query: PlanQuery, limit: int) -> tuple[Any, ...]:
    """What ``nemo-like plan`` has in the row of the job's mode."""
    row = next(row for row in make_report(query, [], limit).rows if row.ac == query.job.ac.mode)
    return row.plan.peak_bytes, row.need.reserved, row.plan.step_seconds, row.fits


def _searched(job: Job, limit: int) -> tuple[Any, ...]:
    """What `fit` says of it, pinned to every choice of it."""
    sharded = job.strategy if isinstance(job.strategy, FSDP2) else FSDP2()
    pins: dict[str, Any] = {
        "dp_replicate": job.dp_replicate, "dp_shard": job.dp_shard, "tp": job.tp.size, "cp": job.cp.size, "pp": job.pp.size,
        "micro_batch": ROWS, "grad_accum": (job.pp.microbatches if job.pp.size > 1 else job.step.microbatches),
        "reshard_after_forward": [sharded.reshard_after_forward], "cpu_offload": sharded.cpu_offload,
        "sequence_parallel": job.tp.sequence_parallel, "loss_parallel": job.tp.loss_parallel, "cp_method": job.cp.method,
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


def _check_fronts(job: Job, share: float) -> None:
    """``plan``, `fit` pinned to the job, and the recipes' ``--fit``: the same bytes, milliseconds and verdict."""
    query = PlanQuery.of(_model(), _sample(ROWS), job)
    free = _planned(query, 1 << 36)
    limit = int((free[1] or free[0]) * share)
    planned, searched = _planned(query, limit), _searched(job, limit)
    assert planned[3] == searched[3], (planned, searched)
    assert not searched[3] or _same(planned, searched), (planned, searched)
    options = _options(job)
    own = replace(options.job(), world_size=job.world_size, gpu=GPU)
    rows = options.planned_input(ROWS, TOKENS)
    planned, chosen = _planned(PlanQuery.of(_model(), rows, own), limit), _chosen(options, job, limit)
    assert planned[3] == chosen[3], (planned, chosen)
    assert not chosen[3] or _same(planned, chosen), (planned, chosen)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Seconds are sums, which two fronts add up in another order."""
    return one[:2] == other[:2] and math.isclose(one[2], other[2], rel_tol=1e-12)


def _options(job: Job) -> PretrainOptions:
    """The pretraining job of the same options."""
    count = job.pp.microbatches if job.pp.size > 1 else job.step.microbatches
    reshard = {None: "default", True: "yes", False: "no"}
    assert isinstance(job.strategy, FSDP2)
    return PretrainOptions(
        ac=job.ac.mode, loss="model" if job.loss is None else "chunked", offload=job.offload.mode,  # type: ignore[union-attr]
        precision="bfloat16" if job.param_dtype == torch.bfloat16 else "float32", dp_replicate=job.dp_replicate,
        reshard_after_forward=reshard[job.strategy.reshard_after_forward], tp=job.tp.size, cp=job.cp.size, pp=job.pp.size,
        grad_accum=count or 1, batch_size=ROWS * (count or 1) * job.data_ranks,
    )  # fmt: skip


def _chosen(options: PretrainOptions, job: Job, limit: int) -> tuple[Any, ...]:
    """What ``--fit`` predicts of these options."""
    ranks = Ranks(0, job.ranks, torch.device("cpu"), options.tp, options.cp, options.pp)
    asked = replace(options, fit="ep", fit_memory=f"{limit}B")  # the model has no experts: all is as the options say
    try:
        best, _ = best_of(asked, ranks, _model(), TOKENS, resolve_device(GPU), 64 << 30)
    except ValueError as error:
        assert "--fit: " in str(error), error
        return (None, None, None, False)
    return best.peak_bytes, best.reserved, best.step_seconds, best.fits


@settings(
    max_examples=1, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate]
)
@given(job=jobs(), share=st.sampled_from([0.5, 2.0]))
def test_every_front_says_the_same_of_a_job(job: Job, share: float) -> None:
    _check_fronts(job, share)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_every_front_says_the_same_of_300_jobs(part: int) -> None:
    @seed(part)
    @settings(
        max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
    )
    @given(job=jobs(), share=st.sampled_from([0.5, 2.0]))
    def check(job: Job, share: float) -> None:
        _check_fronts(job, share)

    check()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(job=jobs())
def test_the_line_of_a_job_makes_it_again(job: Job) -> None:
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


@pytest.mark.parametrize("name", ["sequence_parallel", "ema", "prefetch", "reshard_after_forward"])
def test_a_flag_means_the_same_with_and_without_stages(name: str) -> None:
    values = {"sequence_parallel": True, "ema": True, "prefetch": 2, "reshard_after_forward": "no"}
    for pp in (1, 2):
        job = flags.job_of({name: values[name], "pp": pp, "tp": 2, "world_size": 4, "grad_accum": 2})
        kind, _, field = flags.FLAGS[name].field.partition(".")
        got = getattr(getattr(job, kind), field)
        assert got == {"no": False}.get(values[name], values[name])  # type: ignore[call-overload]


def test_accumulation_counts_in_the_step_or_in_the_pipeline() -> None:
    one, staged = flags.job_of({"grad_accum": 4}), flags.job_of({"grad_accum": 4, "pp": 2, "world_size": 2})
    assert one.step.microbatches == 4
    assert (staged.step.microbatches, staged.pp.microbatches) == (1, 4)


def test_a_flag_is_one_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = flags.Flag("stages_per_rank", "pp.stages_per_rank", None, int)
    monkeypatch.setitem(flags.FLAGS, flag.name, flag)
    job = flags.job_of({"pp": 2, "pp_schedule": "interleaved_1f1b", "stages_per_rank": 3})
    assert job.pp.stages_per_rank == 3
    assert flag.help == "stages on one rank"
    assert flag.name in flags.flags_on("plan")
