"""Experts reached without all-to-all: each rank gathers all tokens, and the results are summed where they belong.

Sends as many bytes as there are ranks, whatever the router says: for few ranks, and for networks and back ends whose
all-to-all is slow or missing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.distributed.expert.exchange import ByToken, process_group


@torch.library.custom_op("nemo_like::route_gathered", mutates_args=())
def route_gathered(chosen: Tensor, experts: int, group: str) -> tuple[Tensor, Tensor]:
    """What all ranks' tokens chose. A collective; the one place of a layer that waits for the device.

    Args:
        chosen: (N, k) the experts of this rank's tokens; `experts` for none. N may differ by rank.
        experts: in all, consecutive ones on each rank. group: the ranks, by `group_key`.

    Returns:
        places: (R,) slots of this rank's experts among those of all ranks, (ranks * most, k), sorted by expert.
        table: (1 + experts / ranks,) on the host: the most tokens of a rank, then the rows of each of this rank's experts.
    """
    ranks = process_group(group)
    size, rank = ranks.size(), ranks.rank()
    own = torch.tensor([chosen.shape[0]], device=chosen.device)
    sizes = own.new_empty(size)
    dist.all_gather_into_tensor(sizes, own, group=ranks)
    most = int(sizes.max())
    padded = chosen.new_full((most, chosen.shape[1]), experts)
    padded[: chosen.shape[0]] = chosen
    everywhere = chosen.new_empty(size * most, chosen.shape[1])
    dist.all_gather_into_tensor(everywhere, padded, group=ranks)
    here = everywhere.reshape(-1) - rank * (experts // size)
    mine = torch.where((here >= 0) & (here < experts // size), here, experts)
    counts = torch.bincount(mine, minlength=experts + 1)[: experts // size].cpu()
    places = torch.argsort(mine, stable=True)[: int(counts.sum())]
    return places, torch.cat([torch.tensor([most]), counts])


@torch.library.custom_op("nemo_like::gather_rows", mutates_args=())
def gather_rows(rows: Tensor, most: int, group: str) -> Tensor:
    """(N, D) of each rank, N at most `most` → (ranks * most, D), those that a rank has not being zero. A collective."""
    ranks = process_group(group)
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    out = rows.new_empty(ranks.size() * most, *rows.shape[1:])
    dist.all_gather_into_tensor(out, padded, group=ranks)
    return out


@torch.library.custom_op("nemo_like::sum_rows", mutates_args=())
def sum_rows(rows: Tensor, own: int, group: str) -> Tensor:
    """(ranks * most, D) of each rank → (own, D): summed over the ranks, the part of this one. A collective."""
    ranks = process_group(group)
    out = rows.new_empty(rows.shape[0] // ranks.size(), *rows.shape[1:])
    dist.reduce_scatter_tensor(out, rows.contiguous(), group=ranks)
    return out[:own].clone()


def _setup_gather(ctx: Any, inputs: tuple, output: Tensor) -> None:
    rows, _, ctx.group = inputs
    ctx.own = rows.shape[0]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return sum_rows(grad, ctx.own, ctx.group), None, None


def _setup_sum(ctx: Any, inputs: tuple, output: Tensor) -> None:
    rows, _, ctx.group = inputs
    ctx.most = rows.shape[0] // process_group(ctx.group).size()


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return gather_rows(grad, ctx.most, ctx.group), None, None


gather_rows.register_autograd(_gather_backward, setup_context=_setup_gather)
sum_rows.register_autograd(_sum_backward, setup_context=_setup_sum)


class AllGather(ByToken):
    """`Dispatch` by an all-gather of tokens and a reduce-scatter of results.

    Args:
        experts: in all. group: the ranks, by `group_key`.
    """

    def __init__(self, experts: int, group: str) -> None:
        self.experts, self.group = experts, group

    def choices(
        self, rows: Tensor, chosen: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Any]:
        """As `ByToken.choices`."""
        places, table = route_gathered(chosen, self.experts, self.group)
        most = int(table.tolist()[0])
        came = None if weights is None else gather_rows(weights, most, self.group)
        return places, table[1:], came, (most, rows.shape[0])

    def spread(self, rows: Tensor, way: Any) -> Tensor:
        """As `ByToken.spread`."""
        return gather_rows(rows, way[0], self.group)

    def summed(self, results: Tensor, way: Any) -> Tensor:
        """As `ByToken.summed`."""
        return sum_rows(results, way[1], self.group)
