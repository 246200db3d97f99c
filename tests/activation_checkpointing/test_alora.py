"""peft's activated LoRA: hooks that it puts on the layers for one call hand the adapters where to start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import parallelize
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
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        model(**batch()).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("ac", ["full", "selective", "submodule", "sequential"])
def test_gradients_are_those_of_the_bare_model(ac: str) -> None:
    expected = gradients(adapted(INVOCATION))
    everywhere = gradients(adapted())
    assert not all(torch.equal(expected[name], everywhere[name]) for name in expected)  # so the offsets do count
    actual = gradients(parallelize(adapted(INVOCATION), "single", ac))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", ["60%", "30%"])
def test_budgets_are_planned_with_the_adapters_tokens(budget: str) -> None:
    """Which tokens the adapters see hangs on the ids alone, and a run without weights has those."""
    expected = gradients(adapted(INVOCATION))
    model = parallelize(adapted(INVOCATION), "single", budget, sample_input=batch())
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    bare, without = adapted(INVOCATION), batch()["input_ids"][:, 4:]  # one sequence has no invocation now
    for each in (bare, model):
        each.zero_grad()
        torch.manual_seed(3)
        each(input_ids=without, labels=without).loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), bare.parameters()) if b.grad is not None)
