"""Operations that moving bytes needs of a device: streams, events, copies, memory on both sides; and a pool of the host's.

They decide nothing: every order between two accesses to memory is made by `nemo_like.offload.mover`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nemo_like._util.device_work import check_kind
from nemo_like._util.log import warn_once


class Backend:
    """A device's streams and memory, through `torch.get_device_module`: CUDA, and XPU and NPU where torch has them.

    Streams and events are opaque to callers. On the CPU, "device" and host are both main memory, and torch's stand-ins
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
        self.copy_out, self.copy_back = [
            self._module.Stream(device=device) if use_streams and not on_cpu else self.current_stream()
            for _ in ("to the host", "from the host")
        ]

    def current_stream(self) -> Any:
        """Return the stream that the caller's own operators run on."""
        return self._module.current_stream(self.device)

    def record(self, stream: Any) -> Any:
        """Return an event that happens when `stream` has done all it was given so far."""
        event = self._module.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Let work given to `stream` from now on start after `event`. Does not block the host."""
        stream.wait_event(event)

    def done(self, event: Any) -> bool:
        """Return whether `event` has happened. Does not block."""
        return event.query()

    def synchronize(self, event: Any) -> None:
        """Block the host until `event` has happened."""
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy bytes, (n,) uint8 to (n,) uint8, on `stream`."""
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)

    def lend(self, tensor: torch.Tensor, stream: Any, made_on: Any) -> None:
        """Tell the allocator, which knows the stream `made_on`, that `stream` reads `tensor` from here on."""
        if stream != made_on:
            tensor.record_stream(stream)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return CPU memory, uint8 of shape (nbytes,). Raises RuntimeError or MemoryError where it is refused."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pin_memory)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Return device memory of the current stream's pool, uint8 of shape (nbytes,)."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


def default_backend(*, pin_memory: bool = True, use_streams: bool = True) -> Backend:
    """Return the accelerator's back end where there is an accelerator, else the CPU's."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None  # is_available() returned True
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        return Backend(device, pin_memory=pin_memory, use_streams=use_streams)
    warn_once(
        "Offloading was requested and there is no accelerator: tensors are copied within CPU memory, which saves none. "
        "That is of use for tests only."
    )
    return Backend()


# A pool of CPU memory: a few large slabs, cut into blocks, within a budget.
#
# Pinning memory costs milliseconds a call, and PyTorch rounds each pinned allocation up to a power of two. So blocks are
# cut from slabs of such sizes and reused from step to step.

ALIGNMENT = 512  # Bytes. CUDA's allocator gives the same alignment, and it is a multiple of every dtype's size.
SLAB_BYTES = 64 << 20  # Bytes of a slab, where neither the budget nor a larger block requires another size.


@dataclass(eq=False)
class Block:
    """Bytes [lo, hi) of a slab: free, or of one owner until `HostPool.give_back`."""

    slab: torch.Tensor  # (bytes,) uint8
    lo: int
    hi: int

    @property
    def nbytes(self) -> int:
        return self.hi - self.lo

    def bytes(self, count: int) -> torch.Tensor:
        """Return the first `count` bytes of the block, as a uint8 view of shape (count,)."""
        return self.slab[self.lo : self.lo + count]


class HostPool:
    """Blocks of CPU memory. Not thread safe: its owner holds a lock.

    Args:
        allocate: makes a uint8 tensor of so many bytes of CPU memory, and raises where it cannot.
        budget_bytes: bound on the bytes of all slabs together; None for no bound.
        slab_bytes: the usual size of a slab.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        *,
        budget_bytes: int | None = None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self._allocate = allocate
        self.budget_bytes = budget_bytes
        self.slab_bytes = slab_bytes
        self.free: list[Block] = []  # Unused bytes; no two blocks touch each other.
        self.reserved_bytes = 0  # Bytes of all slabs, used or not.
        self.live_bytes = 0  # Bytes of blocks that are out.
        self.peak_live_bytes = 0
        self.refusal: str | None = None  # Why the last `take` gave nothing.

    def take(self, nbytes: int) -> Block | None:
        """Return a block of at least `nbytes`; None where budget or memory refuse, with the reason in `refusal`."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        large_enough = (block for block in self.free if block.nbytes >= size)
        block = min(large_enough, key=lambda block: block.nbytes, default=None) or self._grow(size)
        if block is None:
            return None
        taken = Block(block.slab, block.lo, block.lo + size)
        block.lo += size
        if not block.nbytes:
            self.free.remove(block)
        self.live_bytes += size
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        return taken

    def give_back(self, block: Block) -> None:
        """Make the block's bytes free for the next `take`. The caller has no copy running on them."""
        self.live_bytes -= block.nbytes
        for free in [free for free in self.free if free.slab is block.slab]:
            if free.hi == block.lo or block.hi == free.lo:
                block = Block(block.slab, min(block.lo, free.lo), max(block.hi, free.hi))
                self.free.remove(free)
        self.free.append(block)

    def _grow(self, size: int) -> Block | None:
        """Return a new slab for `size` bytes: of the usual size, or the smallest where the budget does not allow that."""
        least = 1 << (size - 1).bit_length()
        wanted = max(self.slab_bytes, least)
        if self.budget_bytes is not None:
            room = max(self.budget_bytes - self.reserved_bytes, 0)
            wanted = wanted if wanted <= room else least
            if wanted > room:
                self.refusal = (
                    f"the host budget of {self.budget_bytes} bytes has {room} bytes left and a slab of {least} bytes is "
                    "needed"
                )
                return None
        try:
            slab = self._allocate(wanted)
        except (RuntimeError, MemoryError) as error:  # torch's errors when pinning or allocating fails
            self.refusal = f"{wanted} bytes of CPU memory were refused ({str(error).splitlines()[0]})"
            return None
        self.reserved_bytes += wanted
        self.free.append(Block(slab, 0, wanted))
        return self.free[-1]
