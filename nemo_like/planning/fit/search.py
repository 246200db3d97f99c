"""The search: best first, so that the first configurations that fit are the best there are.

A queue has everything not examined yet, by the least time that it could take: for a local shape that is not traced, a
bound; for a traced configuration, its time. The bytes of a configuration are only predicted when no other could be faster.
No shape is traced that could not win. A configuration whose plan is not made yet has the time of the fastest choices that
fit next to parameters and optimizer state. All ways to run a layout with its state in host memory share one entry, keyed by
the fastest; it is expanded when popped. So nothing that is left out can beat the result (tests compare it with a search of
everything).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_like._util.progress import Say, silent
from nemo_like._util.table import three_digits
from nemo_like.options import MemoryBudget
from nemo_like.options.step import SYNC
from nemo_like.planning.answers.outside_allocator import outside_of
from nemo_like.planning.answers.seconds import StepSeconds
from nemo_like.planning.answers.verdict import ALLOCATED, Need, plan_within
from nemo_like.planning.fit.accounts import account_of
from nemo_like.planning.fit.candidate import Candidate
from nemo_like.planning.fit.known_bounds import KnownBounds
from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.fit.question import Question
from nemo_like.planning.fit.shapes import Shape, ShapeKey
from nemo_like.planning.planner import describe
from nemo_like.planning.program.storages import Peak
from nemo_like.planning.query import Choices

Tracer = Callable[[ShapeKey], Shape]
Planning = Callable[[Configuration, int], tuple[Choices, Peak] | None]
"""Function that returns a plan's choices and its peak, for the highest peak that it may have."""


@dataclass(frozen=True)
class StateOnHost:
    """Entry for all ways to run a layout with parameters, gradients and optimizer state in host memory."""

    conf: Configuration


@dataclass(frozen=True)
class Resolved:
    """Bytes and seconds that a configuration takes."""

    seconds: StepSeconds
    peak: Peak
    need: Need
    choices: Choices
    """One choice for each layer call of each stage."""
    budget: str = ""
    """The peak that a plan was made for, as it is written after ``ac=``."""


class OutOfTimeError(Exception):
    """The minutes of a search are over."""


@dataclass
class Found:
    """Result of a search."""

    best: list[Candidate] = field(default_factory=list)
    """Configurations that fit, fastest first."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Number of combinations by the reason why they are not among `best`."""
    nearest: Candidate | None = None
    """The configuration that needs least, where nothing fits."""
    looked_at: int = 0
    """Number of configurations of which bytes were predicted."""
    traced: int = 0
    """Number of local shapes that were traced."""
    interrupted: bool = False
    """True if the search was interrupted: its best by then is not known to be the fastest."""


class Search:
    """Search for one question on one model."""

    def __init__(
        self,
        question: Question,
        layouts: Iterable[Configuration],
        trace: Tracer,
        say: Say = silent,
        until: float = math.inf,
    ) -> None:
        """Look at nothing yet; `until`: when the search ends at the latest, by `time.monotonic`."""
        self.question, self.trace, self.say, self.until = question, trace, say, until
        self.so_far: float | None = None
        """Seconds per token of the fastest that is known to fit."""
        self.found = Found()
        self.shapes: dict[ShapeKey, Shape | str] = {}
        """Traced shapes; for the others, why the model cannot have them."""
        self.by_shape: dict[ShapeKey, list[Configuration]] = {}
        # Shapes that others are bounded by come first.
        for conf in sorted(layouts, key=lambda conf: (conf.pp > 1, conf.cp, conf.micro_batch, conf.tp, conf.ep)):
            self.by_shape.setdefault(ShapeKey.of(conf), []).append(conf)
        self.hopeless: dict[Any, bool] = {}
        self.bounds = KnownBounds(question, self.shapes, self.by_shape, self._traced)
        self.least_staged: tuple[int, Configuration] | None = None
        """The pipeline with the fewest bytes, out of those that the whole model shows not to fit."""
        self.too_large: dict[Configuration, int] = {}
        """Least bytes of the pipelines that were examined more closely."""
        self._exact: dict[Configuration, float] = {}
        """Seconds of one GPU for a token, of pipelines whose choices are known."""
        self.least: tuple[Shape, Configuration, Resolved] | None = None
        """The configuration with the lowest peak, out of those that do not fit."""

    # --- the two ways through everything --------------------------------------------------------------------------

    def run(self, count: int = 10) -> Found:
        """Find the best that fits, and up to `count` of the next best layouts among the shapes that were traced for it."""
        order = itertools.count()
        queue: list[tuple[float, int, Any]] = []
        try:
            self._walk(queue, order, count)
        except (KeyboardInterrupt, OutOfTimeError) as stop:
            items = (item for *_, item in sorted(queue, key=lambda entry: entry[:2]))
            resolved = [item for item in items if isinstance(item, tuple) and item[1] is not None]
            if not (resolved or self.found.best):
                if isinstance(stop, KeyboardInterrupt):
                    raise
                raise ValueError(
                    f"Nothing that fits was found in the minutes that there were: {self._traced_shapes()} of "
                    f"{len(self.by_shape)} shapes were traced. Give more minutes, or pin more."
                ) from stop
            self.found.interrupted = True
            for conf, known in resolved:
                shape = self.shapes[ShapeKey.of(conf)]
                layouts = {candidate.layout for candidate in self.found.best}
                if len(layouts) < count and conf.layout not in layouts and not isinstance(shape, str):
                    self.found.best.append(self.candidate(shape, conf, known))
            return self._finished(queue)
        if not self.found.best:
            self._look_at_the_least()
        result = self._finished(queue)
        if result.best and time.monotonic() <= self.until:
            result.best[0] = self._refined(result.best[0])
        else:
            result.nearest = self._nearest()
        return result

    def _finished(self, queue: Iterable[tuple[float, int, Any]]) -> Found:
        """Count the entries that are left in the queue."""
        for _, _, item in queue:
            self.found.rejected[_SLOWER] += len(self.by_shape[item]) if isinstance(item, ShapeKey) else 1
        self.found.traced = self._traced_shapes()
        # The least time of a plan is that of the mix that recomputes least, which may not be the fastest of all.
        self.found.best.sort(key=lambda candidate: -candidate.tokens_per_second_per_gpu)
        return self.found

    def _traced_shapes(self) -> int:
        return sum(not isinstance(shape, str) for shape in self.shapes.values())

    def _walk(self, queue: list[tuple[float, int, Any]], order: Iterator[int], count: int) -> None:
        """Go through shapes, configurations and resolved ones by their least seconds, until `count` are found."""
        large = list[ShapeKey]()
        for key in self.by_shape:
            heapq.heappush(queue, (self.bounds.seconds(key), next(order), key))
        while queue and len(self.found.best) < count:
            if time.monotonic() > self.until:
                raise OutOfTimeError
            bound, _, item = heapq.heappop(queue)
            self.say(f"traced {self._traced_shapes()} of {len(self.by_shape)} shapes{self._best_so_far()}")
            if isinstance(item, ShapeKey):
                if not self.found.best and (better := self.bounds.seconds(item)) > bound:
                    heapq.heappush(queue, (better, next(order), item))  # other shapes were traced meanwhile
                elif self.found.best:
                    self.found.rejected[_SLOWER] += len(self.by_shape[item])
                elif item not in large and self._is_too_large(item):
                    large.append(item)
                    heapq.heappush(queue, (math.inf, next(order), item))  # what needs least, if nothing fits
                else:
                    for seconds, entry in self._entries(item):
                        heapq.heappush(queue, (seconds, next(order), entry))
                continue
            conf = item.conf if isinstance(item, StateOnHost) else item[0]
            if any(candidate.layout == conf.layout for candidate in self.found.best):
                self.found.rejected["slower than another way to run the same layout"] += 1
                continue
            shape = self._traced(ShapeKey.of(conf))
            if isinstance(item, StateOnHost):
                for seconds, entry in self._ways(shape, conf, (True,)):
                    heapq.heappush(queue, (seconds, next(order), entry))
                continue
            resolved = item[1]
            if isinstance(shape, str):  # it could not be cut into stages
                self.found.rejected[shape] += 1
            elif self.found.best and shape.key.staged and shape.key.in_one_stage not in self.shapes:
                self.found.rejected[_SLOWER] += 1
            elif resolved is not None:
                self.found.best.append(self.candidate(shape, conf, resolved))
            elif shape.key.staged and (better := self._least_pipeline(shape, conf)) > bound:
                if better < math.inf:
                    heapq.heappush(queue, (better, next(order), item))
            elif shape.key.staged and (exact := self._pipeline_seconds(shape, conf)) > bound:
                heapq.heappush(queue, (exact, next(order), item))
            elif (resolved := self._resolve(shape, conf)) is not None:
                per_token = self.question.per_token(resolved.seconds.total, conf)
                self.so_far = per_token if self.so_far is None else min(self.so_far, per_token)
                heapq.heappush(queue, (per_token, next(order), (conf, resolved)))

    def _best_so_far(self) -> str:
        return "" if self.so_far is None else f", {three_digits(1 / self.so_far)} tokens/s/GPU so far"

    def _look_at_the_least(self) -> None:
        """Examine the pipelines that may need less than all else, where nothing fits."""
        large = [(least, conf) for conf, least in self.too_large.items()]
        for least, conf in sorted(large, key=lambda entry: entry[0]):
            if self._near(least):
                self._look_at(conf)
        if self.least is None and self.least_staged is not None:
            self._look_at(self.least_staged[1])

    def _look_at(self, conf: Configuration) -> None:
        shape = self._traced(ShapeKey.of(conf))
        if isinstance(shape, Shape) and shape.key.staged:
            with quietly(), suppress(ValueError):  # it cannot be cut
                self._remember_nearest(shape, conf, self._uniform(shape, conf, exact=True))

    # --- shapes ---------------------------------------------------------------------------------------------------

    def _traced(self, key: ShapeKey) -> Shape | str:
        if key not in self.shapes:
            try:
                with quietly():
                    self.shapes[key] = self.trace(key)
            except ValueError as error:
                self.shapes[key] = str(error).splitlines()[0]
        return self.shapes[key]

    def _is_too_large(self, key: ShapeKey) -> bool:
        """Return whether no configuration of a shape that is not traced fits."""
        with quietly():
            return self.bounds.exclude(key, self._variants)

    def _entries(self, key: ShapeKey) -> Iterator[tuple[float, Entry]]:
        """Yield all configurations of a traced shape by the least seconds per token that they take."""
        shape = self._traced(key)
        if isinstance(shape, str):
            self.found.rejected[shape] += len(self.by_shape[key])
            return
        if shape.key.staged:
            yield from self._staged_entries(key, shape)
            return
        states = tuple(state for state in self.question.host_state if not state)
        for conf in self.by_shape[key]:
            yield from self._ways(shape, conf, states)
            if True in self.question.host_state and (least := self._least_on_host(shape, conf)) is not None:
                yield least, StateOnHost(conf)
            elif self.question.lacks_host_rates:
                self.found.rejected["cpu_offload: the bandwidth of host memory is not known for this device"] += 1

    def _least_on_host(self, shape: Shape, conf: Configuration) -> float | None:
        """Return the seconds per token that no way to run a layout with its state in host memory is below.

        For the bound, nothing is recomputed and no activation moved. None: there is no such way, which is counted.
        """
        every = self._variants(shape, conf, (True,))
        ways = dict.fromkeys(way.change(ac="none", offload="none") for way in every)
        if not ways:
            self.found.rejected[_HOST_MEMORY] += 1
            return None
        seconds = (shape.seconds(way, shape.choices(way)) for way in ways)
        return min(self.question.per_token(each.total, conf) for each in seconds)

    def _ways(self, shape: Shape | str, conf: Configuration, states: Collection[bool]) -> Iterator[tuple[float, Entry]]:
        """Yield configurations of the layout of `conf`; `states`: values of ``cpu_offload``."""
        assert isinstance(shape, Shape)
        for way in self._variants(shape, conf, states):
            choices, least = self.bounds.whole(shape).least(way)
            if least > shape.most_allocated(way) and (self.found.best or not self._near(least)):
                self.found.rejected["memory"] += 1
                continue
            seconds = shape.seconds(way, [choices])
            yield self.question.per_token(seconds.total, way), (way, None)

    def _staged_entries(self, key: ShapeKey, shape: Shape) -> Iterator[tuple[float, Entry]]:
        """Yield all pipelines of a shape by the least seconds per token that they could take; none is cut for that."""
        bounds = self.bounds.exact(key)
        for conf in self.by_shape[key]:
            for way in self._variants(shape, conf):
                if bounds is None:
                    yield 0.0, (way, None)
                    continue
                least = bounds.bytes(way, way.mode)
                if least > shape.most_allocated(way):
                    self.found.rejected["memory"] += 1
                    if self.least_staged is None or least < self.least_staged[0]:
                        self.least_staged = least, way.change(ac="full")
                    continue
                yield self.question.per_token(bounds.seconds(way, way.mode), way), (way, None)

    def _least_pipeline(self, shape: Shape, conf: Configuration) -> float:
        """Return the seconds of one GPU for a token that this pipeline is not below.

        They are infinite where its bytes are too many, which is counted.
        """
        known = self.bounds.pipeline(shape.key)
        if known is None:  # it cannot be cut, which is reported when it is tried
            return 0.0
        if known.bytes(conf, conf.mode) > shape.most_allocated(conf):
            self.found.rejected["memory"] += 1
            self.too_large[conf.change(ac="full")] = known.bytes(conf, "full")
            return math.inf
        return self.question.per_token(known.seconds(conf, conf.mode), conf)

    def _pipeline_seconds(self, shape: Shape, conf: Configuration) -> float:
        """Return the seconds of one GPU for a token; 0 where that takes a plan, or the model cannot be cut."""
        if conf.mode == "plan":
            return 0.0
        if conf not in self._exact:
            self._exact[conf] = 0.0
            with quietly(), suppress(ValueError):
                seconds = shape.seconds(conf, shape.choices(conf))
                self._exact[conf] = self.question.per_token(seconds.total, conf)
        return self._exact[conf]

    def _near(self, least: int) -> bool:
        """Return whether a configuration of at least so many bytes could need less than all others so far.

        If nothing fits, it is worth examining.
        """
        return self.least is None or least < self.least[2].peak.total

    def _variants(
        self, shape: Shape, conf: Configuration, states: Collection[bool] | None = None
    ) -> Iterator[Configuration]:
        """Yield all ways to run the layout of `conf`.

        `states`: values of ``cpu_offload``, by default all that are searched. State that overfills host memory is left out.
        """
        states = self.question.host_state if states is None else states
        pins = self.question.pins
        losses = pins.get("loss", ("model", "chunked"))
        modes = pins.get("ac", ("none", "full", "selective", "plan"))
        sharded = conf.shard_ranks > 1
        reshards = pins.get("reshard_after_forward", (None, False) if sharded else (None,))
        offloads = pins.get("offload", ("none", "boundary"))
        if conf.pp > 1:
            # Stages stay gathered for a whole step, and nothing waits elsewhere, unless the caller requests it.
            reshards = tuple(dict.fromkeys(reshard if reshard else None for reshard in reshards))
            offloads = pins.get("offload", ("none",))
            # A budget for each stage takes long to plan: unless the caller requests one, the winner alone gets it.
            assert shape.key.staged
            modes = tuple(mode for mode in modes if mode != "plan" or "ac" in pins)
            states = tuple(state for state in states if not state)
            if not modes or not states:
                self.found.rejected[_NOT_BESIDE_PP] += 1
                return
        elif True in states and self._overfills_host(shape, conf):
            states = tuple(state for state in states if not state)
        losses = tuple(loss for loss in losses if loss != "chunked" or shape.can_chunk)
        step = conf.job.step
        syncs = pins.get("sync", SYNC) if sharded and step.microbatches > 1 else (step.sync,)
        for state, loss, reshard, offload, mode, sync in itertools.product(
            states, losses, reshards, offloads, modes, syncs
        ):
            if offload == "none" or mode != "none":  # else there is no region whose inputs could wait elsewhere
                ac = MemoryBudget(peak_bytes=self.question.limit_of(conf.job)) if mode == "plan" else mode
                try:
                    way = conf.change(
                        **self._with_details(ac=ac, loss=loss, offload=offload), step=replace(step, sync=sync)
                    )
                    way = way.with_strategy(reshard_after_forward=reshard, cpu_offload=state)
                except ValueError as error:  # of `nemo_like.job.RULES`
                    self.found.rejected[str(error)] += 1
                    continue
                yield way

    def _with_details(self, **words: Any) -> dict[str, Any]:
        """Return fields of a job with what the caller's options have beside these words."""
        asked = self.question.asked
        if asked is None:
            return words
        if words["loss"] == "chunked" and asked.loss is not None:
            words["loss"] = asked.loss
        return words | {"offload": replace(asked.offload, mode=words["offload"])}

    def _overfills_host(self, shape: Shape, conf: Configuration) -> bool:
        assert isinstance(shape, Shape)
        way = conf.change(ac="full", loss=None, offload="none")
        there = way.with_strategy(reshard_after_forward=None, cpu_offload=True)
        return shape.host_bytes(there) > self.question.host_memory

    # --- one configuration ----------------------------------------------------------------------------------------

    def _resolve(self, shape: Shape, conf: Configuration) -> Resolved | None:
        """Return what `conf` takes; None where it does not fit, which is counted."""
        self.found.looked_at += 1
        if isinstance(shape, Shape) and shape.key.staged:
            try:
                with quietly():
                    shape.query(conf)
            except ValueError as error:
                self.shapes[shape.key] = reason = str(error).splitlines()[0]
                self.found.rejected[reason] += 1
                return None
        with quietly():
            resolved = None
            if not self._is_hopeless(shape, conf):
                if conf.mode == "plan":
                    resolved = self._planned(shape, conf, shape.planned)
                else:
                    resolved = self._uniform(shape, conf)
                    if resolved.need.bytes > self.question.limit_of(conf.job):
                        self._remember_too_large(shape, conf, resolved)
                        resolved = None
        if resolved is None:
            self.found.rejected["memory"] += 1
        elif shape.host_bytes(conf, resolved.choices) > self.question.host_memory:
            self.found.rejected[_HOST_MEMORY] += 1
            return None
        return resolved

    def _uniform(self, shape: Shape, conf: Configuration, *, exact: bool = False) -> Resolved:
        """Return what a mode without a budget takes.

        The bytes beyond the peak are predicted only where the peak alone would fit. A peak that does not fit is that of one
        rank, unless it shall be `exact`.
        """
        choices = shape.choices(conf)
        peak = shape.peak(conf, choices) if exact else shape.peak_if_it_fits(conf, choices)
        known = peak.total <= self.question.limit_of(conf.job)
        need = shape.need(conf, choices, peak) if known else Need(peak.total, ALLOCATED)
        return Resolved(shape.seconds(conf, choices), peak, need, choices)

    def _planned(self, shape: Shape, conf: Configuration, make: Planning) -> Resolved | None:
        """Return the plan that `make` makes for the highest peak with which the needed bytes fit; None: none does."""
        fitting = plan_within(shape.query(conf), self.question.limit_of(conf.job), lambda budget: make(conf, budget))
        if fitting is None:
            return None
        choices, peak, need, budget = fitting
        return Resolved(shape.seconds(conf, choices), peak, need, choices, budget)

    def _is_hopeless(self, shape: Shape, conf: Configuration) -> bool:
        """Return whether no mode can fit: none saves less than the layers' inputs, and these are too many bytes."""
        turns = conf.grad_accum if conf.pp > 1 else min(conf.grad_accum, 3)
        key = (
            shape.key,
            conf.shard_ranks,
            conf.pp,
            conf.schedule,
            turns,
            conf.way[1:],
            self.question.limit_of(conf.job),
        )
        if key not in self.hopeless:
            if shape.key.staged and conf.mode not in ("full", "plan"):
                return False  # its own peak says as much, in as long
            least = conf.change(ac="full")
            peak = shape.peak_if_it_fits(least, shape.choices(least))
            self.hopeless[key] = peak.total > shape.most_allocated(conf)
            if self.hopeless[key]:
                self._remember_too_large(shape, least, self._uniform(shape, least))
        return self.hopeless[key]

    def _remember_too_large(self, shape: Shape, conf: Configuration, resolved: Resolved) -> None:
        """Keep what does not fit; of a pipeline, the peak of one rank, which is made exact if nothing fits."""
        if shape.key.staged:
            self.too_large[conf] = resolved.peak.total
        else:
            self._remember_nearest(shape, conf, resolved)

    def _remember_nearest(self, shape: Shape, conf: Configuration, resolved: Resolved) -> None:
        if self.least is None or resolved.peak.total < self.least[2].peak.total:
            self.least = shape, conf, resolved

    def _nearest(self) -> Candidate | None:
        """Return the configuration that needs least, where nothing fits."""
        if self.least is None:
            return None
        shape, conf, resolved = self.least
        # Its need was only predicted where the peak alone would fit.
        with quietly():
            need = shape.need(conf, resolved.choices, resolved.peak)
        return self.candidate(shape, conf, replace(resolved, need=need))

    def _refined(self, best: Candidate) -> Candidate:
        """Return the winner with the best plan of all, where it has a plan."""
        conf = best.conf
        shape = self._traced(ShapeKey.of(conf))
        if isinstance(shape, str):
            return best
        if isinstance(shape, Shape) and shape.key.staged and "ac" not in self.question.pins:
            conf = conf.change(ac=MemoryBudget(peak_bytes=self.question.limit_of(conf.job)))
        elif best.plan is None:
            return best
        with quietly():
            planned = self._planned(shape, conf, shape.refined)
        if planned is None or shape.host_bytes(conf, planned.choices) > self.question.host_memory:
            return best
        finer = self.candidate(shape, conf, planned)
        return finer if finer.step_seconds <= best.step_seconds else best

    def predicted(self, shape: Shape, conf: Configuration) -> Candidate | None:
        """Return the report of a configuration that was not searched; None: it does not fit.

        Where `conf` has a plan, the report is of the best plan of all.

        Raises:
            ValueError: the model cannot be cut into its stages.
        """
        limit = self.question.limit_of(conf.job)
        with quietly():
            if conf.mode == "plan":
                conf = conf.change(ac=MemoryBudget(peak_bytes=limit))
                resolved = self._planned(shape, conf, shape.refined)
            else:
                resolved = self._uniform(shape, conf)
        if resolved is None or resolved.need.bytes > limit:
            return None
        if shape.host_bytes(conf, resolved.choices) > self.question.host_memory:
            return None
        return self.candidate(shape, conf, resolved)

    def candidate(self, shape: Shape, conf: Configuration, resolved: Resolved) -> Candidate:
        """Return the report of one configuration."""
        question, plan = self.question, None
        with quietly():
            account = account_of(shape, conf, resolved.choices, resolved.seconds)
            if conf.mode == "plan":
                conf, plan = (
                    conf.change(ac=resolved.budget),
                    describe(shape.query(conf), resolved.choices, resolved.budget),
                )
        return Candidate(
            conf,
            host_bytes=shape.host_bytes(conf, resolved.choices),
            peak=resolved.peak,
            need=resolved.need,
            seconds=resolved.seconds,
            tokens=conf.sequences * question.seq_len,
            model_flops=shape.flops(conf) * conf.grad_accum / conf.pp,
            peak_flops=question.device.peak_flops,
            fits=resolved.need.bytes <= question.limit_of(conf.job),
            plan=plan,
            sample=shape.traced.sample,
            account=account,
            outside=outside_of(conf.job, question.device),
        )


Entry = tuple[Configuration, Resolved | None] | StateOnHost
_HOST_MEMORY = "host memory"
_SLOWER = "slower than the best, not looked at"
_NOT_BESIDE_PP = "not planned beside pp: cpu_offload"


@contextmanager
def quietly() -> Iterator[None]:
    """Silence planning's log: messages on one candidate among thousands would drown the report."""
    logger = logging.getLogger("nemo_like")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
