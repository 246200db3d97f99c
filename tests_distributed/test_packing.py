"""Packed documents equal the documents one by one, with and without context parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import ContextParallel, parallelize
from tests_distributed.cut_models import build
from tests_distributed.packed_rows import packed, wrong_forms
from tests_distributed.spawn import run_ranks

NAMES = ("llama", "gemma3_text", "gpt_oss", "bert")


@pytest.mark.parametrize("name", [*NAMES, "gpt2"])
def test_on_one_rank(name: str) -> None:
    assert wrong_forms(name, 1, ("none", "selective")) == []


def _cut(rank: int, world_size: int, name: str, cp: Any, modes: tuple[str, ...]) -> list[str]:
    return wrong_forms(name, cp, modes)


@pytest.mark.parametrize("name", NAMES)
def test_cut_over_two_ranks(name: str) -> None:
    assert run_ranks(2, _cut, name, 2, ("none", "selective", "full"), timeout=120) == [[], []]


def test_cut_by_heads() -> None:
    assert run_ranks(2, _cut, "llama", ContextParallel(2, "ulysses"), ("selective",)) == [[], []]


def test_what_cannot_be_told_apart_is_refused() -> None:
    model = parallelize(build("llama"), "single", "none")
    rows = packed("numbers")
    with pytest.raises(ValueError, match="in one piece"):
        model(**rows | {"attention_mask": rows["attention_mask"].roll(2, 1)})
    with pytest.raises(ValueError, match="go on where a document begins"):
        model(**rows, position_ids=torch.arange(15).expand(2, -1))
    with pytest.raises(ValueError, match="cu_seqlens is"):
        model(**packed("positions") | {"position_ids": None, "cu_seqlens": torch.tensor([0, 31])})
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        parallelize(build("t5"), "single", "none")(**rows)
    with pytest.raises(NotImplementedError, match="GatedDeltaNet"):
        parallelize(build("qwen3_next"), "single", "none")(**rows)
