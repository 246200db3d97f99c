"""Operators by which the ranks of a sequence send each other tensors; policies, tracers and the planner know them.

| operator | sends | its gradient |
|---|---|---|
| ``nemo_like::gather_sequence`` | every part to every rank | ``scatter_sequence`` |
| ``nemo_like::scatter_sequence`` | of a whole sequence on each rank, the sums of the parts | ``gather_sequence`` |
| ``nemo_like::heads_for_sequence`` | of all heads of a part, all parts of some heads (Ulysses) | ``sequence_for_heads`` |
| ``nemo_like::sequence_for_heads`` | back | ``heads_for_sequence`` |
| ``nemo_like::sum_parts`` | one small tensor: its sum on every rank | times the ranks |

Each waits until the result is there. `group` is the name of a process group; nothing is sent on fake tensors.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.ops import OpFacts, declare
from nemo_like.distributed.mesh import axis_size

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
    dist.all_gather_single(parts, part, group=_groups[group])
    return join(parts.unflatten(0, (ranks, -1)), dim)


@torch.library.custom_op("nemo_like::scatter_sequence", mutates_args=())
def scatter_sequence(whole: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """This rank's part of the sum of all ranks' whole sequences: `dim` shrinks from ranks * L to L."""
    chunks = whole.chunk(2 * ranks, dim)
    # (2 * ranks, ..., chunk, ...), a rank's two chunks side by side
    sent = torch.stack([chunks[at] for rank in range(ranks) for at in (rank, 2 * ranks - 1 - rank)])
    mine = sent.new_empty((2, *sent.shape[1:]))
    dist.reduce_scatter_single(mine, sent, group=_groups[group])
    return torch.cat([mine[0], mine[1]], dim)


@torch.library.custom_op("nemo_like::heads_for_sequence", mutates_args=())
def heads_for_sequence(part: Tensor, ranks: int, group: str) -> Tensor:
    """(B, H, L, D) of a part to (B, H / ranks, ranks * L, D) of the whole sequence, in its order."""
    sent = torch.stack(part.chunk(ranks, 1))
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=_groups[group])
    return join(got, 2).contiguous()


@torch.library.custom_op("nemo_like::sequence_for_heads", mutates_args=())
def sequence_for_heads(whole: Tensor, ranks: int, group: str) -> Tensor:
    """(B, H / ranks, ranks * L, D) to (B, H, L, D): the opposite of `heads_for_sequence`."""
    sent = split(whole, 2, ranks).contiguous()
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


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    ctx.arguments = inputs[1:]


def is_undone_by(operator: Any, opposite: Callable[..., Tensor]) -> None:
    """Register `opposite`, which takes the same arguments, as the gradient of `operator`."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return opposite(grad, *ctx.arguments), *[None for _ in ctx.arguments]

    operator.register_autograd(backward, setup_context=_keep_arguments)


is_undone_by(gather_sequence, scatter_sequence)
is_undone_by(scatter_sequence, gather_sequence)
is_undone_by(heads_for_sequence, sequence_for_heads)
is_undone_by(sequence_for_heads, heads_for_sequence)
# Every rank goes backward from the same sum, so each part is in `ranks` of them; FSDP's mean divides by that again.
is_undone_by(sum_parts, lambda grad, ranks, group: grad * ranks)

# Saved, unless a plan repeats them or puts their results on the host; but for gathered tensors, since keeping them
# would undo the saving of the cut. Gathering, a rank receives the parts it does not have, into a buffer of the whole;
# by all-to-all, at most as much as it has, from one copy into another.
declare(
    "nemo_like.gather_sequence.default",
    OpFacts(
        collective=True,
        received=lambda part, whole: whole - part,
        scratch=lambda args, whole: whole.nbytes + (0 if args[0].is_contiguous() else args[0].nbytes),
    ),
)
declare(
    "nemo_like.scatter_sequence.default",
    OpFacts(saved=True, collective=True, scratch=lambda args, part: args[0].nbytes + part.nbytes),
)
for _name in ("heads_for_sequence", "sequence_for_heads"):
    declare(
        f"nemo_like.{_name}.default",
        OpFacts(
            saved=True, collective=True, received=lambda sent, got: got, scratch=lambda args, got: 2 * args[0].nbytes
        ),
    )


# Which part of a sequence a rank holds: pure functions of its length, the number of ranks and the rank.
#
# A sequence is padded to a multiple of 2 * ranks and cut into 2 * ranks chunks; rank r holds chunk r and, after it, chunk
# 2 * ranks - 1 - r. Under a causal mask the chunks at the end see most keys, so a pair from both ends is the same work on
# every rank.


def padded_length(length: int, ranks: int) -> int:
    """Return `length` rounded up so that `ranks` ranks can be given equal parts.

    >>> padded_length(13, 2), padded_length(16, 2), padded_length(13, 1)
    (16, 16, 13)
    """
    step = 2 * ranks if ranks > 1 else 1
    return -(-length // step) * step


def positions(length: int, ranks: int, rank: int, device: torch.device | str | None = None) -> Tensor:
    """Return the positions in the whole sequence of the tokens of `rank`'s part, (length / ranks,); `length` is padded
    already.

    >>> positions(8, 2, 0).tolist(), positions(8, 2, 1).tolist()
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    return cut(torch.arange(length, device=device), 0, ranks, rank)


def pad(whole: Tensor, dim: int, ranks: int, value: float = 0) -> Tensor:
    """`whole` with `value` after its end on `dim`, so that `ranks` ranks can be given equal parts."""
    missing = padded_length(whole.shape[dim], ranks) - whole.shape[dim]
    if not missing:
        return whole
    return torch.nn.functional.pad(whole, [0, 0] * (whole.ndim - 1 - dim % whole.ndim) + [0, missing], value=value)


def cut(whole: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    """`rank`'s part of a padded sequence on `dim`: its two chunks one after the other."""
    if ranks == 1:
        return whole
    chunks = whole.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)


def join(parts: Tensor, dim: int) -> Tensor:
    """The whole sequence on `dim` from the parts of all ranks, stacked in front: (ranks, ...) to (...)."""
    ranks = len(parts)
    if ranks == 1:
        return parts[0]
    heads, tails = zip(*(part.chunk(2, dim) for part in parts))
    return torch.cat([*heads, *reversed(tails)], dim)


def split(whole: Tensor, dim: int, ranks: int) -> Tensor:
    """The parts of all ranks, stacked in front: the opposite of `join`. (...) to (ranks, ...)."""
    return torch.stack([cut(whole, dim, ranks, rank) for rank in range(ranks)])


# For loops of one's own: tensors of whole sequences to this rank's part, and back.

T = TypeVar("T", bound=Tensor | Mapping[str, Any])

_PADDING = {"labels": -100, "targets": -100, "shift_labels": -100}


def shard_sequence(batch: T, mesh: DeviceMesh, *, dim: int = 1, length: int | None = None) -> T:
    """This rank's part of whole sequences, in the order in which a model cut by ``cp=`` returns its logits.

    The model itself is called with whole sequences; this is for tensors outside of it: labels and weights of a loss of
    one's own. The gradients that FSDP2 averages are those of the whole loss where each rank's loss is its part of the
    sum, times the ranks: ``cross_entropy(part, labels, reduction="sum") * cp / counted_tokens_of_all_ranks``.

    Args:
        batch: a tensor with the sequence on `dim`, padded with 0; or a dict of such, of which tensors as long as
            `length` on `dim` are cut (``labels``, ``targets`` and ``shift_labels`` padded with -100) and all else stays.
        mesh: with a ``cp`` axis; without one, or with one rank on it, `batch` comes back as it is.
        length: tokens of the whole sequence; None: of ``input_ids``, else of the first tensor.

    Returns:
        (B, S, ...) as (B, padded S / cp, ...): of 2 * cp equal chunks of the padded sequence, the rank-th from the front and
        then the rank-th from the back. S is padded to a multiple of 2 * cp.
    """
    ranks, rank = _place(mesh)
    if ranks == 1:
        return batch
    if isinstance(batch, Tensor):
        return cut(pad(batch, dim, ranks), dim, ranks, rank)  # type: ignore[return-value]
    if length is None:
        first = batch.get("input_ids")
        tensors = (value for value in batch.values() if isinstance(value, Tensor) and value.ndim > dim)
        first = next(tensors, None) if first is None else first
        if first is None:
            raise ValueError("shard_sequence got a dict without a tensor that has a sequence; pass length=.")
        length = first.shape[dim]
    return {  # type: ignore[return-value]
        name: cut(pad(value, dim, ranks, _PADDING.get(name, 0)), dim, ranks, rank)
        if isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] == length
        else value
        for name, value in batch.items()
    }


def unshard_sequence(part: Tensor, mesh: DeviceMesh, *, dim: int = 1, length: int | None = None) -> Tensor:
    """The whole sequences from every rank's part, on every rank; with gradients. The opposite of `shard_sequence`.

    Args:
        part: a tensor with this rank's part on `dim`, such as ``output.logits`` (B, S / cp, V).
        mesh: with a ``cp`` axis.
        length: tokens to return; None: all, with the padding at the end.
    """
    ranks, _ = _place(mesh)
    whole = part if ranks == 1 else gather_sequence(part, dim, ranks, name_group(mesh["cp"].get_group()))
    return whole if length is None else whole.narrow(dim, 0, length)


def _place(mesh: DeviceMesh) -> tuple[int, int]:
    """Ranks of the ``cp`` axis, and which of them this one is."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is {a_or_an(mesh)}; it must be the DeviceMesh that the model was cut over.")
    ranks = axis_size(mesh, "cp")
    return ranks, mesh["cp"].get_local_rank() if ranks > 1 else 0
