"""Budgets where only a part of each block trains, so that backward needs little of attention: planned, and to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nemo_like import parallelize
from tests.checks import assert_bitwise, step
from tests.models.adapted import with_lora
from tests.models.tiny import llama


def _adapted(targets: list[str]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        pytest.importorskip("peft")
        return with_lora(llama(), targets)

    return make


def _mlps_alone() -> nn.Module:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    return model


MODELS = {"MLPs adapted": _adapted(["gate_proj", "up_proj", "down_proj"]), "MLPs alone": _mlps_alone}


@pytest.mark.parametrize("budget", ["35%", pytest.param("65%", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_attention_that_backward_does_not_need_is_skipped(name: str, budget: str) -> None:
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    sample = {"input_ids": ids, "labels": ids}
    torch.manual_seed(0)
    bare = MODELS[name]().train()
    model = parallelize(copy.deepcopy(bare), "single", budget, sample_input=sample, device="cpu")
    assert_bitwise(step(model, **sample), step(bare, **sample))
