"""A plain PyTorch model: no Hugging Face, no launcher, any device.

    python docs/examples/plain_pytorch.py

`parallelize` finds the repeated layers (``blocks``) by their structure. Gradients are those of the bare model.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nemo_like import parallelize


class Block(nn.Module):
    """(B, T, D) to (B, T, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        )  # each (B, heads, T, D / heads)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Token ids (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, vocabulary: int = 64, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
model = parallelize(Decoder(), ac="selective")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(64, (4, 33), device=next(model.parameters()).device)
for step in range(5):
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
