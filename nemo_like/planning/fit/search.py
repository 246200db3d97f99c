"""The search: all layouts ranked by a formula, and the best few planned as `plan` does.

In the order of the estimated seconds of a token, layouts are looked at: the model is traced in that layout, and the planner
predicts its bytes and seconds under the fastest mode that fits. The search ends once enough layouts fit and all whose
estimate is within a twentieth of the best were looked at, or after `MOST_LOOKS`. The two fastest then get a plan for all the
memory that there is. Each look corrects the estimates of layouts that are alike.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_like._util.log import quiet
from nemo_like._util.progress import Say, silent
from nemo_like._util.table import three_digits
from nemo_like.job import Job
from nemo_like.options.step import SYNC
from nemo_like.planning.account import account_of
from nemo_like.planning.fit.formula import Formula
from nemo_like.planning.fit.layouts import MOVED, SHARDING, Layout, job_of
from nemo_like.planning.fit.question import Question
from nemo_like.planning.fit.report import Candidate, host_bytes_of, model_flops
from nemo_like.planning.memory_model.storages import Peak
from nemo_like.planning.planner import balanced, describe
from nemo_like.planning.predictions.budget_search import plan_within
from nemo_like.planning.predictions.rank import fullest_peaks
from nemo_like.planning.predictions.reserved import ALLOCATED, Need, most_allocated, outside_of, verdict
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import Choices, PlanQuery, Traced

MOST_LOOKS = 24  # Most layouts that are planned.
WITHIN = 1.05  # Layouts whose estimate is within a twentieth of the best are looked at.
ALIKE = 1.01  # Answers within a hundredth of the fastest are alike: speeds are predicted less well than that.
PLANS = 2  # Layouts that get a plan for the whole memory.
# Layouts that are looked at although they are estimated to need more than there is, by up to the last multiple: where
# nothing fits yet, and where they are estimated to be faster than those that do, by the third.
_LEAST_LOOKS, _MORE_LOOKS, _FASTER, _DOUBTFUL = 8, 3, 1.02, 1.25

Tracer = Callable[[Question, int], Traced]  # Function of a question and the sequences of a micro-batch.


class OutOfTimeError(Exception):
    """The minutes of a search are over."""


class Entry(NamedTuple):
    """A layout in a way, by their numbers in its `Ranking`."""

    ranking: Ranking
    layout: int
    way: int


class Found(NamedTuple):
    """Result of a search."""

    best: list[Candidate]  # Layouts that fit, fastest first.
    rejected: Counter[str]  # Number of layouts by the reason why they are not among `best`.
    # The configuration that needs least of those that were looked at, where nothing fits.
    nearest: Candidate | None
    # Share by which the formula was off where it was looked at: of ``seconds`` and of ``bytes``, median and worst.
    off: Mapping[str, tuple[float, float]]
    interrupted: bool  # True if the search was interrupted: its best by then is not known to be the fastest.


class Ranking:
    """All layouts of one question, with the formula's estimates and their corrections by looks."""

    def __init__(self, question: Question, formula: Formula, layouts: Sequence[Layout]) -> None:
        self.question, self.formula, self.layouts = question, formula, list(layouts)
        self.rejected = Counter[str]()
        self.modes = question.pins.get("ac", (*formula.modes, "plan"))
        self.ways = _ways(question, formula)
        self.estimate = formula.estimate(self.layouts, self.ways)
        tokens = torch.tensor([[layout.sequences * question.seq_len] for layout in self.layouts], dtype=torch.float64)
        self.per_token = question.gpus / tokens.view(-1, 1)
        self.open = self._allowed()
        alike, self.sizes = dict[Any, int](), dict[Any, int]()
        # The fields that layouts share for which the formula is off alike.
        shared = [(it.tp, it.ep > 1, it.schedule, it.cp > 1, it.sequence_parallel) for it in self.layouts]
        number = torch.tensor([alike.setdefault(fields, len(alike)) for fields in shared])
        # Number of each (layout, way), the same where the formula is off alike.
        self.classes = 2 * number.unsqueeze(1) + torch.tensor([getattr(way.fsdp, MOVED) for way in self.ways])
        self._off = {what: torch.ones(2 * len(alike), dtype=torch.float64) for what in ("seconds", "bytes")}
        # For each class, the fields that it shares with its kin.
        self.like = [key[:_KIN] for key in alike for _ in range(2)]
        self._seen: dict[str, dict[int, float]] = {"seconds": {}, "bytes": {}}
        numbers = [self.sizes.setdefault(layout.sizes, len(self.sizes)) for layout in self.layouts]
        # Number of each layout, the same for those that differ in how ranks share tensors alone.
        self.siblings = torch.tensor(numbers)
        self.costs = self._costs()

    def _allowed(self) -> Tensor:
        """Return which layout can be run in which way, by the rules of the search."""
        question, count = self.question, len(self.layouts)
        keys = [(layout.pp > 1, layout.dp_shard * layout.cp > 1, layout.grad_accum > 1) for layout in self.layouts]
        fine = {key: [self._fine(way, *key) for way in self.ways] for key in set(keys)}
        if keys and not any(map(any, fine.values())):
            self.rejected[f"not planned beside pp: {MOVED}"] += count
        if question.lacks_host_rates:
            self.rejected[f"{MOVED}: the bandwidth of CPU memory is not known for this device"] += count
        fits = self.estimate.host <= question.host_memory
        allowed = torch.tensor([fine[key] for key in keys], dtype=torch.bool).view(count, len(self.ways))
        if full := int((allowed & ~fits).sum()):
            self.rejected["CPU memory"] += full
        return allowed & fits

    def _fine(self, way: Layout, staged: bool, sharded: bool, accumulates: bool) -> bool:
        """Return whether layouts that have stages, shards and several micro-batches, or none, are run in a way."""
        pins = self.question.pins
        if way.sync != self.ways[0].sync and (staged or not (sharded and accumulates)):
            return False
        usual = all(
            flag.moves or flag.name in pins or getattr(way.fsdp, flag.name) == flag.searched[0] for flag in SHARDING
        )
        if staged:
            # Stages stay gathered for a whole step, and nothing waits elsewhere, unless the caller requests it.
            moves = way.offload != "none" and "offload" not in pins
            return not getattr(way.fsdp, MOVED) and not moves and usual
        return (sharded or usual) and (not getattr(way.fsdp, MOVED) or self.question.gpus > 1)

    # --- estimates ------------------------------------------------------------------------------------------------

    def corrected(self, what: str) -> Tensor:
        """Return the estimates (layouts, ways, modes), corrected by looks at layouts that are alike."""
        return getattr(self.estimate, what) * self._off[what][self.classes].unsqueeze(2)

    def corrected_of(self, what: str, entry: Entry) -> list[float]:
        """Return `corrected` of one entry, by mode."""
        factor = self._off[what][self.classes[entry.layout, entry.way]]
        return (getattr(self.estimate, what)[entry.layout, entry.way] * factor).tolist()

    def learn(self, entry: Entry, mode: str, seconds: float, size: int) -> dict[str, float]:
        """Correct the estimates by the plan of a layout; return the factors by which they were off."""
        at, number = self.formula.modes.index(mode), int(self.classes[entry.layout, entry.way])
        off = {}
        for what, real in (("seconds", seconds), ("bytes", float(size))):
            off[what] = real / float(getattr(self.estimate, what)[entry.layout, entry.way, at])
            self._seen[what][number] = off[what]
            for other, like in enumerate(self.like):  # a class without a look is taken to be off as its kin are
                kin = [math.log(factor) for each, factor in self._seen[what].items() if self.like[each] == like]
                if other not in self._seen[what] and kin:
                    self._off[what][other] = math.exp(sum(kin) / len(kin))
            self._off[what][number] = off[what]
        self.costs = self._costs()
        return off

    def _costs(self) -> Tensor:
        """Return the estimated seconds of one GPU for a token (layouts, ways); infinite: it is closed, or too large."""
        seconds, sizes = self.corrected("seconds"), self.corrected("bytes")
        best = torch.full(seconds.shape[:2], math.inf, dtype=torch.float64)
        for value in self._mixes(seconds, sizes):
            best = torch.minimum(best, value)
        return torch.where(self.open, best * self.per_token, math.inf)

    def _mixes(self, seconds: Tensor, sizes: Tensor) -> Iterator[Tensor]:
        """Yield seconds (layouts, ways) where it fits: of each mode, and of plans between two neighbours."""
        limit, modes = float(self.question.limit), self.formula.modes
        stays = torch.tensor([way.offload == "none" for way in self.ways]).view(1, -1)
        for number, mode in enumerate(modes):
            fits = sizes[..., number] <= limit
            if mode == "none":
                fits = fits & stays  # else there is no region whose inputs could wait elsewhere
            if mode in self.modes or (mode == "full" and "plan" in self.modes):
                yield torch.where(fits, seconds[..., number], math.inf)
        for fast, slow in zip(range(len(modes)), range(1, len(modes))) if "plan" in self.modes else ():
            high, low = sizes[..., fast], sizes[..., slow]
            share = ((limit - low) / (high - low).clamp(min=1)).clamp(0, 1)
            mixed = seconds[..., slow] + share * (seconds[..., fast] - seconds[..., slow])
            yield torch.where(low <= limit, mixed, math.inf)

    # --- entries --------------------------------------------------------------------------------------------------

    def best(self) -> tuple[float, Entry] | None:
        """Return the entry with the lowest estimate, and that; None: none is left."""
        if not self.costs.numel():
            return None
        number = int(self.costs.argmin())
        cost = float(self.costs.view(-1)[number])
        return None if math.isinf(cost) else (cost, Entry(self, *divmod(number, len(self.ways))))

    def doubtful(self, fastest: float) -> Entry | None:
        """Return the open entry that is estimated to need least; None: none is left.

        Where something fits that takes `fastest` seconds of a GPU for a token, it is one that is estimated to be faster, and
        to need at most a quarter more than there is.
        """
        sizes = torch.where(self.open, self.corrected("bytes").amin(2), math.inf)
        if not math.isinf(fastest):
            seconds = self.corrected("seconds").amin(2) * self.per_token
            close = (sizes <= _DOUBTFUL * self.question.limit) & (seconds < fastest)
            sizes = torch.where(close, sizes, math.inf)
        if not sizes.numel() or math.isinf(float(sizes.min())):
            return None
        return Entry(self, *divmod(int(sizes.argmin()), len(self.ways)))

    def close(self, entry: Entry) -> None:
        """Leave out an entry from now on."""
        self.open[entry.layout, entry.way] = False
        self.costs[entry.layout, entry.way] = math.inf

    def close_sizes(self, layout: Layout) -> None:
        """Leave out all ways to run layouts of the sizes of `layout`."""
        same = self.siblings == self.sizes.get(layout.sizes, -1)
        self.open[same] = False
        self.costs[same] = math.inf


_KIN = 3  # The first so many of these make kin.


def _ways(question: Question, formula: Formula) -> list[Layout]:
    """Return the ways to run a layout that the pins allow: options that change no size, without a mode."""
    pins = question.pins
    losses = pins.get("loss", ("model", "chunked"))
    if "chunked" in losses and not formula.can_chunk():
        losses = tuple(loss for loss in losses if loss != "chunked")
    return [
        Layout(loss=loss, offload=offload, fsdp=fsdp, sync=sync)
        for loss in losses
        for offload in pins.get("offload", ("none", "boundary"))
        for fsdp in question.shardings
        for sync in pins.get("sync", SYNC)
    ]


@dataclass
class PlannedLayout:
    """A layout that fits, as it was planned."""

    entry: Entry
    layout: Layout
    job: Job
    query: PlanQuery
    choices: Choices
    peak: Peak
    need: Need
    seconds: float
    # Estimated seconds of one GPU for a token with a plan for all the memory; of this one, where it saves everything.
    hoped: float
    budget: str = ""

    @property
    def per_token(self) -> float:
        question = self.entry.ranking.question
        return self.seconds * question.gpus / (self.layout.sequences * question.seq_len)


@dataclass
class Search:
    """A search through the layouts of several questions about one model: its precisions, optimizers, compilers."""

    rankings: Sequence[Ranking]
    trace: Tracer
    say: Say = silent
    until: float = math.inf  # When it ends at the latest, by `time.monotonic`.
    rows: list[PlannedLayout] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    looked_at: int = 0  # Number of layouts that were planned.
    least: PlannedLayout | None = None  # The lowest need of those that do not fit.
    off: dict[str, list[float]] = field(default_factory=lambda: {"seconds": [], "bytes": []})

    def run(self, count: int = 8) -> Found:
        """Return the best `count` layouts.

        Raises:
            ValueError: the minutes ended before anything was found. KeyboardInterrupt: likewise.
        """
        interrupted = False
        try:
            with quiet("nemo_like", logging.ERROR):
                self._walk(count)
                self._plan()
        except (KeyboardInterrupt, OutOfTimeError) as stop:
            if not self.rows:
                if isinstance(stop, KeyboardInterrupt):
                    raise
                raise ValueError(
                    f"Nothing that fits was found in the minutes that there were: {self.looked_at} layouts were looked "
                    "at. Give more minutes, or pin more."
                ) from stop
            interrupted = True
        with quiet("nemo_like", logging.ERROR):
            self.rows.sort(key=lambda row: row.per_token)
            if self.rows:  # of those that predictions cannot tell apart, the one with the fewest options
                alike = [row for row in self.rows if row.per_token <= ALIKE * self.rows[0].per_token]
                first = min(alike, key=lambda row: row.layout.options)
                self.rows.remove(first)
                self.rows.insert(0, first)
            best = [self._candidate(row) for row in self.rows[:count]]
            nearest, least = None, self.least
            if not best and least is not None:
                peaks = fullest_peaks(least.query, least.choices)
                # The need of its fullest rank, which no other exceeds: a look ends with the first that is too high.
                nearest = self._candidate(replace(least, need=verdict(least.query, least.choices, peaks, 1 << 60)))
        rejected = sum((ranking.rejected for ranking in self.rankings), self.rejected)
        rejected["estimated slower, not looked at"] = sum(int(ranking.open.any(1).sum()) for ranking in self.rankings)
        off = {what: (statistics.median_high(values), max(values)) for what, values in self.off.items() if values}
        return Found(best, +rejected, nearest, off, interrupted)

    def _walk(self, count: int) -> None:
        """Look at layouts in the order of their estimates."""
        while self.looked_at < MOST_LOOKS:
            bests = [best for ranking in self.rankings if (best := ranking.best()) is not None]
            if not bests:
                break
            cost, entry = min(bests, key=lambda best: best[0])
            fastest = min((row.hoped for row in self.rows), default=math.inf)
            if len(self.rows) >= count and cost > WITHIN * fastest:
                break
            self._tell()
            self._look(entry)
        for number in range(_LEAST_LOOKS):
            if self.rows and number == _MORE_LOOKS:
                break
            fastest = min((row.hoped for row in self.rows), default=math.inf) / _FASTER
            doubtful = [found for ranking in self.rankings if (found := ranking.doubtful(fastest)) is not None]
            if not doubtful:
                break
            self._tell()
            self._look(min(doubtful, key=lambda entry: min(entry.ranking.corrected_of("bytes", entry))))

    def _tell(self) -> None:
        if time.monotonic() > self.until:
            raise OutOfTimeError
        layouts = sum(len(ranking.layouts) for ranking in self.rankings)
        fastest = min((row.per_token for row in self.rows), default=math.inf)
        so_far = f", {three_digits(1 / fastest)} tokens/s/GPU so far" if self.rows else ""
        self.say(f"planned {self.looked_at} of {layouts} layouts{so_far}")

    def _look(self, entry: Entry) -> None:
        """Plan a layout under the fastest mode that fits, and keep it if one does."""
        ranking, question = entry.ranking, entry.ranking.question
        row, tried, usable, sizes = None, set[str](), self._usable(entry), self._sizes(entry)
        mode = next((mode for mode in usable if sizes[mode] <= question.limit), usable[-1] if usable else None)
        self.looked_at += 1
        while mode is not None:
            tried.add(mode)
            try:
                planned_layout = self.under(entry, mode)
            except ValueError as error:  # of `nemo_like.job.RULES`, or the model cannot have that shape
                self.rejected[str(error).splitlines()[0]] += 1
                ranking.close(entry)
                return
            for what, factor in ranking.learn(entry, mode, planned_layout.seconds, planned_layout.need.bytes).items():
                self.off[what].append(abs(1 / factor - 1))
            fits = planned_layout.need.bytes <= question.limit_of(planned_layout.query.job)
            if fits and host_bytes_of(planned_layout.query, planned_layout.choices) > question.host_memory:
                self.rejected["CPU memory"] += 1
                ranking.close(entry)
                return
            if fits:
                row = planned_layout if row is None or planned_layout.seconds < row.seconds else row
            elif self.least is None or planned_layout.need.bytes < self.least.need.bytes:
                self.least = planned_layout
            # The corrected estimates may show that a faster mode fits, too; where none fits yet, one that needs less may.
            order, sizes = self._usable(entry), self._sizes(entry)
            ahead = order[: order.index(mode)] if row is not None else order
            most = question.limit if row is not None else max(question.limit, sizes[mode])
            mode = next((each for each in ahead if each not in tried and sizes[each] <= most), None)
        if row is None:
            self.rejected["memory"] += 1
            ranking.close(entry)
            return
        row.hoped = min(row.per_token, float(ranking.costs[entry.layout, entry.way]))
        if row.layout.ac in ranking.modes:
            self.rows.append(row)
        elif (planned := self.planned(row)) is not None:  # the caller asks for plans alone
            self.rows.append(planned)
        for other in self.rankings:
            if other.question.alike(question):
                other.close_sizes(row.layout)

    def _usable(self, entry: Entry) -> list[str]:
        """Return the modes that an entry is looked at under, fastest first; full checkpointing stands for a plan."""
        ranking, way = entry.ranking, entry.ranking.ways[entry.way]
        modes = [
            mode
            for mode in ranking.formula.modes
            if mode in ranking.modes and (mode != "none" or way.offload == "none")
        ]
        if not modes and "plan" in ranking.modes:
            return ["full"]
        seconds = dict(zip(ranking.formula.modes, ranking.corrected_of("seconds", entry)))
        return sorted(modes, key=seconds.__getitem__)

    def _sizes(self, entry: Entry) -> dict[str, float]:
        """Return the estimated bytes of an entry, by mode."""
        return dict(zip(entry.ranking.formula.modes, entry.ranking.corrected_of("bytes", entry)))

    def under(self, entry: Entry, mode: str) -> PlannedLayout:
        """Plan a layout under a mode.

        Raises:
            ValueError: it cannot be run, or the model cannot have that shape.
        """
        ranking, question, way = entry.ranking, entry.ranking.question, entry.ranking.ways[entry.way]
        layout = ranking.layouts[entry.layout].way(
            ac=mode, loss=way.loss, offload=way.offload, fsdp=way.fsdp, sync=way.sync
        )
        job = job_of(question.job, layout, question.limit_of, question.asked)
        query = self.trace(question, layout.micro_batch).query(job)
        if query.is_pipeline and query.pp.balance == "memory":
            query = balanced(query, mode)
        choices, limit = query.uniform(mode), question.limit_of(job)
        peaks = fullest_peaks(query, choices)
        peak = max(peaks.values(), key=lambda peak: peak.total)
        fits = peak.total <= most_allocated(query, limit)
        need = verdict(query, choices, peaks, limit) if fits else Need(peak.total + query.input_bytes, ALLOCATED)
        return PlannedLayout(entry, layout, job, query, choices, peak, need, step_seconds(query, choices).total, 0.0)

    def _plan(self) -> None:
        """Give the fastest layouts a plan for all the memory that there is, where that is faster.

        Of layouts that differ in how weights are replicated alone, the first gets one. The next is left out if it would have
        to gain more than a fiftieth above the gain of the plan before.
        """
        shapes, gain, best = set[Any](), 1.0, min((row.per_token for row in self.rows), default=0.0)
        for row in sorted(self.rows, key=lambda row: row.hoped):
            shape = row.layout.way(dp_replicate=1, dp_shard=row.layout.dp_replicate * row.layout.dp_shard).sizes
            if len(shapes) == PLANS or row.hoped * gain > 1.02 * best:
                break
            is_new = shape not in shapes
            shapes.add(shape)
            if not is_new or "plan" not in row.entry.ranking.modes or row.layout.ac == "none" or row.budget:
                continue
            self._tell()
            planned = self.planned(row)
            if planned is not None and planned.seconds < row.seconds:
                self.rows[self.rows.index(row)] = planned
                gain, best = planned.per_token / row.hoped, min(best, planned.per_token)

    def planned(self, row: PlannedLayout) -> PlannedLayout | None:
        """Return the row with the fastest plan within the memory; None: there is none."""
        question, query = row.entry.ranking.question, row.query
        within = plan_within(query, question.limit_of(query.job))
        if within is None:
            return None
        choices, peak, need, budget = within
        seconds = step_seconds(query, choices).total
        if host_bytes_of(query, choices) > question.host_memory:
            return None
        layout = row.layout.way(ac="plan")
        return replace(row, layout=layout, choices=choices, peak=peak, need=need, seconds=seconds, budget=budget)

    def _candidate(self, row: PlannedLayout) -> Candidate:
        question, query, layout, choices = row.entry.ranking.question, row.query, row.layout, row.choices
        job, plan = row.job, None
        if row.budget:
            reserved = None if row.need.reserved is None else [row.need.reserved]
            job, plan = job.change(ac=row.budget), describe(query, choices, row.budget, reserved=reserved)
        return Candidate(
            layout,
            job,
            row.peak,
            row.need,
            step_seconds(query, choices),
            tokens=layout.sequences * question.seq_len,
            model_flops=model_flops(query, layout, question.seq_len) * layout.grad_accum / layout.pp,
            peak_flops=query.device.peak_flops,
            fits=row.need.bytes <= question.limit_of(query.job),
            host_bytes=host_bytes_of(query, choices),
            plan=plan,
            sample=query.traced.sample,
            outside=outside_of(job, query.device),
            explain=partial(account_of, query, choices),
        )
