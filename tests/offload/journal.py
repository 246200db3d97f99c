"""The log of a transfer back end, and the check that nothing in it could race.

A back end's streams run by themselves: what orders two pieces of work are events. The journal keeps every copy, use
and release together with the event calls around them (`Journaled` writes it); `find_hazards` replays it with vector
clocks (Mattern 1989, "Virtual time and global states of distributed systems") and returns each pair of accesses to the
same bytes, one of them a write, that no event orders. It needs no device: the copying back end is watched as CUDA's is.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from nemo_like.offload.backends import AcceleratorBackend, Backend, CopyingBackend
from nemo_like.torch_compat import version_of

HOST = "host"
"""The name of the CPU thread among the streams: whatever it has seen finished precedes all that it enqueues later."""


@dataclass(frozen=True)
class Region:
    """Bytes [lo, hi) of the memory named `space` (a slab, or one device allocation)."""

    space: str
    lo: int
    hi: int

    def meets(self, other: Region) -> bool:
        """Whether the two share a byte."""
        return self.space == other.space and self.lo < other.hi and other.lo < self.hi


@dataclass(frozen=True)
class Entry:
    """One line of the journal. Which fields count depends on `kind`:

    ``record`` (stream, event) · ``wait`` (stream waits for event) · ``seen`` (the host knows event has happened) ·
    ``copy`` (stream, reads, writes) · ``use`` (stream reads) · ``produce`` (stream has written) · ``release`` (the
    memory goes back to the allocator, which hands it to later work of `stream`) · ``hold`` (a release of `reads` will
    also wait for what `stream` has queued: ``Tensor.record_stream``).
    """

    kind: Literal["record", "wait", "seen", "copy", "use", "produce", "release", "hold"]
    stream: str
    event: int | None = None
    reads: Region | None = None
    writes: Region | None = None


@dataclass
class Journal:
    """Entries in the order in which the host made the calls."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Append one line."""
        self.entries.append(entry)

    def of_kind(self, kind: str) -> list[Entry]:
        """The entries of one kind."""
        return [entry for entry in self.entries if entry.kind == kind]


@dataclass(frozen=True)
class Hazard:
    """Two accesses that nothing orders: entries number `first` and `second` of the journal."""

    kind: Literal["read after write", "write after read", "write after write"]
    first: int
    second: int
    region: Region


Clock = dict[str, int]


@dataclass
class _Access:
    index: int
    stream: str
    tick: int
    region: Region
    writes: bool


def find_hazards(journal: Journal) -> list[Hazard]:
    """Every pair of conflicting accesses that no event orders, in the order of the second access.

    A wait for an event that was never recorded orders nothing, as on a real device.
    """
    clocks: defaultdict[str, Clock] = defaultdict(dict)
    events: dict[int, Clock] = {}
    held: defaultdict[str, Clock] = defaultdict(dict)  # by memory space
    history: defaultdict[str, list[_Access]] = defaultdict(list)
    hazards: list[Hazard] = []
    for index, entry in enumerate(journal.entries):
        clock = clocks[entry.stream]
        _join(clock, clocks[HOST])
        if entry.kind == "record":
            events[entry.event] = dict(clock)  # type: ignore[index]
        elif entry.kind == "wait":
            _join(clock, events.get(entry.event, {}))  # type: ignore[arg-type]
        elif entry.kind == "seen":
            _join(clocks[HOST], events.get(entry.event, {}))  # type: ignore[arg-type]
        elif entry.kind == "hold":
            assert entry.reads is not None
            _join(held[entry.reads.space], clock)
        else:
            seen = dict(clock)
            if entry.kind == "release":
                assert entry.writes is not None
                _join(seen, held[entry.writes.space])
            clock[entry.stream] = clock.get(entry.stream, 0) + 1
            for region, writes in ((entry.reads, False), (entry.writes, True)):
                if region is not None:
                    access = _Access(index, entry.stream, clock[entry.stream], region, writes)
                    hazards += _conflicts(history[region.space], access, seen)
                    history[region.space].append(access)
    return hazards


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


def _conflicts(earlier: list[_Access], access: _Access, seen: Clock) -> list[Hazard]:
    found: list[Hazard] = []
    for old in earlier:
        ordered = seen.get(old.stream, 0) >= old.tick
        if ordered or not (old.writes or access.writes) or not old.region.meets(access.region):
            continue
        kind = "read after write" if not access.writes else "write after write" if old.writes else "write after read"
        found.append(Hazard(kind, old.index, access.index, access.region))  # type: ignore[arg-type]
    return found


class Journaled(Backend):
    """Put before a back end: writes each of its calls into `journal`, and looks at nothing but the calls.

    Memory is named when it is first seen: a slab or buffer when it is made, a tensor when it is asked about before it
    is moved. What the current stream has written into a tensor by then, it has produced.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.journal = Journal()
        self._events: dict[int, tuple[int, Any]] = {}  # with the event, so that its id stays its own
        self._spaces: dict[int, tuple[str, int | None]] = {}
        self._numbers = itertools.count()
        super().__init__(*args, **kwargs)

    def record(self, stream: Any) -> Any:
        event = super().record(stream)
        number, _ = self._events.setdefault(id(event), (next(self._numbers), event))
        self._note("record", stream, event=number)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        super().wait(stream, event)
        self._note("wait", stream, event=self._events[id(event)][0])

    def done(self, event: Any) -> bool:
        done = super().done(event)
        if done:
            self._note("seen", None, event=self._events[id(event)][0])
        return done

    def synchronize(self, event: Any) -> None:
        super().synchronize(event)
        self._note("seen", None, event=self._events[id(event)][0])

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        super().copy(target, source, stream)
        self._note("copy", stream, writes=self._region(target), reads=self._region(source))

    def lend(self, tensor: torch.Tensor, stream: Any, made_on: Any) -> None:
        super().lend(tensor, stream, made_on)
        self._note("use", stream, reads=self._region(tensor))
        if stream != made_on:
            self._note("hold", stream, reads=self._region(tensor))

    def host_memory(self, nbytes: int) -> torch.Tensor:
        memory = super().host_memory(nbytes)
        self._name("slab", memory.untyped_storage())
        return memory

    def device_memory(self, nbytes: int) -> torch.Tensor:
        memory = super().device_memory(nbytes)
        self._name_device(memory.untyped_storage(), None)
        return memory

    def serves(self, tensor: torch.Tensor) -> bool:
        served = super().serves(tensor)
        if served and tensor.numel():
            storage, version = tensor.untyped_storage(), version_of(tensor)
            known = self._spaces.get(storage.data_ptr())
            if known is None or known[1] != version:
                space = self._name_device(storage, version)
                self._note("produce", self.current_stream(), writes=Region(space, 0, storage.nbytes()))
        return served

    def _name_device(self, storage: torch.UntypedStorage, version: int | None) -> str:
        stream = self.current_stream()
        space = self._name("device", storage, version)
        region = Region(space, 0, storage.nbytes())
        weakref.finalize(storage, self._note, "release", stream, writes=region).atexit = False
        return space

    def _name(self, kind: str, storage: torch.UntypedStorage, version: int | None = None) -> str:
        space = f"{kind}-{next(self._numbers)}"
        self._spaces[storage.data_ptr()] = (space, version)
        weakref.finalize(storage, self._forget, storage.data_ptr(), space).atexit = False
        return space

    def _forget(self, address: int, space: str) -> None:
        if self._spaces.get(address, ("",))[0] == space:
            del self._spaces[address]

    def _region(self, tensor: torch.Tensor) -> Region:
        address = tensor.untyped_storage().data_ptr()
        start = tensor.data_ptr() - address
        return Region(self._spaces[address][0], start, start + tensor.numel() * tensor.element_size())

    def _note(self, kind: Any, stream: Any, **fields: Any) -> None:
        name = HOST if stream is None else getattr(stream, "name", None) or f"stream-{stream.stream_id}"
        self.journal.add(Entry(kind, name, **fields))


class JournaledCopying(Journaled, CopyingBackend):
    """The copying back end with a journal."""


class JournaledAccelerator(Journaled, AcceleratorBackend):
    """The accelerator's back end with a journal."""
