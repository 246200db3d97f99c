"""Block masks of flex attention are made some rows at a time."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from nemo_like.distributed.context import masks


def _sliding(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q >= kv) & (q - kv < 150 + h)


def test_pieces_of_a_block_mask_are_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_AT_ONCE", 1)
    whole, pieces = (
        create_block_mask(_sliding, 1, 2, 597, 600, device="cpu"),
        masks.build(_sliding, (1, 2, 597, 600), "cpu"),
    )
    assert pieces.shape == whole.shape and torch.equal(pieces.to_dense(), whole.to_dense())
    assert torch.equal(*(create_mask(mask.mask_mod, 1, 2, 597, 600, device="cpu") for mask in (pieces, whole)))
