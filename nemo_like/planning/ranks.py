"""Planning in a job: over how many ranks parameters are sharded, and one plan for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def shard_ranks(mesh: Any, world_size: int | None) -> int:
    """Ranks that FSDP2 shards over: ``dp_shard`` x ``cp`` of `mesh`, or `world_size`, or the process group's size."""
    if mesh is not None:
        return axis(mesh, "dp_shard") * axis(mesh, "cp") if mesh.mesh_dim_names else mesh.size()
    if world_size is not None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; it must be >= 1.")
        return world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def axis(mesh: Any, name: str) -> int:
    """Size of an axis of `mesh`; 1 where there is none."""
    return mesh[name].size() if mesh is not None and name in (mesh.mesh_dim_names or ()) else 1


def same_on_all_ranks(make: Callable[[], T]) -> T:
    """Rank 0 calls `make`; its result, or its error, is everybody's."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return make()
    if torch.distributed.get_world_size() == 1:
        return make()
    box: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            box = [make()]
        except Exception as error:  # noqa: BLE001 - handed on to every rank, where it is raised
            box = [error]
    torch.distributed.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]
