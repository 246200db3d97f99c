"""A model cut into stages, traced in one local shape: schedules, cuts, ranks and microbatches are arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from nemo_like.activation_checkpointing.plan import BudgetError, Plan
from nemo_like.distributed.expert_parallel.find_experts import find_experts
from nemo_like.distributed.pipeline.dealing import StageParts
from nemo_like.distributed.pipeline.order import actions_of
from nemo_like.job import Job
from nemo_like.losses.model_loss import find_head
from nemo_like.options import ChunkedLoss, MemoryBudget
from nemo_like.planning.block import BlockProblem
from nemo_like.planning.fit import network
from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.fit.need import Need, input_bytes, most_allocated, need_of, reserved_by_ranks
from nemo_like.planning.fit.question import Question
from nemo_like.planning.fit.seconds import BlockSeconds, Links, StepSeconds, unit_seconds
from nemo_like.planning.fit.shapes import KERNELS_PER_PARAMETER, ShapeKey, Shared, TracedShape
from nemo_like.planning.fit.stage_seconds import action_seconds_of, layer_parts
from nemo_like.planning.fit.staged_least import StagedLeast
from nemo_like.planning.peak import Peak
from nemo_like.planning.schedule_time import timeline
from nemo_like.planning.stage_plans import choose, describe
from nemo_like.planning.stage_reserved import is_replayed
from nemo_like.planning.stages import Choices, PipelinePlanner, PlannedStage, hidden_of, parts_of
from nemo_like.planning.step_time import optimizer_seconds
from nemo_like.planning.tensor_twin import has_known_rules


class StagedShape:
    """One local shape of the model in stages; what `TracedShape` is for layouts without `pp`."""

    def __init__(
        self, model: nn.Module, key: ShapeKey, question: Question, sample: Callable[[int], Any], shared: Shared
    ) -> None:
        """Nothing is traced yet, but for the model as a whole; raises ValueError where it cannot be cut."""
        apart = [experts.fqn for experts in find_experts(model)] if key.ep > 1 else []
        if key.tp > 1 and not has_known_rules(model, key.tp, whole=apart, exact=False):
            raise ValueError(
                "tp beside pp: the bytes of one rank are not known, where weights are split by unknown rules"
            )
        self.takes_budget = key.tp == 1 or has_known_rules(model, key.tp, whole=apart)
        """Whether plans can be made: not of experts' weights that `tp` splits inside, of which bytes alone are known."""
        self.shared = shared
        self.key, self.question, self.sample = key, question, sample(key.micro_batch)
        self.model = model if key.cp == 1 else copy.deepcopy(model)  # stages cut the layers that they trace for good
        self.job = question.job
        self._first: dict[ChunkedLoss | None, PipelinePlanner] = {}
        self._planners: dict[Any, PipelinePlanner] = {}
        self._blocks: dict[int, BlockSeconds] = {}
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
        key = (*self._layout_key(conf), conf.job.loss, conf.job.offload.mode)
        if key not in self._planners:
            job = replace(conf.job, allocator=self.job.allocator)
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
        """The highest peak that could fit: what is reserved is predicted where backward stays in one piece."""
        inputs = input_bytes(self.sample, self.key.micro_batch, conf)
        return most_allocated(self.question, inputs, predicted=is_replayed(conf.job.pp))

    def need(self, conf: Configuration, choices: Any, peak: Peak) -> Need:
        """What decides whether it fits; `peak`: of these choices, on the highest rank."""
        key = (*self._layout_key(conf), conf.way, tuple(map(tuple, choices)))
        if key not in self._needs:
            inputs = input_bytes(self.sample, self.key.micro_batch, conf)
            reserved = reserved_by_ranks(self.planner(conf), choices, self.question.limit - inputs)
            self._needs[key] = need_of(self.question, peak, reserved, inputs)
        return self._needs[key]

    # --- seconds --------------------------------------------------------------------------------------------------

    def seconds(self, conf: Configuration, choices: Any) -> StepSeconds:
        """Of a whole step: what the busiest rank of the pipeline computes and sends, what it waits for, and what its stages
        gather and reduce, which is once in a step."""
        planner, device = self.planner(conf), self.question.device
        links = Links.of(conf, device)
        parts = [self.stage_parts(stage, own, links) for stage, own in zip(planner.stages, choices)]
        ranks = [planner.of_rank(rank) for rank in range(planner.pp.size)]
        sums = [{name: sum(parts[index][name] for index in own) for name in parts[0]} for own in ranks]
        busiest = busiest_rank(ranks, parts)
        found = {name: value * conf.grad_accum for name, value in sums[busiest].items()}
        actions, count = actions_of(planner.pp), len(planner.stages)
        seconds = action_seconds_of(parts, planner.pp)
        handed = network.send_seconds(planner.hidden_bytes, device.gpus_per_host > conf.gpus // conf.pp, device)
        computing = timeline(actions, seconds, count).seconds
        found["pipeline bubble"] = max(0.0, computing - sum(found.values()))
        found["pipeline sends"] = max(0.0, timeline(actions, seconds, count, handed).seconds - computing)
        gathers, reductions, steps = [], [], []
        for own in ranks:
            units = [self._unit_seconds(planner.stages[index], links) for index in own]
            gathers.append(sum(gather for gather, _ in units))
            reductions.append(sum(reduction for _, reduction in units))
            steps.append(sum(self._optimizer_seconds(planner.stages[index]) for index in own))
        found["parameter gathers"], found["gradient reductions"] = max(gathers), max(reductions)
        found["optimizer"] = max(steps)
        return StepSeconds({name: value for name, value in found.items() if value})

    def block(self, problem: BlockProblem) -> BlockSeconds:
        """Of one kind of layer in one stage."""
        if id(problem) not in self._blocks:
            self._blocks[id(problem)] = BlockSeconds.of(problem)
        return self._blocks[id(problem)]

    def stage_parts(self, stage: PlannedStage, choices: Any, links: Links) -> dict[str, float]:
        """Seconds of one microbatch in one stage."""
        planner = stage.planner
        calls = [(planner.problems[call.kind], choice) for call, choice in zip(planner.traced.calls, choices)]
        parts = layer_parts(((self.block(problem), problem, choice) for problem, choice in calls), links)
        parts["head and embedding"] = planner.outer().seconds
        return parts

    def _unit_seconds(self, stage: PlannedStage, links: Links) -> tuple[float, float]:
        """To gather a stage's parameters and to reduce its gradients; nothing is said to hide them."""
        sharding = stage.planner.sharding
        if not sharding.on:
            return 0.0, 0.0
        own = [
            unit_seconds(unit, links.shards, links) for unit in sharding.all if unit not in sharding.experts.values()
        ]
        own += [unit_seconds(unit, links.expert_shards, links) for unit in sharding.experts.values()]
        return sum(gather for gather, _ in own), sum(reduction for _, reduction in own)

    def _optimizer_seconds(self, stage: PlannedStage) -> float:
        trained, device = stage.planner.sharding.trained, self.question.device
        loop = len(trained) * KERNELS_PER_PARAMETER * device.launch_seconds
        return max(loop, optimizer_seconds(trained, self.question.job.step.optimizer, device))

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


def busiest_rank(ranks: Sequence[Sequence[int]], parts: Sequence[Mapping[str, float]]) -> int:
    """The rank of a pipeline that is busy longest; `ranks`: the stages of each, `parts`: seconds of each stage."""
    return max(range(len(ranks)), key=lambda rank: sum(sum(parts[index].values()) for index in ranks[rank]))


def _highest(planner: PipelinePlanner, choices: Any) -> Peak:
    return max(planner.peaks(choices), key=lambda peak: peak.total)
