"""Short ways to ask a `PlanQuery`, for tests."""

from __future__ import annotations

from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.options import MemoryBudget
from nemo_like.planning.answers.reserved import Reserved, reserved_on
from nemo_like.planning.answers.within import choose
from nemo_like.planning.model.traced import TracedPart
from nemo_like.planning.planner import describe
from nemo_like.planning.query import Choices, PlanQuery


def plan_of(query: PlanQuery, budget: MemoryBudget, asked: str = "") -> Plan:
    """Return the fastest plan within a budget."""
    choices, gap = choose(query, budget, asked)
    return describe(query, choices, asked or str(budget), gap)


def part_of(query: PlanQuery) -> TracedPart:
    """Return the trace of the first stage; without a pipeline, of the model."""
    return query.stages[0].part


def saved(query: PlanQuery, choices: Choices) -> int:
    """Return the bytes that all layers save till the end of forward."""
    return sum(stage.part.saved(own) for stage, own in zip(query.stages, choices, strict=True))


def reserved(query: PlanQuery, choices: Choices, rank: int = 0) -> Reserved:
    """Return what CUDA's caching allocator reserves on one rank."""
    return reserved_on(query, rank, choices)
