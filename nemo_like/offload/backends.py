"""Operations that moving bytes needs of a device: a stream, events, copies, and CPU memory.

They decide nothing: every order between two accesses to memory is made by `nemo_like.offload.mover`.
"""

from typing import Any

import torch

from nemo_like._util.device_work import check_kind
from nemo_like._util.log import warn_once


class Backend:
    """A device's streams and memory, through `torch.get_device_module`: CUDA, and XPU and NPU where torch has them.

    On the CPU, "device" and host are both main memory, and torch's stand-ins
    for streams and events do nothing: work has ended when its call returns.

    Args:
        device: with its index; None: the CPU.
        pin_memory: page-locked CPU memory; without it copies block the host.
        use_streams: copy while computing; False: on the stream that is current here and now.
    """

    def __init__(
        self, device: torch.device | None = None, *, pin_memory: bool = True, use_streams: bool = True
    ) -> None:
        self.device = torch.device("cpu") if device is None else device
        check_kind(self.device.type)
        self._module = torch.get_device_module(self.device)
        on_cpu = self.device.type == "cpu"
        self.pin_memory = pin_memory and not on_cpu
        # One stream for both directions: a copy back comes behind the copies to the host that were started before it.
        # Those hold their sources on the device, so backward begins without a copy. Only where forward and backward take
        # turns (a pipeline) does it cost time: the two directions of the link do not overlap.
        self.copies = self._module.Stream(device=device) if use_streams and not on_cpu else self.current_stream()

    def current_stream(self) -> Any:
        """Return the stream that the caller's own operators run on."""
        return self._module.current_stream(self.device)

    def record(self, stream: Any) -> Any:
        """Return an event that happens when `stream` has done all it was given so far."""
        event = self._module.Event()
        event.record(stream)
        return event

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy bytes, (n,) uint8 to (n,) uint8, on `stream`."""
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)

    def lend(self, tensor: torch.Tensor, stream: Any, made_on: Any) -> None:
        """Tell the allocator, which knows the stream `made_on`, that `stream` reads `tensor` from here on."""
        if stream != made_on:
            tensor.record_stream(stream)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return CPU memory, uint8 of shape (nbytes,). Raises RuntimeError or MemoryError where it is refused.

        It may be dropped while it is copied. PyTorch keeps pinned blocks for the next allocation, and gives a block out
        only after the copies on it, which it records itself; other memory is copied before the call returns.
        """
        if self.pin_memory:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        # Python's memory, not torch's: meters of torch's CPU memory then have the share of the device, if that is the CPU.
        return torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)


def default_backend(*, pin_memory: bool = True, use_streams: bool = True) -> Backend:
    """Return the accelerator's back end where there is an accelerator, else the CPU's."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return Backend(
            torch.device(accelerator.type, torch.accelerator.current_device_index()),
            pin_memory=pin_memory,
            use_streams=use_streams,
        )
    warn_once(
        "Offloading was requested and there is no accelerator: tensors are copied within CPU memory, which saves none. "
        "That is of use for tests only."
    )
    return Backend()
