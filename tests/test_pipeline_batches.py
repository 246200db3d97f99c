"""How a pipeline's batch is cut, and what counts in each microbatch's loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like.distributed.pipeline.batches import (
    MEAN,
    SUM,
    BatchShares,
    Counted,
    LossShares,
    cut_batch,
    first_rows,
    joined,
    targets_of,
)
from nemo_like.losses.batch_means import LossCall, LossCalls, mean_of

LABELS = torch.tensor([[1, 2, 3, 4], [5, -100, -100, -100], [6, 7, -100, 8]])


def test_rows_are_cut_filled_and_put_together_again() -> None:
    batch = {"ids": LABELS.abs(), "labels": LABELS, "scale": torch.tensor(2.0), "word": "x"}
    parts, rows, tokens = cut_batch(batch, 2, {"labels": -1})
    assert (rows, tokens) == (2, 4) and parts[1]["labels"].tolist() == [[6, 7, -100, 8], [-1] * 4]
    assert parts[1]["ids"].tolist() == [[6, 7, 100, 8]] * 2 and parts[0]["scale"] is batch["scale"]
    with pytest.raises(
        ValueError, match="The batch has 3 rows and the pipeline 2 micro-batches: give a multiple of 2 rows"
    ):
        cut_batch(batch, 2)
    with pytest.raises(ValueError, match="no tensor of shape"):
        cut_batch({"labels": torch.zeros(4)}, 2)
    again = joined(*cut_batch(first_rows(batch, 2), 2)[0])
    assert torch.equal(again["labels"], LABELS[:2]) and again["word"] == "x"


@pytest.mark.parametrize(
    ("target", "window"),
    [
        (LABELS, "all"),
        (LABELS[:, 1:], "next"),
        (F.pad(LABELS, (0, 1), value=-100)[:, 1:], "next"),
        (LABELS[LABELS >= 0], "all"),
        (LABELS.t(), "all"),
    ],
)
def test_where_targets_are_found(target: Tensor, window: str) -> None:
    batch = {"input_ids": LABELS.abs(), "labels": LABELS, "mask": LABELS >= 0}
    assert targets_of(LossCall(target.flatten(), -100, None, "mean"), batch) == [Counted("labels", window, -100)]


def test_targets_that_are_not_in_the_batch() -> None:
    assert targets_of(LossCall(LABELS + 1, -100, None, "mean"), {"labels": LABELS}) == []
    same = {"ids": LABELS.abs(), "y": LABELS.abs()}
    found = targets_of(LossCall(LABELS.abs(), -100, None, "mean"), same)
    assert [one.name for one in found] == ["ids", "y"], "which of them, a later batch tells"


def test_shares_of_microbatches() -> None:
    parts, _, _ = cut_batch({"labels": LABELS}, 3)
    known = LossShares((), [MEAN, SUM, Counted("labels", "all", -100), Counted("labels", "next")])
    assert known.of(parts) == [[1 / 3] * 3, [1.0] * 3, [4 / 8, 1 / 8, 3 / 8], [3 / 5, 0, 2 / 5]]
    assert known.differ(parts) and not known.certain
    assert LossShares((), [SUM]).certain and not LossShares((), [Counted("labels", "all", -100)]).certain


def _loss(logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    return nn.CrossEntropyLoss(weight, label_smoothing=0.1)(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("weighted", [False, True])
def test_means_of_microbatches_add_up_to_the_mean_of_the_batch(weighted: bool) -> None:
    weight = torch.linspace(0.2, 3.0, 10) if weighted else None
    logits = torch.randn(3, 4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = None if weight is None else weight.double()
    parts, _, _ = cut_batch({"labels": LABELS, "logits": logits}, 3)
    known = LossShares([[Counted("labels", "all", -100)]], [SUM], None, [weight])
    shares = BatchShares(known, parts, [1.0] * 3)
    total = torch.zeros((), dtype=torch.float64)
    for number, part in enumerate(parts):
        with shares.calls(number):
            total += _loss(part["logits"], part["labels"], weight)
    torch.testing.assert_close(total, _loss(logits, LABELS, weight), rtol=1e-12, atol=0)
    assert shares.off(torch.device("cpu")) < 1e-6
    with shares.calls(0), pytest.raises(ValueError, match="more mean cross entropies than the 1 of the first batch"):
        _loss(logits, LABELS, weight) + _loss(logits, LABELS, weight)
    with shares.calls(0):
        _loss(logits, LABELS, weight)
    assert shares.off(torch.device("cpu")) > 0.1, "these are not the targets of microbatch 0"


def test_cross_entropies_are_torchs_again_afterwards() -> None:
    before = F.cross_entropy, F.nll_loss
    with LossCalls() as calls:
        F.cross_entropy(torch.randn(4, 10), torch.tensor([1, 2, 3, -100]))
        F.nll_loss(torch.randn(4, 10), torch.tensor([1, 2, 3, 0]), reduction="sum")
        F.cross_entropy(torch.randn(4, 10), torch.rand(4, 10))  # probabilities: every row counts
    assert [(call.reduction, int(call.counted())) for call in calls.seen] == [("mean", 3), ("sum", 4)]
    assert (F.cross_entropy, F.nll_loss) == before
    assert mean_of(torch.tensor(6.0), calls.seen[0]) == 2.0
