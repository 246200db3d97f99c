"""Flex attention over parts of sequences: loss and gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from nemo_like import ContextParallel, parallelize
from tests_distributed.context.cut_models import LENGTH, batch, build, wrong_in_modes
from tests_distributed.context.flex_models import (
    FlexGPT,
    Separated,
    apart,
    by_head,
    causal,
    sliding,
    slope,
    train_flex_on_the_cpu,
)
from tests_distributed.fsdp.packed_rows import wrong_forms
from tests_distributed.spawn import run_ranks

MODES = ("none", "full", "selective")
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 3 + [2] * 5, [0] * 2 + [1] * 11])


def _whole_mask(mask_mod: Any, rows: int | None = None, heads: int | None = None, length: int = LENGTH) -> BlockMask:
    return create_block_mask(mask_mod, rows, heads, length, length, device="cpu")


def _plain(rank: int, world_size: int) -> list[str]:
    """Masks made inside from the length that a rank sees, by the caller for whole sequences, of documents; slopes; GQA."""
    train_flex_on_the_cpu()
    inputs = batch("nanogpt")
    packed = inputs | {"block_mask": _whole_mask(apart(DOCUMENTS), 2)}
    headed = inputs | {"block_mask": _whole_mask(by_head, None, 4)}
    cp = ContextParallel(world_size)
    wrong = wrong_in_modes(FlexGPT(causal), inputs, cp, MODES[1:2])
    wrong += wrong_in_modes(FlexGPT(sliding), batch("nanogpt", length=37), cp, MODES[:1])
    wrong += wrong_in_modes(FlexGPT(), packed, cp, MODES)
    wrong += wrong_in_modes(FlexGPT(), inputs, cp, MODES[:1])  # looks both ways
    wrong += wrong_in_modes(FlexGPT(None, slope, 2), headed, cp, MODES[:1])
    cp = ContextParallel(world_size, "ulysses")
    wrong += wrong_in_modes(FlexGPT(), packed, cp, MODES[1:2])
    return wrong + wrong_in_modes(FlexGPT(None, slope, 2), headed, cp, MODES[:1])


def test_plain_models() -> None:
    assert run_ranks(2, _plain, timeout=240) == [[], []]


@pytest.mark.long
def test_plain_models_on_four_ranks() -> None:
    assert run_ranks(4, _plain_on_four, timeout=240) == [[]] * 4


def _plain_on_four(rank: int, world_size: int) -> list[str]:
    train_flex_on_the_cpu()
    inputs = batch("nanogpt", length=149)  # two blocks of 128 in a row
    mask = _whole_mask(sliding, length=149)
    return wrong_in_modes(FlexGPT(None, slope, 4), inputs | {"block_mask": mask}, ContextParallel(4), MODES)


def _refused(rank: int, world_size: int) -> None:
    train_flex_on_the_cpu()
    inputs = batch("nanogpt")
    blocks = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    less = BlockMask.from_kv_blocks(blocks[..., 0], blocks, mask_mod=causal, seq_lengths=(LENGTH, LENGTH))
    for model, more, method, words in (
        (FlexGPT(), {"block_mask": less}, "all_gather", "blocks of this one are others"),
        (Separated(), {}, "all_gather", r"reads a tensor \(2, 8\)"),
        (FlexGPT(causal), {}, "ring", "no block masks"),
        (FlexGPT(causal, keys=1), {}, "ulysses", "4 heads, 1 of keys"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            parallelize(model, cp=ContextParallel(2, method))(**inputs, **more)


def test_what_a_block_mask_does_not_say_is_refused() -> None:
    run_ranks(2, _refused)


def _family(rank: int, world_size: int, name: str) -> list[str]:
    train_flex_on_the_cpu()
    wrong = wrong_in_modes(build(name), batch(name), ContextParallel(2), MODES)
    if name.startswith("llama"):
        wrong += wrong_forms(name, 2, ("selective",))
        wrong += wrong_in_modes(build(name), batch(name), ContextParallel(2, "ulysses"), ("full",))
    return wrong


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama+flex", "gemma3_text+flex", pytest.param("bert+flex", marks=pytest.mark.long)])
def test_families(name: str) -> None:
    assert run_ranks(2, _family, name, timeout=240) == [[], []]
