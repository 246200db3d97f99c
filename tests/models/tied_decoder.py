"""A GPT-2 in plain PyTorch with separate projections, as tensor parallelism needs them."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.blocks import in_turn

VOCAB, DIM, HEADS = 64, 32, 4


class Attention(nn.Module):
    """As GPT-2's, with separate projections, and heads counted from what is there: (B, T, D) to (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = HEADS, DIM // HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TiedDecoder(nn.Module):
    """GPT-2 by structure, plain PyTorch: token ids (B, T) to logits (B, T, V); the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = in_turn(self.blocks, self.embed(ids) + self.positions(torch.arange(ids.shape[1])))
        return self.head(self.norm(x))
