"""Blocks of memory, and the free ones of a stream: what `nemo_like.planning.allocator_model` keeps its books with."""

from __future__ import annotations

from bisect import bisect_left, insort


class MemoryBlock:
    """A piece of a segment; `pool.free` has it while it is free and mapped."""

    __slots__ = ("address", "mapped", "next", "pool", "prev", "size", "used")

    def __init__(self, address: int, size: int, pool: BlockPool, *, mapped: bool = True) -> None:
        self.address, self.size, self.pool, self.mapped = address, size, pool, mapped
        self.used = False
        self.prev: MemoryBlock | None = None
        self.next: MemoryBlock | None = None

    @property
    def whole(self) -> bool:
        return self.prev is None and self.next is None

    def insert_behind(self, other: MemoryBlock) -> None:
        other.prev, other.next = self, self.next
        if self.next is not None:
            self.next.prev = other
        self.next = other


class BlockPool:
    """The free blocks of one stream, of one kind, smallest first."""

    def __init__(self, *, small: bool, least_rest: int, most_split: float) -> None:
        self.small = small
        self.least_rest, self.most_split = least_rest, most_split
        """Bytes from which on what is left of a block becomes one of its own, for requests below so many bytes."""
        self.free: list[tuple[int, int, MemoryBlock]] = []
        self.unmapped: list[tuple[int, MemoryBlock]] = []
        """Of growing segments, what has no memory behind it, by address."""

    def add(self, block: MemoryBlock) -> None:
        insort(self.free, (block.size, block.address, block))

    def take(self, block: MemoryBlock) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


def can_become(block: MemoryBlock) -> int:
    """Bytes of a free block of a growing segment, with what may still grow behind it."""
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)
