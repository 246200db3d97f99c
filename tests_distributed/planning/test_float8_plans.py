"""``precision="fp8"`` beside a memory budget on two gloo ranks (emulated on the CPU): bits, and predicted peaks."""

from __future__ import annotations

import pytest
import torch

from nemo_like import FSDP2, parallelize
from nemo_like.planning.planner import plan_for
from tests.checks import assert_bitwise, step
from tests.models.fit_models import llama
from tests_distributed.allocated import loop_peak_bytes
from tests_distributed.spawn import on_ranks

pytest.importorskip("torchao.float8")
pytest.importorskip("transformers")

BUDGET = "3000KiB"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("cp", "word"), [(1, "fp8"), pytest.param(1, "fp8-rowwise", marks=pytest.mark.long), (2, "fp8")]
)
@on_ranks(2)
def test_sharded_layers_give_the_same_bits_and_peak_as_planned(rank: int, world_size: int, cp: int, word: str) -> None:
    ids = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(rank // cp))
    sample = {"input_ids": ids, "labels": ids}
    said = {"precision": word, "device": "cpu", "cp": cp, "sample_input": sample}
    plan = plan_for(llama(2), ac=BUDGET, sample_input=sample, gpu="cpu", precision=word, cp=cp, world_size=world_size)
    model = parallelize(llama(2), FSDP2(), ac=BUDGET, **said)
    plain = step(parallelize(llama(2), FSDP2(), ac="none", **said), **sample)
    assert_bitwise(step(model, **sample), plain)
    model.zero_grad()
    measured = loop_peak_bytes(model, sample)
    assert abs(plan.peak_bytes - measured) <= 0.01 * measured, (plan.peak_bytes, measured)
    assert {layer.label for layer in plan.layers} - {"none", "full"} or cp > 1


@on_ranks(2)
def test_weights_that_are_gathered_in_float8_take_no_budget(rank: int, world_size: int) -> None:
    ids = torch.zeros(4, 64, dtype=torch.long)
    with pytest.raises(ValueError, match=r"precision is 'fp8-gather'.*Use precision='fp8'"):
        parallelize(llama(), FSDP2(), ac=BUDGET, precision="fp8-gather", sample_input={"input_ids": ids, "labels": ids})
