"""One model on all ranks: compare a checksum of every tensor, and send the first rank's where they differ.

FSDP2 cuts each rank's shard out of that rank's own weights, and never compares: ranks that drew other initial weights
make one model out of pieces of several, and the replicas of HSDP train as many models as there are replicas.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nemo_like._util.log import warn_once
from nemo_like.distributed.agreement import gather, mesh_groups, wire_device

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def start_from_the_same_weights(model: nn.Module, mesh: DeviceMesh | None) -> bool:
    """Give every rank the first rank's parameters and buffers, where they differ; says so once. A collective.

    Tensors on the meta device have no values yet (`materialize` gives every rank the same), and DTensors are another's
    to care for: both are left out.

    Args:
        model: the same names, shapes and dtypes on every rank (`check_agreement`); changed in place.
        mesh: its ranks hold one model together; None: this process alone.

    Returns:
        Whether anything was sent.
    """
    if mesh is None or mesh.size() == 1:
        return False
    tensors = list(_plain_tensors(model))
    if not tensors:
        return False
    groups = mesh_groups(mesh)
    mine = torch.tensor([_checksum(tensor) for _, tensor in tensors])  # (tensors,) int64
    differs = (gather(mine, groups) != gather_first(mine, groups)).any(0).tolist()
    chosen = [pair for pair, other in zip(tensors, differs, strict=True) if other]
    if not chosen:
        return False
    first = int(mesh.mesh.flatten()[0])
    warn_once(
        f"Ranks had different initial weights in {len(chosen)} of {len(tensors)} tensors (first: {chosen[0][0]}): every "
        f"rank has those of rank {first} now. Give all ranks one seed, or load the weights on all of them, to save this.",
        key="different initial weights",
    )
    for _, tensor in chosen:
        _send_first(tensor, groups)
    return True


def gather_first(row: Tensor, groups: list[dist.ProcessGroup | None]) -> Tensor:
    """The first rank's `row`, (n,) on the CPU."""
    row = row.clone()
    for group in groups:
        there = row.to(wire_device(group))
        dist.broadcast(there, group=group, group_src=0)
        row = there.cpu()
    return row


def _send_first(tensor: Tensor, groups: list[dist.ProcessGroup | None]) -> None:
    # Along one axis after the other: what the first rank of each group has came from the first rank of all before.
    flat = tensor.detach().reshape(-1).view(torch.uint8)  # bytes: back ends do not know every dtype
    for group in groups:
        flat = flat.to(wire_device(group, tensor.device), copy=True)
        dist.broadcast(flat, group=group, group_src=0)
    with torch.no_grad():
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer that has values here, once; a subclass's inner tensors in place of it."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield from _inner(name, tensor)


def _inner(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tensor, DTensor) or tensor.is_meta:
        return
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) and hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, attribute), Tensor):  # some name objects that are no tensors, too
                yield from _inner(f"{name}.{attribute}", part)
    elif tensor.numel():
        for axis, stride in enumerate(tensor.stride()):
            if stride == 0:  # expanded: one element in many places, which copy_ refuses to write
                tensor = tensor.narrow(axis, 0, 1)
        yield name, tensor


def _checksum(tensor: Tensor) -> int:
    """A number out of every bit of `tensor` and where it stands; exact, so the same bits give it on every machine."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.detach()
    bits = bits.to(torch.int8) if bits.dtype == torch.bool else bits.view(_BITS[bits.element_size()])
    while bits.ndim:
        # Rows first: a sum over the last axis makes no copy of a large weight in int64.
        places = torch.arange(1, bits.shape[-1] + 1, device=bits.device)
        bits = (bits * places).sum(-1) if bits.ndim == 1 else bits.sum(-1, dtype=torch.int64)
    return int(bits)
