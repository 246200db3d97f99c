"""Flex attention on the CPU, and plain models that use it.

torch refuses its backward there before it runs (``_validate_device``), though its plain implementation has one, which
differs from SDPA's by rounding. The tests take that check away, in the process of a rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.models.tied_decoder import DIM, HEADS, TiedDecoder


def train_flex_on_the_cpu() -> None:
    """Until the process ends, flex attention has a backward on the CPU, and nothing is compiled for it."""
    flex._validate_device = lambda *states: None  # type: ignore[attr-defined]
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # type: ignore[attr-defined]
    integration: Any = sys.modules.get("transformers.integrations.flex_attention")
    masking: Any = sys.modules.get("transformers.masking_utils")
    if integration is not None and masking is not None:
        integration.compile_friendly_flex_attention = _uncompiled
        masking.create_block_mask = _made_eagerly


def _uncompiled(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **kwargs: Any) -> Any:
    return flex.flex_attention(query, key, value, **kwargs)


def _made_eagerly(*args: Any, _compile: bool = False, **kwargs: Any) -> BlockMask:
    return flex.create_block_mask(*args, **kwargs)


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def sliding(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < 4)


def by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Every head has a window of its own."""
    return (q >= kv) & (q - kv <= 2 + h)


def apart(documents: Tensor) -> Callable[..., Tensor]:
    """Causal within documents, whose numbers are (B, S)."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    return mask_mod


def slope(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """ALiBi."""
    return score - (q - kv).abs() * torch.exp2(-(h + 1.0))


class FlexGPT(TiedDecoder):
    """(idx, targets) to (logits, loss), attention by flex attention: with the caller's block mask, or one made inside."""

    def __init__(self, inside: Callable[..., Tensor] | None = None, score_mod: Any = None, keys: int = HEADS) -> None:
        super().__init__()
        self.inside, self.positions = inside, nn.Embedding(160, DIM)
        for block in self.blocks:
            block.attn = FlexBlock(score_mod, keys)

    def forward(  # type: ignore[override]
        self, idx: Tensor, targets: Tensor | None = None, block_mask: BlockMask | None = None
    ) -> tuple[Tensor, Tensor | None]:
        length = idx.shape[1]
        if self.inside is not None:
            block_mask = create_block_mask(self.inside, len(idx), None, length, length, device="cpu")
        x = self.embed(idx) + self.positions(torch.arange(length))
        for block in self.blocks:
            block.attn.mask = block_mask
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Separated(FlexGPT):
    """Finds its documents inside, in what a rank sees."""

    def forward(self, idx: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        self.inside = apart((idx == 5).long().cumsum(1))
        return super().forward(idx, *args, **kwargs)


class FlexBlock(nn.Module):
    """(B, T, D) to (B, T, D)."""

    def __init__(self, score_mod: Any, keys: int) -> None:
        super().__init__()
        self.score_mod, self.mask = score_mod, None
        self.q, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.k, self.v = nn.Linear(DIM, DIM // HEADS * keys), nn.Linear(DIM, DIM // HEADS * keys)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        out = flex_attention(q, k, v, self.score_mod, self.mask, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(out.transpose(1, 2).flatten(2))
