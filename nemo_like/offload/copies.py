"""One storage's copy on the host, and counters of what an offloader did."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from nemo_like.offload.pool import Block

Event = Any
"""As `Backend.record` returns it."""


class HostCopy:
    """The bytes on the host of one device storage, at one version of its contents.

    They come back into one `buffer`. When every reader has had it, the buffer goes and the next round (a second
    backward through a retained graph) starts.
    """

    def __init__(self, storage: torch.UntypedStorage, version: int, block: Block, stream: Any) -> None:
        self.storage: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self.nbytes = storage.nbytes()
        self.version = version
        self.block = block
        self.stream = stream  # whose operators saved the storage, and so may use its memory
        self.written: Event = None
        self.last_read: Event = None
        self.group = -1  # number of the group that it comes back with
        self.readers: set[object] = set()
        self.unread: set[object] = set()  # readers that have not had it in this round
        self.was_read = False  # every reader has had it once: it is not prefetched again
        self.buffer: torch.Tensor | None = None  # (nbytes,) uint8 on the device
        self.buffer_version: int | None = None
        self.buffer_stream: Any = None
        self.ready: Event = None
        self.ahead = False  # the buffer was prefetched, and not read yet

    def original(self) -> torch.UntypedStorage | None:
        """The device storage, where it is still alive and full."""
        storage = self.storage()
        return storage if storage is not None and storage.nbytes() == self.nbytes else None

    def part_from_original(self) -> None:
        """Neither read the original in place of the copy, nor share the copy with what reads the original."""
        self.storage = _gone


def _gone() -> None:
    """A dead weak reference."""
    return None


@dataclass
class OffloadStats:
    """Live counters of one offloader. All sizes in bytes."""

    moved_bytes: int = 0
    """Copied to the host, in `copies` copies."""
    copies: int = 0
    reloaded_bytes: int = 0
    """Copied back, in `reloads` copies, of which `prefetched` were started before backward asked."""
    reloads: int = 0
    prefetched: int = 0
    shared: int = 0
    """Saved tensors whose storage was on the host already."""
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
    """Host bytes that saved tensors occupy now."""
    host_peak_live_bytes: int = 0
    host_reserved_bytes: int = 0
    """Host bytes of all slabs."""

    def keep(self, reason: str, nbytes: int) -> None:
        """Count a tensor that stays on the device."""
        self.kept_bytes[reason] += nbytes
        self.kept_count[reason] += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for a log or a table."""
        return asdict(self) | {"kept_bytes": dict(self.kept_bytes), "kept_count": dict(self.kept_count)}
