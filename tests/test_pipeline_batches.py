"""What each microbatch of a pipeline counts in the mean loss."""

from __future__ import annotations

import pytest
import torch

from nemo_like.distributed.pipeline.batches import loss_weights


def _parts(**more: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    ids = torch.zeros(2, 4, dtype=torch.long)
    return [{"ids": row[None]} | {name: value[i : i + 1] for name, value in more.items()} for i, row in enumerate(ids)]


def test_what_a_loss_ignores_is_negative_whatever_targets_are_called() -> None:
    targets = torch.tensor([[1, 2, 3, 4], [1, -1, -1, -1]])
    for name in ("labels", "targets", "y"):
        assert loss_weights(_parts(**{name: targets}), takes_items=False) == [0.8, 0.2]
    assert loss_weights(_parts(targets=targets.abs()), takes_items=False) == [0.5, 0.5]


def test_two_that_may_be_targets() -> None:
    targets = torch.tensor([[1, 2, 3, 4], [1, -1, -1, -1]])
    with pytest.raises(ValueError, match="negative numbers in targets, y"):
        loss_weights(_parts(targets=targets, y=targets), takes_items=False)


def test_a_microbatch_in_which_nothing_counts() -> None:
    with pytest.raises(ValueError, match="Microbatch 1 has no label that counts"):
        loss_weights(_parts(targets=torch.tensor([[1, 2], [-1, -1]])), takes_items=False)
