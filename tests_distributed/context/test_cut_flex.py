"""Flex attention over parts of sequences, through transformers' interface: loss and gradients are those of one process.

torch refuses its backward on the CPU before it runs (``_validate_device``), though its plain implementation has one, which
differs from SDPA's by rounding. The tests take that check away, in the process of a rank.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from nemo_like import ContextParallel
from tests_distributed.context.cut_models import batch, build, wrong_in_modes
from tests_distributed.fsdp.packed_rows import wrong_forms
from tests_distributed.spawn import on_ranks

MODES = ("none", "full", "selective")


def train_flex_on_the_cpu() -> None:
    """Until the process ends, flex attention has a backward on the CPU, and nothing is compiled for it."""
    flex._validate_device = lambda *states: None  # type: ignore[attr-defined]
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # type: ignore[attr-defined]
    integration: Any = sys.modules["transformers.integrations.flex_attention"]
    masking: Any = sys.modules["transformers.masking_utils"]
    integration.compile_friendly_flex_attention = _uncompiled
    masking.create_block_mask = _made_eagerly


def _uncompiled(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **kwargs: Any) -> Any:
    return flex.flex_attention(query, key, value, **kwargs)


def _made_eagerly(*args: Any, _compile: bool = False, **kwargs: Any) -> flex.BlockMask:
    return flex.create_block_mask(*args, **kwargs)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "modes"),
    [("llama+flex", MODES[2:]), *((name, MODES) for name in ("llama+flex", "gemma3_text+flex", "bert+flex"))],
)
@on_ranks(2, timeout=240)
def test_families(rank: int, world_size: int, name: str, modes: tuple[str, ...]) -> None:
    whole = build(name)
    train_flex_on_the_cpu()
    wrong = wrong_in_modes(whole, batch(name), ContextParallel(2), modes)
    if modes == MODES and name.startswith("llama"):
        wrong += wrong_forms(name, 2, ("selective",))
        wrong += wrong_in_modes(build(name), batch(name), ContextParallel(2, "ulysses"), ("full",))
    assert not wrong, wrong
