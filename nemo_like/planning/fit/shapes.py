"""A model traced in one local shape (tensor, context and expert parallel sizes, micro-batch): all else is arithmetic."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from nemo_like.activation_checkpointing.plan import OF_HEAD, OF_LAYERS, BudgetError, Part, Plan
from nemo_like.distributed.pipeline.cut import StageParts
from nemo_like.job import Job
from nemo_like.losses.model_loss import find_head
from nemo_like.options import ChunkedLoss, MemoryBudget
from nemo_like.planning import solver
from nemo_like.planning.block import BlockProblem, Choice, best_of
from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.fit.question import Question
from nemo_like.planning.known_blocks import KnownBlocks
from nemo_like.planning.last_within import last_within
from nemo_like.planning.outer import OuterMemory
from nemo_like.planning.planner import RNG_STATE, Planner
from nemo_like.planning.program.readers import Peak
from nemo_like.planning.seconds import Links, StepSeconds, layer_runs, least_seconds, planned_seconds, step_seconds
from nemo_like.planning.sharding import Sharding
from nemo_like.planning.stack import Stack
from nemo_like.planning.verdict import Need, most_allocated, verdict

_MENU = 10
"""Choices of one kind of layer that plans are mixed of while searching, beside all and nothing."""


_COARSE = 1 << 9
"""States of the frontier of a block whose skips are not looked for."""


_COMPUTED = (*OF_LAYERS, *OF_HEAD)
"""Parts of a peak that depend on a microbatch's rows and tokens."""


_QUICK = 64
"""Operators of a block whose best choices with skips are all known in a moment."""


@dataclass(frozen=True)
class ShapeKey:
    """What makes one local shape; `whole`: nothing is sharded, so that autocast lowers dtypes."""

    tp: int
    cp: int
    ep: int
    micro_batch: int
    whole: bool
    staged: bool = False
    """Cut into the stages of a pipeline, of which `whole` then speaks."""

    @property
    def in_one_stage(self) -> ShapeKey:
        return replace(self, staged=False)

    def job(self, asked: Job) -> Job:
        """Return what was `asked` in this shape, on as few ranks as have it, in one stage."""
        return asked.on(
            dp_shard=1 if self.whole else 2 * self.ep,
            dp_replicate=1,
            tp=replace(asked.tp, size=self.tp),
            cp=replace(asked.cp, size=self.cp),
            ep=replace(asked.ep, size=self.ep),
            pp=1,
        )

    @classmethod
    def of(cls, conf: Configuration) -> ShapeKey:
        return cls(conf.tp, conf.cp, conf.ep, conf.micro_batch, conf.gpus == conf.pp, conf.pp > 1)


@dataclass
class Shared:
    """What shapes with the same weights need not find twice."""

    decisions: dict[Any, list[tuple[str, ...]]] = field(default_factory=dict)
    """Of the choices that plans are mixed of, by kind of layer."""
    shardings: dict[Any, Sharding] = field(default_factory=dict)
    outers: dict[Any, dict[tuple[bool, bool], OuterMemory]] = field(default_factory=dict)
    """What is around the layers, which is the same however experts inside them are split."""
    blocks: dict[Any, KnownBlocks] = field(default_factory=dict)
    """By what changes a block whose parameters and inputs are alike."""
    parts: StageParts | str | None = None
    """What stands before, in and after the layers; why the model cannot be cut."""

    def known(self, key: ShapeKey) -> KnownBlocks:
        """Of the blocks of shapes that `key` is like."""
        return self.blocks.setdefault((key.tp, key.cp, key.whole), KnownBlocks())


class TracedShape:
    """One local shape of the model: seconds and bytes of any conf and conf that has it."""

    def __init__(
        self,
        model: nn.Module,
        key: ShapeKey,
        question: Question,
        sample: Callable[[int], Any],
        shared: Shared,
    ) -> None:
        """Trace it; raises ValueError where the model cannot have that shape."""
        self.shared, self.given = shared, (model, sample)
        self.key, self.question, self.sample = key, question, sample(key.micro_batch)
        own = model if key.cp == 1 else copy.deepcopy(model)  # a planner cuts the model that it traces for good
        self.base = Planner(own, self.sample, key.job(question.job), known=shared.known(key))
        self.base.outers = self._outers("model")
        self.blocks = self.base.blocks
        self._least: dict[int, tuple[float, float]] = {}
        self.least_of: dict[Any, tuple[list[Choice], int]] = {}
        self._kept: list[Sequence[Choice]] = []
        """Told apart by id, so they must live."""
        self.needs: dict[Any, Need] = {}
        self.planners: dict[Any, Planner] = {}
        self.peaks: dict[Any, Peak] = {}
        self.plans: dict[Any, tuple[list[Choice], Peak] | None] = {}
        self.mixed: dict[Any, tuple[list[Choice], Peak]] = {}
        """By what a peak depends on, and a place in the row of mixes: the choices, and their peak."""
        self.states_on_host: dict[Any, int] = {}

    def for_job(self, **changed: Any) -> TracedShape:
        """Return the same shape, with nothing traced again, for another optimizer (``step=``) or other settings of the
        ``allocator=``."""
        other = copy.copy(self)
        other.base = copy.copy(self.base)
        other.base.job, other.base.runs = replace(self.base.job, **changed), {}
        if self.__dict__.get("chunked") is not None:
            other.__dict__["chunked"] = copy.copy(self.chunked)
            other.__dict__["chunked"].job = replace(other.__dict__["chunked"].job, **changed)
        other.planners, other.peaks, other.plans, other.least_of, other.needs, other.states_on_host = (
            {},
            {},
            {},
            {},
            {},
            {},
        )
        return other

    def asked(self, question: Question) -> TracedShape:
        """Return the same shape, with nothing traced again, for a question that differs in the optimizer."""
        other = self.for_job(step=question.job.step)
        other.question = question
        return other

    # --- planners -------------------------------------------------------------------------------------------------

    @cached_property
    def chunked(self) -> Planner | None:
        """For a loss in chunks; None where the logits would be whole anyway."""
        return self.base.with_chunks(ChunkedLoss(), self._outers("chunked"))

    def _outers(self, loss: str) -> dict[tuple[bool, bool], OuterMemory]:
        """What shapes with the same weights around as many layers know; empty where this is the first of them."""
        key = (self.key.tp, self.key.cp, self.key.micro_batch, self.key.whole, loss)
        return self.shared.outers.setdefault((*key, tuple(call.kind for call in self.base.traced.calls)), {})

    def planner(self, conf: Configuration) -> Planner:
        """This shape's planner, for so many ranks, so many micro-batches and this way; nothing is traced."""
        key = (_ranks(conf), conf.grad_accum, *conf.way[1:])
        if key not in self.planners:
            base = self.base if conf.job.loss is None else self.chunked
            assert base is not None, "configurations with a loss in chunks are only asked for where there are chunks"
            _ = base.trained, base.names_of_parameters  # found once for all copies
            made = copy.copy(base)
            own = base.job
            made.job = replace(
                conf.job,
                loss=own.loss,
                allocator=own.allocator,
                step=replace(own.step, microbatches=conf.job.step.microbatches),
            )
            made.runs = {}
            made.__dict__["sharding"] = self._sharding(made)
            self.planners[key] = made
        return self.planners[key]

    def _sharding(self, planner: Planner) -> Sharding:
        """What is on one rank: of shapes with the same weights the same, but for the ids of modules and parameters."""
        own, job = self.base.sharding, planner.job
        key = (self.key.tp, self.key.ep, self.key.whole, job.shard_ranks, job.fsdp)
        if key not in self.shared.shardings:
            planner.__dict__.pop("sharding", None)
            self.shared.shardings[key] = planner.sharding
        known = self.shared.shardings[key]
        experts = dict(zip(own.experts, known.experts.values()))
        return replace(known, modules=own.modules, tail_params=own.tail_params, experts=experts)

    # --- choices --------------------------------------------------------------------------------------------------

    @cached_property
    def uniform(self) -> dict[str, list[Choice]]:
        """The modes that need no budget."""
        return {mode: self.base.uniform(mode) for mode in ("none", "full", "selective")}

    def choices(self, conf: Configuration) -> list[Choice]:
        """Of a mode that needs no budget."""
        return self.uniform[conf.mode]

    @cached_property
    def stack(self) -> Stack:
        """All layers as one choice, with a few choices of each kind: the whole frontier is for the winner alone."""
        return Stack(self.base.choice_groups(lambda kind: self.menu[kind]))

    @cached_property
    def menu(self) -> list[tuple[Choice, ...]]:
        """A few choices of each kind, from least held to none: the best for that many bytes. Operators are the same in
        shapes with the same weights, so that what one of them found the others use."""
        made = []
        for kind, problem in enumerate(self.base.problems):
            key = (self.key.tp, self.key.ep, kind, tuple(str(record.op) for record in problem.records))
            if key not in self.shared.decisions:
                # Of a block of many operators, whose best skips a solver looks for, the winner alone gets any.
                skips = self.base.skip and len(problem.records) <= _QUICK
                self.shared.decisions[key] = [choice.decisions for choice in _few(_some(problem, skips))]
            choices = [_choice(problem, words) for words in self.shared.decisions[key] if words]
            made.append(best_of([problem.full(), *choices, problem.none()]))
        return made

    def least(self, conf: Configuration) -> tuple[list[Choice], int]:
        """Choices that no fitting ones of this conf are faster than, and bytes that their peak is not below: what is
        held when forward ends, parameters and optimizer state. Nothing runs for it."""
        key = (_ranks(conf), conf.mode, conf.job.offload.mode, conf.cpu_offload)
        if key not in self.least_of:
            self.least_of[key] = self._least_choices(conf)
        return self.least_of[key]

    def _least_choices(self, conf: Configuration) -> tuple[list[Choice], int]:
        planner = self.planner(conf)
        static = planner.sharding.params + planner.optimizer.state

        def bytes_of(choices: list[Choice]) -> int:
            return static + sum(choice.held_bytes for choice in choices) - sum(planner.moved(choices))

        if conf.mode != "plan":
            return self.uniform[conf.mode], bytes_of(self.uniform[conf.mode])
        mixes = self.stack.mixes
        key = lambda mix: bytes_of(self.stack.assignment(mix))  # noqa: E731
        index = max(0, bisect_right(mixes, self.most_allocated(conf), key=key) - 1)
        choices = self.stack.assignment(mixes[index])
        return choices, bytes_of(choices)

    def planned(self, conf: Configuration, limit: int) -> tuple[list[Choice], Peak] | None:
        """The fastest mix of the menu whose peak is within `limit`, and that peak; None: there is none."""
        key = (_ranks(conf), min(conf.grad_accum, 3), conf.way, limit)
        if key not in self.plans:
            planner, mixes = self.planner(conf), self.stack.mixes

            def planned_at(at: int) -> tuple[list[Choice], Peak]:
                if (*key[:3], at) not in self.mixed:
                    choices = planner.proved_all(self.stack.assignment(mixes[at]))
                    self.mixed[*key[:3], at] = choices, planner.peak(choices)
                return self.mixed[*key[:3], at]

            fits = last_within(limit, lambda at: planned_at(at)[1].total, [mix.bytes for mix in mixes])
            self.plans[key] = None if fits < 0 else planned_at(fits)
        return self.plans[key]

    def refined(self, conf: Configuration, limit: int) -> tuple[list[Choice], Peak] | None:
        """`planned` over the whole frontier; None: nothing fits."""
        planner = self.planner(conf)
        try:
            choices, _ = planner.choose(MemoryBudget(peak_bytes=limit), "")
        except BudgetError:
            return None
        return choices, planner.peak(choices)

    def peak(self, conf: Configuration, choices: Sequence[Choice]) -> Peak:
        """Of a whole step."""
        key = (_ranks(conf), min(conf.grad_accum, 3), conf.way)
        if key not in self.peaks:
            self.peaks[key] = self.planner(conf).peak(choices)
        return self.peaks[key]

    def least_peak(self, conf: Configuration) -> int:
        """Bytes that no step of `conf` is below, whose local shape was not traced but has the same weights: at the point
        where this shape peaks, what is sharded, gathered and reduced is the same, what is computed takes at least the share
        that its rows or tokens are of this shape's (what does not grow with them is more than that), and what is held
        between forward and backward grows with them."""
        rows = conf.micro_batch / self.key.micro_batch
        tokens = rows * self.key.cp / conf.cp
        choices = self.choices(conf)
        peak = self.peak(conf, choices)
        computed = sum(peak.parts.get(name, 0) for name in _COMPUTED)
        least = peak.total - computed + int(min(1.0, rows, tokens) * computed)
        growing = peak.parts.get(Part.HELD_ACTIVATIONS, 0) - self.base.traced.shared_bytes - self._constant
        return least + int(max(0.0, min(rows, tokens) - 1.0) * max(0, growing))

    @cached_property
    def _constant(self) -> int:
        """At most of what layers hold whose bytes may not grow with rows: random states, tensors that they make."""
        return sum(
            self.base.problems[call.kind].trace.state_bytes + self.base.leaves(call.kind) + RNG_STATE
            for call in self.base.traced.calls
        )

    def plan(self, conf: Configuration, choices: Sequence[Choice], asked: str) -> Plan:
        """Choices as what `nemo_like.parallelize` takes."""
        return self.planner(conf).describe(choices, asked)

    def most_allocated(self, conf: Configuration) -> int:
        """The highest peak that could fit."""
        return most_allocated(self.planner(conf), self.question.limit)

    def host_bytes(self, conf: Configuration, choices: Sequence[Choice] = ()) -> int:
        """What one rank has in host memory: parameters, gradients and optimizer state, and of `choices` what layers move."""
        planner = self.planner(conf)
        key = (_ranks(conf), conf.cpu_offload)
        if key not in self.states_on_host:
            self.states_on_host[key] = planner.state_on_host
        return self.states_on_host[key] + sum(planner.moved(choices))

    def need(self, conf: Configuration, choices: Sequence[Choice], peak: Peak) -> Need:
        """What decides whether it fits; `peak`: of these choices."""
        key = (_ranks(conf), min(conf.grad_accum, 3), conf.way, tuple(map(id, choices)))
        if key not in self.needs:
            self.needs[key] = verdict(self.planner(conf), choices, peak, self.question.limit)
            self._kept.append(choices)
        return self.needs[key]

    # --- seconds --------------------------------------------------------------------------------------------------

    def seconds(self, conf: Configuration, choices: Sequence[Choice]) -> StepSeconds:
        """Of a whole step in this configuration."""
        return planned_seconds(self.planner(conf), choices)

    def least_step(self, conf: Configuration) -> float:
        """Seconds that no step of `conf` is faster than, whose local shape was not traced but has the same weights, or
        another share of the experts: kernels without launches, part waves and the bytes of weights, and all collectives
        but those between parts of sequences, where this shape has none, and what splitting experts brings, where this
        one has them all."""
        key, device = ShapeKey.of(conf), self.question.device
        rows = key.micro_batch / self.key.micro_batch  # whole sequences
        share = rows * self.key.cp / key.cp  # tokens
        resharding = self.question.pins.get("reshard_after_forward", (None, False))
        host = False not in self.question.pins.get("cpu_offload", (False,))
        way = conf.change(ac="none", loss=None, offload="none").with_strategy(
            reshard_after_forward=False if False in resharding else resharding[0], cpu_offload=host
        )
        runs = []
        for run in layer_runs(self.planner(way), self.uniform["none"]):
            kind = next(n for n, block in enumerate(self.blocks) if block is run.block)
            if kind not in self._least:
                self._least[kind] = least_seconds(self.base.problems[kind])
            forward, backward = (seconds * share for seconds in self._least[kind])
            block = replace(
                run.block,
                kernels=(),
                forward=forward,
                backward=backward,
                sequence_bytes=int(run.block.sequence_bytes * rows) if key.cp > 1 else 0,
                expert_bytes=int(run.block.expert_bytes * share),
                boundary_bytes=int(run.block.boundary_bytes * share),
            )
            known = key.ep == self.key.ep or (key.ep > 1 and self.key.ep > 1)
            unit, experts = (run.unit, run.experts) if known else (None, None)
            if experts is not None:
                # Of more ranks that share a layer's experts, each gathers fewer; its shard of them all is as large.
                gathered, reduced = (size * self.key.ep // key.ep for size in (experts.gathered, experts.reduce_input))
                experts = replace(experts, gathered=gathered, reduce_input=reduced)
            runs.append(replace(run, block=block, unit=unit, experts=experts))
        head = self.head_seconds(key.micro_batch * self.question.seq_len / key.cp)
        return step_seconds(runs, [], Links.of(conf.job, device), conf.job.step, outer=head, optimizer=0.0).total

    def head_seconds(self, tokens: float) -> float:
        """At least, of the head's products with so many tokens: with its weights, and with what trains."""
        head = find_head(self.base.model)
        if head is None:
            return 0.0
        own = any(p.requires_grad for p in head.parameters())
        others = any(p.requires_grad for layer in self.base.layers for p in layer.module.parameters())
        return 2.0 * (1 + own + others) * self.head_weights() * tokens / self.question.device.matmul_flops["half"]

    def head_weights(self) -> int:
        """Parameters of the head on one rank; 0: it is not known."""
        head = find_head(self.base.model)
        return 0 if head is None else sum(p.numel() for p in head.parameters())

    def flops(self) -> float:
        """Of one microbatch on one rank: forward and backward of layers and head, nothing twice."""
        tokens = self.key.micro_batch * self.question.seq_len / self.key.cp
        layers = sum(self.base.problems[call.kind].trace.flops for call in self.base.traced.calls)  # one rank's
        head = find_head(self.given[0])
        weights = 0 if head is None else sum(p.numel() for p in head.parameters())
        return 3.0 * (layers + 2.0 * weights * tokens / self.key.tp)


def _ranks(conf: Configuration) -> tuple[int, int, int]:
    """Return the sizes of the axes that a local shape leaves open. Bounds also ask it of stages, on fewer replicas."""
    return conf.shard_ranks, conf.dp_replicate, conf.pp


def _few(choices: Sequence[Choice]) -> list[Choice]:
    """`_MENU` of them, at even steps of held bytes."""
    if len(choices) <= _MENU:
        return list(choices)
    low, high = choices[0].held_bytes, choices[-1].held_bytes
    steps = (low + (high - low) * n // _MENU for n in range(1, _MENU + 1))
    picked = {bisect_right(choices, step, key=lambda choice: choice.held_bytes) - 1 for step in steps}
    return [choices[index] for index in sorted(picked)]


def _some(problem: BlockProblem, skips: bool) -> Sequence[Choice]:
    """The frontier of a block, coarse where it has many operators: a dozen of its choices are looked for."""
    if skips:
        return problem.frontier(skip=True)
    points = solver.spread(solver.linear_frontier(problem.ops(), _COARSE), _COARSE)
    return best_of([problem.full(), *map(problem.choice, points), problem.none()])


def _choice(problem: BlockProblem, words: Sequence[str]) -> Choice:
    keep = sum(1 << k for k, word in enumerate(words) if word == "save")
    skip = sum(1 << k for k, word in enumerate(words) if word == "skip")
    return problem.choice(solver.Point(0, 0.0, keep, skip))
