"""The answer of a plan: whether it fits, with which checkpointing, how fast, and the effects of changes of the job."""

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from nemo_like._util.table import (
    ByteUnit,
    Column,
    Fact,
    Table,
    as_json,
    milliseconds,
    of_limit,
    paragraph,
    percent,
    screen_width,
    three_digits,
    yes_no,
)
from nemo_like._util.tensors import split_sample
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import BudgetError, Plan
from nemo_like.distributed.documents import makes_masks, masks_in_blocks
from nemo_like.job import Job
from nemo_like.options import PlanSearch, StepSpec, parse_ac
from nemo_like.planning.account import Explained, account_of, dtype_of, setting
from nemo_like.planning.accuracy import DENSE, accuracy_words, kind_of
from nemo_like.planning.advise import changes
from nemo_like.planning.memory_model.storages import Peak
from nemo_like.planning.model.capture import planned_imbalance
from nemo_like.planning.model.traced import MODES
from nemo_like.planning.planner import balanced_peak, choices_under, describe, query_of
from nemo_like.planning.predictions.budget_search import plan_within
from nemo_like.planning.predictions.rank import peak_of, peaks_of
from nemo_like.planning.predictions.reserved import (
    Need,
    Outside,
    default_limit,
    most_allocated,
    need_of,
    outside_of,
    reserved_within,
)
from nemo_like.planning.predictions.seconds import timeline_of
from nemo_like.planning.query import Choices, PlanQuery, Stage

SHARES = ("75%", "50%", "25%", "12.5%")  # Budgets that are planned where the caller names none.


@dataclass(frozen=True)
class ReportRow(Explained):
    """One way to checkpoint, with the bytes and seconds of a step."""

    ac: str  # Text to write after ``ac=``.
    plan: Plan
    need: Need  # Bytes that decide whether it fits; in a pipeline, on the rank that needs most.
    fits: bool  # True if it fits on the device, and in CPU memory.
    # One choice for each layer call of each stage.
    choices: Choices = field(default=(), compare=False, repr=False)
    host_bytes: int = 0  # Bytes that one rank has in CPU memory.
    peaks: tuple[Peak, ...] = ()  # The peak of each rank of the pipeline; one without a pipeline.
    # Bytes that the caching allocator reserves on each rank of a pipeline; empty: no pipeline, or no such allocator.
    reserved: tuple[int, ...] = ()
    # Share of the time in which the ranks of a pipeline wait, communication left out; None: no pipeline.
    bubble: float | None = None

    @property
    def seconds(self) -> float:
        """Predicted seconds of a whole step."""
        return self.plan.step_seconds


@dataclass(frozen=True)
class WhatIf:
    """One change of a job, and the fastest plan that then fits."""

    change: str  # The change in the keywords of `nemo_like.parallelize`, or in words.
    row: ReportRow  # The fastest row that fits; where nothing does, full checkpointing.
    tokens_per_second: float | None  # Tokens per second of one device; None: the input is not text.
    # The changed job, where it has the same question: as many tokens on as many devices.
    job: Job | None = None

    def facts(self, unit: ByteUnit) -> list[Fact]:
        """Return its values; sizes in bytes, times in seconds."""
        row, no_text = self.row, "".format
        return [
            Fact("change", self.change, Column("what if", left=True)),
            Fact("ac", row.ac, Column("ac", left=True)),
            Fact("needed_bytes", row.need.bytes, Column("needs"), unit.number),
            Fact("step_seconds", row.seconds, Column("ms"), milliseconds if row.fits else no_text),
            Fact(
                "tokens_per_second",
                self.tokens_per_second,
                Column("tokens/s", 1),
                three_digits if row.fits else no_text,
            ),
            Fact("fits", row.fits, Column("fits", left=True), yes_no),
        ]


@dataclass(frozen=True)
class PlanReport:
    """Ways to checkpoint that fit, with their cost. ``print(report)`` prints the verdict, the line to paste and the table.

    Bytes are of the rank that needs most, seconds of one optimizer step. All numbers are predicted.
    """

    rows: tuple[ReportRow, ...]
    """Rows of no checkpointing, the modes, and the requested plans."""
    best: ReportRow | None
    """The fastest row that fits; None where nothing does."""
    limit: int
    """Bytes that a step may take on each device."""
    job: Job
    """The job that all rows were planned for, but for ``ac``."""
    device: str
    about: str = ""
    """The model, its input and the devices, in a line."""
    unmet: tuple[str, ...] = ()
    """Reasons why no plan meets a requested budget, a sentence each."""
    tokens: int | None = None
    """Tokens of one micro-batch, of all ranks that share it; None: the input is not text."""
    balanced: int | None = None
    """Peak of `best` in bytes where every rank's experts get as many tokens; None: `best` is planned so."""
    padding: int = 0
    """Bytes of parameters, gradients and optimizer state on a rank that belong to no weight."""
    checkpoint_bytes: int = 0
    """CPU memory of a rank that a copy of its parameters and optimizer state takes, from which an asynchronous checkpoint is
    written."""
    answer: str = ""
    """Result of ``"min"`` or ``"max"``, in a sentence."""
    kind: str = DENSE
    """The kind of job whose errors the report states (`nemo_like.planning.accuracy`)."""
    pipeline: Mapping[str, Any] | None = None
    """Stages, schedule and micro-batches of a pipeline, and layers and micro-batches in flight of each stage."""
    what_if: tuple[WhatIf, ...] = ()
    """Effects of single changes of the job, where they were requested."""
    outside: Outside = field(default_factory=Outside)
    """Bytes that each device has outside of torch's allocator, beside those that the rows need."""
    stored: torch.dtype = torch.float32
    """Dtype of the parameters."""
    is_default_limit: bool = False
    """True if `limit` is not the caller's: another job may have another one."""

    def call(self, row: ReportRow | None = None, sample: str | None = None) -> str:
        """Return the line of Python that runs `row` as it was planned (default: `best`).

        Args:
            row: one of `rows`.
            sample: the name of one input; default: ``batch``, in a pipeline ``microbatch``.

        Raises:
            ValueError: nothing fits, and no row was given.
        """
        row = self.best if row is None else row
        if row is None:
            raise ValueError(self.verdict())
        staged = self.job.pp.size > 1
        if row.ac in MODES and not staged:
            return self.job.change(ac=row.ac, step=StepSpec(), search=PlanSearch()).as_call()
        return self.job.change(ac=row.ac).as_call(sample=sample or ("microbatch" if staged else "batch"))

    def tokens_per_second(self, row: ReportRow) -> float | None:
        """Return the predicted tokens per second of one device; None: the input is not text."""
        if self.tokens is None or not row.seconds:
            return None
        count = self.job.step.microbatches if self.job.pp.size == 1 else self.job.pp.microbatches or 1
        sharing = self.job.tp.size * self.job.cp.size * self.job.pp.size
        return self.tokens * count / row.seconds / sharing

    def slower(self, row: ReportRow) -> float:
        """Return the share by which the step of `row` is longer than one without checkpointing."""
        return row.seconds / self.rows[0].seconds - 1 if self.rows[0].seconds else 0.0

    def verdict(self) -> str:
        """Return the answer in a line: whether it fits, with which ``ac=``, at which price."""
        row = self.best or min(self.rows, key=lambda row: row.need.bytes)
        taken = f"{of_limit(row.need.bytes, self.limit)} {row.need.by}"
        if self.best is None:
            host = ", and more CPU memory than there is" if row.need.bytes <= self.limit else ""
            return f"Does not fit: ac={_short(row.ac)!r}, the least, takes {taken}{host}."
        if row.ac == "none":
            return f"Fits without checkpointing, ac='none': {taken}."
        return f"Fits with ac={_short(row.ac)!r}: {taken}, {percent(self.slower(row))} slower than ac='none'."

    def table(self) -> Table:
        """Return the rows as a table: bytes in one unit, milliseconds, and tokens per second of one device."""
        return Table.of(map(self._facts, self.rows))

    def _unit(self) -> ByteUnit:
        return ByteUnit.for_sizes([row.need.bytes for row in self.rows])

    def _facts(self, row: ReportRow) -> list[Fact]:
        """Return the values of a row: sizes in bytes, times in seconds, shares of one."""
        plan, size = row.plan, self._unit().number
        on_host = any(each.host_bytes for each in self.rows)
        ranks = row.peaks if self.job.pp.size > 1 else ()
        reserved = [f" ({size(each)})" for each in row.reserved] or [""] * len(ranks)
        return [
            Fact("ac", row.ac, Column("ac", left=True), _short),
            Fact("saved_bytes", plan.held_bytes, Column("saved", 3), size),
            Fact("host_bytes", row.host_bytes, Column("host", 2), size if on_host else "".format),
            Fact("peak_bytes", plan.peak_bytes, Column("peak"), size),
            Fact("reserved_bytes", row.need.reserved, Column("reserved"), size),
            Fact("needed_bytes", row.need.bytes),
            Fact("recompute_share", plan.recompute_share, Column("recompute", 5), percent),
            Fact("recompute_flops", plan.recompute_flops),
            Fact("slower", self.slower(row), Column("slower"), percent),
            Fact("step_seconds", row.seconds, Column("ms"), milliseconds),
            Fact("tokens_per_second", self.tokens_per_second(row), Column("tokens/s", 1), three_digits),
            Fact("bubble", row.bubble, Column("bubble", 4), percent),
            Fact("fits", row.fits, Column("fits", left=True), yes_no),
            Fact("peak_at", plan.peak_at, Column("peak at", 6, left=True)),
            Fact("peak_parts", dict(plan.peak)),
            Fact("rank_peak_bytes", [peak.total for peak in row.peaks]),
            Fact("rank_reserved_bytes", list(row.reserved)),
            Fact("layers", dict(Counter(layer.label for layer in plan.layers))),
            Fact("lists", None if row.ac in MODES or plan.lists is None else plan.lists.words),
            *(
                Fact("", size(peak.total) + more, Column(f"rank {rank}", 7))
                for rank, (peak, more) in enumerate(zip(ranks, reserved))
            ),
        ]

    def text(self, width: int | None = None, explain: bool = False) -> str:
        """Return the report for a screen of `width` columns (None: as wide as it gets).

        Args:
            explain: also report the parts of the peak, and the meanings of the columns.
        """
        table, unit = self.table(), self._unit()
        paste = "" if self.best is None else f"Paste: {self.call()}"
        first, *more = [line for line in (self.answer, self.verdict(), paste) if line]
        first = paragraph(f"{first} {setting(self.device, self.job, self.stored)}", width)
        lines = ["\n".join([first, *more])]
        row = self.best or min(self.rows, key=lambda row: row.need.bytes)
        outside = self.outside.words() if explain or row.need.bytes >= 0.9 * self.limit else ""
        lines += [paragraph(text, width) for text in (self.about, outside, *self._warnings())]
        lines += [
            table.with_note(self.outside.note(unit, self.limit), width),
            self._lists(row, width),
            paragraph(accuracy_words(self.kind), width),
        ]
        if explain:
            lines += [self.breakdown(), *(paragraph(text, width) for text in _MEANINGS)]
        return "\n\n".join(line for line in (*lines, self.changes_text(width)) if line)

    def changes_text(self, width: int | None = None) -> str:
        """Return `what_if`, and the best change with its line to paste, for a screen; empty: no change was requested."""
        return "\n".join([self.what_if_table().text(width), *self._better()]) if self.what_if else ""

    def _lists(self, row: ReportRow, width: int | None) -> str:
        """Return a plan as lists of names, to paste and to edit; empty: `row` is a mode."""
        lists = row.plan.lists
        if row.ac in MODES or lists is None:
            return ""
        lines = ",\n ".join(paragraph(json.dumps(names.words), width and width - 2) for names in lists.lists)
        return f"The same by names, as --ac or ac= takes it:\n[{lines}]"

    def _better(self) -> list[str]:
        """Return the single change of the job that is faster than `best` and fits, and its line to paste."""
        fitting = [change for change in self.what_if if change.job is not None and change.row.fits]
        fastest = min(fitting, key=lambda change: change.row.seconds, default=None)
        if fastest is None or (self.best is not None and fastest.row.seconds > _FASTER * self.best.seconds):
            return []
        row, job = fastest.row, fastest.job
        assert job is not None  # `fitting`
        word = "Fits" if self.best is None else "Faster"
        call = replace(self, job=job, best=row).call()
        return [f"{word} with {fastest.change}: {milliseconds(row.seconds)} ms, ac={row.ac!r}.", f"Paste: {call}"]

    def what_if_table(self) -> Table:
        """Return `what_if` as a table, with the recommended row first."""
        now = [] if self.best is None else [WhatIf("as asked", self.best, self.tokens_per_second(self.best))]
        return Table.of(change.facts(self._unit()) for change in (*now, *self.what_if))

    def __str__(self) -> str:
        return self.text(screen_width())

    def _warnings(self) -> list[str]:
        """Return warnings about the numbers, a sentence each."""
        lines = []
        if self.balanced is not None and self.best is not None:
            peaks = (write_bytes(self.best.plan.peak_bytes), write_bytes(self.balanced))
            lines.append(
                f"Peak where the fullest rank's experts get {planned_imbalance(self.job):g} times their share of the "
                f"tokens: {peaks[0]}; where all get as many: {peaks[1]}."
            )
        if self.padding >= min(row.plan.peak_bytes for row in self.rows) / 20:
            lines.append(
                f"Padding: {write_bytes(self.padding)} per rank of parameters, gradients and optimizer state belong to no "
                f"weight, because {self.job.shard_ranks} ranks do not divide their sizes. Shard over fewer (dp_replicate=)."
            )
        return lines

    def breakdown(self) -> str:
        """Return where the bytes and milliseconds of `best` come from, or of the row that needs least."""
        row = self.best or min(self.rows, key=lambda row: row.need.bytes)
        copied = f"CPU memory of an asynchronous checkpoint: {self._unit().word(self.checkpoint_bytes)} a rank."
        return f"ac={row.ac!r}:\n{row.explanation()}\n{copied}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON values: sizes in bytes, times in seconds, shares of one."""
        return {
            "verdict": self.verdict(),
            "answer": self.answer or None,
            "about": self.about,
            "device": self.device,
            "traced_for": self.rows[0].plan.traced_for,
            "job": self.job.words(machine=True),
            "limit_bytes": self.limit,
            "outside_bytes": dict(self.outside.parts),
            "memory_fraction": self.outside.fraction,
            "recommended": self.best.ac if self.best else None,
            "call": self.call() if self.best else None,
            "unmet": list(self.unmet),
            "balanced_peak_bytes": self.balanced,
            "padding_bytes": self.padding,
            "checkpoint_bytes": self.checkpoint_bytes,
            "tokens": self.tokens,
            "pipeline": None if self.pipeline is None else dict(self.pipeline),
            "rows": [as_json(self._facts(row)) for row in self.rows],
            "what_if": [as_json(change.facts(self._unit())) for change in self.what_if],
        }


def _short(ac: str) -> str:
    """Return ``ac`` for a cell: lists of names may be long."""
    return ac if len(ac) <= _CELL else f"{ac[: _CELL - 4]} ..."


_CELL = 44  # Characters.
# Share of the time of the fastest row that a change must be below, to be named: predictions are off by more.
_FASTER = 0.99
_MEANINGS = (
    "saved: activations that wait for backward, on the rank that peaks highest. reserved: bytes that CUDA's caching "
    "allocator takes for all tensors, by a model of it; these must fit. recompute: FLOPs that backward runs again, as "
    "a share of a forward. slower: the whole step against ac='none'. ms: of one optimizer step; tokens/s: of one "
    "device.",
    "Seconds are a roofline by the device's sourced rates, with the collectives that nothing hides.",
)


def make_report(
    query: PlanQuery,
    more: Sequence[str] = (),
    limit: int | None = None,
    *,
    tokens: int | None = None,
    about: str = "",
) -> PlanReport:
    """Return the modes, `more`, and the fastest plan within `limit`, as one report.

    Args:
        query: the job, on a traced model.
        more: budgets and lists of names as they are written after ``ac=``; default: `SHARES` of the activations.
        limit: bytes that a step may take on each device; default: `default_limit`.
        tokens, about: see `PlanReport`.
    """
    is_default = limit is None
    limit = default_limit(query.job, query.device) if limit is None else limit
    rows = [row_of(mode, query, query.uniform(mode), limit) for mode in MODES]
    unmet = list[str]()
    for text in [text for text in dict.fromkeys(more or SHARES) if text not in MODES]:
        try:
            choices = choices_under(query, parse_ac(text), text)
        except BudgetError as error:
            unmet += [str(error)] if more else []
            continue
        if choices is None:
            raise ValueError(
                f"ac is {text!r}, of which no plan is made. Give a budget, a mode of {(*MODES, 'submodule')}, or lists of "
                "names."
            )
        rows.append(row_of(text, query, choices, limit))
    fastest = rows[0] if rows[0].fits else _planned_within(query, limit)
    if fastest is not None and fastest.ac not in {row.ac for row in rows}:
        rows.append(fastest)
    fitting = (row for row in rows if row.fits)
    best = min(fitting, key=lambda row: (row.seconds, row.plan.peak_bytes), default=None)
    even = None if best is None else balanced_peak(query, best.choices)
    pipeline = {
        "stages": len(query.stages),
        "schedule": query.pp.schedule,
        "microbatches": query.microbatches,
        "layers_per_stage": query.counts,
        "in_flight": [query.most_in_flight(index) for index in range(len(query.stages))],
    }
    return PlanReport(
        tuple(rows),
        best,
        limit,
        query.job,
        query.device.name,
        about,
        tuple(unmet),
        tokens,
        None if even is None else even.total,
        max(map(_padding, query.stages)),
        max(sum(_stored(query.stages[stage]) for stage in query.of_rank(rank)) for rank in range(query.pp.size)),
        pipeline=pipeline if query.is_pipeline else None,
        outside=outside_of(query.job, query.device),
        stored=dtype_of(query.traced.given),
        is_default_limit=is_default,
        kind=kind_of(query.traced.given, query.job, query.traced.sample),
    )


def fastest_within(query: PlanQuery, limit: int) -> ReportRow | None:
    """Return no checkpointing if that fits in `limit` bytes, else the fastest plan that does, as a row; None: none does."""
    choices = query.uniform("none")
    if peak_of(query, choices).total <= most_allocated(query, limit):
        none = row_of("none", query, choices, limit)
        if none.fits:
            return none
    return _planned_within(query, limit)


def _planned_within(query: PlanQuery, limit: int) -> ReportRow | None:
    planned = plan_within(query, limit)
    return None if planned is None else row_of(planned[3], query, planned[0], limit)


def row_of(name: str, query: PlanQuery, choices: Choices, limit: int) -> ReportRow:
    """Return the row of one way to checkpoint, for a step within `limit` bytes."""
    peaks = peaks_of(query, choices)
    reserved = reserved_within(query, choices, limit)
    need = need_of(query, max(peaks, key=lambda peak: peak.total), reserved)
    plan = describe(query, choices, name, reserved=reserved)
    host = sum(layer.host_bytes for layer in plan.layers) + max(stage.state_on_host for stage in query.stages)
    fits = need.bytes <= limit and host <= int(query.job.search.host_memory)
    bubble = timeline_of(query, choices).bubble if query.is_pipeline else None
    of_ranks = tuple(reserved) if query.is_pipeline else ()
    explain = partial(account_of, query, choices)
    return ReportRow(name, plan, need, fits, choices, host, tuple(peaks), of_ranks, bubble, explain=explain)


def _stored(stage: Stage) -> int:
    """Return the bytes of parameters and optimizer state of a rank, wherever they are."""
    of_gradients = sum(unit.host_grad for unit in stage.sharding.all)
    return stage.sharding.params + stage.optimizer.state + stage.state_on_host - of_gradients


def _padding(stage: Stage) -> int:
    """Return the bytes of parameters, gradients and optimizer state of a rank that belong to no weight."""
    sharding = stage.sharding
    state = sum(sum(sizes[:2]) for sizes in stage.optimizer.states)  # a counter of steps has no padding
    trained = sum(param.size for param in sharding.trained)
    return int(sharding.padding * (2 + state / trained)) if trained else sharding.padding


MOST_GPUS = 1 << 14
_MOST_PROBES = 12


@dataclass(frozen=True)
class Step:
    """A model, a job and its input, which a step is planned for."""

    model: nn.Module
    job: Job
    # Function that makes the input of one micro-batch, of so many sequences of so many tokens, and describes it.
    given: Callable[[int, int], tuple[Any, str]]
    batch: int = 1  # Sequences of a micro-batch.
    seq_len: int = 0  # Tokens of a sequence; 0: the input has a length of its own.

    @cached_property
    def input(self) -> tuple[Any, str]:
        """Input of one micro-batch, and its description."""
        return self.given(self.batch, self.seq_len)

    def query(self, job: Job | None = None, batch: int | None = None, seq_len: int | None = None) -> PlanQuery:
        """Trace the model for a job, a batch and a length; None: the step's own.

        Raises:
            ValueError: as `nemo_like.plan_for`.
        """
        job = self.job if job is None else job
        same = batch is None and seq_len is None
        sample, _ = self.input if same else self.given(batch or self.batch, seq_len or self.seq_len)
        return query_of(self.model, sample, job)


def what_if(step: Step, query: PlanQuery, report: PlanReport) -> Iterator[WhatIf]:
    """Yield the effects of those single changes of a job that its verdict calls for.

    Where it fits without checkpointing: of a longer sequence and of fewer devices. Else of the loss, the optimizer,
    offloading: less memory may make it fit, or leave room for a faster plan. A change that cannot be planned is left out.

    Args:
        step, query: the step and its query that `report` was made from.
    """
    roomy = report.best is not None and report.best.ac == "none"
    for words, make in _changed(step, query, roomy):
        with masks_in_blocks(words == FLEX):
            try:
                other = make()
            except (ValueError, NotImplementedError):
                continue  # a rule of the job, the model's positions, a part that is not planned
            if other is None:
                continue
            limit = default_limit(other.job, other.device) if report.is_default_limit else report.limit
            row = fastest_within(other, limit) or row_of("full", other, other.uniform("full"), limit)
        tokens = None if report.tokens is None else report.tokens * (2 if words == _TWICE else 1)
        same = words not in (_TWICE, _HALF) and "=" in words and other.job != query.job
        speed = replace(report, job=other.job, tokens=tokens).tokens_per_second(row)
        yield WhatIf(words, row, speed, other.job if same and other.job.as_call() != query.job.as_call() else None)


_TWICE, _HALF = "twice the sequence", "half the GPUs"
FLEX = "attn_implementation='flex_attention', masks by blocks"


def _changed(step: Step, query: PlanQuery, roomy: bool) -> Iterator[tuple[str, Callable[[], PlanQuery | None]]]:
    job = query.job
    if roomy and step.seq_len:
        yield _TWICE, lambda: step.query(job, seq_len=2 * step.seq_len)
    if roomy and job.ranks > 1 and job.ranks % 2 == 0:
        yield _HALF, lambda: query.under(job.change(world_size=job.ranks // 2))
    if query.device.cuda is not None and makes_masks(step.model, split_sample(step.input[0])[1]):
        yield FLEX, step.query
    for change in () if roomy else changes(job):
        if change.job.ac == job.ac:  # the report shows which ac= is best
            yield change.words, partial(query.changed, change.job)


def least_need(query: PlanQuery, limit: int) -> int:
    """Return the bytes that full checkpointing needs where `limit` may be taken; no plan saves less."""
    return row_of("full", query, query.uniform("full"), limit).need.bytes


def largest(needs: Callable[[int], int], start: int, limit: int, most: int, step: int = 1) -> int:
    """Return the largest multiple of `step` up to `most` that needs at most `limit` bytes; 0: not even one.

    The need grows almost evenly, so two values show where the limit is crossed. The answer and the next multiple are both
    computed.

    Args:
        needs: returns bytes by size, growing.
        start: the first size to try.
    """
    fits, fails, sizes = 0, most // step + 1, dict[int, int]()
    guess = min(max(1, start // step), fails - 1)
    for _ in range(_MOST_PROBES):
        if fails - fits <= 1:
            break
        sizes[guess] = needs(guess * step)
        if sizes[guess] <= limit:
            fits = guess
        else:
            fails = guess
        low, high = min(sizes), max(sizes)
        slope = (sizes[high] - sizes[low]) / (high - low) if high > low else 0.0
        at = fits or low
        if slope > 0:
            guess = int(at + (limit - sizes[at]) / slope)
        else:
            guess = 2 * guess if fits == guess else guess // 2
        guess = min(max(guess, fits + 1), fails - 1)
    return fits * step


def fewest(needs: Callable[[int], int], counts: Sequence[int], limit: int) -> int | None:
    """Return the smallest of `counts` that needs at most `limit` bytes each; None: none does.

    Args:
        needs: returns bytes of one device by the number of devices, falling.
        counts: in order; doubling steps find the first that fits, bisection the smallest.
    """
    low, high = 0, 0
    while needs(counts[high]) > limit:
        if high == len(counts) - 1:
            return None
        low, high = high + 1, min(2 * high + 1, len(counts) - 1)
    return counts[bisect_left(counts, True, low, high, key=lambda count: needs(count) <= limit)]


def gpu_unit(tp: int, cp: int, ep: int, pp: int, dp_replicate: int) -> int:
    """Return the smallest number of devices that these axes take; all others are multiples of it.

    >>> gpu_unit(2, 1, 8, 1, 2)
    16
    """
    return tp * cp * (ep // math.gcd(ep, tp * cp)) * pp * dp_replicate


def gpu_counts(job: Job, per_node: int) -> list[int]:
    """Return the numbers of devices that a job could run on: those that its axes allow, whole nodes above one."""
    unit = gpu_unit(job.tp.size, job.cp.size, job.ep.size, job.pp.size, job.dp_replicate)
    return [count for count in range(unit, MOST_GPUS + 1, unit) if count <= per_node or count % per_node == 0]
