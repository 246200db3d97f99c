"""How many tokens the experts of one rank get, as a plan takes it."""

from __future__ import annotations

from torch import nn

from nemo_like.distributed.expert import find_experts
from nemo_like.distributed.expert.find_experts import experts_per_token
from nemo_like.distributed.expert.grouped import zero_rows_stay_zero
from nemo_like.distributed.expert.split_experts import has_experts
from nemo_like.fake.run import PlannedRouting
from nemo_like.job import Job

IMBALANCE = 1.5
"""Rows that the fullest rank's experts get, as a multiple of what they would get if all got alike, where nobody says. A
router that has not been trained yet spreads tokens badly, and its first hundred steps have the highest peak."""


def planned_imbalance(job: Job) -> float:
    """Return the imbalance that `job` is planned with."""
    return min(IMBALANCE if job.ep.imbalance is None else job.ep.imbalance, job.ep.size)


def routing_of(model: nn.Module, job: Job) -> PlannedRouting | None:
    """Return how tokens go to the experts of `model`, or of a stage of it; None: none are split."""
    experts = find_experts(model, job.ep.plan) if job.ep.size > 1 and has_experts(model, job.ep.plan) else ()
    if not experts:
        return None
    # Called with a row for each expert and token, such a module sends those that the router chose.
    sparse = zero_rows_stay_zero(experts[0].module)
    sent = (experts_per_token(model) or 1) / experts[0].count if sparse else 1.0
    return PlannedRouting(job.ep.size, planned_imbalance(job), sent)
