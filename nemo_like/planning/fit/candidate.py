"""One configuration: the arguments of `nemo_like.parallelize`, and what a step then takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.job import Job
from nemo_like.losses.model_loss import find_head
from nemo_like.options import ADAMW, PlanSearch, Precision, StepSpec, dtype_word
from nemo_like.planning.account import Explained, account_of
from nemo_like.planning.fit.layouts import Layout
from nemo_like.planning.memory_model.storages import Peak
from nemo_like.planning.planner import describe
from nemo_like.planning.predictions.outside_allocator import Outside, outside_of
from nemo_like.planning.predictions.reserved import Need
from nemo_like.planning.predictions.seconds import StepSeconds, step_seconds
from nemo_like.planning.query import Choices, PlanQuery
from nemo_like.profiling.larger_batch import most_elements


@dataclass(frozen=True)
class Candidate(Explained):
    """A configuration with its predicted bytes and seconds."""

    layout: Layout
    """Sizes of its axes, micro-batch and accumulation, and the way it is run, in the words of `fit`."""
    job: Job
    """The job to train with."""
    peak: Peak
    """Allocated bytes, on the rank that needs most; in a pipeline, on the stage that does."""
    need: Need
    """Bytes that decide whether it fits."""
    seconds: StepSeconds
    tokens: int
    """Tokens of all GPUs in one step."""
    model_flops: float
    """FLOPs of one step on one GPU, without recomputation."""
    peak_flops: float
    fits: bool
    host_bytes: int = 0
    """Bytes that one rank has in CPU memory."""
    plan: Plan | None = field(default=None, compare=False, repr=False)
    """The plan of what each layer saves, where `ac` is a peak."""
    sample: Any = field(default=None, compare=False, repr=False)
    """One micro-batch, on the meta device but for small integers: the input that a cut into stages looks at."""
    outside: Outside = field(default_factory=Outside)
    """Bytes that each GPU has outside of torch's allocator, beside those that it needs."""

    @property
    def ac(self) -> str:
        """``none`` | ``full`` | ``selective``, or the peak that a plan was made for (``"62.5GiB"``)."""
        return self.layout.ac if self.plan is None else self.plan.budget

    @property
    def reserved(self) -> int | None:
        """Bytes that CUDA's caching allocator would have reserved at most; None: not known."""
        return self.need.reserved

    @property
    def peak_bytes(self) -> int:
        return self.peak.total

    @property
    def step_seconds(self) -> float:
        return self.seconds.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.layout.gpus / self.step_seconds

    @property
    def mfu(self) -> float:
        """FLOPs that the model needs, as a share of what the device's data sheet promises."""
        return self.model_flops / self.step_seconds / self.peak_flops if self.peak_flops else 0.0

    def kwargs(self) -> dict[str, Any]:
        """Return the arguments of `nemo_like.parallelize`, without the model; a plan is a `Plan`, which needs no sample."""
        job = self._runnable(self.plan)
        arguments = {name: getattr(job, "step" if name == "optimizer" else name) for name in job.words()}
        if "optimizer" in arguments:
            arguments["step"] = arguments.pop("optimizer")
        return arguments | ({"sample_input": self.sample} if self.layout.pp > 1 else {})

    def call(self, sample: str = "batch") -> str:
        """Return the line of Python that does the same; `sample`: the name of one micro-batch."""
        from_file = self.plan is not None and self.layout.tp > 1 and self.layout.pp == 1
        needs_sample = self.layout.pp > 1 or (self.plan is not None and not from_file)
        return self._runnable(self.plan if from_file else None).as_call(sample=sample if needs_sample else None)

    def _runnable(self, plan: Plan | None) -> Job:
        """Return the job without what the launcher sets; with `plan`, if given, else with the tokens planned for."""
        # The loop accumulates, not `parallelize`: which of one micro-batch reduce is no question.
        step = replace(self.job.step, microbatches=1, sync=StepSpec.sync)
        if self.plan is None and step.optimizer in ADAMW:
            step = replace(step, optimizer=StepSpec.optimizer)  # its form is the loop's, where no plan counts with it
        job = replace(self.job, step=step, search=PlanSearch(), world_size=None)
        if self.plan is None and (tokens := most_elements(tensors_in(self.sample))):
            job = replace(job, planned_tokens=tokens)  # a plan knows them itself
        return job if plan is None else replace(job, ac=plan)

    def to_dict(self) -> dict[str, Any]:
        """Return it in JSON values; sizes in bytes, times in seconds."""
        job = self.job
        return {
            **vars(self.layout),
            "ac": self.ac,
            "precision": precision_word(job.precision),
            "optimizer": job.step.optimizer,
            "compile": job.compile,
            "peak_bytes": self.peak_bytes,
            "peak_at": self.peak.at,
            "reserved_bytes": self.reserved,
            "needed_bytes": self.need.bytes,
            "input_bytes": self.need.inputs,
            "judged_by": self.need.by,
            "host_bytes": self.host_bytes,
            "outside_bytes": dict(self.outside.parts),
            "memory_fraction": self.outside.fraction,
            "parts": dict(self.peak.parts),
            "step_seconds": self.step_seconds,
            "seconds": dict(self.seconds.parts),
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": self.mfu,
            "fits": self.fits,
            "call": self.call(),
            "explained": None if self.account is None else self.account.as_json(),
        }


def candidate_of(
    job: Job,
    query: PlanQuery,
    layout: Layout,
    choices: Choices,
    peak: Peak,
    need: Need,
    *,
    seq_len: int,
    limit: int,
    budget: str = "",
) -> Candidate:
    """Return what a layout takes, as it was planned.

    Args:
        job: to train with.
        query, choices, peak, need: the job on a traced model, what each layer call saves, and what that takes.
        seq_len: tokens of a sequence. limit: bytes that a step may take.
        budget: the peak that a plan was made for, as it is written after ``ac=``; empty: a mode.
    """
    plan, seconds = None, step_seconds(query, choices)
    if budget:
        reserved = None if need.reserved is None else [need.reserved]
        job, plan = job.change(ac=budget), describe(query, choices, budget, reserved=reserved)
    return Candidate(
        layout,
        job,
        peak,
        need,
        seconds,
        tokens=layout.sequences * seq_len,
        model_flops=_flops(query, layout, seq_len) * layout.grad_accum / layout.pp,
        peak_flops=query.device.peak_flops,
        fits=need.bytes <= limit,
        host_bytes=host_bytes_of(query, choices),
        plan=plan,
        sample=query.traced.sample,
        outside=outside_of(job, query.device),
        explain=partial(account_of, query, choices),
    )


def host_bytes_of(query: PlanQuery, choices: Choices) -> int:
    """Return the bytes that one rank has in CPU memory: its state, and activations that layers move there."""
    moved = sum(sum(stage.moved(chosen)) for stage, chosen in zip(query.stages, choices))
    return max(stage.state_on_host for stage in query.stages) + moved


def _flops(query: PlanQuery, layout: Layout, seq_len: int) -> float:
    """Return the FLOPs of one micro-batch in all stages of a rank's shape, without recomputation."""
    parts = [stage.part for stage in query.stages]
    layers = sum(part.problems[call.kind].trace.flops for part in parts for call in part.traced.calls)
    head = find_head(query.traced.given)
    weights = 0 if head is None else sum(p.numel() for p in head.parameters())
    tokens = layout.micro_batch * seq_len / layout.cp
    return 3.0 * (layers + 2.0 * weights * tokens / layout.tp)


def precision_word(precision: Precision) -> str:
    """Return the shortest word for a precision; ``fp32`` where nothing is cast."""
    return precision.matmuls or dtype_word(precision.dtypes["param_dtype"]) or "fp32"
