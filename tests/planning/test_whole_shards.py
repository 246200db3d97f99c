"""What one rank holds where FSDP2 is there and shards nothing, and where tensor parallelism splits an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import Job, dry_run
from nemo_like.fake_rank import SAME
from nemo_like.options import FSDP2, StepSpec, TensorParallel
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from tests.planning.queries import part_of

transformers = pytest.importorskip("transformers")


def _model(name: str = "Llama", layers: int = 2, **more: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, **more,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def _query(**setup: Any) -> PlanQuery:
    ids = torch.zeros(2, 16, dtype=torch.long)
    made = Job.of(step=StepSpec(keeps_output=False), **setup)
    return PlanQuery.of(_model(), {"input_ids": ids, "labels": ids}, made.change(gpu=resolve_device("cpu")))


def test_replicas_reduce_also_where_nothing_is_sharded() -> None:
    alone, replicas = _query(), _query(dp_replicate=2, world_size=2)
    assert not alone.stages[0].sharding.on and replicas.stages[0].sharding.on
    none = [peak_of(query, query.uniform("full")).parts for query in (alone, replicas)]
    assert "reduce buffers" not in none[0] and none[1]["reduce buffers"] > 0
    apart = _query(dp_replicate=2, world_size=2, strategy="ddp")
    assert not apart.stages[0].sharding.on  # nobody shards: a single device, or DDP


def test_one_rank_gathers_into_no_buffer() -> None:
    """FSDP2 copies parameter by parameter there: nothing is fetched ahead."""
    one, two = _query(dp_replicate=2, world_size=2), _query(world_size=2)
    assert {unit.flat for unit in one.stages[0].sharding.all} == {0}
    assert all(unit.flat == unit.gathered for unit in two.stages[0].sharding.all)
    sizes = {id(p): p.numel() * 4 for p in part_of(one).model.parameters()}
    layer = sum(sizes[id(p)] for p in part_of(one).model.model.layers[0].parameters())
    for fsdp in (FSDP2(), FSDP2(forward_prefetch=1)):
        query = _query(dp_replicate=2, world_size=2, strategy=fsdp)
        peak = peak_of(query, query.uniform("full"))
        assert "backward of layer" in peak.at and peak.parts["gathered layers"] == layer


# What transformers splits by code of its own, or torch by an input that it splits; the loss of a head that stays split, in
# chunks; stages of parts of sequences, and in float8. Each as a rank of 8 runs it (3 s each).
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "more", "asked"),
    [
        ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, {"tp": 2}),
        ("Llama", {}, {"tp": TensorParallel(2, loss_parallel=True), "loss": "chunked"}),
        ("Olmo3", {"sliding_window": 8}, {"tp": 2}),
        ("Llama", {}, {"tp": TensorParallel(2, sequence_parallel=True), "pp": 2}),
        ("Llama", {}, {"precision": "fp8", "pp": 2}),
    ],
    ids=["experts", "a loss in chunks", "an input that is split", "stages", "float8 in stages"],
)
def test_a_budget_is_planned_to_the_byte(name: str, more: dict[str, Any], asked: dict[str, Any]) -> None:
    if "precision" in asked:
        pytest.importorskip("torchao")
    ids = torch.zeros(2, 16, dtype=torch.long)
    job = Job.of(ac="50%", world_size=8, gpu="h100-80gb", **asked)
    layers = 2 if "pp" in asked else 1
    found = dry_run(_model(name, layers, **more), job, {"input_ids": ids, "labels": ids}, layers=None)
    assert found.against is not None and abs(found.peak_bytes - found.against) <= SAME
