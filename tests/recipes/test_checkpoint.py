"""Checkpoints of the training job in one process: bitwise, kept, cleaned up, and damage of every kind."""

import contextlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from nemo_like.distributed.ranks import Ranks
from nemo_like.distributed.weights.checkpoints import CheckpointError, CheckpointStore, copied_bytes

pytestmark = pytest.mark.compat

ALONE = Ranks(0, 1, torch.device("cpu"))


def _state(seed: int) -> dict[str, Any]:
    generator = torch.manual_seed(seed)
    return {
        "model": {"a.weight": torch.randn(40, 30, generator=generator), "b": torch.randn(7).bfloat16()},
        "optimizer": {"a.weight": {"step": torch.tensor(seed + 0.5), "exp_avg": torch.randn(40, generator=generator)}},
    }


def _flat(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    flat = {}
    for key, value in state.items():
        flat |= _flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    a, b = _flat(a), _flat(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def _store(folder: Path, **keywords: Any) -> CheckpointStore:
    return CheckpointStore(folder, ALONE, **keywords)


def _load(folder: Path) -> tuple[int | None, dict[str, Any]]:
    state = _state(99)
    return _store(folder).load(state, lambda about: None), state


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    store = _store(tmp_path / "run", background=False)
    for step in (1, 2):
        store.save(step, _state(step), {"seed": step})
    return store.folder


def test_nothing_there_is_no_checkpoint(tmp_path: Path):
    assert _load(tmp_path / "new" / "run")[0] is None


@pytest.mark.parametrize("background", [True, False])
def test_round_trip_is_bitwise_and_only_the_newest_are_kept(tmp_path: Path, background: bool):
    store = _store(tmp_path, keep=2, background=background)
    for step in (3, 7, 12):
        state = _state(step)
        store.save(step, state, {"seed": step})
        for tensor in _flat(state).values():
            tensor.zero_()  # training goes on: what is being written must not change with it
    store.wait()
    assert store.steps() == [12, 7]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000012", "step-00000007"}
    about: list[Any] = []
    state = _state(99)
    assert store.load(state, about.append) == 12
    assert _same(state, _state(12)) and about == [{"seed": 12}]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped bit in the data": lambda p: _flip(p / "__0_0.distcp"),
    "flipped bit in DCP's metadata": lambda p: _flip(p / ".metadata"),
    "data cut short": lambda p: (p / "__0_0.distcp").write_bytes((p / "__0_0.distcp").read_bytes()[:-100]),
    "data missing": lambda p: (p / "__0_0.distcp").unlink(),
    "manifest missing": lambda p: (p / "manifest.json").unlink(),
    "manifest cut short": lambda p: (p / "manifest.json").write_text((p / "manifest.json").read_text()[:40]),
    "manifest of another format": lambda p: (p / "manifest.json").write_text(json.dumps({"format": 99})),
    "empty folder": lambda p: (shutil.rmtree(p), p.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_falls_back_to_the_checkpoint_before_with_one_line(two: Path, logs, damage: str):
    DAMAGE[damage](two / "step-00000002")
    step, state = _load(two)
    assert step == 1 and _same(state, _state(1))
    assert len(logs.messages) == 1
    assert "step-00000002 cannot be read" in logs.messages[0] and "Going on from step 1" in logs.messages[0]


def test_a_run_goes_on_past_the_step_of_a_damaged_checkpoint(two: Path):
    _flip(two / "step-00000002" / "__0_0.distcp")
    store = _store(two, keep=1, background=False)
    assert store.load(_state(99), lambda about: None) == 1
    assert store.steps() == [1] and (two / ".damaged-00000002").exists()
    store.save(2, _state(2), {})
    assert store.steps() == [2], "the sound one is kept, not the damaged one"
    step, state = _load(two)
    assert step == 2 and _same(state, _state(2))


def test_only_damaged_checkpoints_are_an_error(two: Path):
    for step in (1, 2):
        _flip(two / f"step-0000000{step}" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"00002 cannot be read.*00001 cannot be read.*start again"):
        _load(two)
    assert _store(two).steps() == [2, 1], "nothing is moved where nothing is gone on from"


def test_a_checkpoint_without_a_tensor_that_the_run_needs_is_reported(two: Path):
    state = _state(99)
    state["model"]["new"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Missing key.*model\.new"):
        _store(two).load(state, lambda about: None)


def test_a_refused_checkpoint_loads_nothing(two: Path):
    def refuse(about: Any) -> None:
        raise ValueError("another run")

    state = _state(99)
    with pytest.raises(ValueError, match="another run"):
        _store(two).load(state, refuse)
    assert _same(state, _state(99))


def test_leftovers_of_killed_saves_do_not_count_and_are_cleared(two: Path):
    shutil.copytree(two / "step-00000002", two / ".writing-00000003")
    (two / "step-00000001").rename(two / ".deleting-00000001")
    assert _load(two)[0] == 2
    _store(two, background=False).save(3, _state(3), {})
    assert {path.name for path in two.iterdir()} == {"step-00000002", "step-00000003"}
    step, state = _load(two)
    assert step == 3 and _same(state, _state(3))


def test_a_failed_write_is_reported_by_the_next_wait_and_harms_nothing(two: Path):
    store = _store(two)
    (two / "step-00000005").write_text("in the way: a folder cannot be renamed to this name")
    store.save(5, _state(5), {})
    with pytest.raises(CheckpointError, match=r"Writing the checkpoint of step 5 .* failed: .*Checkpoints before it"):
        store.wait()
    (two / "step-00000005").unlink()
    assert _load(two)[0] == 2
    store.save(6, _state(6), {})  # and the store goes on
    store.wait()
    assert _load(two)[0] == 6


def test_copies_of_tied_weights_count_once():
    numbers = torch.ones(3)
    assert copied_bytes({"model": {"a": numbers, "tied": numbers}}) == 12


def test_a_file_where_the_folder_should_be_is_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Writing to --checkpoint-dir '.*file' failed: FileExistsError"):
        _store(tmp_path / "file")


def test_a_save_in_the_background_never_waits_for_the_stream_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judge: DCP's own loader, told of CUDA: a thread that copies ahead waits for its current stream, that of training."""
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("stream"), wait_stream=lambda other: None, device_type="cuda")
    module = SimpleNamespace(current_stream=lambda: stream, stream=lambda _: contextlib.nullcontext())
    for name, value in (("_get_available_device_type", lambda: "cuda"), ("_get_device_module", lambda kind: module)):
        monkeypatch.setattr(filesystem, name, value)
    available = torch.cuda.is_available
    of_writer = lambda: sys._getframe(1).f_globals["__name__"] == filesystem.__name__ or available()  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", of_writer)
    state = {str(number): torch.zeros(2**20) for number in range(12)}  # 50 MB; it copies 10 MB ahead
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "plain"), no_dist=True)
    assert len(waits) >= 4
    waits.clear()
    store = _store(tmp_path / "ours")
    store.save(1, state, {})
    store.wait()
    assert waits == []
