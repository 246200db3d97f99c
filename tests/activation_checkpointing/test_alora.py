"""peft's activated LoRA: hooks that it puts on the layers for one call hand the adapters where to start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import parallelize
from tests.checks import assert_bitwise, same, step
from tests.models.families import FAMILIES, text

peft = pytest.importorskip("peft")

INVOCATION = [5, 7]


def batch() -> dict[str, Any]:
    """Each sequence has the invocation tokens at a place of its own."""
    made = text()
    ids = made["input_ids"].masked_fill(torch.isin(made["input_ids"], torch.tensor(INVOCATION)), 9)
    for row, at in enumerate((2, 6)):
        ids[row, at : at + 2] = torch.tensor(INVOCATION)
    return {"input_ids": ids, "labels": ids}


def adapted(invocation: list[int] | None = None) -> nn.Module:
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM",
        init_lora_weights=False, lora_dropout=0.1, alora_invocation_tokens=invocation,
    )  # fmt: skip
    torch.manual_seed(0)
    return peft.get_peft_model(FAMILIES["llama"].build(), config).train()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    step(model, seed=3, **batch())
    return step(model, seed=3, **batch())


@pytest.mark.parametrize("ac", ["full", "selective", "submodule", "sequential"])
def test_gradients_are_those_of_the_bare_model(ac: str) -> None:
    expected = gradients(adapted(INVOCATION))
    assert not same(gradients(adapted()), expected)  # so the offsets do count
    assert_bitwise(gradients(parallelize(adapted(INVOCATION), "single", ac)), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", ["60%", "30%"])
def test_budgets_are_planned_with_the_adapters_tokens(budget: str) -> None:
    """Which tokens the adapters see hangs on the ids alone, and a run without weights has those."""
    model = parallelize(adapted(INVOCATION), "single", budget, sample_input=batch())
    assert_bitwise(gradients(model), gradients(adapted(INVOCATION)))
    bare, without = adapted(INVOCATION), batch()["input_ids"][:, 4:]  # one sequence has no invocation now
    again = {"input_ids": without, "labels": without}
    assert_bitwise(step(model, seed=3, **again), step(bare, seed=3, **again))
