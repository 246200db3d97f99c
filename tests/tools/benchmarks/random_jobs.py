"""Random jobs, of which three answers must agree: a plan, `fit` with all pinned, and a rank on fake tensors.

    python -m tests.tools.benchmarks random_jobs --jobs 300 --seed 0

prints each job whose answers differ, with its seed, and counts at the end.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import nn

from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.fake_rank import dry_run
from nemo_like.job import Job
from nemo_like.models import text_batch
from nemo_like.options import (
    FSDP2,
    ChunkedLoss,
    ContextParallel,
    ExpertParallel,
    MemoryBudget,
    OffloadConfig,
    PipelineParallel,
    Precision,
    StepSpec,
    TensorParallel,
)  # fmt: skip
from nemo_like.options.pipelining import SCHEDULES
from nemo_like.options.step import OPTIMIZERS
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.report import Candidate
from nemo_like.planning.planner import _under_plan, choices_of, describe, planned, query_of
from nemo_like.planning.predictions.rank import fullest_peaks
from nemo_like.planning.predictions.reserved import verdict
from tests_distributed.planning.peak_families import build

MODELS = ("llama", "qwen3", "mixtral", "qwen3_moe")
T = TypeVar("T")
REFUSALS = (ValueError, NotImplementedError)
SECONDS, BYTES = 1e-9, 1e-3
"""Shares that may lie between seconds of a plan and of `fit`, and between bytes of a plan and of a rank."""


@dataclass(frozen=True)
class Drawn:
    """A job, and what goes through it."""

    model: str
    job: Job
    rows: int
    tokens: int
    peak: float | None = None
    """Share of the way from the bytes of full checkpointing to those of none, where the budget is a peak."""

    @property
    def words(self) -> str:
        asked = ", ".join(f"{name}={text}" for name, text in self.job.words(machine=True).items())
        return f"{self.model}, {self.rows} x {self.tokens} tokens, {asked}" + (
            "" if self.peak is None else f", a peak at {self.peak:.0%} of the way"
        )


@dataclass
class Answers:
    """What was answered about a job; None: nothing, for the reason in `refused`."""

    plan: tuple[int, float] | None = None
    """Bytes and seconds."""
    fit: tuple[int, float] | None = None
    rank: tuple[int, int] | None = None
    """Bytes of the fake rank, and of the plan for it."""
    refused: dict[str, str] = field(default_factory=dict)
    crashed: dict[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """How the answers differ."""
        found = [f"{who} crashed: {text}" for who, text in self.crashed.items()]
        if self.plan and self.fit:
            if self.plan[0] != self.fit[0]:
                found.append(f"bytes: plan {self.plan[0]:,}, fit {self.fit[0]:,} ({self.fit[0] - self.plan[0]:+,})")
            if not math.isclose(self.plan[1], self.fit[1], rel_tol=SECONDS):
                found.append(f"seconds: plan {self.plan[1]!r}, fit {self.fit[1]!r}")
        if self.plan and "fit" in self.refused:
            found.append(f"fit alone refused: {self.refused['fit']}")
        if self.fit and "plan" in self.refused:
            found.append(f"plan alone refused: {self.refused['plan']}")
        if self.rank and abs(self.rank[0] - self.rank[1]) > BYTES * self.rank[0]:
            off = self.rank[1] - self.rank[0]
            found.append(f"rank: {self.rank[0]:,}, its plan {self.rank[1]:,} ({off:+,}, {off / self.rank[0]:+.2%})")
        return found


def draw(seed: int) -> tuple[Drawn, int]:
    """Return the job of `seed`, and how many before it no `Job` could be."""
    random_ = random.Random(seed)
    for skipped in range(1000):
        try:
            return _drawn(random_), skipped
        except ValueError:
            continue
    raise ValueError(f"seed is {seed}, of which 1,000 jobs in a row were refused. Use another one.")


def _drawn(random_: random.Random) -> Drawn:
    pick = random_.choice

    def now_and_then(share: float) -> bool:
        return random_.random() < share

    model = pick(MODELS)
    tp, cp = pick([1, 1, 1, 2, 2, 4]), pick([1, 1, 1, 2, 4])
    pp, replicas = pick([1, 1, 2, 4]), pick([1, 1, 1, 2, 3])
    most = 16 // (tp * cp * pp * replicas)
    if most == 0:
        raise ValueError("more than 16 ranks")
    shards = random_.randint(1, most)
    asked: dict[str, Any] = {
        "world_size": tp * cp * pp * replicas * shards, "dp_replicate": replicas, "gpu": pick(["h100-80gb", "cpu"]),
        "tp": TensorParallel(
            tp, sequence_parallel=tp > 1 and now_and_then(0.5), loss_parallel=tp > 1 and now_and_then(0.25)
        ),
        "cp": ContextParallel(cp, pick(["all_gather", "ulysses"]) if cp > 1 else "all_gather"),
    }  # fmt: skip
    if model in ("mixtral", "qwen3_moe"):
        ep = pick([1, 2, 4])
        asked["ep"] = ExpertParallel(ep, imbalance=pick([None, 1.0, float(ep)]))
    accumulation = pick([1, 1, 2, 3, 4])
    if pp > 1:
        accumulation = 1
        schedule = pick([name for name in SCHEDULES if pp * SCHEDULES[name].default_per_rank <= 4])
        asked["pp"] = PipelineParallel(
            pp, schedule, pick([None, pp, 2 * pp, 3 * pp]), balance=pick(["time", "time", "memory"]),
        )  # fmt: skip
    asked["strategy"] = FSDP2(
        pick([None, None, True, False, 2]),
        pick([1, 1, 0, 2]),
        pick([1, 1, 0, 2]),
        cpu_offload=pp == 1 and now_and_then(0.05),
    )
    asked["precision"] = pick([None, "bf16", "bf16", Precision("bf16", reduce_dtype="bf16")])
    asked["ac"] = pick(["none", "full", "selective", "60%", "30%", "peak", "peak"])
    asked["loss"] = pick([None, None, "chunked", ChunkedLoss(chunk_tokens=16, grads_in_float32=now_and_then(0.5))])
    asked["offload"] = OffloadConfig("boundary", min_bytes=1) if now_and_then(0.15) else "none"
    asked["compile"] = "aot_eager" if now_and_then(0.03) else None
    asked["step"] = StepSpec(
        accumulation, pick(["every", "last"]), now_and_then(0.5), "zero" if now_and_then(0.3) else "free",
        pick([*OPTIMIZERS, "adamw", "adamw", "adamw-foreach", "sgd-momentum"]), ema=now_and_then(0.2),
    )  # fmt: skip
    share = random_.uniform(0.1, 0.9) if asked["ac"] == "peak" else None
    asked["ac"] = "none" if share is not None else asked["ac"]
    if asked["offload"] != "none" and asked["ac"] == "none":
        asked["offload"] = "none"  # no region has an input that could wait
    return Drawn(model, Job.of(**asked), random_.randint(1, 3), pick([32, 64, 96]), share)


@functools.lru_cache(maxsize=len(MODELS))
def _model(name: str) -> nn.Module:
    return build(name).to("meta")


def answer(drawn: Drawn, *, rank: bool = True) -> Answers:
    """Return what the three say about a job; `rank`: the third one, too, which takes longest."""
    found = Answers()

    def ask(who: str, how: Callable[[], T]) -> T | None:
        try:
            return how()
        except REFUSALS as error:
            found.refused[who] = str(error)
        except Exception as error:  # noqa: BLE001 - any other is a finding
            at = traceback.extract_tb(error.__traceback__)[-1]
            found.crashed[who] = f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})"
        return None

    job, limit = drawn.job, None
    if drawn.peak is not None and (limit := ask("plan", lambda: _limit(drawn))) is None:
        return found
    shared = isinstance(job.ac, MemoryBudget)  # `fit` takes no share of the activations
    best = None if shared else ask("fit", lambda: _fit(drawn, limit))
    if best is not None:
        found.fit = best.peak_bytes, best.step_seconds
        job = job if best.plan is None else job.change(ac=best.plan)
    elif limit is not None:
        return found
    plan = ask("plan", lambda: _plan(drawn, job))
    if plan is not None:
        found.plan = plan.peak_bytes, plan.step_seconds
    if plan is not None and rank:
        number = int(plan.peak_at.rpartition(", on rank ")[2]) if job.pp.size > 1 else 0
        number *= job.ranks // job.pp.size
        run = ask("rank", lambda: dry_run(_model(drawn.model), job, text_batch(drawn.rows, drawn.tokens), rank=number))
        if run is not None and run.against is not None:
            found.rank = run.peak_bytes, run.against
    return found


def _limit(drawn: Drawn) -> int:
    """Return the bytes that the peak's budget is for: between what full checkpointing and none need."""
    query = query_of(_model(drawn.model), text_batch(drawn.rows, drawn.tokens), drawn.job, "none")
    needs = []
    for mode in ("full", "none"):
        choices = query.uniform(mode)
        needs.append(verdict(query, choices, fullest_peaks(query, choices), query.device.memory_bytes).bytes)
    return needs[0] + int((drawn.peak or 0) * max(0, needs[1] - needs[0]))


def _plan(drawn: Drawn, job: Job) -> Plan:
    model, sample = _model(drawn.model), text_batch(drawn.rows, drawn.tokens)
    if isinstance(job.ac, MemoryBudget):
        return planned(model, sample, job)[1]
    if isinstance(job.ac, Plan):
        query = _under_plan(model, sample, job)
        chosen = [choices_of(stage, job.ac) for stage in query.stages]
        return describe(query, [each for each in chosen if each is not None], job.ac.budget)
    query = query_of(model, sample, job, job.ac.mode)
    return describe(query, query.uniform(job.ac.mode), job.ac.mode)


def _fit(drawn: Drawn, limit: int | None) -> Candidate:
    """Return what `fit` finds where every axis and mode is pinned."""
    job, pins = drawn.job, dict[str, Any]()
    assert isinstance(job.strategy, FSDP2)
    if job.pp.size == 1:
        pins["grad_accum"] = job.step.microbatches
    if limit is not None:
        pins |= {"ac": "plan", "memory": limit}
    report = fit(
        _model(drawn.model), job.change(step=replace(job.step, microbatches=1)), gpus=job.ranks, seq_len=drawn.tokens,
        micro_batch=drawn.rows, dp_shard=job.dp_shard, reshard_after_forward=[job.strategy.reshard_after_forward],
        cpu_offload=job.strategy.cpu_offload, count=1, **pins,
    )  # fmt: skip
    if not report.candidates:
        raise ValueError(report.problem)
    return report.best


def run(jobs: int, seed: int) -> int:
    """Print the jobs from `seed` on whose answers differ, and return how many do."""
    logging.disable(logging.WARNING)
    counts, start = Counter[str](), time.perf_counter()
    try:
        for number in range(seed, seed + jobs):
            drawn, skipped = draw(number)
            counts["drawn again, as no Job can be so"] += skipped
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = answer(drawn)
            if problems := found.problems:
                print(f"seed {number}: {drawn.words}", *problems, sep="\n    ", flush=True)
            counts.update(_counted(found))
    finally:  # also where it is interrupted
        print(*(f"{count:6} {words}" for words, count in counts.items()), sep="\n")
        print(f"{time.perf_counter() - start:6.0f} seconds", flush=True)
    return counts["jobs whose answers differ"]


def _counted(found: Answers) -> dict[str, int]:
    problems, both = found.problems, bool(found.plan and found.fit)
    return {
        "jobs": 1,
        "jobs whose answers differ": bool(problems),
        "plan and fit answered": both,
        "of those, equal": both and not any("fit" in each for each in problems),
        "plan and rank answered": found.rank is not None,
        "of these, close": found.rank is not None and not any("rank" in each for each in problems),
    } | {f"{who} refused: {why[:90]}": 1 for who, why in found.refused.items()}
