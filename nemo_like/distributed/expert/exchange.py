"""The three operators of expert parallelism. As operators of their own, each can be saved, repeated, counted and priced.

`nemo_like::route` makes everything that determines which token goes where, and is never run twice: a recomputation that
counted other tokens than forward would send other numbers of rows, and the other ranks would wait or read garbage.
`exchange_rows` is the all-to-all of tokens, and of what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


# How rows travel to the experts that they chose, and how results come back: one interface, several implementations.
#
# `SplitExperts` knows nothing else of the other ranks. An implementation routes in operators whose results are saved in
# every mode (`nemo_like.activation_checkpointing.ops.routing_ops`), and moves rows in others, which may be repeated in
# recomputation.


@dataclass(frozen=True)
class Sent:
    """The rows that came to this rank's experts, as `Dispatch.send` returns them."""

    counts: list[int]
    """Rows of each of this rank's experts."""
    ends: Tensor
    """(experts here,) int32 on the device: where the rows of each end."""
    way_back: Any
    """The state that the implementation's own `bring_back` needs."""


class Dispatch(Protocol):
    """An implementation, for one group of ranks and a number of experts."""

    def send(self, rows: Tensor, chosen: Tensor, weights: Tensor | None) -> tuple[Tensor, Sent]:
        """Send `rows` to their experts. A collective, with gradients.

        Args:
            rows: (N, D) of this rank. chosen: (N, k) their experts, by number; the number of all experts means none.
            weights: (N, k) what each expert's result counts; None: 1, and k is 1.

        Returns:
            (R, D) the rows of this rank's experts, sorted by expert; and what there is to know of them.
        """

    def bring_back(self, results: Tensor, sent: Sent) -> Tensor:
        """(R, D) of the experts → (N, D): the weighted sum for each row that was sent; zero for one that went to none."""


class AllToAll:
    """Each row goes to each of its experts, and back, by one all-to-all with uneven counts. The default.

    Args:
        experts: in all. group: the ranks, by `exchange.group_key`. leaves_out: whether rows may go to no expert.
    """

    def __init__(self, experts: int, group: str, leaves_out: bool = False) -> None:
        self.experts, self.group, self.leaves_out = experts, group, leaves_out

    def send(self, rows: Tensor, chosen: Tensor, weights: Tensor | None) -> tuple[Tensor, Sent]:
        """As `Dispatch.send`."""
        order, table, arrange, ends = route(chosen.reshape(-1), self.experts, self.group)
        # Added up in Python: a sum of the table would be an operator, which a plan might recompute or leave out.
        to, of = table.tolist()
        sent, received, counts = [sum(row) for row in to], [sum(row) for row in of], [sum(row) for row in zip(*of)]
        # Not `rows[...]`, which may copy the index first; nor index_select, whose gradient adds in no fixed order where a
        # row is taken several times. Permutations take each row once.
        taken = torch.ops.aten.index.Tensor(rows, [order[: sum(sent)] // chosen.shape[-1]])
        taken = exchange_rows(taken, sent, received, self.group).index_select(0, arrange)
        return taken, Sent(counts, ends, (order, arrange, sent, received, chosen.shape, weights, rows.dtype))

    def bring_back(self, results: Tensor, sent: Sent) -> Tensor:
        """As `Dispatch.bring_back`."""
        order, arrange, there, here, shape, weights, dtype = sent.way_back
        back = exchange_rows(results.index_select(0, inverse(arrange)), here, there, self.group)
        if self.leaves_out:
            back = back.new_zeros(order.shape[0], back.shape[1]).index_copy(0, order[: back.shape[0]], back)
        else:
            back = back.index_select(0, inverse(order))
        if weights is None:
            return back
        return (back.view(*shape, -1) * weights[..., None]).sum(1).to(dtype)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    return torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))


class ByToken:
    """Base of implementations that send a token once to each rank, and sum the results where they are made.

    They give `choices`, `spread` and `summed`; this finds the rows of each expert among the tokens that came.
    """

    def choices(
        self, rows: Tensor, chosen: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Any]:
        """Return what came to this rank: (places, counts, weights, way).

        places: (R,) numbers of slots (token * k + choice) among the tokens that came, sorted by expert. counts: (experts
        here,) on the host. weights: (tokens that came, k). way: what `spread` and `summed` need.
        """
        raise NotImplementedError

    def spread(self, rows: Tensor, way: object) -> Tensor:
        """(N, D) of this rank → (tokens that came, D)."""
        raise NotImplementedError

    def summed(self, results: Tensor, way: object) -> Tensor:
        """(tokens that came, D) → (N, D), summed over the ranks that each token went to."""
        raise NotImplementedError

    def send(self, rows: Tensor, chosen: Tensor, weights: Tensor | None) -> tuple[Tensor, Sent]:
        """As `Dispatch.send`."""
        places, table, came, way = self.choices(rows, chosen, weights)
        counts = table.tolist()
        tokens = self.spread(rows, way)
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(device=rows.device, dtype=torch.int32)
        taken = torch.ops.aten.index.Tensor(tokens, [places // chosen.shape[-1]])
        return taken, Sent(counts, ends, (places, tokens.shape[0] * chosen.shape[-1], chosen.shape[-1], came, way))

    def bring_back(self, results: Tensor, sent: Sent) -> Tensor:
        """As `Dispatch.bring_back`."""
        places, slots, choices, weights, way = sent.way_back
        dtype = results.dtype
        if weights is not None:
            results = (results * weights.reshape(-1).index_select(0, places)[:, None]).to(dtype)
        # Each place is written once, so that the sum has a fixed order.
        out = results.new_zeros(slots, results.shape[1]).index_copy(0, places, results)
        return self.summed(out.view(-1, choices, results.shape[1]).sum(1), way)


# Experts reached without all-to-all: each rank gathers all tokens, and the results are summed where they belong.
#
# Sends as many bytes as there are ranks, whatever the router decides: for few ranks, and for networks and back ends whose
# all-to-all is slow or missing.


@torch.library.custom_op("nemo_like::route_gathered", mutates_args=())
def route_gathered(chosen: Tensor, experts: int, group: str) -> tuple[Tensor, Tensor]:
    """Return the choices of all ranks' tokens. A collective; the one place of a layer that waits for the device.

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
def sum_rows(rows: Tensor, rows_here: int, group: str) -> Tensor:
    """(ranks * most, D) of each rank → (own, D): summed over the ranks, the part of this one. A collective."""
    ranks = process_group(group)
    out = rows.new_empty(rows.shape[0] // ranks.size(), *rows.shape[1:])
    dist.reduce_scatter_tensor(out, rows.contiguous(), group=ranks)
    return out[:rows_here].clone()


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
