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
MORE_NAMES = ("qwen3", "deepseek_v3", "mixtral", "gemma2", "phi3", "stablelm", "olmoe", "modernbert")
LONG_NAMES = (*NAMES[1:], "qwen3", "deepseek_v3", "mixtral")


@pytest.mark.parametrize("name", [*NAMES, "gpt2"])
def test_on_one_rank(name: str) -> None:
    assert wrong_forms(name, 1, ("none", "selective")) == []


def _cut(rank: int, world_size: int, name: str, cp: Any, modes: tuple[str, ...]) -> list[str]:
    return wrong_forms(name, cp, modes)


@pytest.mark.parametrize("name", NAMES)
def test_cut_over_two_ranks(name: str) -> None:
    assert run_ranks(2, _cut, name, 2, ("none", "selective", "full"), timeout=120) == [[], []]


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_NAMES)
def test_more_families_cut_over_two_ranks(name: str) -> None:
    assert run_ranks(2, _cut, name, 2, ("none", "selective", "full"), timeout=120) == [[], []]


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in LONG_NAMES)])
def test_cut_over_four_ranks(name: str) -> None:
    assert run_ranks(4, _cut, name, 4, ("selective",), timeout=120) == [[]] * 4


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
    with pytest.raises(NotImplementedError, match=r"rows of 15 tokens, and attention_chunk_size \(4\)"):
        parallelize(build("llama4"), "single", "none")(**rows)
    with pytest.raises(NotImplementedError, match=r"rows of 15 tokens, and floor_scale \(2\)"):
        parallelize(build("llama4_tuned"), "single", "none")(**rows)
    with pytest.raises(NotImplementedError, match="GatedDeltaNet"):
        parallelize(build("qwen3_next"), "single", "none")(**rows)
