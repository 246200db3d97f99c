"""A block of Llama's shapes, written plainly: what planning is measured on by hand."""

import torch
from torch import nn

D, S = 4096, 8192


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.to(torch.float32)
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rotate(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class LlamaStyle(nn.Module):
    """Hidden D, KV D/4, FFN 3.5 D, heads of 128."""

    def __init__(self) -> None:
        super().__init__()

        def linear(i: int, o: float) -> nn.Linear:
            return nn.Linear(i, int(o), bias=False)

        self.q, self.k, self.v, self.o = linear(D, D), linear(D, D / 4), linear(D, D / 4), linear(D, D)
        self.gate, self.up, self.down = linear(D, 3.5 * D), linear(D, 3.5 * D), linear(int(3.5 * D), D)
        self.n1, self.n2 = Norm(), Norm()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # (B, S, D) -> (B, S, D)
        h = self.n1(x)
        q, k, v = (w(h).view(*x.shape[:2], -1, 128).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = q * cos + _rotate(q) * sin, k * cos + _rotate(k) * sin
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(x.shape))
        h = self.n2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
