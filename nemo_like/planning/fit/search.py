"""The search: best first, so that the first configurations that fit are the best there are.

Everything not looked at yet stands in a queue by the least time that it could take: a local shape that is not traced by
a bound, a traced configuration by its time. The bytes of a configuration are only asked for when no other could be faster,
and no shape is traced that could not win. A configuration with a plan stands there, till the plan is made, by the time of
one that may hold all the memory but parameters and optimizer state. So nothing that is left out can beat what was found;
`brute_force` looks at everything, and tests compare the two.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_like.planning.fit.candidate import Candidate
from nemo_like.planning.fit.layouts import Layout
from nemo_like.planning.fit.question import Question
from nemo_like.planning.fit.seconds import StepSeconds
from nemo_like.planning.fit.shapes import ShapeKey, TracedShape, Variant
from nemo_like.planning.fit.staged import StagedShape
from nemo_like.planning.peak import Peak

Shape = TracedShape | StagedShape
Tracer = Callable[[ShapeKey], Shape]


@dataclass
class Found:
    """What a search looked at."""

    best: list[Candidate] = field(default_factory=list)
    """Those that fit, fastest first."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Combinations by the reason why they are not among `best`."""
    nearest: Candidate | None = None
    """Where nothing fits: what needs least."""
    looked_at: int = 0
    """Configurations of which bytes were predicted."""
    traced: int = 0
    """Local shapes that were traced."""


class Search:
    """One question on one model."""

    def __init__(self, question: Question, layouts: Iterable[Layout], trace: Tracer) -> None:
        self.question, self.trace = question, trace
        self.found = Found()
        self.shapes: dict[ShapeKey, Shape | str] = {}
        """The traced ones; why the model cannot have the others."""
        self.by_shape: dict[ShapeKey, list[Layout]] = {}
        # Shapes that others are bounded by come first.
        for layout in sorted(
            layouts, key=lambda layout: (layout.pp > 1, layout.cp, layout.micro_batch, layout.tp, layout.ep)
        ):
            self.by_shape.setdefault(ShapeKey.of(layout), []).append(layout)
        self.hopeless: dict[Any, bool] = {}

    # --- the two ways through everything --------------------------------------------------------------------------

    def run(self, count: int = 10) -> Found:
        """The best that fits, and up to `count` of the next best layouts among the shapes that were traced for it."""
        order = itertools.count()
        queue: list[tuple[float, int, Any]] = []
        later = 0
        for key in self.by_shape:
            heapq.heappush(queue, (self._bound(key), next(order), key))
        while queue and len(self.found.best) < count:
            bound, _, item = heapq.heappop(queue)
            if isinstance(item, ShapeKey):
                if not self.found.best and (better := self._bound(item)) > bound:
                    heapq.heappush(queue, (better, next(order), item))  # other shapes were traced meanwhile
                elif self.found.best:
                    later += len(self.by_shape[item])
                else:
                    for seconds, entry in self._entries(item):
                        heapq.heappush(queue, (seconds, next(order), entry))
                continue
            layout, variant, peak = item
            if any(found.layout == layout for found in self.found.best):
                self.found.rejected["slower than another way to run the same layout"] += 1
                continue
            shape = self._traced(ShapeKey.of(layout))
            assert not isinstance(shape, str)
            if peak is not None:
                self.found.best.append(self.candidate(shape, layout, variant, peak))
            elif (resolved := self._resolve(shape, layout, variant)) is not None:
                per_token = self._per_token(resolved[0], layout)
                heapq.heappush(queue, (per_token, next(order), (layout, variant, resolved[1])))
        later += sum(1 if isinstance(item, tuple) else len(self.by_shape[item]) for _, _, item in queue)
        if later:
            self.found.rejected["slower than the best, not looked at"] += later
        self.found.traced = sum(not isinstance(shape, str) for shape in self.shapes.values())
        if self.found.best:
            self.found.best[0] = self._refined(self.found.best[0])
        return self.found

    def brute_force(self, count: int = 10) -> Found:
        """The same by looking at everything."""
        everything: list[tuple[Any, ...]] = []
        for key in self.by_shape:
            for _, (layout, variant, _) in self._entries(key):
                shape = self._traced(key)
                assert not isinstance(shape, str)
                resolved = self._resolve(shape, layout, variant)
                if resolved is not None:
                    per_token = self._per_token(resolved[0], layout)
                    everything.append((per_token, len(everything), shape, layout, variant, resolved[1]))
        everything.sort(key=lambda entry: entry[:2])
        self.found.best = [self.candidate(*entry[2:]) for entry in everything[:count]]
        return self.found

    # --- shapes ---------------------------------------------------------------------------------------------------

    def _traced(self, key: ShapeKey) -> Shape | str:
        if key not in self.shapes:
            try:
                with quietly():
                    self.shapes[key] = self.trace(key)
            except ValueError as error:
                self.shapes[key] = str(error).splitlines()[0]
        return self.shapes[key]

    def _bound(self, key: ShapeKey) -> float:
        """Seconds of one GPU for a token that no layout of the shape is faster than, by the shapes that were traced; 0 where
        none of them has such weights. Without split experts no rank has more rows than with them."""
        if key.staged:
            whole_models = [
                shape
                for other, shape in self.shapes.items()
                if isinstance(shape, TracedShape) and other.tp == key.tp and other.ep in (key.ep, 1) and not other.whole
            ]
            return max((self._least_per_token(key, shape.least_staged) for shape in whole_models), default=0.0)
        like = [
            (other, shape)
            for other, shape in self.shapes.items()
            if isinstance(shape, TracedShape)
            and (other.tp, other.whole) == (key.tp, key.whole)
            and other.ep in (key.ep, 1)
        ]
        # One of each kind says all: the same split of experts, with and without parts of sequences.
        kinds = {(other.ep, other.cp > 1): shape for other, shape in like if other.cp == 1 or key.cp > 1}
        return max((self._least_per_token(key, shape.least_step) for shape in kinds.values()), default=0.0)

    def _least_per_token(self, key: ShapeKey, least: Callable[[Layout], float]) -> float:
        made = (least(layout) * layout.gpus / layout.sequences for layout in self.by_shape[key])
        return min(made) / self.question.seq_len

    def _entries(self, key: ShapeKey) -> Iterator[tuple[float, tuple[Layout, Variant, Peak | None]]]:
        """All configurations of a traced shape by the least seconds per token that they take."""
        shape = self._traced(key)
        if isinstance(shape, str):
            self.found.rejected[shape] += len(self.by_shape[key])
            return
        for layout in self.by_shape[key]:
            for variant in self._variants(shape, layout):
                choices, least = shape.least(layout, variant)
                if least > self.question.limit and (self.found.best or not self._near(least)):
                    self.found.rejected["memory"] += 1
                    continue
                seconds = shape.seconds(layout, variant, choices)
                yield self._per_token(seconds, layout), (layout, variant, None)

    def _near(self, least: int) -> bool:
        """Whether what takes at least so many bytes could need less than anything yet: worth a look if nothing fits."""
        return self.found.nearest is None or least < self.found.nearest.peak_bytes

    def _variants(self, shape: Shape, layout: Layout) -> Iterator[Variant]:
        pins = self.question.pins
        losses = pins.get("loss", ("model", "chunked"))
        modes = pins.get("ac", ("none", "full", "selective", "plan"))
        sharded = layout.shard_ranks > 1
        reshards = pins.get("reshard_after_forward", (None, False) if sharded else (None,))
        offloads = pins.get("offload", ("none", "boundary"))
        if layout.pp > 1:
            # Stages stay gathered for a whole step, and no budget is planned for weights that tp splits.
            reshards = tuple(dict.fromkeys(reshard if reshard else None for reshard in reshards))
            modes = tuple(mode for mode in modes if mode != "plan" or layout.tp == 1)
            offloads = tuple(offload for offload in offloads if offload == "none")
            if True in reshards or not modes or not offloads:
                self.found.rejected["not planned beside pp: resharding, offloading, a budget with tp"] += 1
                return
        for loss in losses:
            if loss == "chunked" and shape.chunked is None:
                continue
            for reshard in reshards:
                for offload in offloads:
                    for mode in modes:
                        if offload != "none" and mode == "none":
                            continue  # there is no region whose inputs could wait elsewhere
                        yield Variant(mode, loss, offload, reshard)

    # --- one configuration ----------------------------------------------------------------------------------------

    def _per_token(self, seconds: StepSeconds, layout: Layout) -> float:
        """Seconds of one GPU for a token."""
        return seconds.total * layout.gpus / (layout.sequences * self.question.seq_len)

    def _resolve(self, shape: Shape, layout: Layout, variant: Variant) -> tuple[StepSeconds, Peak] | None:
        """Its seconds and its peak; None where it does not fit, which is counted."""
        self.found.looked_at += 1
        limit = self.question.limit
        with quietly():
            if self._is_hopeless(shape, layout, variant):
                self.found.rejected["memory"] += 1
                return None
            if variant.ac == "plan":
                made = shape.planned(layout, variant)
                if made is None:
                    self.found.rejected["memory"] += 1
                    return None
                return shape.seconds(layout, variant, made[0]), made[1]
            choices: Any = shape.choices(layout, variant)
            peak = shape.peak(layout, variant, choices)
            if peak.total > limit:
                self.found.rejected["memory"] += 1
                return None
            return shape.seconds(layout, variant, choices), peak

    def _is_hopeless(self, shape: Shape, layout: Layout, variant: Variant) -> bool:
        """Nothing holds less than the layers' inputs, so where these are too much, all other modes are, too."""
        turns = layout.grad_accum if layout.pp > 1 else min(layout.grad_accum, 3)
        key = (shape.key, layout.shard_ranks, layout.pp, layout.schedule, turns, replace(variant, ac="full"))
        if key not in self.hopeless:
            least = replace(variant, ac="full")
            peak = shape.peak(layout, least, shape.choices(layout, least))
            self.hopeless[key] = peak.total > self.question.limit
            if self.hopeless[key]:
                self._remember_nearest(shape, layout, least, peak)
        return self.hopeless[key]

    def _remember_nearest(self, shape: Shape, layout: Layout, variant: Variant, peak: Peak) -> None:
        nearest = self.found.nearest
        if nearest is None or peak.total < nearest.peak_bytes:
            self.found.nearest = self.candidate(shape, layout, variant, peak)

    def _refined(self, best: Candidate) -> Candidate:
        """The winner with the best plan of all, where a plan is what it has."""
        shape, variant = self._traced(ShapeKey.of(best.layout)), self._variant(best)
        if best.plan is None or isinstance(shape, str):
            return best
        with quietly():
            made = shape.refined(best.layout, variant)
        if made is None:
            return best
        finer = self.candidate(shape, best.layout, variant, made[1], made[0])
        return finer if finer.step_seconds <= best.step_seconds else best

    def _variant(self, candidate: Candidate) -> Variant:
        ac = candidate.ac if candidate.plan is None else "plan"
        return Variant(ac, candidate.loss, candidate.offload, candidate.reshard_after_forward)

    def candidate(self, shape: Shape, layout: Layout, variant: Variant, peak: Peak, choices: Any = None) -> Candidate:
        """All that is known of one configuration."""
        question, ac, plan = self.question, variant.ac, None
        if ac == "plan":
            made = (choices, peak) if choices is not None else shape.planned(layout, variant)
            assert made is not None
            chosen, ac = made[0], budget_word(question.limit)
            with quietly():
                plan = shape.plan(layout, variant, chosen, ac)
        else:
            chosen = shape.choices(layout, variant)
        with quietly():
            reserved = shape.reserved(layout, variant, chosen) if peak.total <= question.limit else None
        return Candidate(
            layout=layout, ac=ac, loss=variant.loss, offload=variant.offload, reshard_after_forward=variant.reshard,
            precision=question.precision, optimizer=question.step.optimizer, peak=peak,
            seconds=shape.seconds(layout, variant, chosen), tokens=layout.sequences * question.seq_len,
            model_flops=shape.flops() * layout.grad_accum / layout.pp, peak_flops=question.device.peak_flops,
            fits=peak.total <= question.limit, plan=plan, sample=shape.sample,
            reserved=reserved,
        )  # fmt: skip


def budget_word(size: int) -> str:
    """A limit as one writes it after ``ac=``, rounded down: in tenths of a GiB where it has one, else in MiB, KiB or bytes.

    >>> budget_word(72 << 30), budget_word(3 << 20), budget_word(100)
    ('72.0GiB', '3MiB', '100B')
    """
    if size >= 1 << 30:
        return f"{size * 10 // (1 << 30) / 10:.1f}GiB"
    return f"{size >> 20}MiB" if size >= 1 << 20 else f"{size}B"


@contextmanager
def quietly() -> Iterator[None]:
    """What planning says of one candidate among thousands would drown the report."""
    logger = logging.getLogger("nemo_like")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
