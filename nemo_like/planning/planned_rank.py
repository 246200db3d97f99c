"""The planner's figure of a job that is already decided: a mode, a budget or a `Plan`, on one of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from nemo_like.activation_checkpointing.plan import LayerPlan, Plan
from nemo_like.job import Job
from nemo_like.options import MemoryBudget, parse_ac
from nemo_like.planning.block import BlockProblem, Choice
from nemo_like.planning.kinds import ModelTrace
from nemo_like.planning.planner import MODES, Planner, as_choice
from nemo_like.planning.stage_balance import balanced
from nemo_like.planning.stage_plans import plan_pipeline
from nemo_like.planning.stages import PipelinePlanner


@dataclass(frozen=True)
class PlannedRank:
    """A planned job, and one rank's peak in it."""

    job: Job
    """With a `Plan` in the place of a budget."""
    traced: ModelTrace | None
    """The model's layers; None: they are on several stages."""
    peak_bytes: int | None
    """None: of such an ``ac``, nothing is predicted."""


def plan_rank(model: nn.Module, sample_input: Any, job: Job, rank: int) -> PlannedRank:
    """Plan `job`, and predict what `rank` peaks at.

    Raises:
        ValueError: as `nemo_like.planning.plan_for`, where no plan is made of such a model or job.
    """
    if job.pp.size > 1:
        return _in_stages(model, sample_input, job, rank)
    with Planner(model, sample_input, job) as planner:
        if isinstance(job.ac, MemoryBudget):
            choices, gap = planner.choose(job.ac, str(job.ac))
            job = replace(job, ac=planner.describe(choices, str(job.ac), gap))
            return PlannedRank(job, planner.traced, planner.peak(choices).total)
        chosen = choices_of(planner, job)
        return PlannedRank(job, planner.traced, None if chosen is None else planner.peak(chosen).total)


def choices_of(planner: Planner, job: Job, names: Sequence[str] | None = None) -> list[Choice] | None:
    """Return what each call of a layer keeps under the job's mode or `Plan`; None: it is not one that is predicted.

    names: those of the planner's layers in the whole model; None: it is the whole one.
    """
    if not isinstance(job.ac, Plan):
        mode = next((mode for mode in MODES if parse_ac(mode) == job.ac), None)
        return None if mode is None else planner.uniform(mode)
    plans = {layer.fqn: layer for layer in job.ac.layers}
    whole = {layer.fqn: name for layer, name in zip(planner.layers, names or [each.fqn for each in planner.layers])}
    if any("host" in row for plan in plans.values() for row in (plan.decisions or {}).values()):
        return None
    return [_choice(planner.problems[call.kind], plans.get(whole[call.fqn])) for call in planner.traced.calls]


def _choice(problem: BlockProblem, plan: LayerPlan | None) -> Choice:
    policy = None if plan is None else plan.policy()
    if policy is None or not problem.trace.saves_something:
        return problem.none()
    if plan is not None and not plan.decisions:
        return problem.full()
    tracked, decide = policy.tracked_ops() or (), policy.start()
    words = (decide(each.op, each.nth).value if each.op in tracked else "recompute" for each in problem.records)
    return as_choice(problem, tuple(words), "plan")


def _in_stages(model: nn.Module, sample_input: Any, job: Job, rank: int) -> PlannedRank:
    if isinstance(job.ac, MemoryBudget):
        job = replace(job, ac=plan_pipeline(model, job, sample_input=sample_input))
    pp = job.pp
    if isinstance(job.ac, Plan):  # which has decided these, too
        step = job.ac.step
        balance = tuple(step["balance"]) if "balance" in step else pp.balance
        pp = replace(pp, replay=step.get("replay", pp.replay), balance=balance)
    with PipelinePlanner(model, sample_input, replace(job, pp=pp)) as planner:
        if pp.balance == "memory":
            planner = balanced(planner, getattr(job.ac, "mode", "full"))
        chosen = [choices_of(stage.planner, job, stage.names) for stage in planner.stages]
        if job.ac_scope != "all" or any(each is None for each in chosen):
            return PlannedRank(job, None, None)
        stages = [each for each in chosen if each is not None]
        return PlannedRank(job, None, planner.rank_peak(rank * pp.size // job.ranks, stages).total)
