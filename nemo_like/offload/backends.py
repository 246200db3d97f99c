"""Operations that moving bytes needs of a device: streams, events, copies, host memory. Two implementations.

`AcceleratorBackend` is for CUDA, and for what PyTorch lets one program like it (XPU, NPU); `CopyingBackend` is for the
CPU. All ordering decisions are made by `nemo_like.offload.mover`, which both serve. So what is checked on a CPU is what
runs on a GPU. Every access to memory and every order between two of them is one call here, for tests to write down and
look for races.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from nemo_like._util.log import warn_once


class Backend(ABC):
    """One device's streams and memory. Streams and events are opaque to callers."""

    copy_out: Any
    """The stream of copies to the host."""
    copy_back: Any
    """The stream of copies from the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream that the caller's own operators run on."""

    @abstractmethod
    def record(self, stream: object) -> Any:
        """An event that happens when `stream` has done all it was given so far."""

    @abstractmethod
    def wait(self, stream: object, event: object) -> None:
        """Work given to `stream` from now on starts after `event`. Does not block the host."""

    @abstractmethod
    def done(self, event: object) -> bool:
        """Return whether `event` has happened. Does not block."""

    @abstractmethod
    def synchronize(self, event: object) -> None:
        """Block the host until `event` has happened."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: object) -> None:
        """Copy bytes, (n,) uint8 to (n,) uint8, on `stream`."""

    @abstractmethod
    def lend(self, tensor: torch.Tensor, stream: object, made_on: object) -> None:
        """Operators of `stream` read `tensor` from here on.

        The allocator knows of the stream that the memory was `made_on`; it must not reuse it before another is done.
        """

    @abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8 of shape (nbytes,). Raises RuntimeError or MemoryError where it is refused."""

    @abstractmethod
    def serves(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is in the memory that this back end moves things from."""

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Device memory of the current stream's pool, uint8 of shape (nbytes,)."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


class AcceleratorBackend(Backend):
    """CUDA streams and pinned memory (through `torch.get_device_module`, so XPU and NPU where torch has them)."""

    def __init__(self, device: torch.device, *, pin_memory: bool = True, use_streams: bool = True) -> None:
        """
        Args:
            device: with its index.
            pin_memory: page-locked host memory; without it copies block the host.
            use_streams: copy while computing; False: on the stream that is current here and now.
        """
        super().__init__(device)
        self._module = torch.get_device_module(device)
        self.pin_memory = pin_memory
        self.copy_out = self._module.Stream(device=device) if use_streams else self.current_stream()
        self.copy_back = self._module.Stream(device=device) if use_streams else self.current_stream()

    def current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    def record(self, stream: object) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: object) -> None:
        stream.wait_event(event)

    def done(self, event: Any) -> bool:
        return event.query()

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: object) -> None:
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)

    def lend(self, tensor: torch.Tensor, stream: Any, made_on: object) -> None:
        if stream != made_on:
            tensor.record_stream(stream)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pin_memory)

    def serves(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device


class CopyingBackend(Backend):
    """The CPU: "device" and host are both main memory, and streams are queues that run when they are waited for.

    Operators on the CPU run at once, so the compute stream is always up to date. With `lazy`, copies wait as long as
    the events let them: a wait that is missing shows as bytes that are not there yet, which a fast copy would hide.
    """

    def __init__(self, device: torch.device | None = None, *, lazy: bool = False) -> None:
        super().__init__(torch.device("cpu") if device is None else device)
        self.lazy = lazy
        self.copy_out = _Queue("copy-out")
        self.copy_back = _Queue("copy-back")
        self.stream = _Queue("compute")
        """The stream that `current_stream` returns; tests put another one here to be the user's own side
        stream."""

    def current_stream(self) -> Any:
        return self.stream

    def record(self, stream: Any) -> Any:
        event = _QueueEvent(stream)
        if self._runs_at_once(stream):
            event.happened = True
        else:
            stream.work.append(event.happen)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        if self._runs_at_once(stream):
            event.force()
        else:
            stream.work.append(event.force)

    def done(self, event: Any) -> bool:
        return event.happened

    def synchronize(self, event: Any) -> None:
        event.force()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        if self._runs_at_once(stream):
            target.copy_(source)
        else:
            stream.work.append(lambda: target.copy_(source))

    def lend(self, tensor: torch.Tensor, stream: object, made_on: object) -> None:
        pass  # Python's reference counts keep CPU memory as long as a queued copy needs it

    def _runs_at_once(self, stream: object) -> bool:
        return not self.lazy or stream not in (self.copy_out, self.copy_back)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def serves(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"


class _Queue:
    """A stream of the copying back end: work in order, run up to the event that is waited for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: deque[Callable[[], Any]] = deque()


class _QueueEvent:
    def __init__(self, queue: _Queue) -> None:
        self.queue = queue
        self.happened = False

    def happen(self) -> None:
        self.happened = True

    def force(self) -> None:
        while not self.happened:
            self.queue.work.popleft()()


def default_backend(*, pin_memory: bool = True, use_streams: bool = True) -> Backend:
    """The accelerator's back end where there is an accelerator, else the copying one."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None  # is_available() returned True
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        return AcceleratorBackend(device, pin_memory=pin_memory, use_streams=use_streams)
    warn_once(
        "Offloading was requested and there is no accelerator: tensors are copied within host memory, which saves none. "
        "That is of use for tests only."
    )
    return CopyingBackend()
