"""Checkpoints written by several processes, and by processes that die while writing."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nemo_like.recipes.agree import OtherRankError, Ranks
from nemo_like.recipes.job_checkpoint import CheckpointError, CheckpointStore
from tests_distributed.spawn import RankDiedError, on_ranks, run_ranks

CPU = torch.device("cpu")


def _ranks(rank: int, world_size: int) -> Ranks:
    return Ranks(rank, world_size, CPU, control=None if world_size == 1 else dist.new_group(backend="gloo"))


def _state(seed: float, world_size: int = 1) -> dict[str, Any]:
    """A (10, 3) matrix, sharded over its rows where there are ranks, and a scalar that every rank has."""
    matrix = torch.arange(30.0).view(10, 3) + seed
    if world_size > 1:
        matrix = distribute_tensor(matrix, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    return {"model": {"matrix": matrix}, "optimizer": {"matrix": {"step": torch.tensor(seed)}}}


def _save(rank: int, world_size: int, folder: str, step: int) -> None:
    store = CheckpointStore(folder, _ranks(rank, world_size))
    store.save(step, _state(step, world_size), {"writers": world_size})
    store.wait()


def _load(rank: int, world_size: int, folder: str) -> tuple[int | None, torch.Tensor, float]:
    state = _state(0.25, world_size)
    step = CheckpointStore(folder, _ranks(rank, world_size)).load(state, lambda about: None)
    matrix = state["model"]["matrix"]
    matrix = matrix.full_tensor() if isinstance(matrix, DTensor) else matrix
    return step, matrix, float(state["optimizer"]["matrix"]["step"])


def test_shards_of_two_ranks_load_on_four_and_on_one_and_back(tmp_path: Path):
    for step, writers in enumerate((2, 4, 1), 1):
        run_ranks(writers, _save, str(tmp_path), step, init_group=writers > 1)
        for readers in (4, 1):
            for found, matrix, scalar in run_ranks(readers, _load, str(tmp_path), init_group=readers > 1):
                assert (found, scalar) == (step, step)
                assert torch.equal(matrix, torch.arange(30.0).view(10, 3) + step)


def test_damage_seen_by_one_rank_sends_all_ranks_to_the_checkpoint_before(tmp_path: Path):
    for step in (1, 2):
        run_ranks(2, _save, str(tmp_path), step)
    damaged = tmp_path / "step-00000002" / "__1_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[-300] ^= 1
    damaged.write_bytes(content)
    assert [step for step, _, _ in run_ranks(2, _load, str(tmp_path))] == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".damaged-00000002", "step-00000001"]
    (tmp_path / "step-00000001" / "__0_0.distcp").unlink()
    for error in run_ranks(2, _load, str(tmp_path), return_exceptions=True):
        assert isinstance(error, CheckpointError)
        assert "None is left to resume from" in str(error)


@on_ranks(2)
def test_a_write_that_fails_on_one_rank_is_an_error_on_all_and_harms_nothing(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    store = CheckpointStore(folder, _ranks(rank, world_size))
    store.save(1, _state(1, world_size), {})
    store.wait()
    errors = []
    for background in (True, False):
        store = CheckpointStore(folder, _ranks(rank, world_size), background=background)
        if rank == 1:  # a real full disk, as far as this process can tell
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        try:
            store.save(2, _state(2, world_size), {})
            store.wait()
        except (CheckpointError, OtherRankError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.save(3, _state(3, world_size), {})
    store.wait()
    errors = errors + [str(store.steps())]
    assert len(errors) == 3
    for text in errors[:2]:
        assert text.startswith("CheckpointError: Writing the checkpoint of step 2") and "File too large" in text
    assert errors[2] == "[3, 1]"


def _save_until_killed(rank: int, world_size: int, folder: str, delay: float) -> None:
    store = CheckpointStore(folder, _ranks(rank, world_size), keep=2)
    for step in range(1, 100_000):
        store.save(step, _state(step), {})
        if step == 3:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


def test_a_save_killed_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path: Path):
    for i, delay in enumerate((0.0, 0.011, 0.023, 0.037, 0.05)):
        folder = str(tmp_path / str(i))
        with pytest.raises(RankDiedError):
            run_ranks(1, _save_until_killed, folder, delay, init_group=False)
        step, matrix, scalar = _load(0, 1, folder)
        assert step is not None and step >= 2 and scalar == step
        assert torch.equal(matrix, torch.arange(30.0).view(10, 3) + step)
