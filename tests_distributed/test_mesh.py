"""The mesh: which axes it has, and that a wrong request is the same error on every rank."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from nemo_like.distributed.mesh import axis_size, build_mesh, data_parallel_mesh, validate_mesh
from tests_distributed.spawn import on_ranks, refused_on_ranks, run_ranks


def _shape(rank: int, world_size: int, sizes: dict[str, int]) -> tuple[dict[str, int], list[str], list[list[int]]]:
    mesh = build_mesh(**sizes)
    validate_mesh(mesh)
    dp = data_parallel_mesh(mesh)
    ranks = dp.mesh.tolist() if dp.ndim == 2 else [dp.mesh.tolist()]
    groups = [dist.get_process_group_ranks(dp.get_group(axis)) for axis in range(dp.ndim)]
    assert all(rank in group for group in groups)
    return dict(zip(mesh.mesh_dim_names, mesh.shape)), list(dp.mesh_dim_names), ranks


@pytest.mark.parametrize(
    ("sizes", "axes", "dp_axes", "dp_ranks_of_zero"),
    [
        ({}, {"dp_shard": 4}, ["dp_shard"], [[0, 1, 2, 3]]),
        ({"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}, ["dp_replicate", "dp_shard"], [[0, 1], [2, 3]]),
        ({"tp": 2}, {"dp_shard": 2, "tp": 2}, ["dp_shard"], [[0, 2]]),
        ({"cp": 2}, {"dp_shard": 2, "cp": 2}, ["dp_shard_cp"], [[0, 1, 2, 3]]),
        ({"cp": 2, "tp": 2}, {"dp_shard": 1, "cp": 2, "tp": 2}, ["dp_shard_cp"], [[0, 2]]),
        (
            {"cp": 2, "dp_replicate": 2},
            {"dp_replicate": 2, "dp_shard": 1, "cp": 2},
            ["dp_replicate", "dp_shard_cp"],
            [[0, 1], [2, 3]],
        ),
    ],
)
def test_axes(sizes: dict, axes: dict, dp_axes: list, dp_ranks_of_zero: list) -> None:
    shapes = run_ranks(4, _shape, sizes)
    assert shapes[0] == (axes, dp_axes, dp_ranks_of_zero)
    assert all(shape[:2] == shapes[0][:2] for shape in shapes)


@on_ranks(2, init_group=False, env={"CUDA_VISIBLE_DEVICES": ""})
def test_the_process_group_is_made_from_the_launchers_environment(rank: int, world_size: int) -> None:
    assert not dist.is_initialized()
    assert (tuple(build_mesh().shape), dist.get_backend()) == ((2,), "gloo")


def _build(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    try:
        build_mesh(**sizes)
    finally:
        assert not dist.is_initialized()  # nothing was started, so nobody waits


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp_replicate": 3}, "dp_replicate=3 is 3, which does not divide the 4 ranks"),
        ({"dp_replicate": 2, "tp": 4}, "dp_replicate=2 x tp=4 is 8, which does not divide the 4 ranks"),
        ({"tp": 0}, "tp is 0; it must be a whole number of ranks >= 1"),
        ({"dp_replicate": 2.0}, r"dp_replicate is 2\.0"),
        ({"world_size": 8}, r"world_size is 8, but this job has 4 rank\(s\)"),
    ],
)
def test_a_wrong_size_is_the_same_error_on_every_rank(sizes: dict, message: str) -> None:
    refused_on_ranks(4, _build, sizes, match=message, init_group=False, timeout=20)


def test_one_rank_needs_no_mesh() -> None:
    with pytest.raises(ValueError, match="One rank needs no mesh"):
        build_mesh()
    assert not dist.is_initialized()


MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None]] = {
    "no names": ((4,), None),
    "unknown": ((2, 2), ("dp_replica", "dp_shard")),
    "order": ((2, 2), ("tp", "dp_shard")),
    "no shard": ((2, 2), ("dp_replicate", "tp")),
    "size": ((2,), ("dp_shard",)),
    "stage": ((2, 2), ("pp", "dp_shard")),
}


def _validate(rank: int, world_size: int, case: str) -> None:
    mesh: Any = "dp_shard"
    if case in MESHES:
        shape, names = MESHES[case]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if case == "stage":
        mesh = mesh["dp_shard"]
        assert axis_size(mesh, "dp_shard") == 2 and axis_size(mesh, "tp") == 1
    dist.barrier()  # a rank that leaves while another connects to it is an error of gloo's there
    validate_mesh(mesh)


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("no names", ValueError, "no axis names"),
        ("unknown", ValueError, "axis 'dp_replica'.* Did you mean 'dp_replicate'"),
        ("order", ValueError, "order must be that of pp, dp_replicate, dp_shard, cp, tp"),
        ("no shard", ValueError, "'dp_shard' is missing"),
        ("size", ValueError, r"2 rank\(s\) .* but the job has 4|Rank [23] is not in the mesh"),
        ("no mesh", TypeError, "must be a torch DeviceMesh"),
    ],
)
def test_a_wrong_mesh_is_an_error_on_every_rank(case: str, kind: type, message: str) -> None:
    refused_on_ranks(4, _validate, case, error=kind, match=message, timeout=20)


def test_a_pipeline_stages_slice_is_a_mesh() -> None:
    run_ranks(4, _validate, "stage")
