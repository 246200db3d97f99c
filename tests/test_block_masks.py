"""Block masks of parts, and where flex attention is replaced; no process group."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from nemo_like.distributed.context import masks, sequence_ops
from nemo_like.distributed.context.attention import replace_flex
from nemo_like.distributed.context.methods import method_of
from nemo_like.distributed.context.parts import Parts
from nemo_like.distributed.context.verify_cut import first_tokens


def _sliding(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q >= kv) & (q - kv < 150 + h)


def _dense(mask: object) -> torch.Tensor:
    """What a block mask shows, by its function and by its blocks."""
    shown = create_mask(mask.mask_mod, *mask.shape, device="cpu")  # type: ignore[attr-defined]
    blocks = mask.to_dense().bool().repeat_interleave(128, -1).repeat_interleave(128, -2)  # type: ignore[attr-defined]
    return shown & blocks[..., : shown.shape[-2], : shown.shape[-1]]


@pytest.mark.parametrize("at_once", [2**28, 1])
def test_a_part_sees_what_its_rows_of_the_whole_see(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_AT_ONCE", at_once)
    length, ranks = 597, 2  # 600 with padding
    whole = create_block_mask(_sliding, 1, 2, length, length, device="cpu")
    expected = sequence_ops.pad(_dense(whole), 3, ranks)
    for rank in range(ranks):
        parts = Parts(ranks, rank, "", method_of("all_gather"))
        made = masks.of_part(parts, whole, (1, 2, 300, 600), length, "cpu")
        assert made.shape == (1, 2, 300, 600)
        rows = sequence_ops.positions(600, ranks, rank)
        real = rows < length
        found = _dense(made)
        assert torch.equal(found[:, :, real], expected[:, :, rows[real]])
        assert torch.equal(found[:, :, ~real], (rows[~real, None] == torch.arange(600)).expand(1, 2, -1, -1))
        assert masks.of_part(parts, whole, (1, 2, 300, 600), length, "cpu") is made, "made once"
        assert masks.of_part(parts, made, (1, 2, 300, 600), length, "cpu") is made
        for _ in range(20):
            masks.of_part(
                parts, create_block_mask(_sliding, 1, 1, 300, 300, device="cpu"), (1, 2, 300, 600), 600, "cpu"
            )
        assert len(parts.masks.blocks) == 8


def test_the_first_tokens_of_a_mask() -> None:
    whole = create_block_mask(_sliding, 1, 2, 300, 300, device="cpu")
    given = first_tokens({"mask": whole, "ids": torch.ones(2, 300)}, 300, 16, 2)
    assert given["ids"].shape == (2, 32)
    assert torch.equal(_dense(given["mask"]), _dense(whole)[..., :32, :32])


class _Holder(nn.Module):
    of_class = staticmethod(flex_attention)

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.compile(flex_attention)


class _Unconnected:
    """As Ray's client is, which stands in one of its files."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not connected")


def test_every_place_that_holds_flex_attention_is_found_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    file = types.ModuleType("a_file_with_flex")
    file.attend = compiled = torch.compile(flex_attention)  # type: ignore[attr-defined]
    file.client = _Unconnected()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_file_with_flex", file)
    model = nn.Sequential(_Holder())
    before = (globals()["flex_attention"], file.attend, _Holder.of_class, model[0].own)  # type: ignore[attr-defined]
    undo = list(replace_flex(model))
    now = (globals()["flex_attention"], file.attend, _Holder.of_class, model[0].own)  # type: ignore[attr-defined]
    assert not any(one is other for one, other in zip(before, now))
    assert list(replace_flex(model)) == [], "once"
    states = torch.randn(1, 1, 8, 4)
    assert torch.equal(now[0](states, states, states), before[0](states, states, states)), "whole sequences as ever"
    for take_back in reversed(undo):
        take_back()
    after = (globals()["flex_attention"], file.attend, _Holder.of_class, model[0].own)  # type: ignore[attr-defined]
    assert all(one is other for one, other in zip(before, after)) and file.attend is compiled  # type: ignore[attr-defined]
