"""The model in one local shape (tensor, context and expert parallel sizes, micro-batch): the rest is arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nemo_like.activation_checkpointing.plan import BudgetError
from nemo_like.job import Job
from nemo_like.losses.model_loss import find_head
from nemo_like.options import ContextParallel, MemoryBudget
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.answers.seconds import StepSeconds, step_seconds
from nemo_like.planning.answers.verdict import Need, verdict
from nemo_like.planning.answers.within import choose, last_within
from nemo_like.planning.choose import solver
from nemo_like.planning.choose.layer import BlockProblem, Choice, Stack, as_choice, best_of
from nemo_like.planning.fit.layouts import Configuration, axes_inside
from nemo_like.planning.fit.question import Question
from nemo_like.planning.model.traced import MODES
from nemo_like.planning.planner import balanced
from nemo_like.planning.program.storages import Peak
from nemo_like.planning.query import Choices, PlanQuery, Stage, Traced

_MENU = 10
"""Number of choices of one kind of layer that plans are mixed of while searching, in addition to all and nothing."""

_COARSE = 1 << 9
"""States of the frontier of a block whose skips are not searched."""

_QUICK = 64
"""Most operators of a block whose best choices with skips are all known in a moment."""


@dataclass(frozen=True)
class ShapeKey:
    """Sizes that make one local shape; `whole`: nothing is sharded, so that autocast lowers dtypes."""

    tp: int
    cp: int
    ep: int
    micro_batch: int
    whole: bool
    staged: bool = False
    """True if the model is cut into the stages of a pipeline, to which `whole` then applies."""
    sequence_parallel: bool = False
    loss_parallel: bool = False
    cp_method: str = ContextParallel.method

    @property
    def in_one_stage(self) -> ShapeKey:
        return replace(self, staged=False)

    def job(self, asked: Job) -> Job:
        """Return the job `asked` in this shape, on as few ranks as have it, in one stage."""
        return asked.on(
            dp_shard=1 if self.whole else 2 * self.ep,
            dp_replicate=1,
            **axes_inside(asked, self),
            pp=1,
        )

    @classmethod
    def of(cls, conf: Configuration) -> ShapeKey:
        size = conf.layout
        how = size.sequence_parallel, size.loss_parallel, size.cp_method
        return cls(conf.tp, conf.cp, conf.ep, conf.micro_batch, conf.gpus == conf.pp, conf.pp > 1, *how)

    @property
    def axes(self) -> tuple[Any, ...]:
        """Return what decides which weights a rank has, and whether it has whole sequences of residuals and logits."""
        return self.tp, self.whole, self.sequence_parallel, self.loss_parallel


class Shape:
    """One local shape: bytes and seconds of any configuration that has it, in one stage or in several."""

    def __init__(self, key: ShapeKey, question: Question, traced: Traced) -> None:
        """Trace it, if it has one stage; raises ValueError where the model cannot have that shape."""
        self.key, self.question, self.traced = key, question, traced
        self._queries: dict[Hashable, PlanQuery] = {}
        self._peaks: dict[Hashable, Peak] = {}
        self._too_high: dict[Hashable, Peak] = {}
        """Peaks above the limit, of one rank that is not known to have the highest."""
        self._plans: dict[Hashable, tuple[Choices, Peak] | None] = {}
        self._mixed: dict[Hashable, tuple[Choices, Peak]] = {}
        """Choices and their peak, by what a peak depends on, and a place in the row of mixes."""
        self._needs: dict[Hashable, Need] = {}
        if not key.staged:
            _ = self.whole

    @cached_property
    def whole(self) -> Stage:
        """The model in one stage, on as few ranks as have the shape."""
        return self.traced.query(self.key.job(self.question.job)).stages[0]

    @cached_property
    def can_chunk(self) -> bool:
        """True if the loss can be computed in chunks."""
        return find_head(self.traced.given) is not None if self.key.staged else self.whole.part.can_chunk()

    def query(self, conf: Configuration) -> PlanQuery:
        """Return the query of `conf`, but for its checkpointing.

        In one stage, the query uses this shape's trace, also where `conf` has another shape: bounds are made of that.

        Raises:
            ValueError: the model cannot be cut into the stages of `conf`.
        """
        balances = self.key.staged and conf.job.pp.balance == "memory"
        mode = "full" if conf.mode == "plan" else conf.mode
        key = (conf.grad_accum, *_bytes_of(conf)[:-1], mode if balances else "")
        if key not in self._queries:
            job = conf.change(ac="none").job
            query = self.traced.query(job) if self.key.staged else self.whole_under(job)
            self._queries[key] = balanced(query, mode) if balances else query
        return self._queries[key]

    def whole_under(self, job: Job) -> PlanQuery:
        """Return the query of `job` on the model in one stage, as it is traced in this shape."""
        whole = self.whole
        return PlanQuery(self.traced, job, (Stage(whole.part, job, whole.slice, whole.names),))

    # --- choices --------------------------------------------------------------------------------------------------

    @cached_property
    def uniform(self) -> dict[str, list[Choice]]:
        """Choices of the modes that need no budget, for the model in one stage."""
        return {mode: self.whole.part.uniform(mode) for mode in MODES}

    def choices(self, conf: Configuration) -> Choices:
        """Return the choices of a mode that needs no budget."""
        return self.query(conf).uniform(conf.mode) if self.key.staged else [self.uniform[conf.mode]]

    @cached_property
    def stack(self) -> Stack:
        """Stack of all layers as one choice, with a few choices of each kind: the winner alone gets the whole frontier."""
        return Stack(self.whole.part.choice_groups(lambda kind: self._menu[kind]))

    @cached_property
    def _menu(self) -> list[tuple[Choice, ...]]:
        """A few choices of each kind, from least saved to none: the best for that many bytes.

        Operators are the same in shapes with the same weights, so such shapes share their choices.
        """
        menu, known = [], self.traced.known.decisions
        for kind, problem in enumerate(self.whole.part.problems):
            key = (self.key.tp, self.key.ep, kind, tuple(str(record.op) for record in problem.records))
            if key not in known:
                # Of a block of many operators, whose best skips a solver looks for, the winner alone gets any.
                skips = self.whole.skip and len(problem.records) <= _QUICK
                known[key] = [choice.decisions for choice in _few(_some(problem, skips))]
            choices = [as_choice(problem, words) for words in known[key] if words]
            menu.append(best_of([problem.full(), *choices, problem.none()]))
        return menu

    def planned(self, conf: Configuration, limit: int) -> tuple[Choices, Peak] | None:
        """Return the fastest choices whose peak is within `limit`, and that peak; None: none are.

        In one stage, the choices come from the menu.
        """
        if self.key.staged:
            return self.refined(conf, limit)
        key = (*_bytes_of(conf), limit)
        if key not in self._plans:
            query, mixes = self.query(conf), self.stack.mixes

            def planned_at(at: int) -> tuple[Choices, Peak]:
                if (*key[:-1], at) not in self._mixed:
                    choices = [self.whole.part.proved_all(self.stack.assignment(mixes[at]))]
                    self._mixed[*key[:-1], at] = choices, peak_of(query, choices)
                return self._mixed[*key[:-1], at]

            fits = last_within(limit, lambda at: planned_at(at)[1].total, [mix.bytes for mix in mixes])
            self._plans[key] = None if fits < 0 else planned_at(fits)
        return self._plans[key]

    def refined(self, conf: Configuration, limit: int) -> tuple[Choices, Peak] | None:
        """Return `planned` with choices out of all that there are."""
        key = ("refined", *_bytes_of(conf), limit)
        if key not in self._plans:
            query = self.query(conf)
            try:
                choices, _ = choose(query, MemoryBudget(peak_bytes=limit))
                self._plans[key] = choices, peak_of(query, choices)
            except BudgetError:
                self._plans[key] = None
        return self._plans[key]

    # --- bytes and seconds ----------------------------------------------------------------------------------------

    def peak(self, conf: Configuration, choices: Choices) -> Peak:
        """Return the peak of a step under the mode of `conf`, on the rank that has the highest."""
        key = _bytes_of(conf)
        if key not in self._peaks:
            self._peaks[key] = peak_of(self.query(conf), choices)
        return self._peaks[key]

    def peak_if_it_fits(self, conf: Configuration, choices: Choices) -> Peak:
        """Return `peak`, or that of the first rank whose peak does not fit."""
        key, limit = _bytes_of(conf), self.most_allocated(conf)
        if key not in self._peaks and key not in self._too_high:
            peak = peak_of(self.query(conf), choices, limit)
            (self._peaks if peak.total <= limit else self._too_high)[key] = peak
        return self._peaks.get(key) or self._too_high[key]

    def need(self, conf: Configuration, choices: Choices, peak: Peak) -> Need:
        """Return what decides whether `conf` fits; `peak`: that of these choices."""
        limit = self.question.limit_of(conf.job)
        key = (*_bytes_of(conf), tuple(map(tuple, choices)), limit)
        if key not in self._needs:
            self._needs[key] = verdict(self.query(conf), choices, peak, limit)
        return self._needs[key]

    def most_allocated(self, conf: Configuration) -> int:
        """Return the highest peak that could fit."""
        inputs = self.traced.input_bytes * (conf.grad_accum if conf.pp > 1 else 1)
        return max(0, self.question.limit_of(conf.job) - inputs)

    def host_bytes(self, conf: Configuration, choices: Choices = ()) -> int:
        """Return the bytes that one rank has in host memory.

        They are parameters, gradients and optimizer state, and activations that layers move there.
        """
        stages = self.query(conf).stages
        moved = sum(sum(stage.moved(chosen)) for stage, chosen in zip(stages, choices))
        return max(stage.state_on_host for stage in stages) + moved

    def seconds(self, conf: Configuration, choices: Choices) -> StepSeconds:
        """Return the seconds of a whole step."""
        return step_seconds(self.query(conf), choices)

    def flops(self, conf: Configuration) -> float:
        """Return the FLOPs of one micro-batch in all stages of a rank's shape.

        They are of forward and backward of layers and head, without recomputation.
        """
        parts = [stage.part for stage in self.query(conf).stages]
        layers = sum(part.problems[call.kind].trace.flops for part in parts for call in part.traced.calls)
        head = find_head(self.traced.given)
        weights = 0 if head is None else sum(p.numel() for p in head.parameters())
        tokens = self.key.micro_batch * self.question.seq_len / self.key.cp
        return 3.0 * (layers + 2.0 * weights * tokens / self.key.tp)


def _bytes_of(conf: Configuration) -> tuple[Any, ...]:
    """Return what the bytes of a step depend on; the mode comes last.

    After three micro-batches of one stage, bytes repeat.
    """
    turns = conf.grad_accum if conf.pp > 1 else min(conf.grad_accum, 3)
    mode, *way = conf.way
    job = conf.job
    return (
        conf.shard_ranks,
        conf.dp_replicate,
        conf.pp,
        conf.schedule,
        conf.job.pp.stages_per_rank,
        turns,
        *way,
        job.step.optimizer,
        job.step.keeps_output,
        job.step.sync,
        job.allocator,
        mode,
    )


def _few(choices: Sequence[Choice]) -> list[Choice]:
    """Return `_MENU` of the choices, at even steps of saved bytes."""
    if len(choices) <= _MENU:
        return list(choices)
    low, high = choices[0].held_bytes, choices[-1].held_bytes
    steps = (low + (high - low) * n // _MENU for n in range(1, _MENU + 1))
    picked = {bisect_right(choices, step, key=lambda choice: choice.held_bytes) - 1 for step in steps}
    return [choices[index] for index in sorted(picked)]


def _some(problem: BlockProblem, skips: bool) -> Sequence[Choice]:
    """Return the frontier of a block, coarse where it has many operators, since a dozen of its choices suffice."""
    if skips:
        return problem.frontier(skip=True)
    points = solver.spread(solver.linear_frontier(problem.ops(), _COARSE), _COARSE)
    return best_of([problem.full(), *map(problem.choice, points), problem.none()])
