"""Streams and events of the simulated device, and which work is ordered behind which.

A stream other than the first one is a lazy queue. What it is given runs when somebody waits for it, or earlier where a seed
chooses so. So what is read without a wait is not there yet.

Beside that, each stream, each event and the host have a *clock*: how much work of each stream is known to be done by then
(vector clocks; Mattern, "Virtual time and global states of distributed systems", 1989). Two accesses to the same bytes, one
of them a write, must be ordered by them, whichever ran first.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Clock = dict[int, int]
"""Work of each stream, by its number, that is done."""


def join(clock: Clock, other: Clock) -> None:
    """Add to `clock` what `other` knows."""
    for stream, tick in other.items():
        if tick > clock.get(stream, 0):
            clock[stream] = tick


class Stream(torch.Stream):
    """A stream of work, in order."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        """Make a new stream; `device` and `priority` are taken as `torch.cuda.Stream` takes them, and unused."""
        return host.new_stream(cls)

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        """Let what is given from now on start after `event`."""
        host.wait(self.stream_id, event)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Let what is given from now on start after what `stream` has been given."""
        self.wait_event(host.record(stream.stream_id))

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that happens when all that was given so far is done."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block the host until all that was given so far is done."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Return whether the host can know that all is done."""
        return self.record_event().query()


class Event:
    """A point in the work of a stream."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take what `torch.cuda.Event` takes."""
        self.stream, self.clock, self.position, self.time = 0, Clock(), 0, 0.0

    def record(self, stream: torch.Stream | None = None) -> None:
        """Set the event behind all that `stream` was given so far."""
        host.record(host.current if stream is None else stream.stream_id, self)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Let what `stream` is given from now on start after the event."""
        host.wait(host.current if stream is None else stream.stream_id, self)

    def query(self) -> bool:
        """Return whether the host knows that it has happened, or a seed says that it can tell now."""
        if not host.knows(self) and host.early():
            self.synchronize()
        return host.knows(self)

    def synchronize(self) -> None:
        """Block the host until it has happened."""
        host.run(self.stream, self.position)
        if not host.knows(self):
            join(host.clock, self.clock)
            host.told.clear()

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds on the host from this record to that of `other`."""
        return 1000 * (other.time - self.time)


class Host:
    """All streams, and what the host knows."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.clocks: dict[int, Clock] = {0: {}}
        self.told: set[int] = set()
        """Streams whose clocks have what the host knows."""
        self.streams: dict[int, torch.Stream] = {}
        self.current = 0
        self.queues: dict[int, deque[tuple[int, Callable[[], None]]]] = {0: deque()}
        """Work that waits, with its tick."""
        self.ticks: dict[int, int] = {0: 0}
        self.seed: random.Random | None = None
        self.new_stream(Stream, 0)

    def new_stream(self, cls: type, number: int | None = None) -> Any:
        """Return a stream; `number`: of one that exists."""
        number = len(self.streams) if number is None else number
        stream = torch.Stream.__new__(cls, stream_id=number, device_index=0, device_type=_PRIVATE)
        self.streams[number] = stream
        self.clocks.setdefault(number, Clock())
        self.queues.setdefault(number, deque())
        self.ticks.setdefault(number, 0)
        return stream

    def early(self) -> bool:
        """Return whether work that nobody waits for runs now: never without a seed."""
        return self.seed is not None and self.seed.random() < 0.5

    def knows(self, event: Event) -> bool:
        """Return whether the host knows that `event` has happened."""
        return all(self.clock.get(stream, 0) >= tick for stream, tick in event.clock.items())

    def launch(self, stream: int) -> int:
        """Return the tick of new work on `stream`, which starts after all that the host knows to be done."""
        self.ticks[stream] += 1
        self.clock_of(stream)[stream] = self.ticks[stream]
        return self.ticks[stream]

    def clock_of(self, stream: int) -> Clock:
        """Return what new work on `stream` starts after."""
        if stream not in self.told:
            join(self.clocks[stream], self.clock)
            self.told.add(stream)
        return self.clocks[stream]

    def give(self, stream: int, tick: int, work: Callable[[], None]) -> None:
        """Give `stream` work that may wait."""
        self.queues[stream].append((tick, work))
        if stream == 0 or self.early():
            self.run(stream, tick)

    def run(self, stream: int, tick: int) -> None:
        """Run the work of `stream` up to that of `tick`."""
        queue = self.queues[stream]
        while queue and queue[0][0] <= tick:
            queue.popleft()[1]()

    def record(self, stream: int, event: Event | None = None) -> Event:
        """Return `event`, or a new one, behind all that `stream` was given."""
        event = Event() if event is None else event
        event.stream, event.position, event.time = stream, self.ticks[stream], time.perf_counter()
        event.clock = dict(self.clock_of(stream))
        return event

    def wait(self, stream: int, event: Event) -> None:
        """Let `stream` go on after `event` only."""
        join(self.clocks[stream], event.clock)
        if event.stream != stream:
            position = event.position
            self.give(stream, self.ticks[stream], lambda: self.run(event.stream, position))

    def synchronize(self, stream: int | None = None) -> None:
        """Block the host until a stream, or all of them, are done."""
        for each in list(self.streams) if stream is None else [stream]:
            self.record(each).synchronize()

    @contextmanager
    def on(self, stream: torch.Stream | None) -> Iterator[None]:
        """Make `stream` the current one within the context."""
        before = self.current
        self.current = before if stream is None else stream.stream_id
        try:
            yield
        finally:
            self.current = before


_PRIVATE = int(torch._C._autograd.DeviceType.PrivateUse1)
host = Host()
