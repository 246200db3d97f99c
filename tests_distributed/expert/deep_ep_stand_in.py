"""A package with the interface of `deep_ep` on gloo ranks: what its kernels do by its documentation, in torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


class Buffer:
    """Sends a token once to each rank that has experts of it."""

    calls: list[str] = []  # noqa: RUF012 - of all buffers

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.rank, self.size = group.rank(), group.size()

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        self.experts = num_experts
        each = num_experts // self.size
        in_rank = torch.stack(
            [((topk_idx >= r * each) & (topk_idx < (r + 1) * each)).any(1) for r in range(self.size)], 1
        )
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return in_rank.sum(0).int(), None, per_expert.int(), in_rank, None

    def dispatch(
        self, x: Tensor, handle: Any = None, *, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        num_tokens_per_rank: Tensor | None = None, num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None, num_tokens_per_expert: Tensor | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        Buffer.calls.append("dispatch" if handle is None else "cached dispatch")
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] * x.element_size() <= self.num_nvl_bytes
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return self._there(x, handle[0], handle[1]), None, None, None, None, None
        assert topk_idx is not None and topk_weights is not None and is_token_in_rank is not None
        assert topk_weights.dtype == torch.float32
        came = torch.empty(self.size, dtype=torch.int32)
        dist.all_to_all_single(came, is_token_in_rank.sum(0).int(), group=self.group)
        each, first = self.experts // self.size, self.rank * self.experts // self.size
        chosen = self._there(topk_idx, is_token_in_rank, came)
        mine = (chosen >= first) & (chosen < first + each)
        local = torch.where(mine, chosen - first, -1)
        weights = self._there(topk_weights, is_token_in_rank, came) * mine
        counts = torch.bincount(local[mine], minlength=each).tolist()
        return self._there(x, is_token_in_rank, came), local, weights, counts, (is_token_in_rank, came), None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        Buffer.calls.append("combine")
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        weights = None if topk_weights is None else self._back(topk_weights, *handle)
        return self._back(x, *handle), weights, None

    def _there(self, x: Tensor, in_rank: Tensor, came: Tensor) -> Tensor:
        sent = in_rank.sum(0).tolist()
        out = x.new_empty(int(came.sum()), x.shape[1])
        rows = torch.cat([x[in_rank[:, r]] for r in range(self.size)])
        dist.all_to_all_single(out, rows, came.tolist(), sent, group=self.group)
        return out

    def _back(self, x: Tensor, in_rank: Tensor, came: Tensor) -> Tensor:
        sent = in_rank.sum(0).tolist()
        rows = x.new_empty(sum(sent), x.shape[1])
        dist.all_to_all_single(rows, x, sent, came.tolist(), group=self.group)
        out = torch.zeros(in_rank.shape[0], x.shape[1])
        for r, part in enumerate(rows.split(sent)):
            out[in_rank[:, r]] += part.float()
        return out.to(x.dtype)


def install() -> None:
    """Have ``import deep_ep`` find this."""
    module: Any = ModuleType("deep_ep")
    module.Buffer = Buffer
    sys.modules["deep_ep"] = module
