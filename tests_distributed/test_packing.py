"""Packed documents equal the documents one by one, with and without context parallelism."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from nemo_like import ContextParallel, parallelize
from tests_distributed.cut_models import LOSS, batch, build, differences, step
from tests_distributed.packed_rows import packed, packed_pictures, wrong_forms
from tests_distributed.spawn import run_ranks

NAMES = ("llama", "gemma3_text", "gpt_oss", "bert")
MORE_NAMES = ("qwen3", "deepseek_v3", "mixtral", "gemma2", "phi3", "stablelm", "olmoe", "modernbert")
PICTURE_NAMES = ("qwen3_vl", "llava")
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


def _pictures(rank: int, world_size: int, name: str) -> list[str]:
    """The rows of a batch with pictures, packed into one, are the batch."""
    whole, inputs = build(name), batch(name)
    inputs.pop("attention_mask", None)
    loss, expected = step(copy.deepcopy(whole), inputs)
    wrong = []
    for cp in (1, world_size):
        model = parallelize(copy.deepcopy(whole), "single" if cp == 1 else "fsdp2", "selective", cp=cp)
        for form in ("positions", "numbers"):
            found, grads = step(model, packed_pictures(whole, inputs, form))
            if not abs(found - loss) <= 2 * LOSS * abs(loss):
                wrong.append(f"cp={cp}, {form}: loss {found} for {loss}")
            wrong += [f"cp={cp}, {form}: {text}" for text in differences(grads, expected)]
        if "image_grid_thw" in inputs:
            numbers = packed_pictures(whole, inputs, "numbers") | {"position_ids": None}
            with pytest.raises(NotImplementedError, match=r"position_ids of four streams"):
                model(**numbers)
    return wrong


@pytest.mark.parametrize(
    "name", ["qwen2_vl", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3_vl", "llava"))]
)
def test_documents_with_pictures(name: str) -> None:
    assert run_ranks(2, _pictures, name, timeout=120) == [[], []]


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
