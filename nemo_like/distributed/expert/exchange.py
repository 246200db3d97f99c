"""The exchange of expert parallelism: each token goes once to each rank that has one of its experts, and back.

`nemo_like::route` makes everything that determines which token goes where, and is never run twice: a recomputation that
counted other tokens than forward would send other numbers of rows, and the other ranks would wait or read garbage.
`nemo_like::exchange_rows` is the all-to-all of tokens, of the weights of their experts, and of results. Both are operators
of their own, so that each can be saved, repeated, counted and priced. Ranks of ``tp``, which hold the same tokens, each
send their part of these (`TensorRanks`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.distributed.context.sequence_ops import find_group, is_undone_by, sum_parts


class Members(NamedTuple):
    """Rows and the tokens that they belong to, as `route` returns them: a row is of one token, a token has any number.

    int32, and nothing that could be computed, as each layer keeps it from forward to backward.
    """

    slot: Tensor  # (R,) the token of each row, times `choices`, plus which of its choices it is.
    order: Tensor  # (R,) the rows in the order of their tokens.
    starts: Tensor  # (tokens,) where the rows of each token start in that order.
    choices: int = 1

    @property
    def token(self) -> Tensor:
        """(R,) the token of each row."""
        return self.slot if self.choices == 1 else self.slot // self.choices


@torch.library.custom_op("nemo_like::route", mutates_args=())
def route(
    chosen: Tensor, experts: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Who sends how much to whom. A collective; the one place of a layer that waits for the device.

    Args:
        chosen: (N, k) the experts of each token of this rank; `experts` for none.
        experts: in all, a multiple of the ranks; each rank holds consecutive ones.
        group: the ranks, by `name_group`.

    Returns:
        token, order, starts: `Members` of the (S,) rows that this rank sends, by rank: a token's row once for each rank.
        slot, order, starts: `Members` of the (R,) rows of the experts here, sorted by expert: of the tokens that came.
        ends: (experts here,) where the rows of each expert end.
        table: (2 * ranks + experts here,) on the host: rows sent to each rank, rows received from each, rows of each expert.
    """
    ranks, (tokens, choices) = find_group(group).size(), chosen.shape
    here = experts // ranks
    goes = torch.zeros(tokens, ranks + 1, dtype=torch.bool, device=chosen.device)
    goes = goes.scatter(1, chosen // here, True)[:, :ranks]
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, chosen.reshape(-1), torch.ones_like(chosen, dtype=torch.int64).reshape(-1))
    sent = torch.cat([goes.sum(0)[:, None], counts[:experts].view(ranks, here)], 1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=find_group(group))
    of_experts = received[:, 1:].sum(0)
    table = torch.cat([sent[:, 0], received[:, 0], of_experts]).cpu()
    there, came, rows = (part.tolist() for part in table.split([ranks, ranks, here]))

    place = torch.argsort(goes.logical_not().t().reshape(-1).to(torch.uint8), stable=True)[: sum(there)]
    token, rank = place % tokens, place // tokens
    number = chosen.index_select(0, token) - here * rank[:, None]  # of the expert on that rank
    number = torch.where((number >= 0) & (number < here), number, here).to(torch.int32)
    numbers = number.new_empty(sum(came), choices)
    dist.all_to_all_single(numbers, number, came, there, group=find_group(group))
    slot = torch.argsort(numbers.reshape(-1), stable=True)[: sum(rows)]
    of_tokens = (token, torch.argsort(token, stable=True), _starts(goes))
    of_slots = (slot, torch.argsort(slot), _starts(numbers < here))
    results = (*of_tokens, *of_slots, of_experts.cumsum(0))
    return *(result.to(torch.int32) for result in results), table  # type: ignore[return-value]


def _starts(has: Tensor) -> Tensor:
    """(tokens, places) whether a row is there → (tokens,) how many rows earlier tokens have."""
    counts = has.sum(1)
    return counts.cumsum(0) - counts


@torch.library.custom_op("nemo_like::exchange_rows", mutates_args=())
def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """All-to-all of rows with uneven counts: (sum of `sent`, ...) → (sum of `received`, ...), by rank. A collective."""
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=find_group(group))
    return out


@exchange_rows.register_fake
def _(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    return rows.new_empty((sum(received), *rows.shape[1:]))


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    _, ctx.sent, ctx.received, ctx.group = inputs  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return exchange_rows(grad, ctx.received, ctx.sent, ctx.group), None, None, None  # type: ignore[attr-defined]


exchange_rows.register_autograd(_backward, setup_context=_setup)


# Members are held as they are, not as saved tensors: `route` made them, whose results are kept in every mode. So the last
# exchange of a layer has nothing to be made again behind it, and a recomputation ends before it.


class _Spread(torch.autograd.Function):
    """(tokens, D) → (R, D): to each row its token. The gradient is a sum in a fixed order, without sorting again."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, members: Members) -> Tensor:
        ctx.members = members
        return tokens.index_select(0, members.token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], None, ctx.members), None


class _Sum(torch.autograd.Function):
    """(R, D), each row times its weight (R,) if there are any → (tokens, D): the sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, members: Members) -> Tensor:
        ctx.members = members
        if weights is not None:
            ctx.save_for_backward(rows, weights)
        return _summed(rows, weights, members)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_rows = grads[0].index_select(0, ctx.members.token)
        if not ctx.saved_tensors:
            return of_rows, None, None
        rows, weights = ctx.saved_tensors
        of_weights = torch.bmm(of_rows[:, None], rows[:, :, None]).view(-1) if ctx.needs_input_grad[1] else None
        return of_rows * weights[:, None], of_weights, None


def _summed(
    rows: Tensor,  # (R, D)
    weights: Tensor | None,  # (R,)
    members: Members,
) -> Tensor:
    """One kernel, which adds in float32 and in the order of `members`, and copies no row."""
    in_order = None if weights is None else weights.index_select(0, members.order)
    # (weight, indices, offsets, scale_grad_by_freq, mode: 0 is a sum, sparse, per_sample_weights)
    arguments = (rows.contiguous(), members.order, members.starts, False, 0, False, in_order)
    return torch.ops.aten._embedding_bag_forward_only.default(*arguments)[0]


@dataclass(frozen=True)
class Sent:
    """The rows that came to this rank's experts, and the way back of their results."""

    counts: list[int]  # Rows of each of this rank's experts.
    ends: Tensor  # (experts here,) int32 on the device: where the rows of each end.
    weights: Tensor | None  # (R,) the weight of each row's result.
    here: Members
    there: Members
    way: tuple[list[int], list[int]]  # Rows sent to, and received from, each rank.


class Exchange:
    """Sends rows to their experts, over the ranks of `group` (by `name_group`) that share `experts`, and results back.

    A token goes once to each rank, however many of its experts are there, and the rank sums their results: at most as
    many rows travel as ranks, and as experts of a token.
    """

    def __init__(self, experts: int, group: str) -> None:
        self.experts, self.group = experts, group

    def send(self, rows: Tensor, chosen: Tensor, weights: Tensor | None) -> tuple[Tensor, Sent]:
        """Send `rows` to their experts. A collective, with gradients.

        Args:
            rows: (N, D) of this rank. chosen: (N, k) their experts, by number; the number of all experts means none.
            weights: (N, k) the weight of each expert's result; None: 1.

        Returns:
            (R, D) the rows of this rank's experts, sorted by expert; and the facts about them.
        """
        token, order, starts, slot, order_here, starts_here, ends, table = route(chosen, self.experts, self.group)
        numbers = table.tolist()
        local = ends.shape[0]
        ranks = (len(numbers) - local) // 2
        sent, received, counts = numbers[:ranks], numbers[ranks:-local], numbers[-local:]
        there, here = Members(token, order, starts), Members(slot, order_here, starts_here, chosen.shape[-1])
        came = exchange_rows(_Spread.apply(rows, there), sent, received, self.group)
        if weights is not None:
            weights = exchange_rows(_Spread.apply(weights.to(rows.dtype), there), sent, received, self.group)
            weights = weights.view(-1).index_select(0, slot)
        return _Spread.apply(came, here), Sent(counts, ends, weights, here, there, (sent, received))

    def bring_back(self, results: Tensor, sent: Sent) -> Tensor:
        """(R, D) of the experts → (N, D): the weighted sum for each row that was sent; zero for one that went to none."""
        sums = _Sum.apply(results, sent.weights, sent.here)
        return _Sum.apply(exchange_rows(sums, *reversed(sent.way), self.group), None, sent.there)


# Ranks of tensor parallelism around experts. If each sent all tokens, every expert would see each token once for each of
# them. As operators of their own, the planner knows these exchanges.


@dataclass(frozen=True)
class TensorRanks:
    """`ranks` ranks, of which this is number `rank`; `group`: by `name_group`."""

    ranks: int
    rank: int
    group: str

    def own_part(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's part of a tensor that every rank has: `dim` shrinks from N to N / ranks, rounded up (less
        on the last ranks). The gradient is gathered, and so complete on each rank."""
        return cast("Tensor", rows_of_rank(whole, dim, whole.shape[dim], self.ranks, self.rank, self.group))

    def all_parts(self, part: Tensor, size: int, dim: int = 0) -> Tensor:
        """The whole again, `dim` of `size`, from every rank's part. A collective."""
        return cast("Tensor", rows_of_all(part, dim, size, self.ranks, self.rank, self.group))

    def summed(self, parameter: Tensor) -> Tensor:
        """`parameter`, which every rank has, with a gradient that is the sum of theirs. Backward is a collective."""
        if not parameter.requires_grad:
            return parameter
        return cast("Tensor", _SummedGradient.apply(parameter, self.ranks, self.group))


@torch.library.custom_op("nemo_like::rows_of_rank", mutates_args=())
def rows_of_rank(whole: Tensor, dim: int, size: int, ranks: int, rank: int, group: str) -> Tensor:
    """As `TensorRanks.own_part`; sends nothing."""
    return whole.narrow(dim, *_place(size, ranks, rank)).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("nemo_like::rows_of_all", mutates_args=())
def rows_of_all(part: Tensor, dim: int, size: int, ranks: int, rank: int, group: str) -> Tensor:
    """As `TensorRanks.all_parts`."""
    each = -(-size // ranks)
    part = part.contiguous()
    if part.shape[dim] < each:  # all send as much as the first
        padded = part.new_zeros([each if at == dim else length for at, length in enumerate(part.shape)])
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        part = padded
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    dist.all_gather_single(whole, part, group=find_group(group))
    if dim:
        whole = torch.cat(whole.chunk(ranks), dim)
    return whole if whole.shape[dim] == size else whole.narrow(dim, 0, size).clone()


def _place(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return where the part of `rank` starts, and its size."""
    each = -(-size // ranks)
    start = min(rank * each, size)
    return start, min(each, size - start)


@rows_of_rank.register_fake
def _(whole: Tensor, dim: int, size: int, ranks: int, rank: int, group: str) -> Tensor:
    here = _place(size, ranks, rank)[1]
    return whole.new_empty([here if at == dim else length for at, length in enumerate(whole.shape)])


@rows_of_all.register_fake
def _(part: Tensor, dim: int, size: int, ranks: int, rank: int, group: str) -> Tensor:
    return part.new_empty([size if at == dim else length for at, length in enumerate(part.shape)])


# Every rank goes on from the same whole, so its gradient is the same on each, and the part of it is all there is.
is_undone_by(rows_of_rank, rows_of_all)
is_undone_by(rows_of_all, rows_of_rank)


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, ranks: int, group: str) -> Tensor:
        ctx.arguments = ranks, group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_parts(grad, *ctx.arguments), None, None
