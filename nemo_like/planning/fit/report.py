"""The answer of a search: the fastest configurations, their speed and bytes, what binds them, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_like._util.table import (
    ByteUnit,
    Column,
    Table,
    of_limit,
    paragraph,
    parameters_word,
    percent,
    screen_width,
    three_digits,
)
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import largest_group
from nemo_like.job import Job
from nemo_like.options import ADAMW, ContextParallel, PipelineParallel
from nemo_like.options.memory import AllocatorConfig
from nemo_like.options.parallel import reshard_word
from nemo_like.planning.accuracy import accuracy_words
from nemo_like.planning.advise import changes, helping, in_words
from nemo_like.planning.devices import Device
from nemo_like.planning.fit.candidate import Candidate, precision_word
from nemo_like.planning.fit.layouts import MOST_STAGES
from nemo_like.planning.fit.question import Question
from nemo_like.planning.predictions.seconds import HOST, Links
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import largest, least_need

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
    """Return what keeps a configuration from being faster.

    ``memory: ...``: it recomputes for want of memory. ``network: ...``: waiting for collectives takes longer than any other
    extra. "between hosts" is added where their ranks are on several hosts. ``pipeline: the bubble``; else ``compute``.
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
    if candidate.need.bytes > limit or (worst == "replay" and extra["replay"] > 0.02 * candidate.step_seconds):
        return f"memory: {largest_group(candidate.peak.parts)}"
    if worst == "network" and extra["network"] > 0.02 * candidate.step_seconds:
        longest = max(sent, key=lambda name: sent[name])
        between = " between hosts" if _spans_hosts(longest, candidate.job, device) else ""
        return f"network: {_NETWORK[longest]}{between}"
    if worst == "bubble" and extra["bubble"] > 0.02 * candidate.step_seconds:
        return "pipeline: the bubble"
    if worst == "host" and extra["host"] > 0.02 * candidate.step_seconds:
        return "host: it launches kernels more slowly than the GPU runs them"
    return "compute"


def _spans_hosts(part: str, job: Job, device: Device) -> bool:
    """Return whether the ranks of a collective are on several hosts."""
    links = Links.for_job(job, device)
    groups = {
        "tensor-parallel sums": (links.tensor,),
        "sequence gathers": (links.sequence,),
        "expert exchanges": (links.experts,),
        "parameter gathers": (links.shards,),
        "gradient reductions": (links.shards, links.replicas),
    }
    if part in groups:
        return any(group.hosts > 1 for group in groups[part])
    return job.ranks > device.gpus_per_host  # stages are the outermost axis


Remade = Callable[[Job, int, int | None], PlanQuery]
"""Function that plans a job for so many sequences of a micro-batch, and of another length, if given; raises ValueError where
it cannot be run."""


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
        if change.job.fsdp is not None and change.job.fsdp.cpu_offload:
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


CHECKED = {
    "peak_bytes": "the CPU allocator's bytes of real steps on 1, 2 and 4 ranks (docs/evidence/plans.md)",
    "reserved_bytes": "published steps (docs/evidence/public-numbers.md)",
    "step_seconds": "published steps (docs/evidence/public-numbers.md)",
}
"""References that predictions were compared with; none of them was measured on a GPU at hand."""


_COLUMNS = (
    Column("#"),
    Column("dp_replicate"),
    Column("dp_shard"),
    Column("tp"),
    Column("cp"),
    Column("ep"),
    Column("pp"),
    Column("schedule", 4, left=True),
    Column("batch", left=True),
    Column("precision", 3, left=True),
    Column("optimizer", 3, left=True),
    Column("compile", 4, left=True),
    Column("ac", left=True),
    Column("loss", left=True),
    Column("offload", left=True),
    Column("reshard", 5, left=True),
    Column("cpu_offload", 2, left=True),
    Column("peak", 6),
    Column("reserved", 1),
    Column("ms", 2),
    Column("tokens/s"),
    Column("MFU", 1),
)
_USUAL = {
    "dp_replicate": "1",
    "tp": "1",
    "cp": "1",
    "ep": "1",
    "pp": "1",
    "offload": "none",
    "reshard": "default",
    "cpu_offload": "no",
}
"""Default value of each column."""


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
    """Rank of the adapters that alone train; None: what the model itself trains."""
    interrupted: bool = False
    """True if the search was interrupted: a faster configuration may be among those that it did not examine."""

    @property
    def best(self) -> Candidate:
        """The fastest that fits.

        Raises:
            ValueError: nothing fits; the message has what needs least.
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
            f"Nothing fits in {write_bytes(limit)} on each of {self.question.gpus} x {self.question.device.name}: what "
            f"needs least takes {write_bytes(near.need.bytes)} ({near.need.by}; {near.call()}), bound by {self.binds}."
            + (f" What would help: {'; '.join(self.helps)}." if self.helps else "")
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
        """Return the answer in a line: how fast, in how many bytes, and what keeps it from being faster."""
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
        names = {each.job.step.optimizer for each in self.candidates} or {question.job.step.optimizer}
        optimizer = f", {names.pop()}" if len(names) == 1 else ""
        lora = "" if self.lora is None else f", of which adapters of rank {self.lora} train and all else is frozen,"
        return (
            f"{self.model} ({parameters_word(self.parameters)} parameters){lora} on {question.gpus} x "
            f"{question.device.name}, sequences of {question.seq_len} tokens{batch}{optimizer}; rates of "
            f"{question.device.rates}."
        )

    def table(self) -> Table:
        """Return the configurations as a table, best first; a column that is at its default everywhere is not there."""
        unit = self._unit()
        lines = [_line(number, candidate, unit) for number, candidate in enumerate(self.candidates, 1)]
        for i, column in enumerate(_COLUMNS):
            usual = _USUAL.get(column.name, "")
            same = column.name in ("precision", "optimizer", "compile") and len({line[i] for line in lines}) <= 1
            if same or all(line[i] == usual for line in lines):
                lines = [(*line[:i], "", *line[i + 1 :]) for line in lines]
        return Table(_COLUMNS, tuple(lines))

    def _unit(self) -> ByteUnit:
        return ByteUnit.for_sizes([candidate.need.bytes for candidate in self.candidates])

    def text(self, width: int | None = None, explain: int | None = None, paste: str = "") -> str:
        """Return the report for a screen of `width` columns (None: as wide as it gets).

        Args:
            explain: number of a configuration, to report also where its bytes and milliseconds come from.
            paste: further lines to train with the best, printed below its call.
        """
        if not self.candidates:
            return f"{paragraph(self.problem, width)}\n\n{paragraph(self.about(), width)}"
        table = self.table()
        train = f"\nTrain: {recipe(self, self.best)}" if self.lora is None else ""
        lines = [f"{self.verdict()}\nPaste: {self.call()}{train}" + (f"\n{paste}" if paste else "")]
        lines.append(paragraph(f"{self.about()} Bound by {self.binds}.", width))
        if explain is None and self.best.need.bytes >= 0.9 * self.question.limit_of(self.best.job):
            lines.append(paragraph(self.best.outside.words(), width))
        lines.append(table.with_note(f"{self._unit().name} of one device, predicted.", width))
        if explain is not None and explain <= len(self.candidates):
            chosen = self.candidates[explain - 1]
            lines.append(f"Number {explain}:\n{chosen.explanation()}")
            lines.append(paragraph(chosen.outside.words(), width))
            lines.append(paragraph(self._others(), width))
        elif explain is not None:
            lines.append(f"There is no line {explain}: {len(self.candidates)} configurations were found.")
        lines += [paragraph(self._how(), width), paragraph(accuracy_words(), width)]
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


def _line(number: int, candidate: Candidate, unit: ByteUnit) -> tuple[str, ...]:
    layout, job = candidate.layout, candidate.job
    return (
        str(number),
        *(str(getattr(layout, name)) for name in ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp")),
        layout.schedule or "",
        f"{layout.micro_batch} x {layout.grad_accum}",
        precision_word(job.precision),
        job.step.optimizer,
        job.compile or "none",
        candidate.ac,
        layout.loss,
        layout.offload,
        reshard_word(layout.reshard_after_forward),
        "yes" if layout.cpu_offload else "no",
        unit.number(candidate.peak_bytes),
        "" if candidate.reserved is None else unit.number(candidate.reserved),
        three_digits(1000 * candidate.step_seconds),
        three_digits(candidate.tokens_per_second_per_gpu),
        percent(candidate.mfu),
    )


def recipe(report: FitReport, candidate: Candidate) -> str:
    """Return the command that trains with `candidate`."""
    layout, job = candidate.layout, candidate.job
    flags = {
        "--model": report.model,
        "--seq-len": report.question.seq_len,
        "--global-batch": layout.sequences,
        "--grad-accum": layout.grad_accum,
        "--ac": candidate.ac,
        "--precision": precision_word(job.precision),
    }
    axes = {
        "--dp-replicate": layout.dp_replicate,
        "--tp": layout.tp,
        "--cp": layout.cp,
        "--ep": layout.ep,
        "--pp": layout.pp,
    }
    flags |= {name: size for name, size in axes.items() if size > 1}
    if layout.pp == 1 and layout.grad_accum > 1:
        flags["--sync"] = job.step.sync
    if layout.pp > 1:
        flags["--pp-schedule"] = layout.schedule or PipelineParallel.schedule
        if layout.stages_per_rank != job.pp.facts.default_per_rank:
            flags["--stages-per-rank"] = layout.stages_per_rank
    if job.cp != ContextParallel(job.cp.size):
        flags["--cp-method"] = job.cp.method
    if job.compile is not None:
        flags["--compile"] = job.compile
    if job.step.optimizer in ADAMW[1:]:
        flags["--optimizer"] = job.step.optimizer
    if job.loss is not None:
        flags["--loss"] = "chunked"
    if job.offload.mode != "none":
        flags["--offload"] = job.offload.mode
    if layout.reshard_after_forward is not None:
        flags["--reshard-after-forward"] = "yes" if layout.reshard_after_forward else "no"
    options = [f"{name} {value}" for name, value in flags.items()] + ["--cpu-offload"] * layout.cpu_offload
    if layout.tp > 1:
        options.append("--sequence-parallel" if job.tp.sequence_parallel else "--no-sequence-parallel")
    hosts = -(-layout.gpus // report.question.device.gpus_per_host)
    start = f"torchrun --nnodes {hosts} --nproc-per-node {min(layout.gpus, report.question.device.gpus_per_host)} -m "
    begin = "python -m " if layout.gpus == 1 else start
    optimizer = job.step.optimizer
    note = "" if optimizer in ADAMW else f"  # it trains with AdamW, not {optimizer}"
    note += "  # it steps behind backward, not in it" * job.step.in_backward
    return f"{begin}nemo_like.recipes.pretrain {' '.join(options)}{note}"
