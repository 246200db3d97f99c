"""Snapshots of steps that run here: on real CPU tensors, or as one of many ranks on fake ones."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nemo_like import fake_rank
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.planning.memory_model.storage_ledger import StorageLedger
from tests.explaining.made import Recording, frame

_ENGINE = "torch/autograd/graph.py"
_OURS = (
    *("nemo_like/_util/", "nemo_like/fake/", "nemo_like/planning/", "nemo_like/fake_rank", "explaining/taped.py"),
    *("torch/utils/_python_dispatch", "torch/_ops.py", "torch/_dynamo/", "torch/_compile.py", "/weakref.py"),
)
"""Files whose frames are of the counting, not of the step."""
_THREAD = [frame("torch::autograd::Engine::thread_main()", "??", 0)]


def python_stack() -> list[dict[str, Any]]:
    """Return the stack of the caller as CUDA's allocator would have it: backward runs in a thread of its own."""
    frames: list[dict[str, Any]] = []
    at: Any = sys._getframe(1)
    while at is not None:
        name, filename = at.f_code.co_name, at.f_code.co_filename
        if filename.endswith(_ENGINE) and name == "_engine_run_backward":
            return frames + _THREAD
        if not any(part in filename for part in _OURS):
            frames.append(frame(name, filename, at.f_lineno))
        at = at.f_back
    return frames


class _Writes:
    """Writes what a counter of live bytes counts into `made`."""

    made: Recording
    sizes: dict[int, int]
    at: dict[int, int]

    def changed(self, number: int, size: int) -> None:
        if self.sizes.get(number):
            self.made.free(self.at.pop(number), frames=python_stack())
        super().changed(number, size)  # type: ignore[misc]
        if size:
            self.at[number] = self.made.make(size, "", frames=python_stack())


class Taped(_Writes, LiveBytes):
    """Records what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.at = Recording(), {}


@contextmanager
def dry_runs_taped() -> Iterator[list[Recording]]:
    """Record what `dry_run` runs inside."""
    tapes: list[Recording] = []

    class Ledger(_Writes, StorageLedger):
        def __init__(self, *, on_cpu: bool) -> None:
            super().__init__(on_cpu=on_cpu)
            self.made, self.at = Recording(), {}
            tapes.append(self.made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_rank, "StorageLedger", Ledger)
        yield tapes
