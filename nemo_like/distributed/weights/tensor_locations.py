"""The places where a model's tensors are registered, under the names of the original model."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nemo_like._util.module_tree import bare_name, join
from nemo_like.torch_compat import as_dtensor_type, tree_map_only

# Set on a root whose shards wait in CPU memory, which FSDP2 does not tell in public.
CPU_OFFLOAD_MARK = "_nemo_like_cpu_offload"

# The attribute of a module with the stages of one rank of a pipeline that has the pipeline's process group.
STAGES_MARK = "_nemo_like_stages"


@dataclass(eq=False)
class Slot:
    """One parameter or buffer, and every place it is registered in (more than one where it is tied)."""

    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    # The original model's names, in the order in which the model registers them.
    names: list[str] = field(default_factory=list)
    saved: bool = True  # The tensor is part of a state dict; false for non-persistent buffers.

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    def put(self, tensor: Tensor) -> None:
        """Register `tensor` in every place instead; a parameter keeps `requires_grad` and attributes set on it."""
        if self.is_parameter:
            param = nn.Parameter(tensor, requires_grad=self.tensor.requires_grad)
            param.__dict__.update(self.tensor.__dict__)
            tensor = param
        for module, name in self.places:
            registered: dict[str, Any] = module._parameters if self.is_parameter else module._buffers
            registered[name] = tensor
        self.tensor = tensor


def find_slots(model: nn.Module) -> list[Slot]:
    """Every parameter and buffer of `model`, once each, in the order of registration."""
    slots: dict[int, Slot] = {}
    seen: set[tuple[str, str]] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        transient = module._non_persistent_buffers_set
        for local, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = bare_name(join(prefix, local))
            if tensor is None or (name, local) in seen:
                continue
            seen.add((name, local))
            slot = slots.setdefault(id(tensor), Slot(tensor, saved=local not in transient))
            slot.names.append(name)
            if not any(holder is module and at == local for holder, at in slot.places):
                slot.places.append((module, local))
    return list(slots.values())


def show_shards(model: nn.Module) -> None:
    """Have every FSDP unit register its shards: a forward without backward leaves some units gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def adapters(slots: Iterable[Slot]) -> set[Slot]:
    """The slots that PEFT added to layers of the original model."""
    named = [(slot, name) for slot in slots for name in slot.names]
    layers = {name.partition(".base_layer.")[0] for _, name in named if ".base_layer." in name}

    def added(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:at]) in layers and parts[at] != "base_layer" for at in range(1, len(parts)))

    return {slot for slot, name in named if added(name)}


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Give FSDP's units their own classes back inside, since transformers reads names of classes."""
    units = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, cls in units:
            module.__class__ = cls.__bases__[1]
        yield
    finally:
        for module, cls in units:
            module.__class__ = cls


def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy the unsharded `whole` into `target`, of which this rank may hold a part; no communication.

    Args:
        target: a plain tensor or a DTensor of any sharding, on any device.
        whole: the same global shape, any dtype (cast) and device, with the same values on every rank.
    """
    with torch.no_grad():
        for chunk, view in boxes_of(target):
            view.copy_(_narrowed(whole, chunk.offsets, chunk.sizes))


def list_names(names: Iterable[str], limit: int = 5) -> str:
    """``a, b, c and 7 more``."""
    listed = sorted(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


# DTensors whose local part is several boxes of the whole tensor, told to `torch.distributed.checkpoint` box by box.
#
# A packed weight (gate and up projection in one) is cut so that a rank has rows of each projection, one behind the other.
# Its placement has it, and DTensor gathers it right, but describes every local part to DCP as one box (torch 2.13): DCP
# then saves chunks that overlap, or reads other rows without an error.


class StridedDTensor(DTensor):
    """A DTensor that DCP saves and loads as the boxes that it is; operators give one where they keep the placements."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: object = (), kwargs: object = None) -> Any:  # type: ignore[override]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # Copies on another device, as an asynchronous save makes them, are such tensors again.
        return result if func._schema.is_mutable else tree_map_only(DTensor, in_boxes, result)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in boxes_of(self)]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk, _ in boxes_of(self)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for chunk, box in boxes_of(self) if chunk.offsets == index.offset)


# So that `torch.load` reads these as it reads DTensors.
torch.serialization.add_safe_globals([StridedDTensor])


def in_boxes(tensor: object) -> Any:
    """`tensor` itself, or the same memory as a `StridedDTensor` where it is a DTensor whose local part is several boxes."""
    if not isinstance(tensor, DTensor) or isinstance(tensor, StridedDTensor) or not is_strided(tensor):
        return tensor
    return as_dtensor_type(StridedDTensor, tensor)


def as_dtensor(tensor: object) -> Any:
    """The opposite of `in_boxes`, for an optimizer to work on."""
    return as_dtensor_type(DTensor, tensor) if isinstance(tensor, StridedDTensor) else tensor


def is_strided(tensor: DTensor) -> bool:
    """Return whether the local part of `tensor` is not one box of the whole one."""
    # FSDP2 over a plain cut on the same dim has such a placement, too, and one box.
    cut_twice = any(hasattr(placement, "split_factor") for placement in tensor.placements)
    return cut_twice and any(len(runs) > 1 for runs in _runs(tensor))


def describe_strided(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    """A state dict post hook of `module`, for whoever gives its state dict to DCP."""
    for name in module._parameters:
        value = state.get(prefix + name)
        if value is not None and not isinstance(value, nn.Parameter):  # those are asked for with keep_vars=True
            state[prefix + name] = in_boxes(value)


# A place in a whole tensor, and the values there: a view of this rank's part.
Box = tuple[ChunkStorageMetadata, Tensor]


def boxes_of(tensor: Tensor) -> Iterator[Box]:
    """Yield each box that this rank's part of `tensor` is made of: one of a plain tensor, none of an empty part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    for box in product(*_runs(tensor)):
        offsets, here, sizes = (torch.Size(run[at] for run in box) for at in range(3))
        yield ChunkStorageMetadata(offsets=offsets, sizes=sizes), _narrowed(local, here, sizes)


def _narrowed(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A view of one box of `tensor`; all of it is `tensor` itself, since tensors of other libraries may have no views."""
    for dim, (at, size) in enumerate(zip(offsets, sizes)):
        if size < tensor.shape[dim]:
            tensor = tensor.narrow(dim, at, size)
    return tensor


def _runs(tensor: Tensor) -> list[list[tuple[int, int, int]]]:
    """For each dim, runs of indices that this rank holds: (first in the whole tensor, first in the local part, size)."""
    held = [torch.arange(size) for size in tensor.shape]  # indices of the whole tensor, in the order of the local part
    mesh, placements = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (None, ())
    for axis, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if mesh is not None and dim is not None:
            rank, ranks = mesh.get_local_rank(axis), mesh.size(axis)
            parts = held[dim].chunk(getattr(placement, "split_factor", 1))
            rows = [chunks[rank] for part in parts if rank < len(chunks := part.chunk(ranks))]
            held[dim] = torch.cat(rows) if rows else held[dim][:0]
    runs = []
    for indices in held:
        starts = [0, *(indices.diff() != 1).nonzero().flatten().add(1).tolist()] if len(indices) else []
        ends = [*starts[1:], len(indices)]
        runs.append([(int(indices[start]), start, end - start) for start, end in zip(starts, ends)])
    return runs
