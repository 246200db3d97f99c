"""The helper that every other file here stands on."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests_distributed.spawn import RankDiedError, RanksTimedOutError, run_ranks


def _fail_on(rank: int, world_size: int, failing: list[int]) -> str:
    if rank in failing:
        raise ValueError(f"no {rank} here")
    dist.barrier()
    return "fine"


def _hang(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(100)


def _abort(rank: int, world_size: int) -> None:
    if rank == 1:
        os.abort()


def _die(rank: int, world_size: int, mark: Path, native: bool) -> str:
    """Let a thread of rank 0 die of a segmentation fault, the first time it is called."""
    if rank == 0 and not mark.exists():
        mark.touch()
        me = threading.get_native_id()
        others = [int(tid) for tid in os.listdir("/proc/self/task") if int(tid) != me]
        rank_0, victim = os.getpid(), others[0] if native else me
        if os.fork() == 0:  # from outside, while no thread of rank 0 holds the interpreter
            time.sleep(0.2)
            ctypes.CDLL(None).tgkill(rank_0, victim, signal.SIGSEGV)
            os._exit(0)
        time.sleep(10)
    return "fine"


def test_first_failure_is_raised_with_its_type_and_traceback() -> None:
    with pytest.raises(ValueError, match="no 1 here") as caught:
        run_ranks(2, _fail_on, [1])
    assert "_fail_on" in "".join(caught.value.__notes__)


def test_every_ranks_exception_can_be_seen() -> None:
    errors = run_ranks(2, _fail_on, [0, 1], return_exceptions=True)
    assert [(type(e), str(e)) for e in errors] == [(ValueError, "no 0 here"), (ValueError, "no 1 here")]


def test_a_hung_rank_is_killed_and_shown() -> None:
    started = time.monotonic()
    with pytest.raises(RanksTimedOutError, match="rank 0 of 2") as caught:
        run_ranks(2, _hang, timeout=2.0)
    assert time.monotonic() - started < 10
    assert "barrier" in "".join(caught.value.__notes__)  # rank 0 waits for rank 1


def test_a_rank_that_dies_is_reported() -> None:
    with pytest.raises(RankDiedError, match="rank 1 ended"):
        run_ranks(2, _abort)


def _free_nothing(rank: int, world_size: int, mark: Path | None) -> str:
    """Let glibc end rank 0, the first time it is called, or each time."""
    if rank == 0 and (mark is None or not mark.exists()):
        if mark is not None:
            mark.touch()
        memory = ctypes.create_string_buffer(256)
        ctypes.CDLL(None).free(ctypes.c_void_p(ctypes.addressof(memory) + 16))
    return "fine"


def test_ranks_with_a_broken_heap_run_again_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="native code killed a rank in _free_nothing"):
        assert run_ranks(2, _free_nothing, tmp_path / "mark") == ["fine", "fine"]
    with pytest.warns(UserWarning, match="killed"), pytest.raises(RankDiedError, match="free"):
        run_ranks(2, _free_nothing, None)


def test_ranks_whose_native_thread_died_run_again(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="native code killed a rank in _die"):
        assert run_ranks(2, _die, tmp_path / "mark", True) == ["fine", "fine"]


def test_a_segmentation_fault_under_python_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RankDiedError):
        run_ranks(2, _die, tmp_path / "mark", False)


def test_a_local_function_is_refused() -> None:
    with pytest.raises(TypeError, match="module level"):
        run_ranks(2, lambda rank, world_size: None)
