"""Experts reached by DeepEP's kernels (https://github.com/deepseek-ai/DeepEP), where that package is installed. CUDA only.

After `get_dispatch_layout`, `dispatch` and `combine` of its `Buffer`. A layer's first dispatch moves 256 numbers for each
token and brings the handle, which is saved: the rows then travel in the cached mode, which waits for no device, and in
recomputation again. **Not run on a GPU**: tested on the CPU, against a stand-in for the package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_like._util.extras import MissingExtraError
from nemo_like.distributed.expert.exchange import ByToken, process_group

_FIRST = 256
"""Numbers for each token in the dispatch that brings the handle: its kernels move whole vectors."""
_BUFFERS: dict[str, Any] = {}


def require_deep_ep() -> Any:
    """The package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import deep_ep
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise
        raise MissingExtraError(
            "ExpertParallel.dispatch is 'deepep', and the package deep_ep is not installed. It is built for a machine's "
            "GPUs and network: see https://github.com/deepseek-ai/DeepEP. Or use dispatch='all_to_all'."
        ) from error
    return deep_ep


def _buffer(group: str, row_bytes: int = 0) -> Any:
    """The communication buffer of `group`, made once, and anew where rows are larger than it was made for."""
    package, ranks = require_deep_ep(), process_group(group)
    row_bytes = max(row_bytes, 2 * _FIRST)
    configs = (package.Buffer.get_dispatch_config(ranks.size()), package.Buffer.get_combine_config(ranks.size()))
    sizes = [
        max(getattr(config, hint)(row_bytes, ranks.size()) for config in configs)
        for hint in ("get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint")
    ]
    buffer = _BUFFERS.get(group)
    if buffer is None or buffer.num_nvl_bytes < sizes[0] or buffer.num_rdma_bytes < sizes[1]:
        _BUFFERS[group] = package.Buffer(ranks, *sizes)
    return _BUFFERS[group]


@torch.library.custom_op("nemo_like::deepep_route", mutates_args=())
def deepep_route(
    chosen: Tensor, weights: Tensor, experts: int, row_bytes: int, group: str
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Who sends which token where. A collective; the one place of a layer that waits for the device.

    Args:
        chosen: (N, k) int64, -1 for none. weights: (N, k) float32. experts: in all. row_bytes: of one row.
        group: the ranks, by `group_key`.

    Returns:
        chosen: (tokens that came, k) by this rank's numbers, -1 for experts of other ranks. weights: (tokens that came,
        k). counts: (experts / ranks,) on the host. The handle.
    """
    buffer = _buffer(group, row_bytes)
    per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(chosen, experts)
    first = torch.zeros(chosen.shape[0], _FIRST, dtype=torch.bfloat16, device=chosen.device)
    _, came, came_weights, counts, handle, _ = buffer.dispatch(
        first,
        topk_idx=chosen,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_host,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )
    # Operators may not return what they were given, and a handle may hold that.
    return came, came_weights, torch.tensor(counts), [part.clone() if part is in_rank else part for part in handle]


@torch.library.custom_op("nemo_like::deepep_spread", mutates_args=())
def deepep_spread(rows: Tensor, handle: list[Tensor], group: str) -> Tensor:
    """(N, D) → (tokens that came, D), by the handle. A collective."""
    return _buffer(group, rows.shape[1] * rows.element_size()).dispatch(rows.contiguous(), handle=tuple(handle))[0]


@torch.library.custom_op("nemo_like::deepep_sum", mutates_args=())
def deepep_sum(rows: Tensor, handle: list[Tensor], group: str) -> Tensor:
    """(tokens that came, D) → (N, D), summed over ranks. A collective."""
    return _buffer(group, rows.shape[1] * rows.element_size()).combine(rows.contiguous(), tuple(handle))[0]


def _setup_route(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.group, ctx.handle = inputs[-1], output[-1]
    ctx.set_materialize_grads(False)


def _route_backward(
    ctx: Any, _chosen: object, grad: Tensor | None, *_: object
) -> tuple[None, Tensor | None, None, None, None]:
    if grad is None:
        return None, None, None, None, None
    first = torch.zeros(grad.shape[0], _FIRST, dtype=torch.bfloat16, device=grad.device)
    back = _buffer(ctx.group).combine(first, tuple(ctx.handle), topk_weights=grad.contiguous())[1]
    return None, back, None, None, None


def _setup_rows(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.handle, ctx.group = inputs


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[None], None]:
    return deepep_sum(grad, ctx.handle, ctx.group), [None] * len(ctx.handle), None


def _sum_back(ctx: Any, grad: Tensor) -> tuple[Tensor, list[None], None]:
    return deepep_spread(grad, ctx.handle, ctx.group), [None] * len(ctx.handle), None


deepep_route.register_autograd(_route_backward, setup_context=_setup_route)
deepep_spread.register_autograd(_spread_backward, setup_context=_setup_rows)
deepep_sum.register_autograd(_sum_back, setup_context=_setup_rows)


class DeepEP(ByToken):
    """`Dispatch` by DeepEP.

    Args:
        experts: in all. group: the ranks, by `group_key`.

    Raises:
        MissingExtraError: the package is not installed.
    """

    def __init__(self, experts: int, group: str) -> None:
        require_deep_ep()
        self.experts, self.group = experts, group

    def choices(
        self, rows: Tensor, chosen: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Any]:
        """As `ByToken.choices`."""
        if rows.dtype != torch.bfloat16:
            raise ValueError(
                f"dispatch='deepep' moves bfloat16 alone, and rows are {rows.dtype}: use precision='bf16', or 'all_to_all'."
            )
        weighted = torch.ones(chosen.shape, device=rows.device) if weights is None else weights.float()
        targets = torch.where(chosen < self.experts, chosen, -1).to(torch.int64)
        row_bytes = rows.shape[1] * rows.element_size()
        came, came_weights, counts, handle = deepep_route(targets, weighted, self.experts, row_bytes, self.group)
        flat = came.reshape(-1)
        places = torch.argsort(torch.where(flat < 0, self.experts, flat), stable=True)[: sum(counts.tolist())]
        return places, counts, None if weights is None else came_weights, handle

    def spread(self, rows: Tensor, way: object) -> Tensor:
        """As `ByToken.spread`."""
        return deepep_spread(rows, way, self.group)

    def summed(self, results: Tensor, way: object) -> Tensor:
        """As `ByToken.summed`."""
        return deepep_sum(results, way, self.group)
