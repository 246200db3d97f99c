"""The answer of a search: the fastest configurations, the bytes, seconds and limit of each, and changes that help."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nemo_like._util.console import flag
from nemo_like._util.table import (
    ByteUnit,
    Column,
    Fact,
    Table,
    as_json,
    milliseconds,
    of_limit,
    paragraph,
    parameters_word,
    percent,
    screen_width,
    three_digits,
    yes_no,
)
from nemo_like._util.tensors import tensors_in
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import Plan, largest_group
from nemo_like.flags import changed_flags, flags_on
from nemo_like.job import Job
from nemo_like.losses.model_loss import find_head
from nemo_like.options import ADAMW, PlanSearch, Precision, StepSpec, dtype_word
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.account import Explained, setting
from nemo_like.planning.accuracy import DENSE, accuracy_words
from nemo_like.planning.advise import changes, helping, in_words
from nemo_like.planning.devices import Device
from nemo_like.planning.fit.layouts import MOST_STAGES, SHARDING, Layout
from nemo_like.planning.fit.question import Question
from nemo_like.planning.memory_model.storages import Peak
from nemo_like.planning.predictions.reserved import Need, Outside
from nemo_like.planning.predictions.seconds import HOST, Links, StepSeconds
from nemo_like.planning.query import Choices, PlanQuery
from nemo_like.planning.report import largest, least_need
from nemo_like.profiling.larger_batch import most_elements


@dataclass(frozen=True)
class Candidate(Explained):
    """A configuration with its predicted bytes and seconds."""

    # Sizes of its axes, micro-batch and accumulation, and the way it is run, in the words of `fit`.
    layout: Layout
    job: Job
    peak: Peak  # Allocated bytes, on the rank that needs most; in a pipeline, on the stage that does.
    need: Need  # Bytes that decide whether it fits.
    seconds: StepSeconds
    tokens: int  # Tokens of all GPUs in one step.
    model_flops: float  # FLOPs of one step on one GPU, without recomputation.
    peak_flops: float
    fits: bool
    host_bytes: int = 0  # Bytes that one rank has in CPU memory.
    # The plan of the tensors that each layer saves, where `ac` is a peak.
    plan: Plan | None = field(default=None, compare=False, repr=False)
    # One micro-batch, on the meta device but for small integers: the input that a cut into stages looks at.
    sample: Any = field(default=None, compare=False, repr=False)
    # Bytes that each GPU has outside of torch's allocator, beside those that it needs.
    outside: Outside = field(default_factory=Outside)

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
        """FLOPs that the model needs, as a share of the peak in the device's data sheet."""
        return self.model_flops / self.step_seconds / self.peak_flops if self.peak_flops else 0.0

    def kwargs(self) -> dict[str, Any]:
        """Return the arguments of `nemo_like.parallelize`, without the model; a plan is a `Plan`, which needs no sample."""
        return self._runnable(self.plan).arguments() | ({"sample_input": self.sample} if self.layout.pp > 1 else {})

    def call(self, sample: str = "batch") -> str:
        """Return the line of Python that does the same; `sample`: the name of one micro-batch."""
        from_file = self.plan is not None and self.layout.tp > 1 and self.layout.pp == 1
        needs_sample = self.layout.pp > 1 or (self.plan is not None and not from_file)
        return self._runnable(self.plan if from_file else None).as_call(sample=sample if needs_sample else None)

    def _runnable(self, plan: Plan | None) -> Job:
        """Return the job without the fields that the launcher sets; with `plan`, else with the tokens planned for."""
        # The loop accumulates, not `parallelize`: which of one micro-batch reduce is no question.
        step = replace(self.job.step, microbatches=1, sync=StepSpec.sync)
        if self.plan is None and step.optimizer in ADAMW:
            step = replace(step, optimizer=StepSpec.optimizer)  # its form is the loop's, where no plan counts with it
        job = replace(self.job, step=step, search=PlanSearch(), world_size=None)
        if self.plan is None and (tokens := most_elements(tensors_in(self.sample))):
            job = replace(job, planned_tokens=tokens)  # a plan knows them itself
        return job if plan is None else replace(job, ac=plan)

    def facts(self, number: int, unit: ByteUnit) -> list[Fact]:
        """Return the values of line `number` of a table, whose sizes are in `unit`; here they are in bytes."""
        layout, job, size = self.layout, self.job, unit.number
        words = {
            name: Fact(
                name,
                value,
                _COLUMNS.get(name),
                _WRITES.get(name, str),
                str(_WRITES[name](None)) if name in _WRITES else "",
            )
            for name, value in layout.words.items()
            if name != "ac"
        }
        batch = f"{layout.micro_batch} x {layout.grad_accum}"
        return [
            Fact("", number, Column("#")),
            *(words.pop(name) for name in (*_AXES, "schedule")),
            Fact("", batch, Column("batch", left=True)),
            Fact("precision", precision_word(job.precision), Column("precision", 3, left=True, usual=None)),
            Fact("optimizer", job.step.optimizer, Column("optimizer", 3, left=True, usual=None)),
            Fact("compile", job.compile, Column("compile", 4, left=True, usual=None), nothing="none"),
            Fact("ac", self.ac, Column("ac", left=True)),
            *words.values(),
            Fact("peak_bytes", self.peak_bytes, Column("peak", 6), size),
            Fact("reserved_bytes", self.reserved, Column("reserved", 1), size),
            Fact("step_seconds", self.step_seconds, Column("ms", 2), milliseconds),
            Fact("tokens_per_second_per_gpu", self.tokens_per_second_per_gpu, Column("tokens/s"), three_digits),
            Fact("mfu", self.mfu, Column("MFU", 1), percent),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return it in JSON values; sizes in bytes, times in seconds."""
        return {
            **as_json(self.facts(1, ByteUnit.for_sizes([]))),
            "peak_at": self.peak.at,
            "needed_bytes": self.need.bytes,
            "input_bytes": self.need.inputs,
            "judged_by": self.need.by,
            "host_bytes": self.host_bytes,
            "outside_bytes": dict(self.outside.parts),
            "memory_fraction": self.outside.fraction,
            "parts": self.account.parts,
            "seconds": dict(self.seconds.parts),
            "fits": self.fits,
            "call": self.call(),
            "explained": self.account.as_json(),
        }


def host_bytes_of(query: PlanQuery, choices: Choices) -> int:
    """Return the bytes that one rank has in CPU memory: its state, and activations that layers move there."""
    moved = sum(sum(stage.moved(chosen)) for stage, chosen in zip(query.stages, choices))
    return max(stage.state_on_host for stage in query.stages) + moved


def model_flops(query: PlanQuery, layout: Layout, seq_len: int) -> float:
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


MOST_GPUS = 1 << 17
_GROWING = "PYTORCH_ALLOC_CONF=expandable_segments:True"
_NETWORK = {
    "parameter gathers": "all-gather of parameters",
    "gradient reductions": "reduction of gradients",
    "tensor-parallel sums": "sums of tensor parallelism",
    "sequence gathers": "all-gather of keys and values",
    "expert exchanges": "all-to-all of experts' rows",
    "pipeline sends": "sends between stages",
}


def binds(candidate: Candidate, limit: int, device: Device) -> str:
    """Return the limit that keeps a configuration from being faster.

    ``memory: ...``: it recomputes for want of memory. ``network: ...``: waiting for collectives takes longer than any other
    extra. "between nodes" is added where their ranks are on several nodes. ``pipeline: the bubble``; else ``compute``.
    """
    parts = candidate.seconds.parts
    sent = {name: parts[name] for name in _NETWORK if parts.get(name)}
    extra = {
        "replay": parts.get("replay", 0.0),
        "network": sum(sent.values()),
        "bubble": parts.get("pipeline bubble", 0.0),
        "host": parts.get(HOST, 0.0),
    }
    worst = max(extra, key=lambda name: extra[name])
    if candidate.need.bytes <= limit and extra[worst] <= 0.02 * candidate.step_seconds:
        return "compute"
    if candidate.need.bytes > limit or worst == "replay":
        return f"memory: {largest_group(candidate.account.parts)}"
    if worst == "network":
        longest = max(sent, key=lambda name: sent[name])
        between = " between nodes" if _spans_nodes(longest, candidate.job, device) else ""
        return f"network: {_NETWORK[longest]}{between}"
    return (
        "pipeline: the bubble" if worst == "bubble" else "host: it launches kernels more slowly than the GPU runs them"
    )


def _spans_nodes(part: str, job: Job, device: Device) -> bool:
    """Return whether the ranks of a collective are on several nodes."""
    links = Links.for_job(job, device)
    groups = {
        "tensor-parallel sums": (links.tensor,),
        "sequence gathers": (links.sequence,),
        "expert exchanges": (links.experts,),
        "parameter gathers": (links.shards,),
        "gradient reductions": (links.shards, links.replicas),
    }
    if part in groups:
        return any(group.nodes > 1 for group in groups[part])
    return job.ranks > device.gpus_per_node  # stages are the outermost axis


# Function that plans a job for so many sequences of a micro-batch, and of another length, if given; raises ValueError
# where it cannot be run.
Remade = Callable[[Job, int, int | None], PlanQuery]


def ways_out(candidate: Candidate, question: Question, remade: Remade) -> list[str]:
    """Return single changes that make a job fit that does not, the smallest of each kind; then changes that lower its need.

    Args:
        candidate: the configuration that needs least as it is.
        question: the question that `fit` answers.
    """
    layout, limit = candidate.layout, question.limit

    def needs(job: Job, micro_batch: int = layout.micro_batch, seq_len: int | None = None) -> int:
        query = remade(job.change(ac="full"), micro_batch, seq_len)
        # Where its limit is lower, because it has more outside of the allocator, a job needs so many bytes more.
        return least_need(query, question.limit_of(job)) + limit - question.limit_of(job)

    base, tried = candidate.job.change(ac="full"), []
    can_chunk = remade(base, layout.micro_batch, None).stages[-1].part.can_chunk()
    for change in changes(base):
        if (change.job.loss is not None and base.loss is None and not can_chunk) or (
            change.job.offload != base.offload and layout.pp > 1
        ):
            continue
        words = change.words
        if change.job.offloads_state:
            host = max(stage.state_on_host for stage in remade(change.job, layout.micro_batch, None).stages)
            if host > question.host_memory:
                words = f"{words} with {write_bytes(host)} of CPU memory per rank (--host-memory)"
        tried.append((words, needs(change.job)))
    fitting, lowering = helping(needs(base), limit, tried)
    if "micro_batch" in question.pins:  # else smaller ones were searched already
        rows = layout.micro_batch // 2
        while rows and needs(base, rows) > limit:
            rows //= 2
        fitting += [f"micro-batch {rows} instead of {layout.micro_batch}"] * (rows > 0)
    fitting += _with_more_gpus(base, question, needs)
    with suppress(ValueError):
        eighth = max(2, question.seq_len // 8)
        length = largest(lambda size: needs(base, seq_len=size), 4 * eighth, limit, question.seq_len - 1, eighth)
        fitting += [f"sequence {length:,} instead of {question.seq_len:,}"] * (length > 0)
    return in_words(fitting, lowering)


def _with_more_gpus(job: Job, question: Question, needs: Callable[[Job], int]) -> list[str]:
    """Return how many more GPUs to shard over would help.

    For a pipeline whose stages are too large on any number of them: GPUs for more stages.
    """

    def more(jobs: Iterator[Job]) -> int | None:
        with suppress(ValueError):  # more stages than the model has layers
            for larger in jobs:
                if needs(larger) <= question.limit:
                    return larger.ranks
        return None

    def sharded(job: Job) -> Iterator[Job]:
        shards = job.dp_shard
        while (shards := 2 * shards) * job.ranks // job.dp_shard <= MOST_GPUS:
            yield job.on(dp_shard=shards)

    def staged(job: Job) -> Iterator[Job]:
        pp = job.pp
        while 2 * pp.size <= MOST_STAGES:
            pp = replace(pp, size=2 * pp.size, microbatches=max(pp.microbatches or 1, 2 * pp.size))
            yield job.on(dp_shard=job.dp_shard, pp=pp)

    def words(gpus: int) -> str:
        return f"{gpus - question.gpus} GPUs more ({gpus} in all)"

    gpus = more(sharded(job))
    ways = [] if gpus is None else [words(gpus)]
    fewer = more(sharded(job.change(allocator=AllocatorConfig(expandable_segments=True))))
    if fewer is not None and (gpus is None or fewer < gpus):
        ways.append(f"{words(fewer)} with {_GROWING}")
    if gpus is None and job.pp.size > 1 and (gpus := more(staged(job))) is not None:
        ways.append(f"{words(gpus)} in {gpus // job.ranks} times as many stages")
    return ways


# References that predictions were compared with; none of them was measured on a GPU at hand.
CHECKED = {
    "peak_bytes": "the CPU allocator's bytes of real steps on 1, 2 and 4 ranks (docs/evidence/plans.md)",
    "reserved_bytes": "published steps (docs/evidence/public-numbers.md)",
    "step_seconds": "published steps (docs/evidence/public-numbers.md)",
}


# How the values of options are written in the table, None among them.
_WRITES = {flag.name: yes_no if flag.kind is bool else flag.write for flag in SHARDING}
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp")
# Columns of the words of a layout: those of the axes, then further ones.
_COLUMNS = {
    **{name: Column(name, usual="" if name == "dp_shard" else "1") for name in _AXES},
    "schedule": Column("schedule", 4, left=True),
    "loss": Column("loss", left=True),
    "offload": Column("offload", left=True, usual="none"),
    **{
        flag.name: Column(flag.column, 2, left=True, usual=str(_WRITES[flag.name](flag.searched[0])))
        for flag in SHARDING
    },
}


@dataclass(frozen=True)
class FitReport:
    """The best configurations, and reasons why the others are not among them.

    ``print(report)`` prints the verdict and the table. Bytes are of the rank that needs most, seconds of one optimizer
    step. All numbers are predicted.
    """

    question: Question
    model: str
    """Name of the model as the caller gave it, or of its class."""
    parameters: int
    candidates: tuple[Candidate, ...]
    """Configurations that fit, fastest first."""
    rejected: Mapping[str, int]
    """Number of combinations that are not among `candidates`, by reason."""
    nearest: Candidate | None
    """The configuration that needs least, where nothing fits."""
    helps: tuple[str, ...] = ()
    """Single changes that make it fit, where nothing does: the smallest of each kind, then changes that lower the peak."""
    searched: Mapping[str, float] = field(default_factory=dict)
    """Number of ``layouts`` that were ranked and of those that were planned (``looked_at``), and ``seconds`` that the search
    took."""
    off: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Share by which the formula was off for those that were planned: of ``seconds`` and of ``bytes``, median and worst."""
    lora: int | None = None
    """Rank of the adapters that alone train; None: the parameters that the model itself trains."""
    four_bit: bool = False
    """True where frozen linears have 4 bits (QLoRA)."""
    class_taken: str = ""
    """Words for the class of the model, where its config names another."""
    stored: torch.dtype = torch.float32
    """Dtype of the parameters."""
    kind: str = DENSE
    """The kind of job whose errors the report states (`nemo_like.planning.accuracy`)."""
    interrupted: bool = False
    """True if the search was interrupted: a faster configuration may be among those that it did not examine."""

    @property
    def best(self) -> Candidate:
        """The fastest that fits.

        Raises:
            ValueError: nothing fits; the message has the configuration that needs least.
        """
        if not self.candidates:
            raise ValueError(self.problem)
        return self.candidates[0]

    @property
    def problem(self) -> str:
        """Reason why nothing fits; empty where something does."""
        if self.candidates:
            return ""
        near = self.nearest
        if near is None:
            why = ", ".join(f"{name} ({count})" for name, count in self.rejected.items())
            return f"No combination can be run on {self.question.gpus} GPU(s): {why}."
        limit = self.question.limit_of(near.job)
        return (
            f"Nothing fits in {write_bytes(limit)} on each of {self.question.gpus} x {self.question.device.name}: the "
            f"configuration that needs least takes {write_bytes(near.need.bytes)} ({near.need.by}; {near.call()}), "
            f"bound by {self.binds}." + (f" Changes that would help: {'; '.join(self.helps)}." if self.helps else "")
        )

    @property
    def binds(self) -> str:
        """Limit that keeps the best from being faster, or the nearest from fitting.

        See `nemo_like.planning.fit.report.binds`.
        """
        candidate = self.candidates[0] if self.candidates else self.nearest
        return (
            "" if candidate is None else binds(candidate, self.question.limit_of(candidate.job), self.question.device)
        )

    def call(self, sample: str = "batch") -> str:
        """Return the line of Python that trains with the best; `sample`: the name of one micro-batch.

        Raises:
            ValueError: nothing fits.
        """
        return self.best.call(sample)

    def verdict(self) -> str:
        """Return the answer in a line: how fast, and in how many bytes."""
        if not self.candidates:
            return self.problem
        best, limit = self.best, self.question.limit_of(self.best.job)
        note = "Stopped, the best so far: " if self.interrupted else "Fits: "
        return (
            f"{note}{three_digits(best.tokens_per_second_per_gpu)} tokens/s/GPU (MFU {percent(best.mfu)}), "
            f"{of_limit(best.need.bytes, limit)} {best.need.by}."
        )

    def about(self) -> str:
        """Return the question in a line."""
        question = self.question
        batch = "" if question.global_batch is None else f", {question.global_batch} per step"
        names = {candidate.job.step.optimizer for candidate in self.candidates} or {question.job.step.optimizer}
        optimizer = f", {names.pop()}" if len(names) == 1 else ""
        frozen = "frozen, linears in 4 bits," if self.four_bit else "frozen,"
        lora = "" if self.lora is None else f", of which adapters of rank {self.lora} train and all else is {frozen}"
        return (
            f"{self.model} ({parameters_word(self.parameters)} parameters){self.class_taken}{lora} on {question.gpus} x "
            f"{question.device.name}, sequences of {question.seq_len} tokens{batch}{optimizer}; "
            f"{question.device.about}"
        )

    def table(self) -> Table:
        """Return the configurations as a table, best first; a column that is at its default everywhere is not shown."""
        unit = self._unit()
        return Table.of(candidate.facts(number, unit) for number, candidate in enumerate(self.candidates, 1))

    def _unit(self) -> ByteUnit:
        return ByteUnit.for_sizes([candidate.need.bytes for candidate in self.candidates])

    def text(self, width: int | None = None, explain: int | None = None, paste: str = "") -> str:
        """Return the report for a screen of `width` columns (None: as wide as it gets).

        Args:
            explain: number of a configuration, to report also where its bytes and milliseconds come from.
            paste: further lines to train with the best, printed below its call.
        """
        if not self.candidates:
            on = setting(self.question.device.name, self.question.job, self.stored)
            return f"{paragraph(f'{on} {self.problem}', width)}\n\n{paragraph(self.about(), width)}"
        table = self.table()
        train = f"Train: {recipe(self, self.best)}" if self.lora is None else ""
        on = setting(self.question.device.name, self.best.job, self.stored)
        verdict = paragraph(f"{self.verdict()} {on}", width)
        lines = ["\n".join(line for line in (verdict, f"Paste: {self.call()}", train, paste) if line)]
        lines.append(paragraph(f"{self.about()} Bound by {self.binds}.", width))
        if explain is None and self.best.need.bytes >= 0.9 * self.question.limit_of(self.best.job):
            lines.append(paragraph(self.best.outside.words(), width))
        lines.append(
            table.with_note(self.best.outside.note(self._unit(), self.question.limit_of(self.best.job)), width)
        )
        if explain is not None and explain <= len(self.candidates):
            chosen = self.candidates[explain - 1]
            lines.append(f"Number {explain}:\n{chosen.explanation()}")
            lines.append(paragraph(chosen.outside.words(), width))
            lines.append(paragraph(self._others(), width))
        elif explain is not None:
            lines.append(f"There is no line {explain}: {len(self.candidates)} configurations were found.")
        lines += [paragraph(self._how(), width), paragraph(accuracy_words(self.kind), width)]
        return "\n\n".join(line for line in lines if line)

    def _how(self) -> str:
        """Return how the answer was found, and how far the ranking is to be trusted."""
        words = (
            f"Ranked {self.searched['layouts']:.0f} layouts by a formula and planned {self.searched['looked_at']:.0f} of "
            f"them, in {self.searched['seconds']:.0f} s."
        )
        fastest = max(candidate.tokens_per_second_per_gpu for candidate in self.candidates) if self.candidates else 0.0
        if self.candidates and self.best.tokens_per_second_per_gpu < fastest:
            words += (
                " Of those within 1 % of the fastest, less than predictions are off, the first has the fewest options."
            )
        if not self.off:
            return words
        off = [f"{percent(middle)} (at most {percent(worst)}) in {what}" for what, (middle, worst) in self.off.items()]
        return f"{words} For these, the formula was off by {' and '.join(off)}."

    def _others(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.rejected.items(), key=lambda r: -r[1]))
        return (
            f"Others: {reasons or 'none'}. Peaks were compared with {CHECKED['peak_bytes']}, reserved bytes and seconds "
            f"with {CHECKED['reserved_bytes']}; no GPU at hand was compared."
        )

    def __str__(self) -> str:
        return self.text(screen_width())

    def __repr__(self) -> str:
        return f"<FitReport: {self.verdict()}>"

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON values: sizes in bytes, times in seconds, shares of one."""
        question = self.question
        return {
            "verdict": self.verdict(),
            "model": self.model,
            "parameters": self.parameters,
            "lora": self.lora,
            "four_bit": self.four_bit,
            "gpus": question.gpus,
            "gpu": question.device.name,
            "seq_len": question.seq_len,
            "rates": question.device.rates,
            "global_batch": question.global_batch,
            "limit_bytes": question.limit,
            "host_memory_bytes": question.host_memory,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "rejected": dict(self.rejected),
            "problem": self.problem or None,
            "binds": self.binds,
            "helps": list(self.helps),
            "checked_against": CHECKED,
            "nearest": None if self.nearest is None else self.nearest.to_dict(),
            "searched": dict(self.searched),
            "formula_off": {what: list(values) for what, values in self.off.items()},
            "interrupted": self.interrupted,
        }


def recipe(report: FitReport, candidate: Candidate) -> str:
    """Return the command that trains with `candidate`."""
    layout, job = candidate.layout, candidate.job
    optimizer = job.step.optimizer
    flags = {
        "model": report.model,
        "seq_len": report.question.seq_len,
        "global_batch": layout.sequences,
        "grad_accum": layout.grad_accum,
        "ac": candidate.ac,
        "precision": precision_word(job.precision),
    }
    changed = changed_flags(Job(), job if optimizer in ADAMW else replace(job, step=StepSpec()))
    flags |= {name: changed[name] for name in flags_on("pretrain") if name in changed.keys() - {*flags, "strategy"}}
    if layout.pp == 1 and layout.grad_accum > 1:
        flags["sync"] = job.step.sync
    options = [
        f"{flag(name)} {'' if value is True else shlex.quote(str(value))}".rstrip() for name, value in flags.items()
    ]
    if layout.tp > 1:
        options.append("--sequence-parallel" if job.tp.sequence_parallel else "--no-sequence-parallel")
    nodes = -(-layout.gpus // report.question.device.gpus_per_node)
    start = f"torchrun --nnodes {nodes} --nproc-per-node {min(layout.gpus, report.question.device.gpus_per_node)} -m "
    begin = "python -m " if layout.gpus == 1 else start
    note = "" if optimizer in ADAMW else f"  # it trains with AdamW, not {optimizer}"
    note += "  # it steps behind backward, not in it" * job.step.in_backward
    return f"{begin}nemo_like.recipes.pretrain {' '.join(options)}{note}"
