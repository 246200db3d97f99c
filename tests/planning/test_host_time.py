"""The host's share of a step: a job of short rows on many ranks waits for its launches, and one of long rows does not."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nemo_like import Job
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.predictions.seconds import HOST, layer_runs, step_seconds
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.roofline import host_seconds
from nemo_like.planning.selection.layer import LayerRun
from tests.models.tiny import labelled, made


def _parts(
    tokens: int, gpus: int, ac: str = "none", gpu: str = "h100-80gb", **job: Any
) -> tuple[dict[str, float], Sequence[LayerRun]]:
    """Two layers of an 8B and hardly any vocabulary."""
    model = made(
        "Llama", device="meta", vocab_size=256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=2,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    asked = Job.of(world_size=gpus, ac=ac, gpu=resolve_device(gpu), precision="bf16", **job)
    query = PlanQuery.from_model(model, labelled(torch.zeros(1, tokens, dtype=torch.int64, device="meta")), asked)
    choices = query.uniform(ac)
    return step_seconds(query, choices).parts, layer_runs(query.stages[0], choices[0])


def test_short_rows_split_over_eight_ranks_wait_for_the_host() -> None:
    short, runs = _parts(1024, 8, tp=8)
    (launched,) = {run.block.launched for run in runs}
    assert sum(run.count for run in runs) == 2 and all(run.unit is not None for run in runs)
    # By hand: each layer has 7 products and is a unit of FSDP2, if of one rank; half of what docs/evidence/overhead.md has.
    by_hand = 2 * (launched * (4.6 + 5.8) + (1_710 + 2_010) + 7 * (380 + 785)) / 2 * 1e-6
    assert sum(short.values()) - short["optimizer"] == pytest.approx(by_hand) and short[HOST] > 0
    long, _ = _parts(16_384, 8, tp=8)
    assert HOST not in long


def test_a_look_at_each_operator_costs_the_host_more_than_full_recomputation() -> None:
    none, full, selective = (
        host_seconds(100, name, units=0, split_products=0) for name in ("none", "full", "selective")
    )
    assert none < full < selective
    assert host_seconds(0, "selective", units=0, split_products=0) == 0.0


def test_neither_compiled_layers_nor_a_cpu_wait() -> None:
    eager, _ = _parts(64, 1, "selective")
    compiled, runs = _parts(64, 1, "selective", compile="inductor")
    assert eager[HOST] > 0 and HOST not in compiled and all(run.block.launched == 0 for run in runs)
    on_a_cpu, _ = _parts(64, 1, "selective", gpu="cpu")
    assert HOST not in on_a_cpu
