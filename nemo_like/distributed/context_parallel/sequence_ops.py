"""What the ranks of a sequence send each other, as operators that policies, tracers and the planner know.

| operator | sends | its gradient |
|---|---|---|
| ``nemo_like::gather_sequence`` | every part to every rank | ``scatter_sequence`` |
| ``nemo_like::scatter_sequence`` | of a whole sequence on each rank, the sums of the parts | ``gather_sequence`` |
| ``nemo_like::heads_for_sequence`` | of all heads of a part, all parts of some heads (Ulysses) | ``sequence_for_heads`` |
| ``nemo_like::sequence_for_heads`` | back | ``heads_for_sequence`` |
| ``nemo_like::sum_parts`` | one small tensor: its sum on every rank | times the ranks |

Each waits until the result is there. `group` is the name of a process group; nothing is sent on fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.activation_checkpointing.ops import OpFacts, declare
from nemo_like.distributed.context_parallel import layout

_groups: dict[str, dist.ProcessGroup] = {}


def name_group(group: dist.ProcessGroup) -> str:
    """The name by which the operators here find `group`: a schema takes no process group."""
    _groups[group.group_name] = group
    return group.group_name


def find_group(name: str) -> dist.ProcessGroup:
    """The group that `name_group` named."""
    return _groups[name]


@torch.library.custom_op("nemo_like::gather_sequence", mutates_args=())
def gather_sequence(part: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """The whole sequence, in its order, from every rank's part: `dim` grows from L to ranks * L."""
    part = part.contiguous()
    parts = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(parts, part, group=_groups[group])
    return layout.join(parts.unflatten(0, (ranks, -1)), dim)


@torch.library.custom_op("nemo_like::scatter_sequence", mutates_args=())
def scatter_sequence(whole: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """This rank's part of the sum of all ranks' whole sequences: `dim` shrinks from ranks * L to L."""
    sent = layout.in_chunks(whole, dim, ranks)  # (2 * ranks, ..., chunk, ...), a rank's two chunks side by side
    mine = sent.new_empty((2, *sent.shape[1:]))
    dist.reduce_scatter_tensor(mine, sent, group=_groups[group])
    return torch.cat([mine[0], mine[1]], dim)


@torch.library.custom_op("nemo_like::heads_for_sequence", mutates_args=())
def heads_for_sequence(part: Tensor, ranks: int, group: str) -> Tensor:
    """(B, H, L, D) of a part to (B, H / ranks, ranks * L, D) of the whole sequence, in its order."""
    sent = torch.stack(part.chunk(ranks, 1))
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=_groups[group])
    return layout.join(got, 2).contiguous()


@torch.library.custom_op("nemo_like::sequence_for_heads", mutates_args=())
def sequence_for_heads(whole: Tensor, ranks: int, group: str) -> Tensor:
    """(B, H / ranks, ranks * L, D) to (B, H, L, D): the opposite of `heads_for_sequence`."""
    sent = layout.split(whole, 2, ranks).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=_groups[group])
    return torch.cat(list(got), 1)


@torch.library.custom_op("nemo_like::sum_parts", mutates_args=())
def sum_parts(part: Tensor, ranks: int, group: str) -> Tensor:
    """The sum over the ranks, the same on each."""
    out = part.detach().clone()
    dist.all_reduce(out, group=_groups[group])
    return out


@gather_sequence.register_fake
def _(part: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return part.new_empty([size * ranks if at == dim % part.ndim else size for at, size in enumerate(part.shape)])


@scatter_sequence.register_fake
def _(whole: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return whole.new_empty([size // ranks if at == dim % whole.ndim else size for at, size in enumerate(whole.shape)])


@heads_for_sequence.register_fake
def _(part: Tensor, ranks: int, group: str) -> Tensor:
    batch, heads, length, width = part.shape
    return part.new_empty((batch, heads // ranks, length * ranks, width))


@sequence_for_heads.register_fake
def _(whole: Tensor, ranks: int, group: str) -> Tensor:
    batch, heads, length, width = whole.shape
    return whole.new_empty((batch, heads * ranks, length // ranks, width))


@sum_parts.register_fake
def _(part: Tensor, ranks: int, group: str) -> Tensor:
    return torch.empty_like(part)


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.arguments = inputs[1:]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return scatter_sequence(grad, *ctx.arguments), None, None, None


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return gather_sequence(grad, *ctx.arguments), None, None, None


def _heads_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return sequence_for_heads(grad, *ctx.arguments), None, None


def _sequence_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return heads_for_sequence(grad, *ctx.arguments), None, None


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # Every rank goes backward from the same sum, so each part is in `ranks` of them; FSDP's mean divides by that again.
    return grad * ctx.arguments[0], None, None


gather_sequence.register_autograd(_gather_backward, setup_context=_keep_arguments)
scatter_sequence.register_autograd(_scatter_backward, setup_context=_keep_arguments)
heads_for_sequence.register_autograd(_heads_backward, setup_context=_keep_arguments)
sequence_for_heads.register_autograd(_sequence_backward, setup_context=_keep_arguments)
sum_parts.register_autograd(_sum_backward, setup_context=_keep_arguments)

# Kept, unless a plan repeats them or puts their results on the host. Gathering, a rank receives what it does not have, into
# a buffer of the whole; by all-to-all, at most as much as it has, from one copy into another.
declare("nemo_like.gather_sequence.default", OpFacts(
    saved=True, collective=True, received=lambda part, whole: whole - part,
    scratch=lambda part, whole: whole.nbytes + (0 if part.is_contiguous() else part.nbytes),
))  # fmt: skip
declare("nemo_like.scatter_sequence.default", OpFacts(
    saved=True, collective=True, scratch=lambda whole, part: whole.nbytes + part.nbytes
))  # fmt: skip
for _name in ("heads_for_sequence", "sequence_for_heads"):
    declare(f"nemo_like.{_name}.default", OpFacts(
        saved=True, collective=True, received=lambda sent, got: got, scratch=lambda sent, got: 2 * sent.nbytes
    ))  # fmt: skip
