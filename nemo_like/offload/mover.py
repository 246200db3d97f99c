"""Copies between one device and the host, their order, and the handles that autograd saves in place of tensors.

To the host: the copy stream waits for the operator that made the bytes, copies, and records an event. The mover holds
the device storage until that event has been seen, so that the allocator cannot hand it out while it is read.
Back: the buffer comes from the current stream's pool; the copy stream, behind the copy to the host, waits until earlier
work on that memory is done; whoever reads waits for the copy back. CPU memory is PyTorch's to reuse.

A handle owns its data; nothing looks tensors up by id. So a graph may be walked twice, two graphs may be alive at once in
any order, and a dropped graph frees its tensors.
"""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from nemo_like._util.log import warn_once
from nemo_like.offload.backends import Backend, default_backend
from nemo_like.options import OffloadConfig
from nemo_like.torch_compat import version_of

_Held = tuple[Any, object, int]  # An event, the memory that a copy uses until then, and bytes.


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
    kept_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of saved tensors left on the device, by reason (a storage saved twice counts twice)."""
    kept_count: Counter[str] = field(default_factory=Counter)
    """Saved tensors left on the device, by reason."""
    host_live_bytes: int = 0
    """Host bytes that saved tensors occupy now (`OffloadConfig.host_bytes`)."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for a log or a table."""
        return vars(self) | {"kept_bytes": dict(self.kept_bytes), "kept_count": dict(self.kept_count)}


def _refuse_change(tensor: torch.Tensor, expected: int | None, described: str) -> None:
    """Raise RuntimeError, in autograd's words, where the version counter of `tensor` is not at `expected`."""
    version = version_of(tensor)
    if version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{described}] was saved for backward at version {expected}, and is at version {version} now. Change a "
            "copy instead (tensor.clone()), or use the out-of-place operator."
        )


Guard = Callable[[], Any]  # Returns a tensor, or None where it is gone.


class Handle:
    """One saved tensor, wherever its bytes wait.

    Args:
        read: gives the tensor back; called with the handle.
        saved: the tensor, which is described where it was changed.
        guard: gives a tensor with the version counter of `saved`, which tells of changes in place, if there is one still;
            None: they are not looked for.
    """

    def __init__(self, read: "Callable[[Any], torch.Tensor]", saved: torch.Tensor, guard: Guard | None) -> None:
        self.read, self.guard, self.expected = read, guard, None if guard is None else version_of(guard())
        self.described = f"{type(saved).__name__} {saved.dtype} {list(saved.shape)}"
        self.copies: Sequence[HostCopy] = ()  # none: it stays on the device

    @torch.no_grad()
    def get(self) -> torch.Tensor:
        """Return the tensor as it was saved. Raises RuntimeError where it was changed in place since."""
        if self.guard is not None and (guard := self.guard()) is not None:
            _refuse_change(guard, self.expected, self.described)
        return self.read(self)


def kept(tensor: torch.Tensor) -> Handle:
    """A handle for a tensor that stays on the device."""
    # The original of an operator's output would be a reference cycle (output, graph, handle); a leaf has no graph.
    data = tensor if tensor.is_leaf else tensor.detach()
    return Handle(lambda _: data, data, lambda: data)


def guard_of(tensor: torch.Tensor) -> Guard:
    """An empty tensor that shares the version counter of `tensor`, and none of its memory."""
    probe = tensor.detach()
    if hasattr(probe, "__tensor_flatten__"):
        for name in probe.__tensor_flatten__()[0]:
            if isinstance(getattr(probe, name), torch.Tensor):
                setattr(probe, name, torch.empty(0))
    else:
        # Assigning `.data` swaps the storage and leaves the version counter.
        probe.data = torch.empty(0, dtype=probe.dtype, device=probe.device)
    return lambda: probe


class ChosenHandle(Handle):
    """An operator's output that an engine chose, before autograd has seen it.

    Unlike a saved tensor it may be changed in place later, if `before_change` is called first; the chosen values stay.
    They stay on the device until `start`: an engine drops needless outputs, and those need not be copied.
    """

    def __init__(self, source: torch.Tensor, move: Callable[[torch.Tensor], Handle]) -> None:
        # Below autograd no probe can share the version counter; the tensor itself lives as long as one of its views.
        super().__init__(ChosenHandle.brought, source, weakref.ref(source))
        # Not the output itself, which is about to get a graph: that would be a reference cycle.
        self._move = partial(move, source.detach())
        self._inner: Handle | None = None

    def start(self) -> Handle:
        """Move it now."""
        if self._inner is None:
            self._inner = self._move()
            del self._move
        return self._inner

    def brought(self) -> torch.Tensor:
        inner = self.start()
        # Whoever changes the source writes into it, in recomputation too: the next recomputation must find it as it was.
        return inner.get().clone() if self.guard is None and not inner.copies else inner.get()

    def before_change(self) -> None:
        """The source is about to change."""
        if self.guard is not None:
            inner, self.guard = self.start(), None
            if not inner.copies:
                self._inner = kept(inner.get().clone())
            for copy in inner.copies:
                copy.mover.part_from_source(copy)


class HostCopy:
    """The bytes on the host of one device storage, at one version of its contents. Its readers alone keep it alive.

    They come back into one `buffer`, which goes when every reader has had it. Later (in a second backward through a
    retained graph) they come back for each reader.
    """

    def __init__(self, mover: "Mover", storage: torch.UntypedStorage, version: int, host: torch.Tensor) -> None:
        self.mover, self.version, self.host = mover, version, host  # host: (nbytes,) uint8
        self.storage: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self.stream = mover.backend.current_stream()  # whose operators saved the storage, and so may use its memory
        self.written: Any = None
        self.group = mover.group
        self.unread: weakref.WeakSet[object] = weakref.WeakSet()  # readers that have not had it yet
        self.buffer: torch.Tensor | None = None  # (nbytes,) uint8 on the device, with the version counter at `version`
        self.buffer_stream: Any = None
        self.ready: Any = None

    def original(self) -> torch.UntypedStorage | None:
        """The device storage, where it is still alive and full."""
        storage = self.storage()
        return storage if storage is not None and storage.nbytes() == self.host.numel() else None

    def __del__(self) -> None:
        # Any thread, any time, the collector's included: leave a note and touch nothing.
        self.mover.dead.append((self.ready, self.buffer, self.host.numel()))


class Group(list["weakref.ref[HostCopy]"]):
    """Copies that come back together: those of a layer."""

    number = 0
    nbytes = 0


class Mover:
    """Moves storages between one device and the host, each as a whole. Thread safe.

    Args:
        backend: None: the default one, made when the first tensor is looked at.
        config: the limits.
        use_streams: of the default back end.
        max_inflight_copies: how many copies to the host may be on their way.
    """

    def __init__(
        self,
        backend: Backend | None,
        config: OffloadConfig,
        use_streams: bool = True,
        max_inflight_copies: float = float("inf"),
    ) -> None:
        self._backend, self.config, self.max_inflight_copies = backend, config, max_inflight_copies
        self._use_streams = use_streams
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
        self.group = self._groups[0] = Group()
        # Where no layers are told, a group ends when a handful of them would fill the bytes that prefetching may hold.
        self._group_limit: float = config.max_inflight_bytes // 8
        self._group_out_of_memory: int | None = None

    @cached_property
    def backend(self) -> Backend:
        """The device, where bytes are copied."""
        return self._backend or default_backend(pin_memory=self.config.pin_memory, use_streams=self._use_streams)

    def find(self, storage: torch.UntypedStorage, version: tuple[Any, ...]) -> HostCopy | None:
        """Return the copy of `storage` at this version, where it is on the host."""
        copy = self._copies.get((id(storage), version))
        return copy if copy is not None and copy.original() is storage else None

    def offload(self, storage: torch.UntypedStorage, version: tuple[Any, ...], reader: object) -> HostCopy | str:
        """Return the copy of `storage` on the host, made now where there is none; a reason where it was refused.

        Args:
            storage: of this mover's device.
            version: changes when the contents do. The last of it is the version counter that the bytes come back with,
                so that checks which compare it (in recomputation) find the same one.
            reader: while it is alive, one of those who will `fetch` the copy.
        """
        with self.lock:
            self.retire()
            copy, stats, nbytes = self.find(storage, version), self.stats, storage.nbytes()
            if copy is None:
                backend, budget = self.backend, self.config.host_budget_bytes
                if budget is not None and stats.host_live_bytes + self.config.host_bytes(nbytes) > budget:
                    return (
                        f"the host budget of {budget} bytes has {budget - stats.host_live_bytes} left, and {nbytes} are "
                        "to move"
                    )
                try:
                    host = backend.host_memory(nbytes)
                except (RuntimeError, MemoryError) as error:  # torch's errors when pinning or allocating fails
                    return f"CPU memory of {nbytes} bytes was refused ({str(error).splitlines()[0]})"
                copy = self._copies[id(storage), version] = HostCopy(self, storage, version[-1] or 0, host)
                # The operator that makes these bytes may still be running on the caller's stream.
                backend.copies.wait_event(backend.record(copy.stream))
                backend.copy(host, bytes_of(storage), backend.copies)
                copy.written = backend.record(backend.copies)
                stats.host_live_bytes += self.config.host_bytes(nbytes)
                stats.moved_bytes += nbytes
                stats.copies += 1
                # Python may drop the storage at once; the allocator must not hand it out while the copy reads it.
                self._inflight.append((copy.written, storage, nbytes))
            copy.unread.add(reader)
            if self.group.nbytes > self._group_limit:
                self.open_group(self._group_limit)
            copy.group = self.group  # of a shared copy: backward requests it with the last of its groups
            copy.group.append(weakref.ref(copy))
            copy.group.nbytes += nbytes
            self.retire()
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
            # The newest is in use by the operator that saves it: waiting for its copy would free nothing.
            while len(held) > 1 and (
                len(held) > self.max_inflight_copies or sum(n for *_, n in held) > self.config.max_inflight_bytes
            ):
                held[0][0].synchronize()
                held.popleft()

    def open_group(self, limit: float = float("inf")) -> None:
        """Open a group (a layer) for the copies made from here on; it ends where it has more than `limit` bytes."""
        with self.lock:
            number, self._group_limit = self.group.number + 1, limit
            self.group = self._groups[number] = Group()
            self.group.number = number

    def fetch(self, copy: HostCopy, reader: object) -> torch.Tensor:
        """Return the copy's bytes, (n,) uint8 on the device, ready for the current stream."""
        with self.lock:
            self.retire()
            backend, stream = self.backend, self.backend.current_stream()
            if copy.buffer is not None and version_of(copy.buffer) != copy.version:
                copy.buffer = None  # an earlier reader wrote into it; the host has the true bytes
            if copy.buffer is None and (original := copy.original()) is not None:
                # Another reference keeps it alive: the same bytes, and no copy to wait for.
                whole = bytes_of(original)
                increment_version([whole] * copy.version)
                backend.lend(whole, stream, copy.stream)  # the mover may be the last one that holds it
            else:
                whole = self._copy_back(copy) if copy.buffer is None else copy.buffer
                # Not the host: only the caller's stream waits, so that Python runs on and launches the next operators.
                stream.wait_event(copy.ready)
                backend.lend(whole, stream, copy.buffer_stream)
            self._ahead.discard(copy)
            copy.unread.discard(reader)
            if not copy.unread:
                # From here on the buffer lives as long as the tensors that its readers made of it, and no longer.
                copy.buffer = None  # all have read
            self._look_ahead(copy.group.number)
            return whole

    def _copy_back(self, copy: HostCopy) -> torch.Tensor:
        backend = self.backend
        stream = backend.current_stream()
        buffer = torch.empty(copy.host.numel(), dtype=torch.uint8, device=backend.device)
        backend.copies.wait_event(backend.record(stream))  # earlier kernels may still use this memory
        backend.copy(buffer.data, copy.host, backend.copies)  # `data`: no change to be counted
        copy.ready = backend.record(backend.copies)
        # Checks in recomputation compare version counters: the bytes come back with the counter that they left with.
        increment_version([buffer] * copy.version)
        copy.buffer, copy.buffer_stream = buffer, stream
        self.stats.reloads += 1
        self.stats.reloaded_bytes += buffer.numel()
        return buffer

    def part_from_source(self, copy: HostCopy) -> None:
        """The original is about to change: the current stream's next work comes after the copy's reading of it."""
        with self.lock:
            self.backend.current_stream().wait_event(copy.written)
            copy.storage = lambda: None  # the original would still be found, with other bytes in it

    def _look_ahead(self, group: int) -> None:
        """Start bringing back the rest of this group, and the groups that backward needs next."""
        numbers = range(group, group - self.config.prefetch - 1, -1) if self.config.prefetch else ()
        for copy in (reference() for number in numbers for reference in reversed(self._groups.get(number, ()))):
            # One that all have read is not needed again, and one that was shared belongs to a later group.
            if (
                copy is None
                or not copy.unread
                or copy.group.number > group
                or copy.buffer is not None
                or copy.original() is not None
            ):
                continue
            full = sum(each.host.numel() for each in self._ahead) >= self.config.max_inflight_bytes
            if full or copy.group.number == self._group_out_of_memory:
                return
            try:
                self._copy_back(copy)
            except torch.OutOfMemoryError as error:
                warn_once(
                    f"Offloading could not prefetch {copy.host.numel()} bytes ({error}): brought back when asked for.",
                    key="offload-prefetch-refused",
                )
                self._group_out_of_memory = copy.group.number  # more of it would not help
                return
            self._ahead.add(copy)
            self.stats.prefetched += 1


def _end_of_copies(inflight: deque[_Held], dead: deque[_Held]) -> None:
    """Wait for the copies that read storages or write buffers before these are freed."""
    for event in (event for event, memory, _ in (*inflight, *dead) if memory is not None):
        event.synchronize()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage's bytes as a (n,) uint8 tensor on it."""
    # `.data` starts a version counter of its own, which setting the storage has not moved.
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,)).data
