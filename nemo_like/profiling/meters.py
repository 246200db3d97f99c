"""Meters of live bytes (allocator on CUDA, counted storages on CPU) and of time."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nemo_like.torch_compat import TorchDispatchMode, profiler_is_on, tree_leaves


class StorageRegistry:
    """Numbers storages, each once for as long as it lives, and tells when one is freed.

    Python's ``id`` of a storage is reused after it is freed; the number is not.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._next = 0
        self._foreign: dict[int, torch.UntypedStorage] = {}
        self.live = 0
        self.peak = 0

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Storages that exist anyway (parameters, gradients, inputs): never counted as live. Kept alive from here."""
        for storage in storages_of(tensors):
            self._foreign[id(storage)] = storage

    def number(self, storage: torch.UntypedStorage, *, born: bool = False) -> int:
        """The number of `storage`; `born` counts its bytes as live until it is freed."""
        key = id(storage)
        if key in self._numbers:
            return self._numbers[key][0]
        self._next += 1
        size = storage.nbytes() if born and key not in self._foreign else 0

        def freed(_: object) -> None:
            del self._numbers[key]
            self.live -= size

        self._numbers[key] = (self._next, weakref.ref(storage, freed))
        self.live += size
        self.peak = max(self.peak, self.live)
        return self._next


def storages_of(value: object) -> Iterator[torch.UntypedStorage]:
    """The storages behind every tensor in a pytree, looking inside tensor subclasses (DTensor, quantised types)."""
    for leaf in tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            continue
        if hasattr(leaf, "__tensor_flatten__"):
            names, _ = leaf.__tensor_flatten__()
            yield from storages_of([getattr(leaf, name) for name in names])
        elif leaf.layout is torch.strided:
            yield leaf.untyped_storage()


class CpuMeter(TorchDispatchMode):
    """Live bytes: the storages that operators made and that are not freed yet.

    What one kernel allocates and frees inside is not seen, and neither is code that runs outside PyTorch's dispatcher
    (compiled graphs).
    """

    def __init__(self, registry: StorageRegistry) -> None:
        super().__init__()
        self._registry = registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in storages_of(result):
            self._registry.number(storage, born=True)
        return result

    @property
    def live(self) -> int:
        """Bytes alive now that were not before the meter started."""
        return self._registry.live

    def take_peak(self) -> int:
        """The most bytes alive at one time since the last call."""
        peak = max(self._registry.peak, self._registry.live)
        self._registry.peak = self._registry.live
        return peak


class CudaMeter:
    """The same two numbers from the caching allocator of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> CudaMeter:
        torch.cuda.synchronize(self._device)
        self._base = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self._device)

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._base

    def take_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device) - self._base
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


class Clock:
    """Marks in the device's own time: CUDA events, so that nothing is synchronised, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Any, end: object) -> float:
        """From `start` to `end`; on CUDA the work between them must have finished (synchronise first)."""
        return float(start.elapsed_time(end)) if self._cuda else (end - start) * 1000


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
        if profiler_is_on():  # torch notices that too late, and its next export reads freed memory
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
