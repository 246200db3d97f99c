"""Plans for a model whose linears its owner has made torchao's `Float8Linear`: traced as it runs, emulated on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import Job, parallelize
from nemo_like.options import MemoryBudget
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from tests.models.fit_models import llama
from tests.planning.queries import plan_of
from tests_distributed.allocated import loop_peak_bytes

float8 = pytest.importorskip("torchao.float8")
transformers = pytest.importorskip("transformers")


def _small(**sizes: int) -> Any:
    torch.manual_seed(0)
    common = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaConfig(**common, **sizes)


def _model(**sizes: int) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(_small(**sizes)).train() if sizes else llama()
    config = float8.Float8LinearConfig(emulate=True)
    for layer in model.model.layers:
        float8.convert_to_float8_training(layer, config=config)
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("ac", ["none", "full", "5MiB"])
def test_the_peak_is_within_one_per_cent(ac: str) -> None:
    ids = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(0))
    sample = {"input_ids": ids, "labels": ids}
    query = PlanQuery.of(_model(), sample, Job.of(gpu=resolve_device("cpu")))
    plan = plan_of(query, MemoryBudget.parse(ac)) if "MiB" in ac else None
    predicted = peak_of(query, query.uniform(ac)).total if plan is None else plan.peak_bytes
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


@pytest.mark.few(1)
@pytest.mark.parametrize("ac", ["none", "full"])
def test_what_an_operator_on_float8_runs_inside_counts(ac: str) -> None:
    """Where the peak is inside a layer: the emulated product makes both operands anew, 3 to 4 % of these peaks."""
    sizes = dict(hidden_size=64, intermediate_size=256, vocab_size=32, max_position_embeddings=256)
    ids = torch.randint(32, (4, 256), generator=torch.Generator().manual_seed(0))
    sample = {"input_ids": ids, "labels": ids}
    query = PlanQuery.of(_model(**sizes), sample, Job.of(gpu=resolve_device("cpu")))
    predicted = peak_of(query, query.uniform(ac))
    measured = loop_peak_bytes(parallelize(_model(**sizes), "single", ac=ac, device="cpu"), sample)
    assert abs(predicted.total - measured) <= 0.005 * measured
