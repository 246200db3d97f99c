"""Copies of a micro-batch's activations to CPU memory and back (``offload=``), as `nemo_like.offload` makes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from nemo_like.activation_checkpointing.plan import Part
from nemo_like.options import OffloadConfig
from nemo_like.planning.memory_model.storages import LogRun, Moved, Storages


class HostCopies:
    """Writes the copies of one micro-batch.

    Args:
        storages: receives what is written.
        offload: limits how many bytes may be on their way, and how far ahead they are fetched.
        at_once: a copy to the host has ended when the next operator runs, as on the CPU; else any may still be on its way.
        inside: the runs of the layers' logs.
        inputs: for each layer, the storages of its inputs that it keeps.
    """

    def __init__(
        self, storages: Storages, offload: OffloadConfig, at_once: bool, inside: list[LogRun], inputs: list[list[int]]
    ) -> None:
        self.storages, self.offload, self.at_once, self.inside, self.inputs = storages, offload, at_once, inside, inputs
        self.sent: deque[tuple[int, Callable[[], None], int]] = deque()
        """Copies to the host that may be on their way: bytes, the function that frees their source, and the layer."""
        self.away: dict[int, list[tuple[int, Callable[[], None]]]] = {}
        """Bytes of each storage that was copied out, and the function that copies it back, by layer."""

    def send(self, i: int, *, inputs: bool, sizes: Sequence[int]) -> None:
        """Copy out what waits on the host for layer `i`: its inputs, and storages of these bytes.

        Free the sources of copies that have arrived.
        """
        storages, run, back = self.storages, self.inside[i], list[tuple[int, Callable[[], None]]]()
        self.away[i] = back
        for storage in self.inputs[i] if inputs else ():
            size = storages.sizes.get(storage, 0)
            self.sent.append((size, partial(storages.drop, storage), i))
            back.append((size, partial(self._make_input, i, size)))
        if inputs:
            self.inputs[i] = []
        for size in sizes:
            gone: list[Moved] = []
            self.sent.append((size, partial(self._move_out, run, size, gone), i))
            back.append((size, partial(self._move_back, run, gone)))
        most, at_least = (0, 0) if self.at_once else (self.offload.max_inflight_bytes, 1)
        while len(self.sent) > at_least and sum(size for size, _, _ in self.sent) > most:
            self.sent.popleft()[1]()

    def fetch(self, i: int, *, ahead: bool) -> None:
        """Copy back what layer `i` needs, and (`ahead`) what the layers before it do, the last copy first."""
        self._fetch_layer(i, None, 0)
        fetched = 0
        for j in range(i - 1, max(-1, i - 1 - self.offload.prefetch), -1) if ahead else ():
            fetched = self._fetch_layer(j, self.offload.max_inflight_bytes, fetched)

    def _fetch_layer(self, i: int, most: int | None, fetched: int) -> int:
        """Copy back what layer `i` has on the host; return the bytes so far. No copy begins once `most` have come."""
        for copy in [copy for copy in self.sent if copy[2] == i]:  # its copies out end first
            self.sent.remove(copy)
            copy[1]()
        waiting = self.away.get(i, [])
        while waiting and (most is None or fetched < most):
            size, copy_back = waiting.pop()
            copy_back()
            fetched += size
        return fetched

    def _make_input(self, i: int, size: int) -> None:
        self.inputs[i].append(self.storages.make(size, Part.SAVED_ACTIVATIONS))

    def _move_out(self, run: LogRun, size: int, gone: list[Moved]) -> None:
        gone += filter(None, [self.storages.move_out(run, size)])

    def _move_back(self, run: LogRun, gone: list[Moved]) -> None:
        for each in gone:
            self.storages.move_back(run, each)
