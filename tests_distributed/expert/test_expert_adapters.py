"""LoRA on the fused weights of experts that are split over ranks."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import parallelize
from tests.checks import step
from tests.models.expert_families import build, tokens
from tests_distributed.expert.whole_gradients import assert_trains
from tests_distributed.spawn import run_ranks

TARGETS = {"mixtral": "mlp", "gpt_oss": "mlp", "llama4": "feed_forward"}


def _adapted(name: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = build(name)
    weights = [f"{TARGETS[name]}.experts.{weight}" for weight in ("gate_up_proj", "down_proj")]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=weights, init_lora_weights=False)
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.2)
    return model


MODES = ("none", "full", "selective", "50%")


def _trained(rank: int, world_size: int, name: str, modes: tuple[str, ...] = MODES) -> None:
    ids = tokens(world_size)
    mine = {"input_ids": ids[rank : rank + 1], "labels": ids[rank : rank + 1]}
    wanted = step(_adapted(name), input_ids=ids, labels=ids)
    assert sum(".experts." in key for key in wanted) == 2 * 2 * 2  # layers, weights, factors
    ways = [{"ac": mode, "ep": 2} for mode in modes]
    model: Any = assert_trains(partial(_adapted, name), wanted, mine, *ways)
    with model.disable_adapter():
        with torch.no_grad():
            found = model(**mine).loss
        bare = build(name)(**mine).loss
        assert abs(found - bare) <= 1e-6 * bare


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("full", "50%"), MODES])
@pytest.mark.parametrize(("name", "ranks"), [("mixtral", 2), ("gpt_oss", 2), ("llama4", 2), ("mixtral", 4)])
def test_adapters_on_the_weights_of_experts(name: str, ranks: int, modes: tuple[str, ...]) -> None:
    pytest.importorskip("peft")
    run_ranks(ranks, _trained, name, modes, timeout=120)


def _beside_tp(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=re.escape("adapters on the weights of 'base_model.model.model.layers.0.mlp")):
        parallelize(_adapted("mixtral"), ep=2, tp=2, device="cpu")


def test_beside_tensor_parallelism_they_are_refused() -> None:
    pytest.importorskip("peft")
    run_ranks(2, _beside_tp)
