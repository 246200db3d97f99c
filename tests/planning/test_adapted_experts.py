"""Adapters that PEFT puts around fused weights of experts: planned and measured bytes of a step."""

from typing import Any

import pytest
import torch

from nemo_like import Job, parallelize
from nemo_like.options import StepSpec
from nemo_like.planning.model.traced import with_adapters
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from tests.allocator_events import cpu_events
from tests.models.expert_families import build, tokens

pytest.importorskip("peft")


BATCH = {"input_ids": tokens(2, 48), "labels": tokens(2, 48)}


def _measured(family: str, ac: str) -> int:
    model: Any = parallelize(with_adapters(build(family), 4), "single", ac, device="cpu")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0, foreach=False)

    def train() -> None:
        model(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    return sum(p.nbytes for p in model.parameters()) + max(cpu_events(train))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_step_with_adapters_on_fused_experts_peaks_as_planned(family: str) -> None:
    """Each forward adds a parametrization to the weights, and removes it: W + BA is a tensor of its own for the layer."""
    job = Job.of("single", step=StepSpec(optimizer="sgd", keeps_output=False), device="cpu")
    query = PlanQuery.from_model(with_adapters(build(family), 4), BATCH, job)
    for ac in ("none", "full", "selective"):
        assert abs(peak_of(query, query.uniform(ac)).total - _measured(family, ac)) <= 256, ac
