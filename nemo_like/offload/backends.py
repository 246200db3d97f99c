"""Operations that moving bytes needs of a device: streams, events, copies, host memory. Two implementations.

`CopyingBackend` is for the CPU, `AcceleratorBackend` for CUDA and what PyTorch lets one program like it (XPU, NPU).
They decide nothing: every order between two accesses to memory is made by `nemo_like.offload.mover`.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_like._util.log import warn_once


class CopyingBackend:
    """The CPU: "device" and host are both main memory, and work has ended when its call returns.

    Streams and events are opaque to callers; here they are None.
    """

    copy_out: Any = None
    """The stream of copies to the host."""
    copy_back: Any = None
    """The stream of copies from the host."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = torch.device("cpu") if device is None else device

    def current_stream(self) -> Any:
        """Return the stream that the caller's own operators run on."""

    def record(self, stream: Any) -> Any:
        """Return an event that happens when `stream` has done all it was given so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let work given to `stream` from now on start after `event`. Does not block the host."""

    def done(self, event: Any) -> bool:
        """Return whether `event` has happened. Does not block."""
        return True

    def synchronize(self, event: Any) -> None:
        """Block the host until `event` has happened."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy bytes, (n,) uint8 to (n,) uint8, on `stream`."""
        target.copy_(source)

    def lend(self, tensor: torch.Tensor, stream: Any, made_on: Any) -> None:
        """Tell the allocator, which knows the stream `made_on`, that `stream` reads `tensor` from here on."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return host memory, uint8 of shape (nbytes,). Raises RuntimeError or MemoryError where it is refused."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Return device memory of the current stream's pool, uint8 of shape (nbytes,)."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def serves(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is in the memory that this back end moves things from."""
        return tensor.device == self.device


class AcceleratorBackend(CopyingBackend):
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

    def record(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def done(self, event: Any) -> bool:
        return event.query()

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)

    def lend(self, tensor: torch.Tensor, stream: Any, made_on: Any) -> None:
        if stream != made_on:
            tensor.record_stream(stream)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pin_memory)


def default_backend(*, pin_memory: bool = True, use_streams: bool = True) -> CopyingBackend:
    """Return the accelerator's back end where there is an accelerator, else the CPU's."""
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
