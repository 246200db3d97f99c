"""Ranks of tensor parallelism around experts: they hold the same tokens, and each sends its own part of these.

Otherwise every expert would see each token once for each of them. As operators of their own, the planner knows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed.expert.exchange import group_key, process_group


@dataclass(frozen=True)
class TensorRanks:
    """`ranks` ranks, of which this is number `rank`; `group`: by `exchange.group_key`."""

    ranks: int
    rank: int
    group: str

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> TensorRanks:
        """Return the ranks of a mesh of one axis."""
        return cls(mesh.size(), mesh.get_local_rank(), group_key(mesh.get_group()))

    def own_part(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's part of what every rank has: `dim` shrinks from N to N / ranks, rounded up, or what is
        left. Its gradient is gathered: what comes out has the whole one on each rank."""
        return cast("Tensor", rows_of_rank(whole, dim, self.ranks, self.rank, self.group))

    def all_parts(self, part: Tensor, size: int, dim: int = 0) -> Tensor:
        """The whole again, `dim` of `size`, from every rank's part. A collective."""
        return cast("Tensor", rows_of_all(part, dim, size, self.ranks, self.rank, self.group))

    def summed(self, parameter: Tensor) -> Tensor:
        """`parameter`, which every rank has, with a gradient that is the sum of theirs. Backward is a collective."""
        return cast("Tensor", _SummedGradient.apply(parameter, self.group)) if parameter.requires_grad else parameter


@torch.library.custom_op("nemo_like::rows_of_rank", mutates_args=())
def rows_of_rank(whole: Tensor, dim: int, ranks: int, rank: int, group: str) -> Tensor:
    """As `TensorRanks.own_part`; sends nothing."""
    start, size = _place(whole.shape[dim], ranks, rank)
    return whole.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("nemo_like::rows_of_all", mutates_args=())
def rows_of_all(part: Tensor, dim: int, size: int, ranks: int, rank: int, group: str) -> Tensor:
    """As `TensorRanks.all_parts`."""
    each = -(-size // ranks)
    part = part.contiguous()
    if part.shape[dim] < each:  # all send as much as the first
        shape = [each if at == dim else length for at, length in enumerate(part.shape)]
        padded = part.new_zeros(shape)
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        part = padded
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part, group=process_group(group))
    if dim:
        whole = torch.cat(whole.chunk(ranks), dim)
    return whole if whole.shape[dim] == size else whole.narrow(dim, 0, size).clone()


@torch.library.custom_op("nemo_like::sum_of_ranks", mutates_args=())
def sum_of_ranks(term: Tensor, group: str) -> Tensor:
    """The sum of every rank's `term`. A collective."""
    total = term.clone()
    dist.all_reduce(total, group=process_group(group))
    return total


def _place(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return where the part of `rank` starts, and its size."""
    each = -(-size // ranks)
    start = min(rank * each, size)
    return start, min(each, size - start)


@rows_of_rank.register_fake
def _(whole: Tensor, dim: int, ranks: int, rank: int, group: str) -> Tensor:
    place = _place(whole.shape[dim], ranks, rank)[1]
    return whole.new_empty([place if at == dim else size for at, size in enumerate(whole.shape)])


@rows_of_all.register_fake
def _(part: Tensor, dim: int, size: int, ranks: int, rank: int, group: str) -> Tensor:
    return part.new_empty([size if at == dim else length for at, length in enumerate(part.shape)])


@sum_of_ranks.register_fake
def _(term: Tensor, group: str) -> Tensor:
    return torch.empty_like(term)


def _setup_part(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    whole, ctx.dim, ctx.ranks, ctx.rank, ctx.group = inputs
    ctx.size = whole.shape[ctx.dim]


def _part_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return rows_of_all(grad, ctx.dim, ctx.size, ctx.ranks, ctx.rank, ctx.group), None, None, None, None


def _setup_all(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    _, ctx.dim, _, ctx.ranks, ctx.rank, ctx.group = inputs


def _all_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # Every rank goes on from the same whole, so its gradient is the same on each, and the part of it is all there is.
    return rows_of_rank(grad, ctx.dim, ctx.ranks, ctx.rank, ctx.group), None, None, None, None, None


rows_of_rank.register_autograd(_part_backward, setup_context=_setup_part)
rows_of_all.register_autograd(_all_backward, setup_context=_setup_all)


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: str) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_of_ranks(grad, ctx.group), None
