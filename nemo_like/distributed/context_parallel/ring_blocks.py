"""Attention of some queries over some keys, with its log-sum-exps: what ring attention is put together from.

On the CPU by torch's fused operator, which returns them. Elsewhere by tiles of plain products in float32: exact on any
device, though slower than a fused kernel; those of CUDA were not run here.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE = 512
"""Queries at a time, so that scores are (B, H, 512, keys)."""


def attention_block(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(B, H, L, D) queries over (B, H, M, D) keys and values: the output, and (B, H, L) log-sum-exps in float32.

    causal: query i sees the keys up to i; L is M then.
    """
    if query.device.type == "cpu":
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, total.float()
    return tiled_block(query, key, value, causal, scale)


def attention_block_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; out, total: of the queries over all keys, not of this block's alone."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, total, 0.0, causal, scale=scale
        )
    return tiled_block_backward(grad, query, key, value, out, total, causal, scale)


def tiled_block(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`attention_block` by plain products."""
    outs, totals = [], []
    for first in range(0, query.shape[2], _TILE):
        scores = _scores(query[:, :, first : first + _TILE], key, first, causal, scale)
        total = scores.logsumexp(-1)
        outs.append((scores - total[..., None]).exp() @ value.float())
        totals.append(total)
    return torch.cat(outs, 2).to(query.dtype), torch.cat(totals, 2)


def tiled_block_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_block_backward` by plain products."""
    of_key, of_value = (torch.zeros(key.shape, dtype=torch.float32, device=key.device) for _ in range(2))
    of_query = []
    for first in range(0, query.shape[2], _TILE):
        rows = slice(first, first + _TILE)
        q, g, o = query[:, :, rows].float(), grad[:, :, rows].float(), out[:, :, rows].float()
        weights = (_scores(q, key, first, causal, scale) - total[:, :, rows, None]).exp()
        of_value += weights.transpose(-1, -2) @ g
        of_weights = g @ value.float().transpose(-1, -2) - (g * o).sum(-1, keepdim=True)
        of_scores = weights * of_weights * scale
        of_query.append(of_scores @ key.float())
        of_key += of_scores.transpose(-1, -2) @ q
    return torch.cat(of_query, 2), of_key, of_value


def _scores(query: Tensor, key: Tensor, first: int, causal: bool, scale: float) -> Tensor:
    """Of queries from number `first` on, float32."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if not causal:
        return scores
    rows = torch.arange(first, first + query.shape[2], device=query.device)
    hidden = torch.arange(key.shape[2], device=query.device) > rows[:, None]
    return scores.masked_fill(hidden, -torch.inf)
