"""Reformer's layers replay themselves: they run without gradients in forward, and again, one by one, in backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checks import assert_bitwise
from tests.models.blocks import under

transformers = pytest.importorskip("transformers")


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its layers draw a seed from the operating system for every forward; two runs compare only with equal seeds."""

    def restart() -> None:
        counter = itertools.count(5)

        def seed() -> int:
            number = next(counter)
            torch.manual_seed(number)
            return number

        monkeypatch.setattr(torch, "seed", seed)

    return restart


def _gradients(ac: str, kinds: list[str], dropout: float) -> list[Tensor | None]:
    config = transformers.ReformerConfig(
        attn_layers=kinds, hidden_size=32, num_attention_heads=2, attention_head_size=16, axial_pos_embds=False,
        feed_forward_size=48, vocab_size=64, max_position_embeddings=32, local_attn_chunk_length=8,
        lsh_attn_chunk_length=8, num_buckets=4, num_hashes=2, is_decoder=True, use_cache=False,
        hidden_dropout_prob=dropout, local_attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    model = under(ac, lambda: transformers.ReformerModel(config).train())
    for _ in range(2):
        out = model(input_ids=torch.arange(32)[None] % 64, attention_mask=torch.ones(1, 32)).last_hidden_state
        out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kinds", [["local", "local"], ["lsh", "lsh"], ["local", "lsh"]], ids="-".join)
@pytest.mark.parametrize("ac", ["full", "selective", "submodule", "sequential"])
def test_reversible_layers_train_as_without_checkpointing(
    ac: str, kinds: list[str], dropout: float, seeds: Any
) -> None:
    seeds()
    expected = _gradients("none", kinds, dropout)
    seeds()
    assert_bitwise(_gradients(ac, kinds, dropout), expected)
