"""The device mesh: which ranks share shards, which hold copies, which split a tensor.

Axes, from the slowest network to the fastest, so that neighbours on the innermost axis sit on one node:

| axis | its ranks |
|---|---|
| ``pp`` | hold other layers and pass hidden states on |
| ``dp_replicate`` | hold the same shards and see other data (HSDP) |
| ``dp_shard`` | hold other shards and see other data (FSDP) |
| ``cp`` | hold other shards and see other parts of the same sequences |
| ``tp`` | hold other parts of the same tensors and see the same data |

``dp_shard`` is always there, the others where they are larger than one rank.
"""

import math
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_like._util.words import a_or_an
from nemo_like.distributed import launch
from nemo_like.options import did_you_mean
from nemo_like.torch_compat import flatten_mesh, root_mesh

# Every axis name that a mesh may have, in this order.
AXES: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def build_mesh(
    *,
    dp_replicate: int = 1,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    device_type: str | None = None,
    world_size: int | None = None,
    one_rank: bool = False,
) -> DeviceMesh:
    """A mesh over all ranks of the job, from the launcher's environment; joins the process group if there is none.

    Every number is checked before anything is started, from values that all ranks share. So a wrong one is the same
    error on every rank, and no rank is left waiting.

    Args:
        dp_replicate: groups of ranks that each hold one whole copy of the model (HSDP); 1: one copy over all ranks.
        tp: ranks that one tensor is split over.
        cp: ranks that one sequence is split over; for FSDP they are folded into ``dp_shard``.
        pp: ranks that the layers are divided over.
        device_type: ``"cuda"`` or ``"cpu"``; None: CUDA where there is any.
        world_size: ranks that the caller counts on; None: whatever the job has.
        one_rank: allow a job of one rank, for which a process group is made too.

    Returns:
        A mesh of shape ``(pp, dp_replicate, dp_shard, cp, tp)``, axes of size 1 left out except ``dp_shard``.

    Raises:
        ValueError: a size that is not a whole number >= 1, a product that does not divide the world size, or one rank
            without `one_rank`.
    """
    sizes = {"pp": pp, "dp_replicate": dp_replicate, "cp": cp, "tp": tp}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; it must be a whole number of ranks >= 1.")
    ranks = launch.world_size()
    if world_size is not None and world_size != ranks:
        raise ValueError(f"world_size is {world_size}, but this job has {ranks} rank(s).")
    if ranks == 1 and not one_rank:
        raise ValueError(
            "build_mesh was called in a job of one rank. One rank needs no mesh and no process group: "
            "use strategy='single', or start more ranks (torchrun --nproc-per-node 2 ...)."
        )
    used = math.prod(sizes.values())
    if ranks % used:
        axes = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise ValueError(f"{axes} is {used}, which does not divide the {ranks} ranks, so no shard axis is left.")
    device = launch.init_distributed(device_type, one_rank=one_rank)
    shape = {name: sizes.get(name, ranks // used) for name in AXES}
    shape = {name: size for name, size in shape.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def validate_mesh(mesh: DeviceMesh) -> None:
    """Check a mesh that the caller built, before anything is done with it.

    Raises:
        TypeError: it is no `DeviceMesh`.
        ValueError: unnamed or unknown axes, axes out of order, no ``dp_shard``, or a size that is not that of the job.
            A slice of a larger mesh (one pipeline stage of a mesh with a ``pp`` axis) is fine.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is {mesh!r}, {a_or_an(mesh)}; it must be a torch DeviceMesh.")
    names = mesh.mesh_dim_names
    allowed = ", ".join(AXES)
    if not names:
        raise ValueError(f"The mesh has no axis names; build it with mesh_dim_names taken from {allowed}.")
    for name in names:
        if name not in AXES:
            raise ValueError(
                f"The mesh has an axis {name!r}; known axes are {allowed}.{did_you_mean(name, AXES)} "
                "Rename it, or pass the slice that data and tensor parallelism use (mesh['dp_shard', 'tp'])."
            )
    if list(names) != sorted(names, key=AXES.index):
        raise ValueError(f"The mesh's axes are {names}; their order must be that of {allowed}.")
    if "dp_shard" not in names:
        raise ValueError(f"The mesh's axes are {names}; 'dp_shard' is missing (its size may be 1).")
    ranks, whole = launch.world_size(), root_mesh(mesh).size()
    if whole == mesh.size() and dist.is_initialized() and mesh.get_coordinate() is None:
        raise ValueError(f"Rank {launch.rank()} is not in the mesh {mesh.mesh.tolist()}; every rank must be in it.")
    if whole != ranks:
        raise ValueError(
            f"The mesh has {whole} rank(s) in the shape {dict(zip(names, mesh.shape))}, but the job has {ranks}: "
            "every rank must be in it."
        )


def check_sizes(mesh: DeviceMesh, sizes: Mapping[str, int]) -> None:
    """`validate_mesh`, and raise ValueError where a size that was asked for by axis is neither 1 nor the mesh's."""
    validate_mesh(mesh)
    for name, size in sizes.items():
        if size not in (1, axis_size(mesh, name)):
            raise ValueError(
                f"{name} is {size}, but the mesh's axis has {axis_size(mesh, name)} rank(s); drop one of the two."
            )


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of `mesh` that FSDP shards over: 1-D (FSDP), or 2-D (replicate, shard) for HSDP.

    ``cp`` ranks hold the same parameters and see other tokens, so they shard too: ``dp_shard`` and ``cp`` become one
    axis ``dp_shard_cp`` (as torchtitan's ``parallel_dims.py`` does).
    """
    names = mesh.mesh_dim_names or ()
    if "cp" in names:
        replicas = mesh["dp_replicate"] if "dp_replicate" in names else None
        return flatten_mesh(mesh["dp_shard", "cp"], "dp_shard_cp", replicas)
    return mesh["dp_replicate", "dp_shard"] if "dp_replicate" in names else mesh["dp_shard"]


def axis_size(mesh: DeviceMesh | None, name: str) -> int:
    """Ranks along the axis `name`, 1 where the mesh has no such axis or is None."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return mesh.size(names.index(name)) if mesh is not None and name in names else 1
