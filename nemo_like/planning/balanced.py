"""The peak of a plan for unbalanced experts, were their routers balanced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nemo_like.planning.block import Choice
from nemo_like.planning.planned_routing import planned_imbalance
from nemo_like.planning.planner import Planner, as_choice
from nemo_like.planning.program.readers import Peak


def balanced_peak(planner: Planner, choices: Sequence[Choice]) -> Peak | None:
    """What a step peaks at where each rank's experts get as many rows, under the decisions of `choices`.

    None where that is what `planner` counts with already: no experts on other ranks, or ``imbalance=1``.
    """
    job = planner.job
    if job.ep.size == 1 or planned_imbalance(job) == 1:
        return None
    with planner.again(replace(job, ep=replace(job.ep, imbalance=1.0))) as other:
        return other.peak([_same(other, call.kind, choice) for call, choice in zip(other.traced.calls, choices)])


def _same(other: Planner, kind: int, choice: Choice) -> Choice:
    """`choice` for the same operators on other numbers of rows."""
    problem, words = other.problems[kind], choice.decisions
    if not words:
        return problem.none()
    assert len(words) == len(problem.records)  # the number of rows changes no operator
    return replace(as_choice(problem, words, choice.label), decisions=words)  # those on the host, too, as they are
