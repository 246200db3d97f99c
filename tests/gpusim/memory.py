"""Memory of the simulated device: a caching allocator as CUDA's, and who accessed which bytes.

Bytes that are freed are handed out again at once on their stream, filled with NaN. A block that another stream uses
(`record_stream`) waits until the host knows that it is done. Rules and sizes are those of ``CUDACachingAllocator.cpp``:
blocks are multiples of 512 bytes; up to 1 MiB they are cut from segments of 2 MiB, below 10 MiB from segments of 20 MiB,
and else from a segment of their own in whole 2 MiB. The smallest block that is large enough is taken, and split; neighbours
that are free become one. With `expandable` segments, each pool of a stream is one segment that grows by whole pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from tests.gpusim.streams import Clock, Event, host

MIB = 1 << 20
_SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _LARGE, _ROUND = MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB

_RANGES = 8
"""Most segments that grow."""


class DeviceMemoryError(RuntimeError):
    """Memory has run out: `torch.OutOfMemoryError` is what CUDA raises."""


@dataclass(frozen=True)
class Access:
    """Work that reads or writes bytes [lo, hi)."""

    lo: int
    hi: int
    stream: int
    tick: int
    writes: bool
    name: str

    def conflicts(self, other: Access) -> bool:
        """Return whether the order of both matters."""
        return (self.writes or other.writes) and self.lo < other.hi and other.lo < self.hi

    def covers(self, other: Access) -> bool:
        """Return whether nothing can conflict with `other` alone, as far as streams are the same."""
        inside = self.lo <= other.lo and other.hi <= self.hi
        return inside and self.stream == other.stream and (self.writes or not other.writes)

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.name} on stream {self.stream}"


class Accesses:
    """Accesses to memory that later ones may have to be ordered behind, and the races among them."""

    def __init__(self) -> None:
        self.recent: dict[int, list[Access]] = {}
        """By the storage that they are to."""
        self.of_freed: list[Access] = []
        """Accesses to memory that was freed, which its next owner has to be ordered behind."""
        self.races: list[str] = []

    def freed(self, lo: int, hi: int, stream: int) -> None:
        """Keep what the next owner of bytes [lo, hi) must wait for; they are handed out again on `stream`."""
        last = Access(lo, hi, stream, host.ticks[stream], True, "what had these bytes before")
        self.of_freed += [*(each for each in self.recent.pop(lo, []) if not last.covers(each)), last]

    def made(self, lo: int, hi: int) -> None:
        """Let a new storage of bytes [lo, hi) have the accesses that they had before."""
        known, before, kept = host.clock, [], []
        for each in self.of_freed:
            if each.hi <= lo or hi <= each.lo:
                kept.append(each)
            elif known.get(each.stream, 0) < each.tick:
                before.append(replace(each, lo=max(lo, each.lo), hi=min(hi, each.hi)))
                kept += [replace(each, hi=lo)] if each.lo < lo else []
                kept += [replace(each, lo=hi)] if hi < each.hi else []
        self.of_freed, self.recent[lo] = kept, before

    def add(self, storage: int, access: Access, clock: Clock) -> None:
        """Add an access that starts when `clock` is done."""
        kept = []
        for other in self.recent.get(storage, ()):
            known = clock.get(other.stream, 0) >= other.tick
            if access.conflicts(other) and not known:
                self.races.append(f"{access} and {other}: nothing orders them, bytes {access.lo:#x} to {access.hi:#x}")
            elif not (
                access.covers(other) or (known and access.writes and access.lo <= other.lo and other.hi <= access.hi)
            ):
                kept.append(other)
        self.recent[storage] = [*kept, access]


@dataclass(eq=False)
class Block:
    """A piece of a segment."""

    segment: Segment
    lo: int
    hi: int
    used: int = 0
    """Bytes asked for; 0: it is free."""
    lent: set[int] = field(default_factory=set)
    """Other streams that use it."""

    @property
    def size(self) -> int:
        return self.hi - self.lo


@dataclass(eq=False)
class Segment:
    """Memory that the device gave, for one stream and one pool."""

    stream: int
    small: bool
    blocks: list[Block] = field(default_factory=list)
    """In order, without gaps."""


class DeviceMemory:
    """The device's memory."""

    def __init__(self, size: int, expandable: bool = False) -> None:
        """Have `size` bytes."""
        self.arena = torch.empty(size * _RANGES if expandable else size, dtype=torch.uint8)
        self.base, self.size, self.expandable = self.arena.data_ptr(), size, expandable
        self.segments: list[Segment] = []
        self.blocks: dict[int, Block] = {}
        """In use, or lent, by address."""
        self.waiting: list[tuple[Block, list[Event]]] = []
        """Freed, and lent to streams that are not known to be done."""
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.count: Counter[str] = Counter()
        self.accesses = Accesses()

    # --- the caching allocator ------------------------------------------------------------------------------------

    def allocate(self, size: int, stream: int) -> int:
        """Return the address of `size` bytes that `stream` may use from now on."""
        rounded = max(512, -(-size // 512) * 512)
        self._take_back()
        block = self._free_block(rounded, stream) or self._new_block(rounded, stream)
        if block is None:
            self.count["num_alloc_retries"] += 1
            host.synchronize()
            self._take_back()
            self.empty_cache()
            block = self._free_block(rounded, stream) or self._new_block(rounded, stream)
        if block is None:
            self.count["num_ooms"] += 1
            raise DeviceMemoryError(f"{size} bytes were asked for, and {self.size - self.now['reserved']} are left.")
        self._split(block, rounded)
        block.used = size
        self.blocks[block.lo] = block
        self.accesses.made(self.base + block.lo, self.base + block.hi)
        self._fill(block, stream)
        self._counted("allocated", block.size)
        self._counted("requested", size)
        return self.base + block.lo

    def free(self, address: int) -> None:
        """Take back the bytes at `address`: for its own stream now, where others use it when they are done."""
        block = self.blocks[address - self.base]
        if block.lent:
            self.waiting.append((block, [host.record(stream) for stream in sorted(block.lent)]))
            block.lent = set()
        else:
            self._release(block)

    def lend(self, address: int, stream: int) -> None:
        """Note that `stream` uses the bytes at `address`, too."""
        block = self.blocks[address - self.base]
        if stream != block.segment.stream:
            block.lent.add(stream)

    def empty_cache(self) -> None:
        """Give segments back of which nothing is used."""
        for segment in list(self.segments):
            if self.expandable:
                if not segment.blocks[-1].used and segment.blocks[-1].lo not in self.blocks:
                    last = segment.blocks[-1]
                    page = _page(segment.small)
                    kept = -(-(last.lo - segment.blocks[0].lo) // page) * page
                    self._resize_last(segment, segment.blocks[0].lo + kept)
            elif len(segment.blocks) == 1 and segment.blocks[0].lo not in self.blocks:
                self.segments.remove(segment)
                self._counted("reserved", -segment.blocks[0].size)
                self.count["num_device_free"] += 1

    def _counted(self, name: str, size: int) -> None:
        self.now[name] += size
        self.peak[name] = max(self.peak[name], self.now[name])

    def _take_back(self) -> None:
        """Free the lent blocks whose streams are known to be done."""
        waiting, self.waiting = self.waiting, []
        for block, events in waiting:
            if all(event.query() for event in events):
                self._release(block)
            else:
                self.waiting.append((block, events))

    def blank(self, address: int, stream: int) -> None:
        """Fill the bytes at `address` with NaN in the order of `stream`, as if they were freed; they stay where they are."""
        self._fill(self.blocks[address - self.base], stream)

    def _fill(self, block: Block, stream: int) -> None:
        part = self.arena[block.lo : block.hi]
        host.give(stream, host.ticks[stream], lambda: part.fill_(0xFF))  # NaN in every floating-point type

    def _release(self, block: Block) -> None:
        self.accesses.freed(self.base + block.lo, self.base + block.hi, block.segment.stream)
        del self.blocks[block.lo]
        self._counted("allocated", -block.size)
        self._counted("requested", -block.used)
        block.used = 0
        blocks = block.segment.blocks
        at = blocks.index(block)
        for left in (at, at - 1):
            if 0 <= left < len(blocks) - 1 and not ({blocks[left].lo, blocks[left + 1].lo} & self.blocks.keys()):
                blocks[left : left + 2] = [Block(block.segment, blocks[left].lo, blocks[left + 1].hi)]

    def _pool(self, size: int, stream: int) -> Iterator[Segment]:
        return (each for each in self.segments if each.stream == stream and each.small == (size <= _SMALL))

    def _free_block(self, size: int, stream: int) -> Block | None:
        free = (
            block
            for segment in self._pool(size, stream)
            for block in segment.blocks
            if block.lo not in self.blocks and block.size >= size
        )
        # The last block of a segment that grows is taken last.
        grows = lambda block: self.expandable and block is block.segment.blocks[-1]  # noqa: E731
        return min(free, key=lambda block: (grows(block), block.size, block.lo), default=None)

    def _new_block(self, size: int, stream: int) -> Block | None:
        if self.expandable:
            return self._grown(size, stream)
        small = size <= _SMALL
        want = _SMALL_SEGMENT if small else _LARGE_SEGMENT if size < _LARGE else -(-size // _ROUND) * _ROUND
        taken = sorted((segment.blocks[0].lo, segment.blocks[-1].hi) for segment in self.segments)
        ends = [0, *(hi for _, hi in taken)]
        starts = [*(lo for lo, _ in taken), self.size]
        lo = next((end for end, start in zip(ends, starts) if start - end >= want), None)
        return None if lo is None else self._segment(stream, small, lo, lo + want)

    def _segment(self, stream: int, small: bool, lo: int, hi: int) -> Block:
        segment = Segment(stream, small)
        segment.blocks.append(Block(segment, lo, hi))
        self.segments.append(segment)
        self._counted("reserved", hi - lo)
        self.count["num_device_alloc"] += 1
        return segment.blocks[0]

    def _grown(self, size: int, stream: int) -> Block | None:
        """Return a block at the end of the pool's segment, which grows by the pages that are missing."""
        page = _page(size <= _SMALL)
        segment = next(self._pool(size, stream), None)
        if segment is None:
            lo = len(self.segments) * self.size  # each has its range of addresses
            if self.now["reserved"] + -(-size // page) * page > self.size:
                return None
            return self._segment(stream, size <= _SMALL, lo, lo + -(-size // page) * page)
        last = segment.blocks[-1]
        free = 0 if last.lo in self.blocks else last.size
        more = -(-(size - free) // page) * page
        if self.now["reserved"] + more > self.size:
            return None
        self._resize_last(segment, last.hi + more)
        return segment.blocks[-1]

    def _resize_last(self, segment: Segment, hi: int) -> None:
        last = segment.blocks[-1]
        self._counted("reserved", hi - last.hi)
        if last.lo in self.blocks:
            segment.blocks.append(Block(segment, last.hi, hi))
        elif hi > last.lo:
            segment.blocks[-1] = replace(last, hi=hi)
        else:
            segment.blocks.pop()
            if not segment.blocks:
                self.segments.remove(segment)

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest >= 512 if block.segment.small or self.expandable else rest > _SMALL:
            blocks = block.segment.blocks
            blocks.insert(blocks.index(block) + 1, Block(block.segment, block.lo + size, block.hi))
            block.hi = block.lo + size


def _page(small: bool) -> int:
    return _SMALL_SEGMENT if small else _LARGE_SEGMENT
