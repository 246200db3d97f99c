"""Host memory for what is offloaded: a few large slabs, cut into blocks, within a budget.

Pinning memory costs milliseconds a call, and PyTorch rounds each pinned allocation up to a power of two. So blocks are
cut from slabs of such sizes and reused from step to step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

ALIGNMENT = 512
"""Bytes. CUDA's allocator gives the same alignment, and it is a multiple of every dtype's size."""
SLAB_BYTES = 64 << 20
"""Bytes of a slab, where neither the budget nor a larger block requires another size."""


@dataclass(eq=False)
class Slab:
    """One allocation. `free` holds its unused ranges, sorted, never touching each other."""

    memory: torch.Tensor  # (bytes,) uint8
    free: list[tuple[int, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


@dataclass(eq=False)
class Block:
    """`nbytes` bytes of a slab, from `lo`; it belongs to one owner until `HostPool.give_back`."""

    slab: Slab
    lo: int
    nbytes: int

    def bytes(self, count: int) -> torch.Tensor:
        """Return the first `count` bytes of the block, as a uint8 view of shape (count,)."""
        return self.slab.memory[self.lo : self.lo + count]


class HostPool:
    """Blocks of host memory. Not thread safe: its owner holds a lock."""

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        *,
        budget_bytes: int | None = None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """
        Args:
            allocate: makes a uint8 tensor of so many bytes of host memory, and raises where it cannot.
            budget_bytes: bound on the bytes of all slabs together; None for no bound.
            slab_bytes: the usual size of a slab.
        """
        self._allocate = allocate
        self.budget_bytes = budget_bytes
        self.slab_bytes = slab_bytes
        self.slabs: list[Slab] = []
        self.live_bytes = 0
        """Bytes of blocks that are out."""
        self.peak_live_bytes = 0
        self.peak_reserved_bytes = 0
        self.refusal: str | None = None
        """Why the last `take` gave nothing."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slabs, used or not."""
        return sum(slab.nbytes for slab in self.slabs)

    def take(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes` bytes; None where budget or memory refuse, with the reason in `refusal`."""
        size = round_up(max(nbytes, 1), ALIGNMENT)
        block = self._best_fit(size)
        if block is None:
            slab = self._grow(size)
            if slab is None:
                return None
            block = (slab, 0)
        slab, index = block
        lo, hi = slab.free.pop(index)
        if hi - lo > size:
            insort(slab.free, (lo + size, hi))
        self.live_bytes += size
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        return Block(slab, lo, size)

    def give_back(self, block: Block) -> None:
        """Make the block's bytes free for the next `take`. The caller has no copy running on them."""
        lo, hi = block.lo, block.lo + block.nbytes
        keep = []
        for start, end in block.slab.free:
            if end == lo:
                lo = start
            elif start == hi:
                hi = end
            else:
                keep.append((start, end))
        insort(keep, (lo, hi))
        block.slab.free = keep
        self.live_bytes -= block.nbytes

    def trim(self) -> int:
        """Give slabs without a live block back to the system; returns their bytes. No copy may be running on them."""
        empty = [slab for slab in self.slabs if slab.free == [(0, slab.nbytes)]]
        self.slabs = [slab for slab in self.slabs if slab not in empty]
        return sum(slab.nbytes for slab in empty)

    def _best_fit(self, size: int) -> tuple[Slab, int] | None:
        best: tuple[int, Slab, int] | None = None
        for slab in self.slabs:
            for index, (lo, hi) in enumerate(slab.free):
                if hi - lo >= size and (best is None or hi - lo < best[0]):
                    best = (hi - lo, slab, index)
        return None if best is None else best[1:]

    def _grow(self, size: int) -> Slab | None:
        """A new slab for `size` bytes: the usual size, or the smallest that the budget still allows."""
        room = None if self.budget_bytes is None else self.budget_bytes - self.reserved_bytes
        least = power_of_two(size)
        wanted = max(self.slab_bytes, least)
        if room is not None and wanted > room:
            wanted = least
        if room is not None and wanted > room:
            self.refusal = (
                f"the host budget of {self.budget_bytes} bytes has {max(room, 0)} bytes left and a slab of {least} "
                "bytes is needed"
            )
            return None
        try:
            memory = self._allocate(wanted)
        except (RuntimeError, MemoryError) as error:  # what torch raises when pinning or allocating fails
            self.refusal = f"{wanted} bytes of host memory were refused ({str(error).splitlines()[0]})"
            return None
        slab = Slab(memory, [(0, wanted)])
        self.slabs.append(slab)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return slab


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value` (at least 1).

    >>> power_of_two(5), power_of_two(8)
    (8, 8)
    """
    return 1 << max(value - 1, 0).bit_length()
