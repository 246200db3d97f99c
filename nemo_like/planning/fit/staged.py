"""A model cut into stages, traced in one local shape: schedules, cuts, ranks and microbatches are arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.plan import BudgetError, Plan
from nemo_like.distributed.pipeline.cut import StageParts
from nemo_like.job import Job
from nemo_like.losses.model_loss import find_head
from nemo_like.options import ChunkedLoss, MemoryBudget
from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.fit.question import Question
from nemo_like.planning.fit.shapes import ShapeKey, Shared, TracedShape
from nemo_like.planning.fit.staged_least import StagedLeast
from nemo_like.planning.program.readers import Peak
from nemo_like.planning.seconds import StepSeconds
from nemo_like.planning.stage_plans import choose, describe
from nemo_like.planning.stage_seconds import pipeline_seconds
from nemo_like.planning.stages import Choices, PipelinePlanner, hidden_of, parts_of
from nemo_like.planning.verdict import Need, verdict


class StagedShape:
    """One local shape of the model in stages; what `TracedShape` is for layouts without `pp`."""

    def __init__(
        self, model: nn.Module, key: ShapeKey, question: Question, sample: Callable[[int], Any], shared: Shared
    ) -> None:
        """Nothing is traced yet, but for the model as a whole; raises ValueError where it cannot be cut."""
        self.shared = shared
        self.key, self.question, self.sample = key, question, sample(key.micro_batch)
        self.model = model if key.cp == 1 else copy.deepcopy(model)  # stages cut the layers that they trace for good
        self.job = question.job
        self._first: dict[ChunkedLoss | None, PipelinePlanner] = {}
        self._planners: dict[Any, PipelinePlanner] = {}
        self._peaks: dict[Any, Peak] = {}
        self._plans: dict[Any, tuple[Choices, Peak] | None] = {}
        self._needs: dict[Any, Need] = {}
        self._least: StagedLeast | None = None

    def for_job(self, **changed: Any) -> StagedShape:
        """Return the same shape, with nothing traced again, for other settings of the ``allocator=``."""
        other = copy.copy(self)
        other.job = replace(self.job, **changed)
        other.ask_anew()
        return other

    def ask_anew(self) -> None:
        """Forget what is known of layouts; what was traced stays."""
        self._first = dict(self._first)
        self._planners, self._plans, self._needs = {}, {}, {}

    def planner(self, conf: Configuration) -> PipelinePlanner:
        """Of this conf and conf; stages of the same layers are traced once for all of them."""
        key = (*self._layout_key(conf), conf.job.loss, conf.job.offload.mode, conf.reshard)
        if key not in self._planners:
            step = replace(self.job.step, microbatches=conf.job.step.microbatches)
            job = replace(conf.job, allocator=self.job.allocator, step=step)
            known = self._first.get(job.loss) or next(iter(self._first.values()), None)
            if known is None:
                made = PipelinePlanner(
                    self.model, self.sample, job, parts=self._parts(job), known=self.shared.known(self.key)
                )
            else:
                made = known.for_job(job)
            self._first.setdefault(job.loss, made)
            self._planners[key] = made
        return self._planners[key]

    def _parts(self, job: Job) -> StageParts:
        """Looked for once for all shapes, also where the model cannot be cut."""
        if self.shared.parts is None:
            try:
                self.shared.parts = parts_of(self.model, self.sample, job)
            except ValueError as error:
                self.shared.parts = str(error)
        if isinstance(self.shared.parts, str):
            raise ValueError(self.shared.parts)
        return self.shared.parts

    def least(self, whole: TracedShape) -> StagedLeast | None:
        """What bounds its pipelines, by `whole`, the model in one stage in this shape; None: it cannot be cut."""
        if self._least is None:
            parts = self._parts(whole.base.job)
            made = StagedLeast(whole, parts, hidden_of(self.model, self.sample, parts, self.key.cp).nbytes)
            self._least = made if made.is_known else None
        return self._least

    @property
    def cuts(self) -> int:
        """Cuts, schedules and set-ups that there is a planner of."""
        return len(self._planners)

    def _layout_key(self, conf: Configuration) -> tuple[Any, ...]:
        return conf.pp, conf.schedule, conf.grad_accum, conf.shard_ranks

    @cached_property
    def chunked(self) -> bool | None:
        """Whether the last stage can have its loss in chunks; None: it cannot."""
        return None if find_head(self.model) is None else True

    # --- choices --------------------------------------------------------------------------------------------------

    def choices(self, conf: Configuration) -> Any:
        """Of a mode that needs no budget, for each stage."""
        return self.planner(conf).uniform(conf.mode)

    def planned(self, conf: Configuration, limit: int) -> tuple[Any, Peak] | None:
        """The fastest plan of each stage within `limit`, and the highest rank's peak; None: there is none."""
        key = (*self._layout_key(conf), conf.way, limit)
        if key not in self._plans:
            planner = self.planner(conf)
            try:
                choices = choose(planner, MemoryBudget(peak_bytes=limit))
                self._plans[key] = choices, _highest(planner, choices)
            except BudgetError:
                self._plans[key] = None
        return self._plans[key]

    refined = planned

    def peak(self, conf: Configuration, choices: Any) -> Peak:
        """Of a whole step, on the rank of the pipeline that has the highest."""
        key = (*self._layout_key(conf), conf.way)
        if key not in self._peaks:
            self._peaks[key] = _highest(self.planner(conf), choices)
        return self._peaks[key]

    def plan(self, conf: Configuration, choices: Any, asked: str) -> Plan:
        """Choices as what `nemo_like.parallelize` takes."""
        return describe(self.planner(conf), choices, asked)

    def most_allocated(self, conf: Configuration) -> int:
        """The highest peak that could fit."""
        return max(0, self.question.limit - self._input_bytes * conf.grad_accum)

    @cached_property
    def _input_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(self.sample))

    def need(self, conf: Configuration, choices: Any, peak: Peak) -> Need:
        """What decides whether it fits; `peak`: of these choices, on the highest rank."""
        key = (*self._layout_key(conf), conf.way, tuple(map(tuple, choices)))
        if key not in self._needs:
            self._needs[key] = verdict(self.planner(conf), choices, peak, self.question.limit)
        return self._needs[key]

    # --- seconds --------------------------------------------------------------------------------------------------

    def seconds(self, conf: Configuration, choices: Any) -> StepSeconds:
        """Of a whole step in this configuration."""
        return pipeline_seconds(self.planner(conf), choices)

    def flops(self) -> float:
        """Of one microbatch in all stages: forward and backward of layers and head, nothing twice."""
        planner = next(iter(self._first.values()))
        layers = sum(
            stage.planner.problems[call.kind].trace.flops
            for stage in planner.stages
            for call in stage.planner.traced.calls
        )
        head = find_head(self.model)
        weights = 0 if head is None else sum(p.numel() for p in head.parameters())
        tokens = self.key.micro_batch * self.question.seq_len / self.key.cp
        return 3.0 * (layers + 2.0 * weights * tokens / self.key.tp)


def _highest(planner: PipelinePlanner, choices: Any) -> Peak:
    return max(planner.peaks(choices), key=lambda peak: peak.total)
