"""Plans for a model whose linears its owner has made torchao's `Float8Linear`: traced as it runs, emulated on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import parallelize
from nemo_like.options import MemoryBudget
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import Planner, Setup
from tests.models.fit_models import llama
from tests_distributed.allocated import loop_peak_bytes

float8 = pytest.importorskip("torchao.float8")
pytest.importorskip("transformers")


def _model() -> Any:
    model = llama()
    config = float8.Float8LinearConfig(emulate=True)
    for layer in model.model.layers:
        float8.convert_to_float8_training(layer, config=config)
    return model


@pytest.mark.parametrize("ac", ["none", "full", "5MiB"])
def test_the_peak_is_within_one_per_cent(ac: str) -> None:
    ids = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(0))
    sample = {"input_ids": ids, "labels": ids}
    planner = Planner(_model(), sample, device=resolve_device("cpu"), setup=Setup(fsdp=None))
    plan = planner.plan(MemoryBudget.parse(ac)) if "MiB" in ac else None
    predicted = planner.peak(planner.uniform(ac)).total if plan is None else plan.peak_bytes
    model = parallelize(_model(), "single", ac=ac if plan is None else plan, device="cpu")
    bare = _model()
    for each in (model, bare):
        each(**sample).loss.backward()
    pairs = zip(model.parameters(), bare.parameters(), strict=True)
    assert all(torch.equal(own.grad, other.grad) for own, other in pairs)
    model.zero_grad()
    measured = loop_peak_bytes(model, sample)
    assert plan is None or 4 << 20 < predicted <= 5 << 20
    assert abs(predicted - measured) <= 0.01 * measured
