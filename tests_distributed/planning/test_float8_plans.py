"""``precision="fp8"`` beside a memory budget on two gloo ranks (emulated on the CPU): bits, and predicted peaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import FSDP2, parallelize
from nemo_like.planning.planner import plan_for
from tests.models.fit_models import llama
from tests_distributed.allocated import loop_peak_bytes
from tests_distributed.spawn import run_ranks

pytest.importorskip("torchao.float8")
pytest.importorskip("transformers")

BUDGET = "3600KiB"


def _gradients(model: Any, sample: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model(**sample).loss.backward()
    return [p.grad.to_local() for p in model.parameters()]


def _run(rank: int, world_size: int, cp: int, word: str) -> tuple[bool, int, int, set[str]]:
    ids = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(rank // cp))
    sample = {"input_ids": ids, "labels": ids}
    said = {"precision": word, "device": "cpu", "cp": cp, "sample_input": sample}
    plan = plan_for(llama(), ac=BUDGET, sample_input=sample, gpu="cpu", precision=word, cp=cp, world_size=world_size)
    model = parallelize(llama(), FSDP2(), ac=BUDGET, **said)
    own = _gradients(model, sample)
    plain = _gradients(parallelize(llama(), FSDP2(), ac="none", **said), sample)
    same = len(own) == len(plain) and all(torch.equal(one, other) for one, other in zip(own, plain))
    model.zero_grad()
    return same, plan.peak_bytes, loop_peak_bytes(model, sample), {layer.label for layer in plan.layers}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("cp", "word"), [(1, "fp8"), pytest.param(1, "fp8-rowwise", marks=pytest.mark.long), (2, "fp8")]
)
def test_sharded_layers_give_the_same_bits_and_peak_as_planned(cp: int, word: str) -> None:
    for same, predicted, measured, labels in run_ranks(2, _run, cp, word):
        assert same
        assert abs(predicted - measured) <= 0.01 * measured, (predicted, measured)
        assert labels - {"none", "full"} or cp > 1, labels


def _refused(rank: int, world_size: int) -> str:
    ids = torch.zeros(4, 64, dtype=torch.long)
    with pytest.raises(ValueError) as refused:
        parallelize(llama(), FSDP2(), ac=BUDGET, precision="fp8-gather", sample_input={"input_ids": ids, "labels": ids})
    return str(refused.value)


def test_weights_that_are_gathered_in_float8_take_no_budget() -> None:
    for words in run_ranks(2, _refused):
        assert "precision is 'fp8-gather'" in words and "Use precision='fp8'" in words
