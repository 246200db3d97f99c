"""For loops of one's own: tensors of whole sequences to this rank's part, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed.context_parallel import layout
from nemo_like.distributed.context_parallel.sequence_ops import gather_sequence, name_group
from nemo_like.distributed.mesh import axis_size
from nemo_like.options.words import a_or_an

T = TypeVar("T", bound=Tensor | Mapping[str, Any])

_PADDING = {"labels": -100, "targets": -100, "shift_labels": -100}


def shard_sequence(batch: T, mesh: DeviceMesh, *, dim: int = 1, length: int | None = None) -> T:
    """This rank's part of whole sequences, in the order in which a model cut by ``cp=`` returns its logits.

    The model itself is called with whole sequences; this is for what stays outside of it: labels and weights of a loss of
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
        return layout.cut(layout.pad(batch, dim, ranks), dim, ranks, rank)  # type: ignore[return-value]
    if length is None:
        first = batch.get("input_ids")
        tensors = (value for value in batch.values() if isinstance(value, Tensor) and value.ndim > dim)
        first = next(tensors, None) if first is None else first
        if first is None:
            raise ValueError("shard_sequence got a dict without a tensor that has a sequence; pass length=.")
        length = first.shape[dim]
    return {  # type: ignore[return-value]
        name: layout.cut(layout.pad(value, dim, ranks, _PADDING.get(name, 0)), dim, ranks, rank)
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
