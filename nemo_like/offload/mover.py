"""When bytes move, and what waits for what. One `Mover` serves one device.

To the host: the copy stream waits for the operator that made the bytes, copies, and records an event. The mover holds
the device storage until that event has been seen, so that the allocator cannot hand it out while it is read.
Back: the buffer comes from the current stream's pool; the copy stream waits until earlier work on that memory and the
copy to the host are done; whoever reads waits for the copy back. Host blocks return to the pool behind the same events.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import torch

from nemo_like._util.log import warn_once
from nemo_like.offload.backends import Backend
from nemo_like.offload.copies import (
    Dead,
    Event,
    Group,
    HostSegment,
    OffloadStats,
    Reader,
    Span,
    StorageCopy,
    at_version,
    bytes_of,
    gaps,
    overlap,
    round_down,
)
from nemo_like.offload.pool import ALIGNMENT, Block, HostPool
from nemo_like.torch_compat import version_of


class Mover:
    """Moves storages between one device and the host. Thread safe."""

    def __init__(
        self,
        backend: Backend,
        pool: HostPool,
        *,
        max_inflight_bytes: int = 1 << 30,
        max_inflight_copies: int | None = None,
        prefetch: int = 1,
        stats: OffloadStats | None = None,
    ) -> None:
        """
        Args:
            backend: the device.
            pool: where host blocks come from.
            max_inflight_bytes: device bytes that copies to the host may hold, and that prefetched buffers may.
            max_inflight_copies: how many copies to the host may be on their way; None: any number.
            prefetch: how many groups ahead of the one in use are brought back.
            stats: counters to fill.
        """
        self.backend = backend
        self.pool = pool
        self.max_inflight_bytes = max_inflight_bytes
        self.max_inflight_copies = max_inflight_copies
        self.prefetch = prefetch
        self.stats = OffloadStats() if stats is None else stats
        self._dead = Dead()
        self._lock = threading.RLock()
        self._inflight: deque[tuple[Event, torch.UntypedStorage, int]] = deque()
        self._inflight_bytes = 0
        self._ahead: set[Span] = set()
        # What a mover that goes away still holds is being read, or written.
        weakref.finalize(self, _end_of_copies, backend, self._inflight, self._ahead).atexit = False
        self._copies: weakref.WeakValueDictionary[tuple[Any, ...], StorageCopy] = weakref.WeakValueDictionary()
        self._group: Group | None = None
        self._told_groups = False
        self._last_group: weakref.ref[Group] | None = None
        self._entered: weakref.ref[Group] | None = None
        self._wanted: deque[weakref.ref[StorageCopy]] = deque()
        self._ahead_bytes = 0

    # -------------------------------------------------------------------------------------------------- to the host
    def offload(self, storage: torch.UntypedStorage, lo: int, hi: int, version: tuple[Any, ...]) -> StorageCopy | None:
        """Have bytes [lo, hi) of `storage` on the host; only what is not there yet is copied.

        Args:
            storage: of this mover's device.
            lo, hi: the bytes that will be asked for.
            version: changes when the contents do; equal versions share one copy. The last of it is the version counter
                that the bytes come back with, so that checks which compare it (in recomputation) find what they know.

        Returns:
            the copy, with [lo, hi) entered as one more reader; None where the pool refused (see ``pool.refusal``).
        """
        with self._lock:
            self._collect()
            lo = round_down(lo, ALIGNMENT)  # the bytes come back with the alignment they had: same kernels, same bits
            if (hi - lo) * 2 >= storage.nbytes():
                lo, hi = 0, storage.nbytes()  # most of it: one plain copy, which later views find complete
            key = (id(storage), version)
            copy = self._copies.get(key)
            if copy is None or copy.original() is not storage:
                copy = StorageCopy(storage, version[-1] or 0, self._dead)
                copy.stream = self.backend.current_stream()
            missing = gaps([(segment.lo, segment.hi) for segment in copy.segments], lo, hi)
            if missing and not self._copy_out(copy, storage, missing):
                return None
            if not missing:
                self.stats.shared += 1
                self._join_group(copy)  # backward requests it with the last of its groups
            self._copies[key] = copy
            self._enter_reader(copy, lo, hi)
            self._retire()
            self._update_host_stats()
            return copy

    def _copy_out(self, copy: StorageCopy, storage: torch.UntypedStorage, missing: list[tuple[int, int]]) -> bool:
        blocks: list[Block] = []
        for lo, hi in missing:
            block = self.pool.take(hi - lo)
            if block is None:
                # All or nothing: half a tensor on the host would save no device memory.
                for taken in blocks:
                    self.pool.give_back(taken)
                return False
            blocks.append(block)
        backend = self.backend
        # The operator that makes these bytes may still be running on the caller's stream.
        backend.wait(backend.copy_out, backend.record(backend.current_stream()))
        for (lo, hi), block in zip(missing, blocks, strict=True):
            backend.copy(block.bytes(0, hi - lo), bytes_of(storage, lo, hi), backend.copy_out)
        # One event for all parts: whoever brings any of them back waits for this, and not for the host.
        written = backend.record(backend.copy_out)
        copy.segments += [HostSegment(lo, hi, block, written) for (lo, hi), block in zip(missing, blocks, strict=True)]
        moved = sum(hi - lo for lo, hi in missing)
        self.stats.moved_bytes += moved
        self.stats.copies += len(missing)
        # Python may drop the storage at once; the allocator must not hand it out while the copy reads it.
        self._hold_until(written, storage, moved)
        if copy.group is None:
            self._join_group(copy)
        return True

    def _hold_until(self, event: Event, storage: torch.UntypedStorage, nbytes: int) -> None:
        self._inflight.append((event, storage, nbytes))
        self._inflight_bytes += nbytes

    def _retire(self) -> None:
        """Let go of storages whose copies have ended, and wait for the oldest where too much is on its way."""
        while self._inflight and self.backend.done(self._inflight[0][0]):
            self._inflight_bytes -= self._inflight.popleft()[2]
        # The newest is in use by the operator that saves it: waiting for its copy would free nothing.
        most = len(self._inflight) if self.max_inflight_copies is None else self.max_inflight_copies
        while len(self._inflight) > 1 and (
            self._inflight_bytes > self.max_inflight_bytes or len(self._inflight) > most
        ):
            self.stats.offload_stalls += 1
            self.backend.synchronize(self._inflight[0][0])
            self._inflight_bytes -= self._inflight.popleft()[2]

    def _enter_reader(self, copy: StorageCopy, lo: int, hi: int) -> None:
        inside = [span for span in copy.spans if overlap((span.lo, span.hi), (lo, hi))]
        if len(inside) == 1 and inside[0].lo <= lo and hi <= inside[0].hi:
            span = inside[0]
        else:
            # Several spans become one. Readers of the old ones find it by their range; a buffer they had is given up.
            span = Span(min([lo, *(span.lo for span in inside)]), max([hi, *(span.hi for span in inside)]))
            for old in inside:
                span.tensors += old.tensors
                span.unread += old.tensors
                span.round = max(span.round, old.round + 1)
                self._drop_buffer(old)
            copy.spans = [kept for kept in copy.spans if kept not in inside] + [span]
        span.tensors += 1
        span.unread += 1
        span.was_read = False

    # -------------------------------------------------------------------------------------------------------- groups
    def open_group(self) -> None:
        """Open a group (a layer) for what is offloaded from here on."""
        with self._lock:
            self._group, self._told_groups = None, True

    def _join_group(self, copy: StorageCopy) -> None:
        group = self._group
        # Where no groups are opened, one ends when a handful of them would fill what prefetching may hold.
        if group is None or (not self._told_groups and group.nbytes > self.max_inflight_bytes // 8):
            group = self._group = Group(self._last_group() if self._last_group is not None else None)
            self._last_group = weakref.ref(group)
        if copy.group is not None:
            copy.group.leave(copy)
        copy.group = group
        group.copies.append(weakref.ref(copy))
        group.nbytes += copy.nbytes

    # ---------------------------------------------------------------------------------------------------------- back
    def reader(self, copy: StorageCopy, lo: int, hi: int) -> Reader:
        """A place for one saved tensor, bytes [lo, hi), among those that `offload` entered."""
        return Reader(copy, lo, hi, self._dead)

    def fetch(self, reader: Reader) -> tuple[torch.Tensor, int]:
        """The reader's bytes on the device, ready for the current stream.

        Returns:
            a (n,) uint8 tensor and the offset in the storage of its first byte; the reader's bytes lie inside.
        """
        copy, lo, hi = reader.copy, reader.lo, reader.hi
        with self._lock:
            self._collect()
            self._retire()
            original = copy.original()
            backend, stream = self.backend, self.backend.current_stream()
            if original is not None:
                # Another reference keeps it alive: the same bytes, and no copy to wait for.
                self.stats.still_on_device += 1
                self._read(copy.span_of(lo, hi), reader)
                self._look_ahead(copy)
                whole = at_version(bytes_of(original, 0, copy.nbytes), copy.version)
                backend.lend(whole, stream, copy.stream)  # the mover may be the last one that holds it
                return whole, 0
            span = copy.span_of(lo, hi)
            buffer = self._buffer_of(copy, span)
            # Not the host: only the caller's stream waits, so that Python runs on and launches what follows.
            backend.wait(stream, span.ready)
            backend.lend(buffer, stream, span.stream)
            self._read(span, reader)
            self._look_ahead(copy)
            return buffer, span.lo

    def prefetch_for(self, reader: Reader) -> None:
        """Start the way back of the reader's bytes, where they are not on the device any more."""
        copy, lo, hi = reader.copy, reader.lo, reader.hi
        with self._lock:
            if copy.original() is None:
                self._prefetch(copy, copy.span_of(lo, hi))

    def part_from_source(self, copy: StorageCopy) -> None:
        """The original is about to change: what the current stream does next comes after the copy's reading of it.

        From here on the copy is on its own: the original is neither read in its place nor shared with.
        """
        with self._lock:
            stream = self.backend.current_stream()
            for segment in copy.segments:
                self.backend.wait(stream, segment.written)
            # The weak reference would still find the storage, with other bytes in it.
            copy.storage = _nothing
            for key in [key for key, known in self._copies.items() if known is copy]:
                del self._copies[key]

    def _buffer_of(self, copy: StorageCopy, span: Span) -> torch.Tensor:
        """The span's buffer: prefetched, left by an earlier reader, or started now."""
        if span.buffer is not None and version_of(span.buffer) != span.buffer_version:
            self._drop_buffer(span)  # an earlier reader wrote into it; the host has the true bytes
        if span.buffer is None and span.last_buffer is not None:
            earlier = span.last_buffer()
            if earlier is not None and version_of(earlier) == span.buffer_version:
                span.buffer = earlier  # a tensor of an earlier round still holds it: no second copy
        if span.buffer is None:
            self.stats.reload_stalls += 1
            return self._copy_back(copy, span)
        if span.waiting:
            self.stats.reload_stalls += not self.backend.done(span.ready)
        return span.buffer

    def _copy_back(self, copy: StorageCopy, span: Span) -> torch.Tensor:
        backend = self.backend
        stream = backend.current_stream()
        buffer = backend.device_memory(span.hi - span.lo)
        backend.wait(backend.copy_back, backend.record(stream))  # earlier kernels may still use this memory
        for segment in copy.segments:
            start, end = max(segment.lo, span.lo), min(segment.hi, span.hi)
            if start >= end:
                continue
            backend.wait(backend.copy_back, segment.written)
            backend.copy(
                buffer.data[start - span.lo : end - span.lo],  # a copy is not a change: not to be counted as one
                segment.block.bytes(start - segment.lo, end - segment.lo),
                backend.copy_back,
            )
        span.ready = backend.record(backend.copy_back)
        for segment in copy.segments:
            if overlap((segment.lo, segment.hi), (span.lo, span.hi)):
                segment.last_read = span.ready  # the host block may be written again only after this
        # Checks in recomputation compare version counters: the bytes come back with the counter that they left with.
        at_version(buffer, copy.version)
        span.buffer, span.stream = buffer, stream
        span.buffer_version = version_of(buffer)
        span.last_buffer = weakref.ref(buffer)
        self.stats.reloads += 1
        self.stats.reloaded_bytes += span.hi - span.lo
        return buffer

    def _read(self, span: Span, reader: Reader) -> None:
        if span.waiting:
            self._no_more_ahead(span)
        # A reader that reads twice in one round (a backward that walks one node twice) counts once.
        if reader.last_round != span.round:
            reader.last_round = span.round
            span.unread -= 1
        self._end_round(span)

    def _end_round(self, span: Span) -> None:
        if span.unread <= 0:
            # Everybody has it: from here on the buffer lives as long as what they made of it, and no longer.
            self._drop_buffer(span)
            span.was_read = True
            span.round += 1
            span.unread = span.tensors

    def _drop_buffer(self, span: Span) -> None:
        if span.waiting:
            # This copy was not waited for, and the allocator may hand its memory to the current stream's next operator.
            self._no_more_ahead(span)
            self.backend.wait(span.stream, span.ready)
        span.buffer = None

    def _no_more_ahead(self, span: Span) -> None:
        span.waiting = False
        self._ahead.discard(span)
        self._ahead_bytes -= span.hi - span.lo

    # ----------------------------------------------------------------------------------------------------- prefetch
    def _look_ahead(self, copy: StorageCopy) -> None:
        """Start bringing back the rest of this group, and the groups that backward needs next."""
        group = copy.group
        if self.prefetch and group is not None and (self._entered is None or self._entered() is not group):
            self._entered = weakref.ref(group)
            self._wanted.extend(reversed(group.copies))
            for _ in range(self.prefetch):
                group = group.previous() if group is not None and group.previous is not None else None
                if group is not None:
                    self._wanted.extend(reversed(group.copies))
        while self._wanted and self._ahead_bytes < self.max_inflight_bytes:
            wanted = self._wanted.popleft()()
            if wanted is not None and wanted.original() is None:
                for span in wanted.spans:
                    # What was read is not wanted again in this backward, and where memory ran out more would not help.
                    if not span.was_read and not self._prefetch(wanted, span):
                        self._wanted.clear()
                        return

    def _prefetch(self, copy: StorageCopy, span: Span) -> bool:
        if span.buffer is not None or (span.last_buffer is not None and span.last_buffer() is not None):
            return True
        try:
            self._copy_back(copy, span)
        except torch.OutOfMemoryError as error:
            warn_once(
                f"Offloading could not prefetch {span.hi - span.lo} bytes ({error}): brought back when asked for.",
                key="offload-prefetch-refused",
            )
            return False
        span.waiting = True
        self._ahead.add(span)
        self._ahead_bytes += span.hi - span.lo
        self.stats.prefetched += 1
        return True

    # -------------------------------------------------------------------------------------------------- what is over
    def _collect(self) -> None:
        """Take back what died since the last call."""
        while self._dead.readers:
            reference, lo, hi, last_round = self._dead.readers.popleft()
            copy = reference()
            if copy is not None:
                span = copy.span_of(lo, hi)
                span.tensors -= 1
                span.unread -= last_round != span.round
                if span.tensors > 0:
                    self._end_round(span)
        while self._dead.copies:
            segments, spans = self._dead.copies.popleft()
            for span in spans:
                self._drop_buffer(span)
            for segment in segments:
                # Every write to host memory is on `copy_out`: with it behind the last reader, anyone may write.
                if segment.last_read is not None:
                    self.backend.wait(self.backend.copy_out, segment.last_read)
                self.pool.give_back(segment.block)

    def collect(self) -> None:
        """Take back what died, and let go of storages whose copies have ended."""
        with self._lock:
            self._collect()
            self._retire()
            self._update_host_stats()

    def trim(self) -> int:
        """Wait for all copies and give unused host memory back to the system; returns its bytes."""
        with self._lock:
            self._collect()
            while self._inflight:
                event, _, nbytes = self._inflight.popleft()
                self.backend.synchronize(event)
                self._inflight_bytes -= nbytes
            for stream in (self.backend.copy_out, self.backend.copy_back):
                self.backend.synchronize(self.backend.record(stream))
            freed = self.pool.trim()
            self._update_host_stats()
            return freed

    def _update_host_stats(self) -> None:
        self.stats.host_live_bytes = self.pool.live_bytes
        self.stats.host_reserved_bytes = self.pool.reserved_bytes
        self.stats.host_peak_live_bytes = self.pool.peak_live_bytes
        self.stats.host_peak_reserved_bytes = self.pool.peak_reserved_bytes


def _end_of_copies(
    backend: Backend, inflight: deque[tuple[Event, torch.UntypedStorage, int]], ahead: set[Span]
) -> None:
    """Wait for the copies to the host before the storages that they read are freed, and for those back likewise."""
    while inflight:
        backend.synchronize(inflight.popleft()[0])
    while ahead:
        span = ahead.pop()
        backend.wait(span.stream, span.ready)


def _nothing() -> None:
    """A dead weak reference."""
    return None
