"""What runs and checkpoints of several processes are after one was killed, has no disk left, or may not write."""

import contextlib
import io
import json
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nemo_like._util.json_file import replace_folder
from nemo_like.distributed.ranks import OtherRankError, Ranks
from nemo_like.distributed.weights.checkpoints import CheckpointError, CheckpointStore
from nemo_like.recipes.pretrain import main
from tests.checks import whole
from tests_distributed.recipes.pretrain_job import LLAMA, run_job, run_main
from tests_distributed.spawn import RankDiedError, on_ranks, refused_on_ranks, run_ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a small job."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "text.txt").write_text("".join(f"{i} bottles of beer on the wall.\n" for i in range(200)))
    line = f"--model {folder / 'config.json'} --data {folder / 'text.txt'} --steps 4 --global-batch 4 --seq-len 16"
    return f"{line} --eval-samples 0 --warmup-steps 1 --device cpu --precision float32".split()


def _killed_in_a_step(rank: int, world_size: int, arguments: list[str]) -> None:
    left = iter(range(3))

    def count(*_: object) -> None:
        if next(left, None) is None and rank == world_size - 1:  # in the fourth step: nothing ends the save of step 2
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_pre_hook(count)
    main(arguments)


def test_a_run_killed_in_a_step_goes_on_from_the_last_checkpoint(base: list[str], tmp_path: Path) -> None:
    line = [*base, "--save-every", "2", "--sync-save", "--checkpoint-dir", str(tmp_path / "killed")]
    with pytest.raises(RankDiedError):
        run_ranks(2, _killed_in_a_step, line, init_group=False)
    whole = run_job(2, base, tmp_path / "whole.json")
    resumed = run_job(2, [*line, "--resume"], tmp_path / "resumed.json")
    assert resumed["first_step"] == 2 and resumed["losses"] == whole["losses"][2:]


def _killed_in_the_result(rank: int, world_size: int, folder: str, steps: int) -> None:
    """steps: the writing and the renamings that it still does."""
    left, rename = iter(range(steps)), Path.rename

    def die() -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"new")
        die()

    Path.rename = lambda self, to: die() or rename(self, to)  # type: ignore[assignment,method-assign]
    replace_folder(Path(folder), write)


def _write(folder: Path, content: bytes) -> None:
    replace_folder(folder, lambda target: (target / "model.safetensors").write_bytes(content) and None)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_result_killed_in_its_writing_leaves_the_one_before(tmp_path: Path, steps: int) -> None:
    result = tmp_path / "model"
    _write(result, b"old")
    # Between the renamings it has another name, which the next call finds, also where that is killed.
    for done in [steps, 1][: 1 + steps // 2]:
        with pytest.raises(RankDiedError):
            run_ranks(1, _killed_in_the_result, str(result), done, init_group=False)
    assert [path.read_bytes() for path in result.iterdir()] == [b"old"]
    _write(result, b"new")
    assert [path.read_bytes() for path in result.iterdir()] == [b"new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def _without_disk(rank: int, world_size: int, arguments: list[str]) -> str:
    """The error of the job where a file can have no more than 20 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main(arguments) == 2
    return said.getvalue()


def test_a_full_disk_is_said_and_loses_nothing(base: list[str], tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    line = [*base, "--save-every", "2", "--checkpoint-dir", str(run), "--resume=auto"]
    run_job(1, line, tmp_path / "summary")
    kept = {"step-00000002", "step-00000004"}
    (said,) = run_ranks(1, _without_disk, [*line, "--export", str(model)], init_group=False)
    assert f"Writing {model} failed:" in said and "run again with --resume" in said and not model.exists()
    (said,) = run_ranks(1, _without_disk, [*line, "--steps", "6"], init_group=False)
    assert "Writing the checkpoint of step 6" in said and "Checkpoints before it are untouched" in said
    assert kept < {path.name for path in run.iterdir()} and not (run / "step-00000006").exists()
    more = run_job(1, [*line, "--steps", "6", "--export", str(model)], tmp_path / "summary")
    assert more["first_step"] == 4 and (model / "model.safetensors").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="writes to a full device (Linux)")
def test_a_summary_that_finds_no_room_is_said_after_the_result(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, model = tmp_path / "run.json", tmp_path / "model"
    (tmp_path / f"run.json.{os.getpid()}.partial").symlink_to("/dev/full")
    assert main([*base, "--steps", "1", "--export", str(model), "--json", str(summary)]) == 2
    said = capsys.readouterr().err
    assert f"Writing {summary} failed: OSError: [Errno 28] No space left" in said and "--resume" in said
    assert (model / "model.safetensors").exists()


def test_a_folder_that_may_not_be_written_is_refused_at_once(base: list[str]) -> None:
    # Not even root may.
    assert run_ranks(1, run_main, [*base, "--checkpoint-dir", "/proc/run"], init_group=False) == [2]


def _ranks(rank: int, world_size: int) -> Ranks:
    return Ranks(
        rank, world_size, torch.device("cpu"), control=None if world_size == 1 else dist.new_group(backend="gloo")
    )


def _state(seed: float, world_size: int = 1) -> dict[str, Any]:
    """A (10, 3) matrix, sharded over its rows where there are ranks, and a scalar that every rank has."""
    matrix = torch.arange(30.0).view(10, 3) + seed
    if world_size > 1:
        matrix = distribute_tensor(matrix, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    return {"model": {"matrix": matrix}, "optimizer": {"matrix": {"step": torch.tensor(seed)}}}


def _save_step(rank: int, world_size: int, folder: str, step: int) -> None:
    store = CheckpointStore(folder, _ranks(rank, world_size))
    store.save(step, _state(step, world_size), {"writers": world_size})
    store.wait()


def _load_step(rank: int, world_size: int, folder: str) -> tuple[int | None, torch.Tensor, float]:
    state = _state(0.25, world_size)
    step = CheckpointStore(folder, _ranks(rank, world_size)).load(state, lambda about: None)
    return step, whole(state["model"]["matrix"]), float(state["optimizer"]["matrix"]["step"])


def test_shards_of_two_ranks_load_on_four_and_on_one_and_back(tmp_path: Path):
    for step, writers in enumerate((2, 4, 1), 1):
        run_ranks(writers, _save_step, str(tmp_path), step, init_group=writers > 1)
        for readers in (4, 1):
            for found, matrix, scalar in run_ranks(readers, _load_step, str(tmp_path), init_group=readers > 1):
                assert (found, scalar) == (step, step)
                assert torch.equal(matrix, torch.arange(30.0).view(10, 3) + step)


def test_damage_seen_by_one_rank_sends_all_ranks_to_the_checkpoint_before(tmp_path: Path):
    for step in (1, 2):
        run_ranks(2, _save_step, str(tmp_path), step)
    damaged = tmp_path / "step-00000002" / "__1_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[-300] ^= 1
    damaged.write_bytes(content)
    assert [step for step, _, _ in run_ranks(2, _load_step, str(tmp_path))] == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".damaged-00000002", "step-00000001"]
    (tmp_path / "step-00000001" / "__0_0.distcp").unlink()
    refused_on_ranks(2, _load_step, str(tmp_path), error=CheckpointError, match="None is left to resume from")


@on_ranks(2)
def test_a_write_that_fails_on_one_rank_is_an_error_on_all_and_harms_nothing(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    folder, unlimited = str(tmp_path), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    _save_step(rank, world_size, folder, 1)
    for background in (True, False):
        store = CheckpointStore(folder, _ranks(rank, world_size), background=background)
        if rank == 1:  # a real full disk, as far as this process can tell
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"^Writing the checkpoint of step 2 .*File too large"):
            store.save(2, _state(2, world_size), {})
            store.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    _save_step(rank, world_size, folder, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    step, matrix, scalar = _load_step(rank, world_size, folder)
    assert (step, scalar) == (3, 3) and torch.equal(matrix, torch.arange(30.0).view(10, 3) + 3)


@on_ranks(2)
def test_what_one_rank_cannot_copy_or_another_cannot_see_is_an_error_on_all(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    own = (OtherRankError, CheckpointError)
    with pytest.MonkeyPatch.context() as patch, pytest.raises((OtherRankError, MemoryError)):
        if rank:
            patch.setattr(DefaultStager, "stage", lambda *given: (_ for _ in ()).throw(MemoryError("full")))
        _save_step(rank, world_size, str(tmp_path / "one"), 1)
    # Folders that are not shared.
    with pytest.raises(own[rank == 0], match="does not see __1_0.distcp: .* shared" if rank == 0 else "Another rank"):
        _save_step(rank, world_size, str(tmp_path / f"of-{rank}"), 1)


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
        step, matrix, scalar = _load_step(0, 1, folder)
        assert step is not None and step >= 2 and scalar == step
        assert torch.equal(matrix, torch.arange(30.0).view(10, 3) + step)
