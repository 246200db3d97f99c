"""What PyTorch's CPU allocator gives out: the judge of counted bytes."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch


def cpu_events(run: Callable[[], Any]) -> list[int]:
    """Bytes allocated since `run` began, after each allocation or release of PyTorch's CPU allocator."""
    events = AllocatorEvents()
    events.start()
    try:
        run()
    finally:
        levels = events.stop()
    return levels


class AllocatorEvents:
    """Every allocation of PyTorch's CPU allocator on this thread between `start` and `stop`, and its end: exact, and slow.

    Releases of older memory do not count. The profiler cannot tell their size, and where an earlier profile saw other
    memory at the same address, and not its end, it reports that one's.

    Raises:
        RuntimeError: (`start`) another profiler is on.
    """

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def start(self) -> None:
        if torch.autograd._profiler_enabled():  # torch notices that too late, and its next export reads freed memory
            raise RuntimeError("A profiler of torch is on already on this thread; end it first.")
        with quiet_profiler():
            self._profiler.start()

    def stop(self) -> list[int]:
        """Bytes that were allocated since `start` and are alive, after each event; 0 first."""
        with quiet_profiler():
            self._profiler.stop()
        handle, path = tempfile.mkstemp(suffix=".json")
        os.close(handle)
        try:
            self._profiler.export_chrome_trace(path)
            with open(path, encoding="utf-8") as file:
                events = json.load(file)["traceEvents"]
        finally:
            os.unlink(path)
        seen = [
            (event["ts"], event["args"].get("Ev Idx", 0), event["args"]["Addr"], event["args"]["Bytes"])
            for event in events
            if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
        ]
        levels, alive = [0], set[int]()
        for _, _, address, size in sorted(seen):
            if size > 0:
                alive.add(address)
            elif address in alive:
                alive.remove(address)
            else:
                continue  # older than `start`
            levels.append(levels[-1] + size)
        return levels


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """PyTorch's profiler writes to the process's stderr at each start and stop, whatever its log level."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
