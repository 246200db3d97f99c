"""When bytes move, and which streams wait for which. One `Mover` serves one device.

To the host: the copy stream waits for the operator that made the bytes, copies, and records an event. The mover holds
the device storage until that event has been seen, so that the allocator cannot hand it out while it is read.
Back: the buffer comes from the current stream's pool; the copy stream, behind the copy to the host, waits until earlier
work on that memory is done; whoever reads waits for the copy back. CPU memory is PyTorch's to reuse.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import increment_version

from nemo_like._util.log import warn_once
from nemo_like.offload.backends import Backend
from nemo_like.offload.stays import OffloadStats
from nemo_like.options import OffloadConfig
from nemo_like.torch_compat import version_of

Event = Any  # Of the device's module: `torch.cuda.Event`, for example.
_Held = tuple[Event, object, int]  # An event, the memory that a copy uses until then, and bytes.


class HostCopy:
    """The bytes on the host of one device storage, at one version of its contents. Its readers alone keep it alive.

    They come back into one `buffer`. When every reader has had it, the buffer goes and the next round (a second
    backward through a retained graph) starts.
    """

    def __init__(self, mover: "Mover", storage: torch.UntypedStorage, version: int, host: torch.Tensor) -> None:
        self.mover, self.version, self.host = mover, version, host  # host: (nbytes,) uint8
        self.storage: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self.nbytes = storage.nbytes()
        self.stream = mover.backend.current_stream()  # whose operators saved the storage, and so may use its memory
        self.written: Event = None
        self.group = Group()
        self.readers: weakref.WeakSet[object] = weakref.WeakSet()
        self.unread: weakref.WeakSet[object] = weakref.WeakSet()  # readers that have not had it in this round
        self.was_read = False  # every reader has had it once: it is not prefetched again
        self.buffer: torch.Tensor | None = None  # (nbytes,) uint8 on the device, with the version counter at `version`
        self.buffer_stream: Any = None
        self.ready: Event = None

    def original(self) -> torch.UntypedStorage | None:
        """The device storage, where it is still alive and full."""
        storage = self.storage()
        return storage if storage is not None and storage.nbytes() == self.nbytes else None

    def add_reader(self, reader: object) -> None:
        """Count `reader`, while it is alive, among those who will `Mover.fetch` it."""
        with self.mover.lock:  # another thread may be going through the readers
            self.readers.add(reader)
            self.unread.add(reader)
            self.was_read = False

    def __del__(self) -> None:
        # Any thread, any time, the collector's included: leave a note and touch nothing.
        self.mover.dead.append((self.ready, self.buffer, self.nbytes))


class Group(list["weakref.ref[HostCopy]"]):
    """Copies that come back together: those of a layer."""

    number = 0
    nbytes = 0


class Mover:
    """Moves storages between one device and the host, each as a whole. Thread safe.

    Args:
        make_backend: makes the back end, when the first tensor is looked at.
        config: the limits.
        max_inflight_copies: how many copies to the host may be on their way; None: any number.
    """

    def __init__(
        self, make_backend: Callable[[], Backend], config: OffloadConfig, max_inflight_copies: int | None = None
    ) -> None:
        self._make_backend, self.config, self.max_inflight_copies = make_backend, config, max_inflight_copies
        self.stats = OffloadStats()
        self.lock = threading.RLock()
        # Sources of copies to the host, and buffers that were dropped before anyone waited for them. All copies are on
        # one stream, so their events happen in turn.
        self._inflight: deque[_Held] = deque()
        self.dead: deque[_Held] = deque()  # Notes of copies that died, with their buffers.
        # Memory that a mover still holds at its end is being read, or written.
        weakref.finalize(self, _end_of_copies, self._inflight, self.dead).atexit = False
        self._copies: weakref.WeakValueDictionary[tuple[Any, ...], HostCopy] = weakref.WeakValueDictionary()
        self._ahead: weakref.WeakSet[HostCopy] = weakref.WeakSet()  # Prefetched, and not read yet.
        self._groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._group = self._groups[0] = Group()
        # Where no layers are told, a group ends when a handful of them would fill the bytes that prefetching may hold.
        self._group_limit: float = config.max_inflight_bytes // 8
        self._group_out_of_memory: int | None = None

    @cached_property
    def backend(self) -> Backend:
        """The device, where bytes are copied."""
        return self._make_backend()

    def find(self, storage: torch.UntypedStorage, version: tuple[Any, ...]) -> HostCopy | None:
        """Return the copy of `storage` at this version, where it is on the host."""
        copy = self._copies.get((id(storage), version))
        return copy if copy is not None and copy.original() is storage else None

    def offload(self, storage: torch.UntypedStorage, version: tuple[Any, ...]) -> HostCopy | str:
        """Return the copy of `storage` on the host, made now where there is none; a reason where it was refused.

        Args:
            storage: of this mover's device.
            version: changes when the contents do. The last of it is the version counter that the bytes come back with,
                so that checks which compare it (in recomputation) find the same one.
        """
        with self.lock:
            self.retire()
            shared = self.find(storage, version)
            self.stats.shared += shared is not None
            copy = shared or self._copy_out(storage, version[-1] or 0)
            if isinstance(copy, HostCopy):
                self._copies[id(storage), version] = copy
                if self._group.nbytes > self._group_limit:
                    self.open_group(self._group_limit)
                copy.group = self._group  # of a shared copy: backward requests it with the last of its groups
                copy.group.append(weakref.ref(copy))
                copy.group.nbytes += copy.nbytes
                self.retire()
            return copy

    def _copy_out(self, storage: torch.UntypedStorage, version: int) -> HostCopy | str:
        backend, stats, nbytes, budget = self.backend, self.stats, storage.nbytes(), self.config.host_budget_bytes
        if budget is not None and stats.host_live_bytes + self.config.host_bytes(nbytes) > budget:
            return (
                f"the host budget of {budget} bytes has {budget - stats.host_live_bytes} left, and {nbytes} are to move"
            )
        try:
            host = backend.host_memory(nbytes)
        except (RuntimeError, MemoryError) as error:  # torch's errors when pinning or allocating fails
            return f"CPU memory of {nbytes} bytes was refused ({str(error).splitlines()[0]})"
        stats.host_live_bytes += self.config.host_bytes(nbytes)
        stats.host_peak_live_bytes = max(stats.host_peak_live_bytes, stats.host_live_bytes)
        copy = HostCopy(self, storage, version, host)
        # The operator that makes these bytes may still be running on the caller's stream.
        backend.copies.wait_event(backend.record(copy.stream))
        backend.copy(host, bytes_of(storage), backend.copies)
        copy.written = backend.record(backend.copies)
        stats.moved_bytes += nbytes
        stats.copies += 1
        # Python may drop the storage at once; the allocator must not hand it out while the copy reads it.
        self._inflight.append((copy.written, storage, nbytes))
        return copy

    def retire(self) -> None:
        """Let go of copies that died and storages whose copies ended; wait for the oldest where too much is moving."""
        with self.lock:
            held = self._inflight
            while self.dead:
                ready, buffer, nbytes = self.dead.popleft()
                self.stats.host_live_bytes -= self.config.host_bytes(nbytes)
                if buffer is not None:
                    held.append((ready, buffer, 0))
            while held and held[0][0].query():
                held.popleft()
            most = len(held) if self.max_inflight_copies is None else self.max_inflight_copies
            # The newest is in use by the operator that saves it: waiting for its copy would free nothing.
            while len(held) > 1 and (len(held) > most or sum(n for *_, n in held) > self.config.max_inflight_bytes):
                self.stats.offload_stalls += 1
                held[0][0].synchronize()
                held.popleft()

    def open_group(self, limit: float = float("inf")) -> None:
        """Open a group (a layer) for the copies made from here on; it ends where it has more than `limit` bytes."""
        with self.lock:
            number, self._group_limit = self._group.number + 1, limit
            self._group = self._groups[number] = Group()
            self._group.number = number

    def fetch(self, copy: HostCopy, reader: object) -> torch.Tensor:
        """Return the copy's bytes, (n,) uint8 on the device, ready for the current stream."""
        with self.lock:
            self.retire()
            backend, stream = self.backend, self.backend.current_stream()
            if copy.buffer is not None and version_of(copy.buffer) != copy.version:
                copy.buffer = None  # an earlier reader wrote into it; the host has the true bytes
            original = copy.original() if copy.buffer is None else None
            if original is not None:
                # Another reference keeps it alive: the same bytes, and no copy to wait for.
                self.stats.still_on_device += 1
                whole = bytes_of(original)
                increment_version([whole] * copy.version)
                backend.lend(whole, stream, copy.stream)  # the mover may be the last one that holds it
            else:
                late = copy.buffer is None or (copy in self._ahead and not copy.ready.query())
                self.stats.reload_stalls += late
                whole = self._copy_back(copy) if copy.buffer is None else copy.buffer
                # Not the host: only the caller's stream waits, so that Python runs on and launches the next operators.
                stream.wait_event(copy.ready)
                backend.lend(whole, stream, copy.buffer_stream)
            self._ahead.discard(copy)
            copy.unread.discard(reader)
            if not copy.unread:
                # From here on the buffer lives as long as the tensors that its readers made of it, and no longer.
                copy.buffer, copy.was_read = None, True
                copy.unread.update(copy.readers)
            self._look_ahead(copy.group.number)
            return whole

    def _copy_back(self, copy: HostCopy) -> torch.Tensor:
        backend = self.backend
        stream = backend.current_stream()
        buffer = torch.empty(copy.nbytes, dtype=torch.uint8, device=backend.device)
        backend.copies.wait_event(backend.record(stream))  # earlier kernels may still use this memory
        backend.copy(buffer.data, copy.host, backend.copies)  # `data`: no change to be counted
        copy.ready = backend.record(backend.copies)
        # Checks in recomputation compare version counters: the bytes come back with the counter that they left with.
        increment_version([buffer] * copy.version)
        copy.buffer, copy.buffer_stream = buffer, stream
        self.stats.reloads += 1
        self.stats.reloaded_bytes += copy.nbytes
        return buffer

    def part_from_source(self, copy: HostCopy) -> None:
        """The original is about to change: the current stream's next work comes after the copy's reading of it."""
        with self.lock:
            self.backend.current_stream().wait_event(copy.written)
            copy.storage = lambda: None  # the original would still be found, with other bytes in it

    def _look_ahead(self, group: int) -> None:
        """Start bringing back the rest of this group, and the groups that backward needs next."""
        if not self.config.prefetch or group == self._group_out_of_memory:
            return
        numbers = range(group, group - self.config.prefetch - 1, -1)
        for copy in (reference() for number in numbers for reference in reversed(self._groups.get(number, ()))):
            # One that was read is not needed again in this backward, and one that was shared belongs to a later group.
            if copy is None or copy.was_read or copy.group.number > group:
                continue
            if sum(each.nbytes for each in self._ahead) >= self.config.max_inflight_bytes:
                return
            if not self.prefetch(copy):
                self._group_out_of_memory = group  # more of it would not help
                return

    def prefetch(self, copy: HostCopy) -> bool:
        """Start the way back, where the storage is not on the device any more; return whether there was memory."""
        with self.lock:
            if copy.buffer is not None or copy.original() is not None:
                return True
            try:
                self._copy_back(copy)
            except torch.OutOfMemoryError as error:
                warn_once(
                    f"Offloading could not prefetch {copy.nbytes} bytes ({error}): brought back when asked for.",
                    key="offload-prefetch-refused",
                )
                return False
            self._ahead.add(copy)
            self.stats.prefetched += 1
            return True


def _end_of_copies(inflight: deque[_Held], dead: deque[_Held]) -> None:
    """Wait for the copies that read storages or write buffers before these are freed."""
    for event in (event for event, memory, _ in (*inflight, *dead) if memory is not None):
        event.synchronize()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage's bytes as a (n,) uint8 tensor on it."""
    # `.data` starts a version counter of its own, which setting the storage has not moved.
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,)).data
