"""What runs and checkpoints of several processes are after one was killed, has no disk left, or may not write."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nemo_like.recipes.agree import OtherRankError, Ranks
from nemo_like.recipes.command_line import parse_options
from nemo_like.recipes.finetune import FineTuning, main
from nemo_like.recipes.job_checkpoint import CheckpointError, CheckpointStore, copied_bytes
from nemo_like.recipes.loop import run_job
from nemo_like.recipes.result import _replace
from tests_distributed.recipes.finetune_job import make_model, questions, run_finetune, write_lines
from tests_distributed.spawn import RankDiedError, on_ranks, run_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a small job."""
    folder = tmp_path_factory.mktemp("job")
    make_model(folder / "model", max_position_embeddings=2048)
    write_lines(folder / "data.jsonl", questions())
    line = f"--model {folder / 'model'} --data {folder / 'data.jsonl'} --steps 4 --batch-size 4 --seq-len 32 --save-every 2"
    line += " --eval-samples 0 --warmup-steps 1 --lr 1e-2 --device cpu --precision float32 --sync-save"
    return line.split()


def _killed_in_a_step(rank: int, world_size: int, arguments: list[str]) -> None:
    train = FineTuning._forward_and_backward

    def killed(self: FineTuning) -> torch.Tensor:
        if self.step == 3 and self.ranks.rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(self)

    FineTuning._forward_and_backward = killed  # type: ignore[method-assign]
    main(arguments)


def test_a_run_killed_in_a_step_goes_on_from_the_last_checkpoint(base: list[str], tmp_path: Path) -> None:
    line = [*base, "--lora", "--output", str(tmp_path / "killed")]
    with pytest.raises(RankDiedError):
        run_ranks(2, _killed_in_a_step, line, init_group=False, timeout=100)
    whole = run_finetune(2, [*base, "--lora", "--output", str(tmp_path / "whole")], tmp_path / "whole.json")
    resumed = run_finetune(2, [*line, "--resume"], tmp_path / "resumed.json")
    assert resumed["first_step"] == 2 and resumed["losses"] == whole["losses"][2:]


def _killed_in_the_result(rank: int, world_size: int, folder: str, finished: bool) -> None:
    def write(target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"new and whole" if finished else b"new and ha")
        if not finished:
            os.kill(os.getpid(), signal.SIGKILL)

    if finished:
        Path.rename = lambda self, to: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    _replace(Path(folder), write, ALONE)


def _write(folder: Path, content: bytes) -> None:
    def write(target: Path) -> None:
        (target / "model.safetensors").write_bytes(content)

    _replace(folder, write, ALONE)


@pytest.mark.parametrize("finished", [False, True])
def test_a_result_killed_in_its_writing_leaves_the_one_before(tmp_path: Path, finished: bool) -> None:
    result = tmp_path / "model"
    _write(result, b"old")
    with pytest.raises(RankDiedError):
        run_ranks(1, _killed_in_the_result, str(result), finished, init_group=False)
    assert [path.read_bytes() for path in result.iterdir()] == [b"old"]
    _write(result, b"new")
    assert [path.read_bytes() for path in result.iterdir()] == [b"new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def _without_disk(rank: int, world_size: int, arguments: list[str], checkpoints: bool) -> str:
    """The error where a file can have no more than 20 kB, in the checkpoints or only in the result."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    full = (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    job = FineTuning(parse_options("finetune", arguments), ALONE)
    if checkpoints:
        resource.setrlimit(resource.RLIMIT_FSIZE, full)
    save_result = job.save_result

    def save_without_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, full)
        save_result()

    job.save_result = save_without_disk  # type: ignore[method-assign]
    try:
        run_job(job)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_full_disk_is_said_and_loses_nothing(base: list[str], tmp_path: Path) -> None:
    line = [*base, "--output", str(tmp_path / "run")]
    (said,) = run_ranks(1, _without_disk, line, False, init_group=False, timeout=100)
    assert f"Writing {tmp_path / 'run' / 'model'} failed:" in said and "run again with --resume" in said
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]
    assert not (tmp_path / "run" / "model").exists()
    run_finetune(1, [*line, "--resume"], tmp_path / "on.json")
    transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "run" / "model"))

    shutil.rmtree(tmp_path / "run" / "model")
    more = [*line, "--steps", "6", "--resume"]
    (said,) = run_ranks(1, _without_disk, more, True, init_group=False, timeout=100)
    assert "Writing the checkpoint of step 6" in said and "Checkpoints before it are untouched" in said
    assert run_finetune(1, more, tmp_path / "on.json")["first_step"] == 4


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="writes to a full device (Linux)")
def test_a_summary_that_finds_no_room_is_said_after_the_result(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"run.json.{os.getpid()}.partial").symlink_to("/dev/full")
    line = [*base, "--lora", "--steps", "1", "--output", str(tmp_path / "run"), "--json", str(tmp_path / "run.json")]
    assert main(line) == 2
    said = capsys.readouterr().err
    assert f"Writing {tmp_path / 'run.json'} failed: [Errno 28] No space left" in said and "--resume" in said
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


def test_a_folder_that_may_not_be_written_is_refused_at_once(base: list[str]) -> None:
    codes = run_ranks(1, _code, [*base, "--output", "/proc/tuned"], init_group=False)  # not even root may
    assert codes == [2]


def _code(rank: int, world_size: int, arguments: list[str]) -> int:
    return main(arguments)


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


def _save_step(rank: int, world_size: int, folder: str, step: int, **how: bool) -> None:
    store = CheckpointStore(folder, _ranks(rank, world_size), **how)
    store.save(step, _state(step, world_size), {"writers": world_size})
    store.wait()


def _load_step(rank: int, world_size: int, folder: str) -> tuple[int | None, torch.Tensor, float]:
    state = _state(0.25, world_size)
    step = CheckpointStore(folder, _ranks(rank, world_size)).load(state, lambda about: None)
    matrix = state["model"]["matrix"]
    matrix = matrix.full_tensor() if isinstance(matrix, DTensor) else matrix
    return step, matrix, float(state["optimizer"]["matrix"]["step"])


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
    for error in run_ranks(2, _load_step, str(tmp_path), return_exceptions=True):
        assert isinstance(error, CheckpointError)
        assert "None is left to resume from" in str(error)


@on_ranks(2)
def test_a_write_that_fails_on_one_rank_is_an_error_on_all_and_harms_nothing(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    _save_step(rank, world_size, folder, 1, process=True)
    writers = [os.getpid(), *(process.pid for process in multiprocessing.active_children() if process.pid)]
    assert len(writers) == 2
    errors = []
    for how in ({"background": True}, {"process": True}, {"background": False}):
        store = CheckpointStore(folder, _ranks(rank, world_size), **how)
        for pid in writers if rank == 1 else ():  # a real full disk, as far as these processes can tell
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        try:
            store.save(2, _state(2, world_size), {})
            store.wait()
        except (CheckpointError, OtherRankError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        for pid in writers:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    _save_step(rank, world_size, folder, 3, process=True)
    assert len(errors) == 3
    for text in errors:
        assert text.startswith("CheckpointError: Writing the checkpoint of step 2") and "File too large" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    assert os.getpgid(writers[1]) == writers[1]  # a signal to the group of its rank does not end a save
    step, matrix, scalar = _load_step(rank, world_size, folder)
    assert (step, scalar) == (3, 3) and torch.equal(matrix, torch.arange(30.0).view(10, 3) + 3)


@on_ranks(2)
def test_without_room_for_shared_memory_a_thread_writes_and_it_is_said(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    numbers = torch.ones(3)
    assert copied_bytes({"model": {"a": numbers, "tied": numbers}}) == 12
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10 if rank else 10**9))
        patch.setattr("nemo_like.recipes.job_checkpoint.warn_once", messages.append)
        _save_step(rank, world_size, str(tmp_path), 1, process=True)
    assert not multiprocessing.active_children() and _load_step(rank, world_size, str(tmp_path))[0] == 1
    assert "/dev/shm has 10B free" in messages[0] and "a thread of the training process writes" in messages[0]


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
