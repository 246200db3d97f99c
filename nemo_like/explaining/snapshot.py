"""The events of a memory snapshot of PyTorch, in order.

``torch.cuda.memory._dump_snapshot`` writes a pickle of plain values: segments of the caching allocator with their blocks as
they are at the end, and for each device the last events before. From both follow the blocks alive at each event.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from nemo_like.explaining.stacks import Frames

BEFORE = -1  # The number of the event that made a block from before the recording.
_FREED, _ASKED = "free_completed", "free_requested"
_GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(eq=False, slots=True)
class Block:
    """One allocation."""

    address: int
    size: int  # Bytes, rounded by the allocator where the snapshot has that size.
    stream: int
    frames: Frames
    born: int = BEFORE  # The number of the event that made it.
    died: int | None = None  # The number of the event that freed it; None: alive at the end.
    asked: int | None = None  # The number of the event that asked to free it, which other streams may delay.
    requested: int = 0  # Bytes that were asked for.
    freed: Frames = ()  # The stack that freed it.

    def outlives(self, event: int) -> bool:
        """Return whether it is freed after `event`, or not at all."""
        return self.died is None or self.died > event


@dataclass(frozen=True)
class Gone:
    """A block that is taken to be gone from event `since` on, up to event `until` (None: until it was freed)."""

    block: Block
    since: int = BEFORE
    until: int | None = None

    @property
    def end(self) -> int | None:
        """The number of the event at which it is gone no longer."""
        ends = [event for event in (self.until, self.block.died) if event is not None]
        return min(ends, default=None)

    def at(self, event: int) -> int:
        """Return the bytes that are gone after `event`."""
        return (
            self.block.size
            if max(self.block.born, self.since) <= event and (self.end is None or self.end > event)
            else 0
        )


@dataclass
class SegmentAt:
    """A segment, or a mapped part of one, at some event."""

    address: int
    size: int
    stream: int
    blocks: list[Block] = field(default_factory=list)  # The largest first.


@dataclass
class MemoryTimeline:
    """The memory of a device after each event of its trace."""

    device: int
    trace: list[dict[str, Any]]
    segments: list[dict[str, Any]]
    blocks: list[Block]
    active: array[int]  # Bytes in blocks, at the start and after each event: one more than there are events.
    reserved: array[int]  # Bytes in segments, likewise.
    notes: list[str] = field(default_factory=list)  # Doubts about the file, a line each.

    @cached_property
    def peak_at(self) -> int:
        """Return the number of the event after which most is active; `BEFORE`: at the start."""
        return max(range(len(self.active)), key=self.active.__getitem__) - 1

    @property
    def recorded(self) -> bool:
        """True if any allocation was recorded: else the file has the blocks of one moment."""
        return any(block.born > BEFORE for block in self.blocks)

    @property
    def expandable(self) -> bool:
        """True if its segments grow already."""
        return any(segment.get("is_expandable") for segment in self.segments) or any(
            event["action"] == "segment_map" for event in self.trace
        )

    @property
    def out_of_memory(self) -> dict[str, Any] | None:
        """Return the first event of memory that ran out."""
        return next((event for event in self.trace if event["action"] == "oom"), None)

    def alive(self, at: int) -> list[Block]:
        """Return the blocks after event `at`, the largest first."""
        alive = (block for block in self.blocks if block.born <= at and block.outlives(at))
        return sorted(alive, key=lambda block: -block.size)

    def peak_without(self, gone: Iterable[Gone]) -> int:
        """Return the most active bytes, had blocks been gone for a part of their life."""
        spans = ((max(part.block.born, part.since), part.end, part.block.size) for part in gone)
        less = _over_time((span for span in spans if span[1] is None or span[1] > span[0]), len(self.trace))
        return max(map(operator.sub, self.active, less))

    @cached_property
    def most_reserved_at(self) -> int:
        """Return the number of the event after which most is reserved, as `peak_at`; of several, with most in blocks."""
        return max(range(len(self.reserved)), key=lambda number: (self.reserved[number], self.active[number])) - 1

    def segments_at(self, at: int) -> list[SegmentAt]:
        """Return the segments after event `at`, each with its blocks; of an expandable one each part that was mapped."""
        ends = {segment["address"]: (segment["total_size"], segment.get("stream", 0)) for segment in self.segments}
        for event in reversed(self.trace[at + 1 :]):
            grows, address = _GROWS.get(event["action"], 0), event.get("addr", 0)
            if grows < 0:
                ends[address] = event["size"], event.get("stream", 0)
            elif grows:
                _take_out(ends, address, event["size"])
        segments = [SegmentAt(address, size, stream) for address, (size, stream) in sorted(ends.items())]
        starts = [segment.address for segment in segments]
        for block in self.alive(at):
            number = bisect(starts, block.address) - 1
            if number >= 0:
                segments[number].blocks.append(block)
        return segments


def timelines(snapshot: Mapping[str, Any]) -> Iterator[MemoryTimeline]:
    """Yield the timeline of each device of which the snapshot has anything."""
    traces, segments = snapshot["device_traces"], snapshot["segments"]
    numbers = {segment.get("device", 0) for segment in segments} | {k for k, trace in enumerate(traces) if trace}
    for device in sorted(numbers):
        of_device = [segment for segment in segments if segment.get("device", 0) == device]
        yield timeline(of_device, traces[device] if device < len(traces) else [], device)


def timeline(segments: list[dict[str, Any]], trace: list[dict[str, Any]], device: int = 0) -> MemoryTimeline:
    """Return the blocks of a device over time, from those at the end back through the events of its `trace`."""
    notes = _overlaps(segments)
    alive = {block.address: block for block in _blocks_at_the_end(segments)}
    done, missing = list[Block](), 0
    for number, event in zip(reversed(range(len(trace))), reversed(trace)):
        action, address = event["action"], event.get("addr", 0)
        if action == "alloc":
            block = alive.pop(address, None)
            missing += block is None
            if block is not None:
                block.born, block.requested = number, event["size"]
                block.frames, block.stream = event.get("frames") or block.frames, event.get("stream", block.stream)
                done.append(block)
        elif action == _FREED:
            missing += address in alive
            alive[address] = Block(
                address,
                event["size"],
                event.get("stream", 0),
                frames=(),
                died=number,
                asked=number,
                requested=event["size"],
                freed=event.get("frames") or (),
            )
        elif action == _ASKED and address in alive:
            alive[address].asked = number
            alive[address].freed = event.get("frames") or alive[address].freed
    if missing:
        notes.append(f"{missing:,} of {len(trace):,} events do not fit together: some are lost.")
    blocks = [*alive.values(), *done]
    active = _over_time(((block.born, block.died, block.size) for block in blocks), len(trace))
    grown = [_GROWS.get(event["action"], 0) * event["size"] for event in trace]
    start = sum(segment["total_size"] for segment in segments) - sum(grown)
    if start < 0:
        notes.append("The trace gives segments back that it never took: its beginning is lost.")
    reserved = array("q", accumulate(grown, initial=start))
    return MemoryTimeline(device, trace, segments, blocks, active, reserved, notes)


def _take_out(ends: dict[int, tuple[int, int]], address: int, size: int) -> None:
    """Take the bytes from `address` on out of the segment that has them; of an expandable one the rest stays."""
    inside = (start for start, (total, _) in ends.items() if start <= address < start + total)
    holder = address if address in ends else next(inside, None)
    if holder is None:
        return
    total, stream = ends.pop(holder)
    for start, end in ((holder, address), (address + size, holder + total)):
        if end > start:
            ends[start] = end - start, stream


def _over_time(spans: Iterable[tuple[int, int | None, int]], events: int) -> array[int]:
    """Return the bytes at the start and after each event.

    spans: of each block the event that makes it, the one that frees it (None: it stays), and its bytes.
    """
    change = array("q", bytes(8 * (events + 1)))
    for since, until, size in spans:
        change[since + 1] += size
        if until is not None and until < events:
            change[until + 1] -= size
    return array("q", accumulate(change))


def _blocks_at_the_end(segments: list[dict[str, Any]]) -> Iterator[Block]:
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            at = block.get("address", address)
            if block["state"] != "inactive":
                yield Block(
                    at,
                    block["size"],
                    segment.get("stream", 0),
                    frames_of(block),
                    requested=block.get("requested_size", block["size"]),
                )
            address = at + block["size"]


def frames_of(block: Mapping[str, Any]) -> Frames:
    """Return the stack of a block; torch 2.0 has it in a ``history``."""
    history = block.get("history") or [{}]
    holder = block if "frames" in block or not isinstance(history, list) else history[0]
    frames = holder.get("frames") if isinstance(holder, dict) else None
    return frames if isinstance(frames, list | tuple) else ()


def _overlaps(segments: list[dict[str, Any]]) -> list[str]:
    """Return a line where blocks reach out of their segment or segments into each other."""
    ends = sorted((segment["address"], segment["address"] + segment["total_size"]) for segment in segments)
    crossed = sum(end > start for (_, end), (start, _) in pairwise(ends))
    crossed += sum(sum(block["size"] for block in each["blocks"]) > each["total_size"] for each in segments)
    return [f"{crossed} segments overlap or are overfull: the file is damaged."] if crossed else []
