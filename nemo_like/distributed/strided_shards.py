"""DTensors whose local part is several boxes of the whole tensor, told to `torch.distributed.checkpoint` box by box.

A packed weight (gate and up projection in one) is cut so that a rank has rows of each projection, one behind the other.
Its placement says so, and DTensor gathers it right, but describes every local part to DCP as one box (torch 2.13): DCP
then saves chunks that overlap, or reads other rows without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from nemo_like.torch_compat import as_dtensor_type, tree_map_only


class StridedDTensor(DTensor):
    """A DTensor that DCP saves and loads as the boxes that it is; operators give one where they keep the placements."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # Copies on another device, as an asynchronous save makes them, are such tensors again.
        return result if func._schema.is_mutable else tree_map_only(DTensor, in_boxes, result)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in _boxes(self)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk, _ in _boxes(self)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for chunk, box in _boxes(self) if chunk.offsets == index.offset)


# So that `torch.load` reads these as it reads DTensors.
torch.serialization.add_safe_globals([StridedDTensor])


def in_boxes(tensor: Any) -> Any:
    """`tensor` itself, or the same memory as a `StridedDTensor` where it is a DTensor whose local part is several boxes."""
    if not isinstance(tensor, DTensor) or isinstance(tensor, StridedDTensor) or not is_strided(tensor):
        return tensor
    return as_dtensor_type(StridedDTensor, tensor)


def as_dtensor(tensor: Any) -> Any:
    """The opposite of `in_boxes`, for an optimizer to work on."""
    return as_dtensor_type(DTensor, tensor) if isinstance(tensor, StridedDTensor) else tensor


def is_strided(tensor: DTensor) -> bool:
    """Whether the local part of `tensor` is not one box of the whole one."""
    # FSDP2 over a plain cut on the same dim has such a placement, too, and one box.
    cut_twice = any(hasattr(placement, "split_factor") for placement in tensor.placements)
    return cut_twice and any(len(runs) > 1 for runs in _runs(tensor))


def describe_strided(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """A state dict post hook of `module`, for whoever gives its state dict to DCP."""
    for name in module._parameters:
        value = state.get(prefix + name)
        if value is not None and not isinstance(value, nn.Parameter):  # those are asked for with keep_vars=True
            state[prefix + name] = in_boxes(value)


def _boxes(tensor: DTensor) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
    """Where each box of the local part is in the whole tensor, and the box, a view."""
    local = tensor.to_local()
    for box in product(*_runs(tensor)):
        view = local
        for dim, (_, here, size) in enumerate(box):
            view = view.narrow(dim, here, size)
        offsets, sizes = (torch.Size(run[at] for run in box) for at in (0, 2))
        yield ChunkStorageMetadata(offsets=offsets, sizes=sizes), view


def _runs(tensor: DTensor) -> list[list[tuple[int, int, int]]]:
    """For each dim, runs of indices that this rank holds: (first in the whole tensor, first in the local part, size)."""
    found = []
    for indices in _own_indices(tensor):
        starts = [0, *(indices.diff() != 1).nonzero().flatten().add(1).tolist()] if len(indices) else []
        ends = [*starts[1:], len(indices)]
        found.append([(int(indices[start]), start, end - start) for start, end in zip(starts, ends)])
    return found


def _own_indices(tensor: DTensor) -> list[Tensor]:
    """For each dim, the indices of the whole tensor that this rank holds, in the order of the local part."""
    indices = [torch.arange(size) for size in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        rank, ranks = tensor.device_mesh.get_local_rank(axis), tensor.device_mesh.size(axis)
        parts = indices[dim].chunk(getattr(placement, "split_factor", 1))
        own = [chunks[rank] for part in parts if rank < len(chunks := part.chunk(ranks))]
        indices[dim] = torch.cat(own) if own else indices[dim][:0]
    return indices
