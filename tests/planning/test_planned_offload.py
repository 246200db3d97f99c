"""`offload=` beside a budget: what waits in host memory is not in the predicted peak, and is advised only where it helps."""

from __future__ import annotations

import re

import pytest
import torch

from nemo_like import Job, OffloadConfig, StepSpec, parallelize, plan_for
from nemo_like.models import resolve_model
from nemo_like.offload.layer_offload import OffloadWrapper
from nemo_like.planning import BudgetError
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import describe
from nemo_like.planning.query import PlanQuery
from tests.planning.queries import part_of

pytest.importorskip("transformers")

SMALL = OffloadConfig("boundary", min_bytes=0, max_inflight_bytes=1, prefetch=1)
STEP = StepSpec(optimizer="sgd", zero_grad="zero")
"""With gradients there all the time, the peak is where most is held."""


def _model() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    source = resolve_model("llama-tiny")
    return source.build(), source.sample_input(4, 128)


def _query(offload: OffloadConfig) -> PlanQuery:
    model, sample = _model()
    setup = Job.of(step=STEP, offload=offload)
    return PlanQuery.of(model, sample, setup.change(gpu=resolve_device("h100-80gb")))


def test_inputs_on_the_host_leave_the_prediction() -> None:
    plain, moved = _query(OffloadConfig("none")), _query(SMALL)
    full = plain.uniform("full")
    before, after = describe(plain, full, "full"), describe(moved, full, "full")
    (inputs,) = {problem.trace.input_bytes for problem in part_of(plain).problems}
    layers = len(full[0])
    assert after.held_bytes == before.held_bytes - (layers - 1) * inputs  # the last layer's stay
    assert sum(layer.host_bytes for layer in after.layers) == (layers - 1) * inputs
    assert before.peak_bytes - after.peak_bytes == (layers - 2) * inputs  # one is fetched ahead


def test_what_is_kept_moves_with_saved_and_small_tensors_stay() -> None:
    saved = _query(OffloadConfig("saved", min_bytes=0))
    boundary = _query(OffloadConfig("boundary", min_bytes=0))
    choices = saved.uniform("selective")[0]
    assert sum(saved.stages[0].moved(choices)) > sum(boundary.stages[0].moved(choices)) > 0
    assert saved.stages[0].moved(choices)[-1] == 0
    assert not any(_query(OffloadConfig("saved", min_bytes=1 << 40)).stages[0].moved(choices))
    assert not any(saved.stages[0].moved(saved.uniform("none")[0]))


def test_copies_in_flight_are_on_the_device() -> None:
    many = _query(OffloadConfig("boundary", min_bytes=0))
    full = many.uniform("full")  # all of it may be on its way at one time
    assert peak_of(many, full).total == peak_of(_query(OffloadConfig("none")), full).total


@pytest.mark.long
def test_a_budget_that_only_host_memory_meets() -> None:
    model, sample = _model()
    queries = _query(OffloadConfig("none")), _query(SMALL)
    kept, least = (peak_of(query, query.uniform("full")).total for query in queries)
    assert least < kept
    options = dict(gpu="h100-80gb", step=STEP)
    with pytest.raises(BudgetError):
        plan_for(model, ac=f"{(least + kept) // 2}B", sample_input=sample, **options)
    plan = plan_for(model, ac=f"{(least + kept) // 2}B", sample_input=sample, offload=SMALL, **options)
    assert plan.peak_bytes <= (least + kept) // 2 and sum(layer.host_bytes for layer in plan.layers) > 0


@pytest.mark.long
def test_offload_is_advised_only_where_it_would_help() -> None:
    model, sample = _model()
    with pytest.raises(BudgetError) as small:  # its inputs are smaller than what is worth moving
        plan_for(model, ac="1MiB", sample_input=sample, gpu="h100-80gb")
    assert "offload" not in str(small.value)
    source = resolve_model("llama3-8b")
    big, asked = source.build("meta"), {"ac": "1GiB", "gpu": "h100-80gb", "world_size": 8, "precision": "bf16"}
    batch = source.sample_input(4, 8192)
    with pytest.raises(BudgetError) as large:
        plan_for(big, sample_input=batch, **asked)
    assert re.search(r"offload='boundary' \([\d.]+GiB less\)", str(large.value))
    with pytest.raises(BudgetError) as moved:
        plan_for(big, sample_input=batch, offload="boundary", **asked)
    assert "offload='" not in str(moved.value) and moved.value.smallest_bytes < large.value.smallest_bytes


def test_the_front_door_plans_with_it() -> None:
    model, sample = _model()
    model = parallelize(model, "single", "50%", sample_input=sample, offload=SMALL, device="cpu")
    assert any(isinstance(module, OffloadWrapper) for module in model.modules())
    model(**sample).loss.backward()
