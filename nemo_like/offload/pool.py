"""Host memory for what is offloaded: a few large slabs, cut into blocks, within a budget.

Pinning memory costs milliseconds a call, and PyTorch rounds each pinned allocation up to a power of two. So blocks are
cut from slabs of such sizes and reused from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ALIGNMENT = 512
"""Bytes. CUDA's allocator gives the same alignment, and it is a multiple of every dtype's size."""
SLAB_BYTES = 64 << 20
"""Bytes of a slab, where neither the budget nor a larger block requires another size."""


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
    """Blocks of host memory. Not thread safe: its owner holds a lock.

    Args:
        allocate: makes a uint8 tensor of so many bytes of host memory, and raises where it cannot.
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
        self.free: list[Block] = []
        """Unused bytes; no two blocks touch each other."""
        self.reserved_bytes = 0
        """Bytes of all slabs, used or not."""
        self.live_bytes = 0
        """Bytes of blocks that are out."""
        self.peak_live_bytes = 0
        self.refusal: str | None = None
        """Why the last `take` gave nothing."""

    def take(self, nbytes: int) -> Block | None:
        """Return a block of at least `nbytes`; None where budget or memory refuse, with the reason in `refusal`."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        large_enough = [block for block in self.free if block.nbytes >= size]
        block = min(large_enough, key=lambda block: block.nbytes) if large_enough else self._grow(size)
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
        except (RuntimeError, MemoryError) as error:  # what torch raises when pinning or allocating fails
            self.refusal = f"{wanted} bytes of host memory were refused ({str(error).splitlines()[0]})"
            return None
        self.reserved_bytes += wanted
        self.free.append(Block(slab, 0, wanted))
        return self.free[-1]
