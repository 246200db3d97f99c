"""A model of CUDA's caching allocator: from a sequence of allocations and frees to the bytes that it reserves.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` (PyTorch 2.13; the same in
2.15 as far as they are modelled), and no GPU is needed:

- A request is rounded up to 512 bytes (``kMinBlockSize``). With ``roundup_power2_divisions`` it is rounded up to the next
  of so many equal steps between two powers of two.
- Requests up to 1 MiB (``kSmallSize``) come from segments of 2 MiB (``kSmallBuffer``). Those below 10 MiB
  (``kMinLargeAlloc``) come from segments of 20 MiB (``large_segment_size_mb``). Larger ones come from a segment of their
  own, rounded up to 2 MiB (``kRoundLarge``).
- Each stream has its own free blocks, small and large ones apart. The smallest that is large enough is taken, of several
  the one at the lowest address (`get_free_block`).
- A block is split where 512 bytes or more would be left of a small one, more than 1 MiB of a large one (`should_split`).
  With ``max_split_size_mb`` larger requests are not split, and larger blocks serve none of the smaller requests.
- A freed block becomes one with its free neighbours. A segment stays reserved until memory runs out. Then free segments
  of all streams go back to the device, and the request is tried once more.
- With ``expandable_segments`` a stream has one segment of each kind that grows by pages of 2 or 20 MiB at its end.

Not modelled: ``garbage_collection_threshold``, memory pools of CUDA graphs, ``record_stream``, and ``cudaMalloc``'s choice
of addresses: segments here are in the order in which they were made.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from collections.abc import Hashable

from nemo_like.options.memory import AllocatorConfig

MIN_BLOCK = 512
SMALL_REQUEST = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_REQUEST = 10 << 20
LARGE_STEP = 2 << 20


class DeviceMemoryError(RuntimeError):
    """A request that does not fit the device, though every free segment was given back."""


class CachingAllocator:
    """The allocator of one device, before its first request.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 << 20)
    >>> allocator.allocated, allocator.reserved
    (3145728, 20971520)

    Args:
        config: its settings; None: torch's defaults.
        memory: bytes that it may reserve; None: as many as are requested, so that nothing is ever given back.
        address_space: bytes of address space of a growing segment (torch: 9/8 of the device's memory).
    """

    def __init__(
        self, config: AllocatorConfig | None = None, memory: int | None = None, address_space: int = 1 << 46
    ) -> None:
        self.config, self.memory = config or AllocatorConfig(), memory
        self.address_space = address_space
        # Bytes in blocks in use, as ``torch.cuda.memory_allocated`` counts them, and in segments: now, and at most.
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0  # Number of times that segments were given back, because memory had run out.
        self._limit = float("inf") if self.config.max_split_size is None else self.config.max_split_size
        self._pools: dict[tuple[Hashable, bool], BlockPool] = {}
        self._rounded = functools.cache(self.rounded)  # a step requests a dozen sizes thousands of times
        self._next_address = 0

    def allocate(self, size: int, stream: Hashable = 0) -> MemoryBlock:
        """Return a block of at least `size` bytes on `stream`. (For 0 bytes torch requests none.)

        Raises:
            DeviceMemoryError: `memory` does not suffice.
        """
        wanted = self._rounded(size)
        small = wanted <= SMALL_REQUEST
        pool = self._pools.get((stream, small))
        if pool is None:
            fine = small or self.config.expandable_segments
            least_rest = MIN_BLOCK if fine else SMALL_REQUEST + 1
            pool = BlockPool(small=small, least_rest=least_rest, most_split=float("inf") if fine else self._limit)
            self._pools[stream, small] = pool
        block = self._cached(pool, wanted) or self._reserve(pool, wanted)
        if block.size - wanted >= pool.least_rest and wanted < pool.most_split:
            pool.add(block.split(wanted))
        block.used = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Give `block` back to its stream's free ones; its segment stays reserved."""
        assert block.used, "a block is freed twice"
        block.used = False
        self.allocated -= block.size
        block.merge()
        block.pool.add(block)

    def rounded(self, size: int) -> int:
        """Return the bytes of a request for `size`."""
        divisions = self.config.roundup_power2_divisions
        if divisions > 1 and size > MIN_BLOCK * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
        return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)

    def release_cached(self) -> None:
        """Give back segments, or pages of growing ones, in which nothing is used, as ``torch.cuda.empty_cache`` does."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.config.expandable_segments:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    self._give_back(block)

    # --- taking -----------------------------------------------------------------------------------------------------

    def _cached(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        free = pool.free
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        if self.config.expandable_segments:
            # A block at the growing end counts as large as it can become: it is the last choice, not the best fit.
            last = len(free) - 1
            while at < last and can_become(free[at + 1][2]) < can_become(free[at][2]):
                at += 1
        found = free[at][2]
        if size < self._limit <= found.size:
            return None
        if size >= self._limit and found.size >= size + self.config.large_segment:
            return None
        del free[at]
        return found

    def _reserve(self, pool: BlockPool, size: int) -> MemoryBlock:
        block = self._new(pool, size)
        if block is None and self.config.max_split_size is not None and self._release_oversize(pool, size):
            block = self._new(pool, size)
        if block is None:
            self.retries += 1
            self.release_cached()
            block = self._new(pool, size)
        if block is None:
            raise DeviceMemoryError(
                f"{size} bytes do not fit a device of {self.memory}: {self.reserved} are reserved, of which "
                f"{self.allocated} are in use."
            )
        return block

    def _new(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        if self.config.expandable_segments:
            return self._grown(pool, size)
        if pool.small:
            segment = SMALL_SEGMENT
        else:
            segment = self.config.large_segment if size < LARGE_REQUEST else -(-size // LARGE_STEP) * LARGE_STEP
        if not self._count(segment):
            return None
        block = MemoryBlock(self._next_address, segment, pool)
        self._next_address += segment
        return block

    def _count(self, size: int) -> bool:
        """Return whether the device has `size` bytes more, and reserve them then."""
        if self.memory is not None and self.reserved + size > self.memory:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    # --- giving back ------------------------------------------------------------------------------------------------

    def _give_back(self, block: MemoryBlock) -> None:
        block.pool.take(block)
        self.reserved -= block.size

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Give back blocks that are too large to be split, largest first, until `size` bytes of them are gone."""
        wanted = max(size, int(self._limit))
        at = bisect_left(pool.free, (wanted,))
        if at < len(pool.free):
            self._give_back(pool.free[at][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= self._limit:
            released += pool.free[-1][0]
            self._give_back(pool.free[-1][2])
        return released >= wanted

    # --- growing segments -------------------------------------------------------------------------------------------

    def _page(self, pool: BlockPool) -> int:
        return SMALL_SEGMENT if pool.small else self.config.large_segment

    def _grown(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Return a free block of `size` bytes at the lowest address where free and unmapped pieces suffice."""
        block = self._with_room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.take(block)
        return block

    def _with_room(self, pool: BlockPool, size: int) -> MemoryBlock:
        for _, unmapped in pool.unmapped:
            first = unmapped.prev if unmapped.prev is not None and not unmapped.prev.used else unmapped
            room, block = 0, first
            while room < size and block is not None and not block.used:
                room += block.size
                block = block.next  # type: ignore[assignment]
            if room >= size:
                return first
        page = self._page(pool)
        space = -(-self.address_space // page) * page
        start = -(-self._next_address // page) * page  # so that its pages are at multiples of their size
        segment = MemoryBlock(start, space, pool, mapped=False)
        self._next_address = start + space
        pool.add(segment)
        return segment

    def _map(self, block: MemoryBlock, size: int) -> bool:
        """Put memory behind the first `size` bytes of an unmapped block, in whole pages."""
        page, pool = self._page(block.pool), block.pool
        mapped = -(-size // page) * page
        if not self._count(mapped):
            return False
        pool.take(block)
        block.mapped = True
        if mapped < block.size:
            pool.add(block.split(mapped, mapped=False))
        block.merge()
        pool.add(block)
        return True

    def _unmap(self, block: MemoryBlock) -> None:
        """Take the memory away from the whole pages of a free block."""
        page, pool = self._page(block.pool), block.pool
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if end <= start:
            return
        pool.take(block)
        if start > block.address:
            before, block = block, block.split(start - block.address)
            pool.add(before)
        if end < block.address + block.size:
            pool.add(block.split(end - start))
        block.mapped = False
        self.reserved -= block.size
        block.merge()
        pool.add(block)


class MemoryBlock:
    """A piece of a segment; `pool.free` has it while it is free and mapped."""

    __slots__ = ("address", "mapped", "next", "pool", "prev", "size", "used")

    def __init__(self, address: int, size: int, pool: BlockPool, *, mapped: bool = True) -> None:
        self.address, self.size, self.pool, self.mapped = address, size, pool, mapped
        self.used = False
        self.prev: MemoryBlock | None = None
        self.next: MemoryBlock | None = None

    def split(self, size: int, *, mapped: bool = True) -> MemoryBlock:
        """Cut off all behind the first `size` bytes, and return it as a block of its own."""
        rest = MemoryBlock(self.address + size, self.size - size, self.pool, mapped=mapped)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def merge(self) -> None:
        """Take in its neighbours, where these are free, and mapped as it is."""
        for other in (self.prev, self.next):
            if other is None or other.used or other.mapped != self.mapped:
                continue
            self.pool.take(other)
            if other is self.prev:
                self.address, self.prev = other.address, other.prev
                if self.prev is not None:
                    self.prev.next = self
            else:
                self.next = other.next
                if self.next is not None:
                    self.next.prev = self
            self.size += other.size


class BlockPool:
    """The free blocks of one stream, of one kind, smallest first."""

    def __init__(self, *, small: bool, least_rest: int, most_split: float) -> None:
        self.small = small
        # Least bytes left of a block that become one of its own, and the bytes below which requests split blocks.
        self.least_rest, self.most_split = least_rest, most_split
        self.free: list[tuple[int, int, MemoryBlock]] = []
        # Pieces of growing segments that have no memory behind them, by address.
        self.unmapped: list[tuple[int, MemoryBlock]] = []

    def add(self, block: MemoryBlock) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: MemoryBlock) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


def can_become(block: MemoryBlock) -> int:
    """Return the bytes of a free block of a growing segment, with the bytes that may still grow behind it."""
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)
