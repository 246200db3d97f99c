"""How parts are cut: FSDP2's units by dtype, micro-batches of a pipeline and what each counts, rows of a block mask."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from nemo_like.distributed.context import attention
from nemo_like.distributed.pipeline.cut import cut_batch, joined, repeated
from nemo_like.distributed.pipeline.loss_mean import LossMean
from nemo_like.distributed.units import plan_units
from nemo_like.options import PipelineParallel
from tests.models.tiny import llama

LABELS = torch.tensor([[1, 2, 3, 4], [5, -100, -100, -100], [6, 7, -100, 8]])


def test_rows_are_cut_filled_and_put_together_again() -> None:
    batch = {"ids": LABELS.abs(), "labels": LABELS, "scale": torch.tensor(2.0), "word": "x"}
    parts = cut_batch(batch, 2, {"labels": -1})
    assert parts[1]["labels"].tolist() == [[6, 7, -100, 8], [-1] * 4]
    assert parts[1]["ids"].tolist() == [[6, 7, 100, 8]] * 2 and parts[0]["scale"] is batch["scale"]
    with pytest.raises(
        ValueError, match="The batch has 3 rows and the pipeline 2 micro-batches: give a multiple of 2 rows"
    ):
        cut_batch(batch, 2)
    with pytest.raises(ValueError, match="no tensor of shape"):
        cut_batch({"labels": torch.zeros(4)}, 2)
    again = joined(*cut_batch({name: value[:2] for name, value in batch.items() if name != "scale"}, 2))
    assert torch.equal(again["labels"], LABELS[:2]) and again["word"] == "x"[:2]
    assert repeated(batch, 2)["labels"].shape == (6, 4)


@pytest.mark.parametrize(
    ("said", "more", "shares"),
    [
        ("tokens", {}, [4 / 8, 1 / 8, 3 / 8]),
        ("tokens", {"num_items_in_batch": 9}, [1.0] * 3),
        ("Rows", {}, [1 / 3] * 3),
        ("sum", {}, [1.0] * 3),
        (lambda part: (part["labels"] > 4).sum(), {}, [0.0, 1 / 4, 3 / 4]),
        (lambda part: len(part["labels"]), {}, [1 / 3] * 3),
    ],
)
def test_shares_of_micro_batches(said: Any, more: dict[str, Any], shares: list[float]) -> None:
    mean = LossMean(nn.Linear(2, 2), PipelineParallel(2, loss_mean=said))
    assert mean.cut({"labels": LABELS} | more, 3)[1] == shares
    assert mean.cut({"labels": LABELS} | more, 1)[1] == [1.0]


def test_a_causal_model_predicts_no_first_label() -> None:
    mean = LossMean(llama(num_hidden_layers=1), PipelineParallel(2))
    assert mean.cut({"labels": LABELS}, 3)[1] == [3 / 5, 0, 2 / 5]
    assert mean.cut({"labels": LABELS, "shift_labels": LABELS}, 3)[1] == [4 / 8, 1 / 8, 3 / 8]
    assert [part["labels"].tolist() for part in mean.cut({"labels": LABELS}, 2)[0]][1][1] == [-100] * 4


def test_a_wrong_word() -> None:
    with pytest.raises(
        ValueError, match=r"loss_mean is 'token'; it must be 'tokens', 'rows', 'sum' or a function.*tokens"
    ):
        PipelineParallel(2, loss_mean="token")


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def linear(dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(4, 4, bias=False, dtype=dtype)


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize(
    ("dtypes", "main", "split"),
    [
        ((FP32, FP32, FP32, FP32), FP32, {}),
        ((BF16, BF16, BF16, BF16), BF16, {}),
        ((FP32, FP16, FP16, FP16), FP16, {"layer.a": FP32}),
        ((FP16, FP16, FP32, FP16), FP16, {"layer.b.1": FP32}),
        ((FP32, FP16, FP16, BF16), FP16, {"layer.a": FP32, "layer.c": BF16}),
        ((FP16, FP32, FP32, FP16), FP16, {"layer.b.0+layer.b.1": FP32}),
    ],
)
def test_what_is_stored_in_another_dtype_is_a_unit_of_its_own(
    dtypes: tuple[torch.dtype, ...], main: torch.dtype, split: dict[str, torch.dtype], buffer: bool
) -> None:
    a, first, second, c = map(linear, dtypes)
    layer = nn.Module()
    layer.a, layer.b, layer.c = a, nn.Sequential(first, second), c
    if buffer:
        layer.b.register_buffer("scale", torch.zeros(1, dtype=torch.float64))
    plan = plan_units(nn.ModuleDict({"layer": layer}), [layer])
    assert {param.dtype for param in plan.layers[0].params} == {main}
    assert {unit.name: {param.dtype for param in unit.params} for unit in plan.by_dtype} == {
        name: {dtype} for name, dtype in split.items()
    }
    assert sum(len(unit.params) for unit in plan.units) == 4


def test_a_model_without_parameters_has_nothing_to_shard() -> None:
    model = nn.Sequential(nn.Identity())
    assert not any(unit.params for unit in plan_units(model, [model[0]]).units)


def _sliding(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q >= kv) & (q - kv < 150 + h)


def test_pieces_of_a_block_mask_are_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_AT_ONCE", 1)
    whole, pieces = (
        create_block_mask(_sliding, 1, 2, 597, 600, device="cpu"),
        attention.build_block_mask(_sliding, (1, 2, 597, 600), "cpu"),
    )
    assert pieces.shape == whole.shape and torch.equal(pieces.to_dense(), whole.to_dense())
    assert torch.equal(*(create_mask(mask.mask_mod, 1, 2, 597, 600, device="cpu") for mask in (pieces, whole)))
