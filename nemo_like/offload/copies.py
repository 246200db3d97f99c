"""Records of a storage that waits on the host: its parts there, who will ask for them, what is back already."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from nemo_like.offload.pool import Block

Event = Any
"""As `Backend.record` returns it."""
Range = tuple[int, int]
"""Bytes [lo, hi)."""


@dataclass(eq=False)
class HostSegment:
    """Bytes [lo, hi) of a storage, on the host."""

    lo: int
    hi: int
    block: Block
    written: Event
    last_read: Event | None = None


@dataclass(eq=False)
class Span:
    """Bytes [lo, hi) of a storage that come back together, because saved tensors in it overlap.

    `unread` counts the saved tensors that have not asked for it in this round; when none is left, `buffer` goes and the
    next round (a second backward through a retained graph) starts.
    """

    lo: int
    hi: int
    tensors: int = 0
    unread: int = 0
    round: int = 0
    buffer: torch.Tensor | None = None  # (hi - lo,) uint8 on the device
    buffer_version: int | None = None
    ready: Event = None
    stream: Any = None
    waiting: bool = False
    """Prefetched, and not read yet."""
    was_read: bool = False
    """Every reader has had it once; whoever still holds on to it is not prefetched for."""
    last_buffer: weakref.ref[torch.Tensor] | None = None
    """The buffer of an earlier reading: some tensor may still hold it."""


class Group:
    """A group of tensors that were offloaded together (one layer), so that they are prefetched together."""

    def __init__(self, previous: Group | None) -> None:
        self.previous = None if previous is None else weakref.ref(previous)
        self.copies: list[weakref.ref[StorageCopy]] = []
        self.nbytes = 0

    def leave(self, copy: StorageCopy) -> None:
        """`copy` belongs to another group from here on."""
        self.copies = [known for known in self.copies if known() is not copy]
        self.nbytes -= copy.nbytes


class Dead:
    """Objects that died since the last look: notes left by ``__del__``, which may run in any thread at any time."""

    def __init__(self) -> None:
        self.copies: deque[tuple[list[HostSegment], list[Span]]] = deque()
        self.readers: deque[tuple[weakref.ref[StorageCopy], int, int, int]] = deque()


class StorageCopy:
    """The bytes on the host of one device storage, at one version of its contents. Dies with its last saved tensor."""

    def __init__(self, storage: torch.UntypedStorage, version: int, dead: Dead) -> None:
        self._dead = dead
        self.version = version
        self.storage: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self.nbytes = storage.nbytes()
        self.segments: list[HostSegment] = []
        self.spans: list[Span] = []
        self.group: Group | None = None
        self.stream: Any = None
        """Whose operators saved it, and so may use its memory."""

    def original(self) -> torch.UntypedStorage | None:
        """The device storage, where it is still alive and full."""
        storage = self.storage()
        return storage if storage is not None and storage.nbytes() == self.nbytes else None

    def span_of(self, lo: int, hi: int) -> Span:
        """The span that holds [lo, hi)."""
        return next(span for span in self.spans if span.lo <= lo and hi <= span.hi)

    def __del__(self) -> None:
        # Any thread, any time, the collector's included: leave a note and touch nothing.
        self._dead.copies.append((self.segments, self.spans))


class Reader:
    """One saved tensor's place among those that share a copy; its end is noticed by itself."""

    __slots__ = ("_dead", "copy", "hi", "last_round", "lo")

    def __init__(self, copy: StorageCopy, lo: int, hi: int, dead: Dead) -> None:
        self._dead = dead
        self.copy = copy
        self.lo = lo
        self.hi = hi
        self.last_round = -1

    def __del__(self) -> None:
        # As for `StorageCopy.__del__`: any thread, any time.
        self._dead.readers.append((weakref.ref(self.copy), self.lo, self.hi, self.last_round))


def bytes_of(storage: torch.UntypedStorage, lo: int, hi: int) -> torch.Tensor:
    """Bytes [lo, hi) of a storage as a (hi - lo,) uint8 tensor on it."""
    # `.data` starts a version counter of its own, which setting the storage has not moved.
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, lo, (hi - lo,), (1,)).data


def at_version(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """`tensor`, whose version counter is at 0, with the counter at `version`."""
    for _ in range(version):
        torch.autograd.graph.increment_version(tensor)
    return tensor


def gaps(covered: Iterable[Range], lo: int, hi: int) -> list[Range]:
    """The parts of ``[lo, hi)`` that no range of `covered` (disjoint, any order) covers, in order.

    >>> gaps([(2, 4), (6, 9)], 0, 8)
    [(0, 2), (4, 6)]
    """
    holes, at = [], lo
    for start, end in sorted(covered):
        if end <= at:
            continue
        if start >= hi:
            break
        if start > at:
            holes.append((at, start))
        at = max(at, end)
    if at < hi:
        holes.append((at, hi))
    return holes


def overlap(first: Range, second: Range) -> bool:
    """Return whether two ranges share a byte.

    >>> overlap((0, 4), (3, 5)), overlap((0, 4), (4, 5))
    (True, False)
    """
    return first[0] < second[1] and second[0] < first[1]


def round_down(value: int, step: int) -> int:
    """The largest multiple of `step` that is not above `value`."""
    return value - value % step


# What an offloader did, in counted bytes.


@dataclass
class OffloadStats:
    """Live counters of one offloader. All sizes in bytes; they only grow, except the two marked "now"."""

    moved_bytes: int = 0
    """Copied to the host."""
    reloaded_bytes: int = 0
    """Copied back."""
    copies: int = 0
    """Copies to the host that were started."""
    reloads: int = 0
    """Copies back that were started."""
    prefetched: int = 0
    """Copies back that were started before backward asked."""
    shared: int = 0
    """Saved tensors whose bytes were on the host already, through another view of the same storage."""
    still_on_device: int = 0
    """Times backward found the original still alive on the device and no copy was needed."""
    offload_stalls: int = 0
    """Times forward waited because ``max_inflight_bytes`` were on their way to the host."""
    reload_stalls: int = 0
    """Times backward asked for bytes that were not on the device yet."""
    kept_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of saved tensors left on the device, by reason (a storage saved twice counts twice)."""
    kept_count: Counter[str] = field(default_factory=Counter)
    """Saved tensors left on the device, by reason."""
    host_live_bytes: int = 0
    """Now: host bytes that saved tensors occupy."""
    host_reserved_bytes: int = 0
    """Now: host bytes of all slabs."""
    host_peak_live_bytes: int = 0
    host_peak_reserved_bytes: int = 0

    def keep(self, reason: str, nbytes: int) -> None:
        """Count a tensor that stays on the device."""
        self.kept_bytes[reason] += nbytes
        self.kept_count[reason] += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for a log or a table."""
        return asdict(self) | {"kept_bytes": dict(self.kept_bytes), "kept_count": dict(self.kept_count)}
