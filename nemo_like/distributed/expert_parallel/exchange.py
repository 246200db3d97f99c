"""The three operators of expert parallelism. As operators of their own, each can be kept, repeated, counted and priced.

`nemo_like::route` makes everything that says which token goes where, and is never run twice: a replay that counted other
tokens than forward would send other numbers of rows, and the other ranks would wait or read garbage. `exchange_rows` is
the all-to-all of tokens, and of what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_GROUPS: dict[str, dist.ProcessGroup] = {}
"""By name: an operator takes tensors, numbers and strings."""


def group_key(group: dist.ProcessGroup) -> str:
    """The name under which the operators know `group`."""
    _GROUPS[group.group_name] = group
    return group.group_name


def process_group(key: str) -> dist.ProcessGroup:
    """The group whose `group_key` is `key`."""
    return _GROUPS[key]


@torch.library.custom_op("nemo_like::route", mutates_args=())
def route(chosen: Tensor, experts: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Who sends how much to whom. A collective; the one place of a layer that waits for the device.

    Args:
        chosen: (S,) the expert of each row of this rank; `experts` for a row that goes to none.
        experts: experts in all, a multiple of the ranks; each rank holds consecutive ones.
        group: the ranks, by `group_key`.

    Returns:
        order: (S,) the rows sorted by expert, those that go to none at the end.
        table: (2, ranks, experts / ranks) on the host: rows sent to, and received from, each rank for each of its experts
            (of this rank's, for those received).
        arrange: (R,) the received rows, which come by rank, sorted by expert.
        ends: (experts / ranks,) int32 on the device: where the rows of each of this rank's experts end in that order.
    """
    ranks = process_group(group).size()
    order = torch.argsort(chosen, stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int64))
    sent = counts[:experts].view(ranks, experts // ranks).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=process_group(group))
    table = torch.stack([sent, received]).cpu()
    ends = received.sum(0).cumsum(0).to(torch.int32)
    return order, table, _by_expert(received, int(table[1].sum())), ends


def _by_expert(received: Tensor, rows: int) -> Tensor:
    """`received` (ranks, experts) rows in this order → the order that sorts them by expert, and by rank within one."""
    ranks, experts = received.shape
    ids = torch.arange(experts, device=received.device).repeat(ranks)
    return torch.argsort(torch.repeat_interleave(ids, received.flatten(), output_size=rows), stable=True)


@torch.library.custom_op("nemo_like::exchange_rows", mutates_args=())
def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """All-to-all of rows with uneven counts: (sum of `sent`, ...) → (sum of `received`, ...), by rank. A collective."""
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=process_group(group))
    return out


@exchange_rows.register_fake
def _(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    return rows.new_empty((sum(received), *rows.shape[1:]))


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    _, ctx.sent, ctx.received, ctx.group = inputs  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return exchange_rows(grad, ctx.received, ctx.sent, ctx.group), None, None, None  # type: ignore[attr-defined]


exchange_rows.register_autograd(_backward, setup_context=_setup)
