"""LoRA on the fused weights of experts that are split over ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import parallelize
from tests.models.expert_families import build, tokens
from tests_distributed.expert.whole_gradients import assert_close, gradients
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


def _trained(rank: int, world_size: int, name: str, modes: tuple[str, ...]) -> None:
    ids = tokens(world_size)
    mine = ids[rank : rank + 1]
    reference = _adapted(name)
    loss = reference(input_ids=ids, labels=ids).loss
    loss.backward()
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert sum(".experts." in key for key in wanted) == 2 * 2 * 2  # layers, weights, factors
    plain: Any = None
    for mode in modes:
        sample = {"input_ids": mine, "labels": mine} if "%" in mode else None
        model = parallelize(_adapted(name), ac=mode, ep=2, device="cpu", sample_input=sample)
        part = model(input_ids=mine, labels=mine).loss
        part.backward()
        total = part.detach().clone()
        torch.distributed.all_reduce(total)
        assert abs(total / world_size - loss) <= 1e-6 * loss, mode
        found = gradients(model)
        assert_close(found, wanted)
        plain = found if plain is None else plain
        assert all(torch.equal(found[key], plain[key]) for key in plain), mode
    with model.disable_adapter():
        with torch.no_grad():
            found = model(input_ids=mine, labels=mine).loss
        bare = build(name)(input_ids=mine, labels=mine).loss
        assert abs(found - bare) <= 1e-6 * bare


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks"), [("mixtral", 2), ("gpt_oss", 2), ("llama4", 2), ("mixtral", 4)])
def test_adapters_on_the_weights_of_experts(name: str, ranks: int) -> None:
    pytest.importorskip("peft")
    run_ranks(ranks, _trained, name, ("none", "full", "selective", "50%"), timeout=120)


def _beside_tp(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=re.escape("adapters on the weights of 'base_model.model.model.layers.0.mlp")):
        parallelize(_adapted("mixtral"), ep=2, tp=2, device="cpu")


def test_beside_tensor_parallelism_they_are_refused() -> None:
    pytest.importorskip("peft")
    run_ranks(2, _beside_tp)
