"""Which experts of a whole weight this rank holds, so that nothing else is read for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def own_experts(target: Tensor) -> slice | None:
    """The rows of dim 0 of a whole weight that this rank's part of `ep` needs; None: `target` is not split by experts."""
    if not isinstance(target, DTensor) or "ep" not in (target.device_mesh.mesh_dim_names or ()):
        return None
    ranks = target.device_mesh["ep"].size()
    each = target.shape[0] // ranks
    first = target.device_mesh["ep"].get_local_rank() * each
    return slice(first, first + each)


@torch.no_grad()
def copy_own_experts(target: DTensor, own: Tensor) -> None:
    """Copy `own`, the rows that `own_experts` names, into `target`: this rank's shard of them; no communication."""
    names = target.device_mesh.mesh_dim_names or ()
    kept = [(name, place) for name, place in zip(names, target.placements, strict=True) if name != "ep"]
    own = own.detach().to(target.device)
    for name, place in kept:
        # What FSDP2 calls a strided shard of the whole weight is a plain one of this part of it.
        place = Replicate() if place.is_replicate() else Shard(place.dim)  # type: ignore[attr-defined]
        own = distribute_tensor(own, target.device_mesh[name], [place], src_data_rank=None).to_local()
    target.to_local().copy_(own)
