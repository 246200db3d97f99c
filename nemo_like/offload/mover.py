"""When bytes move, and which streams wait for which. One `Mover` serves one device.

To the host: the copy stream waits for the operator that made the bytes, copies, and records an event. The mover holds
the device storage until that event has been seen, so that the allocator cannot hand it out while it is read.
Back: the buffer comes from the current stream's pool; the copy stream waits until earlier work on that memory and the
copy to the host are done; whoever reads waits for the copy back. Host blocks return to the pool behind the same events.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from nemo_like._util.log import warn_once
from nemo_like.offload.backends import Backend, Block, HostPool
from nemo_like.offload.stays import OffloadStats
from nemo_like.options import OffloadConfig
from nemo_like.torch_compat import version_of

Event = Any  # As `Backend.record` returns it.
_Held = tuple[Event, torch.UntypedStorage, int]


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


class Mover:
    """Moves storages between one device and the host, each as a whole. Thread safe.

    `config` has the limits; `max_inflight_copies` is how many copies to the host may be on their way (None: any number).
    """

    def __init__(
        self, backend: Backend, config: OffloadConfig, stats: OffloadStats, max_inflight_copies: int | None = None
    ) -> None:
        self.backend = backend
        self.pool = HostPool(backend.host_memory, budget_bytes=config.host_budget_bytes)
        self.config = config
        self.max_inflight_copies = max_inflight_copies
        self.stats = stats
        # Notes of readers that died, in any thread at any time, with their copies.
        self.dead: deque[tuple[HostCopy, object]] = deque()
        self._lock = threading.RLock()
        self._inflight: deque[_Held] = deque()
        self._inflight_bytes = 0
        self._ahead: set[HostCopy] = set()
        # Memory that a mover still holds at its end is being read, or written.
        weakref.finalize(self, _end_of_copies, backend, self._inflight, self._ahead).atexit = False
        self._copies: weakref.WeakValueDictionary[tuple[Any, ...], HostCopy] = weakref.WeakValueDictionary()
        self._saved: dict[HostCopy, None] = {}  # All copies, in the order of saving.
        self._group = 0  # number of the copies that come back together: those of a layer
        self._group_bytes = 0
        self._told_groups = False
        self._group_without_room: int | None = None

    def has(self, storage: torch.UntypedStorage, version: tuple[Any, ...]) -> bool:
        """Return whether `storage` is on the host at this version."""
        with self._lock:
            self._collect()
            return self._find(storage, version) is not None

    def _find(self, storage: torch.UntypedStorage, version: tuple[Any, ...]) -> HostCopy | None:
        copy = self._copies.get((id(storage), version))
        return copy if copy is not None and copy.readers and copy.original() is storage else None

    def offload(self, storage: torch.UntypedStorage, version: tuple[Any, ...], reader: object) -> HostCopy | None:
        """Return the copy of `storage` on the host, made now where there is none; None where the pool refused.

        Args:
            storage: of this mover's device.
            version: changes when the contents do. The last of it is the version counter that the bytes come back with,
                so that checks which compare it (in recomputation) find the same one.
            reader: identifies who will `fetch` it. Its end is noted in `dead`.
        """
        with self._lock:
            self._collect()
            copy = self._find(storage, version)
            if copy is not None:
                self.stats.shared += 1
            else:
                copy = self._copy_out(storage, version[-1] or 0)
                if copy is None:
                    return None
                self._copies[id(storage), version] = copy
            self._join_group(copy)  # of a shared copy: backward requests it with the last of its groups
            copy.readers.add(reader)
            copy.unread.add(reader)
            copy.was_read = False
            self._retire()
            self._update_host_stats()
            return copy

    def _copy_out(self, storage: torch.UntypedStorage, version: int) -> HostCopy | None:
        block = self.pool.take(storage.nbytes())
        if block is None:
            return None
        backend = self.backend
        stream = backend.current_stream()
        copy = HostCopy(storage, version, block, stream)
        # The operator that makes these bytes may still be running on the caller's stream.
        backend.wait(backend.copy_out, backend.record(stream))
        backend.copy(block.bytes(copy.nbytes), bytes_of(storage), backend.copy_out)
        copy.written = backend.record(backend.copy_out)
        self.stats.moved_bytes += copy.nbytes
        self.stats.copies += 1
        # Python may drop the storage at once; the allocator must not hand it out while the copy reads it.
        self._inflight.append((copy.written, storage, copy.nbytes))
        self._inflight_bytes += copy.nbytes
        return copy

    def _retire(self) -> None:
        """Let go of storages whose copies have ended, and wait for the oldest where too much is on its way."""
        held = self._inflight
        while held and self.backend.done(held[0][0]):
            self._inflight_bytes -= held.popleft()[2]
        most = len(held) if self.max_inflight_copies is None else self.max_inflight_copies
        # The newest is in use by the operator that saves it: waiting for its copy would free nothing.
        while len(held) > 1 and (len(held) > most or self._inflight_bytes > self.config.max_inflight_bytes):
            self.stats.offload_stalls += 1
            self.backend.synchronize(held[0][0])
            self._inflight_bytes -= held.popleft()[2]

    def open_group(self) -> None:
        """Open a group (a layer) for the copies made from here on."""
        with self._lock:
            self._told_groups = True
            self._group, self._group_bytes = self._group + 1, 0

    def _join_group(self, copy: HostCopy) -> None:
        # Where no groups are opened, one ends when a handful of them would fill the bytes that prefetching may hold.
        if not self._told_groups and self._group_bytes > self.config.max_inflight_bytes // 8:
            self._group, self._group_bytes = self._group + 1, 0
        copy.group = self._group
        self._group_bytes += copy.nbytes
        self._saved.pop(copy, None)
        self._saved[copy] = None

    def fetch(self, copy: HostCopy, reader: object) -> torch.Tensor:
        """Return the copy's bytes, (n,) uint8 on the device, ready for the current stream."""
        with self._lock:
            self._collect()
            self._retire()
            backend, stream = self.backend, self.backend.current_stream()
            original = copy.original()
            if original is not None:
                # Another reference keeps it alive: the same bytes, and no copy to wait for.
                self.stats.still_on_device += 1
                whole = at_version(bytes_of(original), copy.version)
                backend.lend(whole, stream, copy.stream)  # the mover may be the last one that holds it
            else:
                whole = self._buffer_of(copy)
                # Not the host: only the caller's stream waits, so that Python runs on and launches the next operators.
                backend.wait(stream, copy.ready)
                backend.lend(whole, stream, copy.buffer_stream)
            self._no_more_ahead(copy)
            self._end_reading(copy, reader)
            self._look_ahead(copy.group)
            return whole

    def prefetch_for(self, copy: HostCopy) -> None:
        """Start the way back, where the storage is not on the device any more."""
        with self._lock:
            if copy.original() is None:
                self._prefetch(copy)

    def part_from_source(self, copy: HostCopy) -> None:
        """The original is about to change: the current stream's next work comes after the copy's reading of it."""
        with self._lock:
            self.backend.wait(self.backend.current_stream(), copy.written)
            copy.storage = lambda: None  # the original would still be found, with other bytes in it

    def _buffer_of(self, copy: HostCopy) -> torch.Tensor:
        """The copy's buffer: prefetched, left by an earlier reader, or started now."""
        if copy.buffer is not None and version_of(copy.buffer) != copy.buffer_version:
            self._drop_buffer(copy)  # an earlier reader wrote into it; the host has the true bytes
        if copy.buffer is None:
            self.stats.reload_stalls += 1
            return self._copy_back(copy)
        self.stats.reload_stalls += copy.ahead and not self.backend.done(copy.ready)
        return copy.buffer

    def _copy_back(self, copy: HostCopy) -> torch.Tensor:
        backend = self.backend
        stream = backend.current_stream()
        buffer = backend.device_memory(copy.nbytes)
        backend.wait(backend.copy_back, backend.record(stream))  # earlier kernels may still use this memory
        backend.wait(backend.copy_back, copy.written)
        backend.copy(buffer.data, copy.block.bytes(copy.nbytes), backend.copy_back)  # `data`: no change to be counted
        copy.ready = backend.record(backend.copy_back)
        copy.last_read = copy.ready  # the host block may be written again only after this
        # Checks in recomputation compare version counters: the bytes come back with the counter that they left with.
        at_version(buffer, copy.version)
        copy.buffer, copy.buffer_stream, copy.buffer_version = buffer, stream, version_of(buffer)
        self.stats.reloads += 1
        self.stats.reloaded_bytes += copy.nbytes
        return buffer

    def _end_reading(self, copy: HostCopy, reader: object) -> None:
        copy.unread.discard(reader)
        if not copy.unread:
            # Every reader has it: from here on the buffer lives as long as the tensors they made of it, and no longer.
            self._drop_buffer(copy)
            copy.was_read = True
            copy.unread = set(copy.readers)

    def _drop_buffer(self, copy: HostCopy) -> None:
        if copy.ahead:
            # This copy was not waited for, and the allocator may hand its memory to the current stream's next operator.
            self._no_more_ahead(copy)
            self.backend.wait(copy.buffer_stream, copy.ready)
        copy.buffer = None

    def _no_more_ahead(self, copy: HostCopy) -> None:
        copy.ahead = False
        self._ahead.discard(copy)

    def _look_ahead(self, group: int) -> None:
        """Start bringing back the rest of this group, and the groups that backward needs next."""
        if not self.config.prefetch or group == self._group_without_room:
            return
        for copy in reversed(self._saved):
            full = sum(each.nbytes for each in self._ahead) >= self.config.max_inflight_bytes
            if full or copy.group < group - self.config.prefetch:
                return
            # A copy that was read is not needed again in this backward; where memory ran out, more would not help.
            wanted = copy.group <= group and not copy.was_read and copy.original() is None
            if wanted and not self._prefetch(copy):
                self._group_without_room = group
                return

    def _prefetch(self, copy: HostCopy) -> bool:
        """Start the way back; return whether there was memory for it."""
        if copy.buffer is not None:
            return True
        try:
            self._copy_back(copy)
        except torch.OutOfMemoryError as error:
            warn_once(
                f"Offloading could not prefetch {copy.nbytes} bytes ({error}): brought back when asked for.",
                key="offload-prefetch-refused",
            )
            return False
        copy.ahead = True
        self._ahead.add(copy)
        self.stats.prefetched += 1
        return True

    def _collect(self) -> None:
        """Take back the copies whose readers died since the last call."""
        while self.dead:
            copy, reader = self.dead.popleft()
            copy.readers.discard(reader)
            self._end_reading(copy, reader)
            if copy.readers:
                continue
            del self._saved[copy]
            # Every write to CPU memory is on `copy_out`: with it behind the last reader, anyone may write.
            if copy.last_read is not None:
                self.backend.wait(self.backend.copy_out, copy.last_read)
            self.pool.give_back(copy.block)

    def collect(self) -> None:
        """Take back copies whose readers died, and let go of storages whose copies have ended."""
        with self._lock:
            self._collect()
            self._retire()
            self._update_host_stats()

    def _update_host_stats(self) -> None:
        self.stats.host_live_bytes = self.pool.live_bytes
        self.stats.host_peak_live_bytes = self.pool.peak_live_bytes
        self.stats.host_reserved_bytes = self.pool.reserved_bytes


def _end_of_copies(backend: Backend, inflight: deque[_Held], ahead: set[HostCopy]) -> None:
    """Wait for the copies to the host before the storages that they read are freed, and for those back likewise."""
    while inflight:
        backend.synchronize(inflight[0][0])
        inflight.popleft()
    while ahead:
        copy = ahead.pop()
        backend.wait(copy.buffer_stream, copy.ready)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage's bytes as a (n,) uint8 tensor on it."""
    # `.data` starts a version counter of its own, which setting the storage has not moved.
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,)).data


def at_version(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Return `tensor`, whose version counter is at 0, with the counter at `version`."""
    for _ in range(version):
        torch.autograd.graph.increment_version(tensor)
    return tensor
