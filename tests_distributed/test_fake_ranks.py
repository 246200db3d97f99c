"""Ranks that are not there, next to ranks that are: `torch_compat.fake_ranks` and `dry_run` in a job of two gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

from nemo_like import Job, dry_run, parallelize
from nemo_like.torch_compat import FakeRanks, fake_ranks
from tests.models.decoders import build
from tests.models.tiny import Decoder
from tests_distributed.spawn import on_ranks, run_ranks


def _sums(mesh: DeviceMesh, group: dist.ProcessGroup) -> list[float]:
    """What two ranks add up: by the group of all, a group of their own, the mesh, and as a DTensor."""
    plain, own = torch.ones(1), torch.ones(1)
    dist.all_reduce(plain)
    dist.all_reduce(own, group=group)
    by_mesh = functional.all_reduce(torch.ones(1), "sum", mesh.get_group())
    parts = distribute_tensor(torch.ones(4, 2), mesh)
    return [plain.item(), own.item(), by_mesh.item(), float((parts.sum() + parts.mean()).full_tensor())]


def _next_to_real_ones(rank: int, world_size: int) -> tuple[list[list[float]], list[int]]:
    mesh, group = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)), dist.new_group([0, 1])
    sums, sizes = [_sums(mesh, group)], []
    with fake_ranks(3, 64):
        inside = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp_shard", "tp"))
        functional.all_reduce(torch.ones(2), "sum", inside["tp"].get_group())
        sizes += [dist.get_world_size(), dist.get_rank(), inside["tp"].size()]
        with fake_ranks(0, 2):
            sizes.append(dist.get_world_size())
        sizes.append(dist.get_world_size())
    sums.append(_sums(mesh, group))
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), fake_ranks(0, 4):
            raise error
        sums.append(_sums(mesh, group))
    again = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    sums.append(_sums(again, dist.new_group([0, 1])))
    return sums, [*sizes, dist.get_world_size(), dist.get_rank()]


@pytest.mark.compat
def test_fake_ranks_leave_the_real_ones_as_they_were() -> None:
    for rank, (sums, sizes) in enumerate(run_ranks(2, _next_to_real_ones)):
        assert sums == [[2.0, 2.0, 2.0, 9.0]] * 5
        assert sizes == [64, 3, 8, 2, 64, 2, rank]


def _peak(axes: dict[str, Any]) -> int:
    ids = torch.zeros(2, 8, dtype=torch.long)
    model, batch = (build("llama"), {"input_ids": ids, "labels": ids}) if "tp" in axes else (Decoder(1), {"ids": ids})
    return dry_run(model, Job.of(ac="full", world_size=64, **axes), batch).peak_bytes


def _dry_run(rank: int, world_size: int, axes: dict[str, Any], ranks: tuple[int, ...]) -> tuple[int, float]:
    peak = _peak(axes) if rank in ranks else 0
    total = torch.ones(1)
    dist.all_reduce(total)
    return peak, total.item()


@pytest.mark.few(1)
@pytest.mark.parametrize(("axes", "ranks"), [({"dp_replicate": 2}, (1,)), ({"tp": 2}, (0, 1))])
def test_a_dry_run_in_a_job_is_that_of_a_process_of_its_own(axes: dict[str, Any], ranks: tuple[int, ...]) -> None:
    alone = _peak(axes)
    wanted = [(alone if rank in ranks else 0, 2.0) for rank in range(2)]
    assert run_ranks(2, _dry_run, axes, ranks) == wanted


# A process for each rank, and models that are planned, split and run (2 s for each).
@pytest.mark.few(1)
@pytest.mark.parametrize("axes", [[("mixtral", "ep")], [("llama", "tp"), ("llama", "cp")]])
@on_ranks(2)
def test_a_budget_is_planned_on_fake_ranks_in_a_job_whose_ranks_work_afterwards(
    rank: int, world_size: int, axes: list[tuple[str, str]]
) -> None:
    ids, found = torch.arange(32).view(2, 16) % 50, []
    for family, axis in axes:
        torch.manual_seed(0)
        batch = {"input_ids": ids, "labels": ids}
        model = parallelize(build(family), ac="50%", sample_input=batch, device="cpu", **{axis: 2})
        model(**batch, use_cache=False).loss.backward()
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        found.append(_sums(mesh, dist.new_group([0, 1])))
    assert found == [[2.0, 2.0, 2.0, 9.0]] * len(axes)


def test_fake_ranks_are_entered_again_after_real_groups_were_destroyed() -> None:
    ranks = FakeRanks(0, 4)
    with ranks:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    with ranks:
        assert dist.get_world_size() == 4
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", mesh.get_group()))
    ranks.forget()
