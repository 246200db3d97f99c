"""How a pipeline's batch is cut, and what each micro-batch counts in its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nemo_like.distributed.pipeline.batches import cut_batch, joined, repeated
from nemo_like.distributed.pipeline.loss_mean import LossMean
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
