"""Predict the peak of one rank in a job that is already decided: a mode, a budget or a `Plan`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from nemo_like.activation_checkpointing.plan import BudgetError, LayerPlan, Plan
from nemo_like.job import Job
from nemo_like.options import MemoryBudget, parse_ac
from nemo_like.planning.advise import Each, lowering
from nemo_like.planning.memory_model.storages import Peak
from nemo_like.planning.model.traced import MODES
from nemo_like.planning.planner import planned, query_of
from nemo_like.planning.predictions.budget_search import choose
from nemo_like.planning.predictions.rank import peak_of, rank_peak
from nemo_like.planning.query import Choices, PlanQuery, Stage
from nemo_like.planning.selection.layer import BlockProblem, Choice, as_choice
from nemo_like.planning.trace.kinds import ModelTrace


@dataclass(frozen=True)
class PlannedRank:
    """A planned job, and one rank's peak in it."""

    job: Job
    """The job, with a `Plan` in the place of a budget."""
    traced: ModelTrace | None
    """The model's layers; None: they are on several stages."""
    peak_bytes: int | None
    """Peak of the rank, in bytes; None: nothing is predicted for such an ``ac``."""


def plan_rank(model: nn.Module, sample_input: Any, job: Job, rank: int) -> PlannedRank:
    """Plan `job`, and predict what `rank` peaks at.

    Raises:
        ValueError: as `nemo_like.planning.plan_for`, where no plan is made of such a model or job.
    """
    if isinstance(job.ac, MemoryBudget):
        query, plan = planned(model, sample_input, job)
        job = replace(job, ac=plan)
    else:
        query = _under_plan(model, sample_input, job)
    chosen = choices_under(query)
    peak = None
    if not (query.is_pipeline and job.ac_scope != "all") and chosen is not None:
        peak = rank_peak(query, rank * job.pp.size // job.ranks, chosen).total
    return PlannedRank(job, None if query.is_pipeline else query.stages[0].part.traced, peak)


def choices_under(query: PlanQuery) -> Choices | None:
    """Return the choices of each layer call under the ``ac`` of the job of `query`; None: it is not one that is predicted.

    Raises:
        BudgetError: no plan fits its budget.
    """
    if isinstance(query.job.ac, MemoryBudget):
        return choose(query, query.job.ac)[0]
    chosen = [choices_of(stage, query.job) for stage in query.stages]
    known = [each for each in chosen if each is not None]
    return known if len(known) == len(chosen) else None


def peak_under(query: PlanQuery) -> Peak:
    """Return the highest peak under the ``ac`` of the job of `query`; where that is not predicted, without checkpointing.

    Raises:
        BudgetError: no plan fits its budget.
    """
    return peak_of(query, choices_under(query) or query.uniform("none"))


def lower_peaks(now: int, tried: Iterable[tuple[Each, PlanQuery | None]]) -> list[tuple[Each, int]]:
    """Return the changes that lower the peak `now`, as `lowering` does.

    tried: changes, with the query of each; None: it cannot be had. One whose budget no plan fits is left out.
    """
    peaks = list[tuple[Each, int]]()
    for change, query in tried:
        with suppress(BudgetError):
            if query is not None:
                peaks.append((change, peak_under(query).total))
    return lowering(now, peaks)


def _under_plan(model: nn.Module, sample_input: Any, job: Job) -> PlanQuery:
    """Return the query of a job whose layers are divided, and recomputed, as its `Plan` states, if it has one."""
    pp = job.pp
    if isinstance(job.ac, Plan):
        step = job.ac.step
        balance = tuple(step["balance"]) if "balance" in step else pp.balance
        pp = replace(pp, balance=balance)
    return query_of(model, sample_input, replace(job, pp=pp), getattr(job.ac, "mode", "full"))


def choices_of(stage: Stage, job: Job) -> list[Choice] | None:
    """Return the choice of each layer call under the job's mode or `Plan`; None: it is not one that is predicted."""
    part = stage.part
    if not isinstance(job.ac, Plan):
        mode = next((mode for mode in MODES if parse_ac(mode) == job.ac), None)
        return None if mode is None else part.uniform(mode)
    plans = {layer.fqn: layer for layer in job.ac.layers}
    names = {layer.fqn: name for layer, name in zip(part.layers, stage.names)}
    if any("host" in row for plan in plans.values() for row in (plan.decisions or {}).values()):
        return None
    return [_choice(part.problems[call.kind], plans.get(names[call.fqn])) for call in part.traced.calls]


def _choice(problem: BlockProblem, plan: LayerPlan | None) -> Choice:
    policy = None if plan is None else plan.policy()
    if policy is None or not problem.trace.saves_something:
        return problem.none()
    if plan is not None and not plan.decisions:
        return problem.full()
    tracked, decide = policy.tracked_ops() or (), policy.start()
    words = (decide(each.op, each.nth).value if each.op in tracked else "recompute" for each in problem.records)
    return as_choice(problem, tuple(words), "plan")
