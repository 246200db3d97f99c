"""Bytes that the caching allocator reserves for a training step, and the verdict whether the step fits by them.

`peak_bytes` counts what tensors take. A GPU runs out of what the allocator has *reserved*, which is whole segments. Their
free pieces may be too small for any request, and those of one stream serve no other. So the step's allocations are run
through a model of the allocator. Several steps are run, from the first one on, in which the optimizer's state is made, until
one reserves nothing more.

A step fits where this ends with no more memory than the limit, and without giving segments back in every step, since the
device would have to wait for that. Where nothing reserves more than tensors take (the CPU), tensors decide. In a pipeline,
the rank that reserves most decides.

These bytes have not been compared with ``torch.cuda.memory_reserved`` on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.devices import Device
from nemo_like.planning.memory_model.allocator import CachingAllocator, DeviceMemoryError, MemoryBlock
from nemo_like.planning.memory_model.storages import Allocations, Peak
from nemo_like.planning.predictions.rank import RankSteps
from nemo_like.planning.query import Choices, PlanQuery
from nemo_like.planning.selection.layer import Choice

_MOST_STEPS = 4
"""Most steps to run. In the second, optimizer state exists from the start; the third usually reserves nothing more."""


@dataclass(frozen=True)
class Reserved:
    """Reserved bytes of one rank."""

    reserved: int
    """Most bytes that the allocator reserves, as ``torch.cuda.max_memory_reserved`` would report."""
    allocated: int
    """Most bytes in blocks that are in use, rounded as the allocator rounds them."""
    tensors: int
    """Most bytes in tensors: `Peak.total`."""
    workspaces: int
    """Bytes of `reserved` that libraries take for themselves."""
    given_back: int = 0
    """Times in the last step that free segments went back to the device, because its memory had run out."""


class StepLogs:
    """The allocations of a rank's steps: of the first one, in which the optimizer's state is made, and of any later one."""

    def __init__(
        self, query: PlanQuery, rank: int, choices: Sequence[Sequence[Choice]], *, kept_outputs: Sequence[int] = ()
    ) -> None:
        """Write both; arguments as for `RankSteps`."""
        storages = Allocations()
        steps = RankSteps(query, rank, choices, storages, kept_outputs=kept_outputs)
        steps.run(first=True)
        self.first, storages.log = storages.log, []
        before = dict(storages.sizes)
        steps.run()
        self.later = storages.log
        gone = {number: size for number, size in before.items() if number not in storages.sizes}
        new = {number: size for number, size in storages.sizes.items() if number not in before}
        assert list(gone.values()) == list(new.values()), "a step does not end as it begins"
        self.renewed = dict(zip(new, gone))
        """Storages that exist when a later step ends, each with the one that was in its place when the step began."""


def replay(
    logs: StepLogs,
    device: Device,
    config: AllocatorConfig | None = None,
    memory: int | None = None,
) -> Reserved:
    """Run the allocations of a rank's steps through the allocator, until one reserves nothing more.

    Args:
        logs: the steps.
        device: a CUDA device.
        config: the allocator's settings; None: torch's defaults.
        memory: bytes of the device; None: as many as are requested.

    Raises:
        DeviceMemoryError: `memory` does not suffice.
    """
    allocator, live = CachingAllocator(config, memory), dict[int, tuple[MemoryBlock, int]]()
    workspaces = workspaces_of(device.cuda)
    for size in workspaces:
        allocator.allocate(size)
    now = most = given_back = 0
    for number in range(_MOST_STEPS):
        before, retries = allocator.reserved, allocator.retries
        for storage, size, stream in logs.later if number else logs.first:
            if size:
                live[storage] = allocator.allocate(size, stream), size
                now += size
                most = max(most, now)
            else:
                block, size = live.pop(storage)
                allocator.free(block)
                now -= size
        given_back = allocator.retries - retries
        if number:
            live.update({other: live.pop(storage) for storage, other in logs.renewed.items()})
        if number > 1 and allocator.reserved == before and not given_back:
            break
    return Reserved(allocator.peak_reserved, allocator.peak_allocated, most, sum(workspaces), given_back)


def reserved_on(query: PlanQuery, rank: int, choices: Sequence[Sequence[Choice]]) -> Reserved:
    """Return what the allocator reserves on one rank; arguments as for `StepLogs`."""
    return replay(StepLogs(query, rank, choices), query.device, query.job.allocator)


def workspaces_of(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return the bytes that cuBLAS takes: one workspace for each thread that multiplies, forward's and autograd's.

    ``parseChosenWorkspaceSize`` of ``aten/src/ATen/cuda/CublasHandlePool.cpp``: 32 MiB on compute capability 9.0, else
    8 MiB and 128 KiB. They are taken from the caching allocator and kept.
    """
    size = 32 << 20 if capability == (9, 0) else (8 << 20) + (128 << 10)
    return size, size


RESERVED, ALLOCATED = "reserved", "allocated"


@dataclass(frozen=True)
class Need:
    """Bytes that one rank must have."""

    bytes: int
    by: str
    """Kind of `bytes`: `RESERVED` or `ALLOCATED`."""
    reserved: int | None = None
    """Most bytes that the caching allocator reserves; None: the device has no such allocator."""
    inputs: int = 0
    """Part of `bytes` that is the step's input (token ids and labels), which peaks and reserved bytes leave out."""


def verdict(query: PlanQuery, choices: Choices, peaks: Mapping[int, Peak], limit: int) -> Need:
    """Return what decides whether a step fits in `limit` bytes of each rank; where it does not, of the first rank so.

    `peaks`: those of `choices` on the fullest ranks (`nemo_like.planning.predictions.rank.fullest_peaks`).
    """
    sizes = {rank: peak.total for rank, peak in peaks.items()}
    reserved = list[int]()
    for rank in sorted(sizes, key=lambda rank: -sizes[rank]) if query.device.cuda is not None else ():
        # What is reserved above the peak is at most twice that of another rank, which runs the same kinds of layers.
        if reserved and sizes[rank] + 2 * (reserved[0] - max(sizes.values())) < max(reserved):
            continue
        reserved += reserved_within(query, choices, limit, [rank])
        if reserved[-1] + query.input_bytes > limit:
            break
    return need_of(query, max(peaks.values(), key=lambda peak: peak.total), reserved)


def need_of(query: PlanQuery, peak: Peak, reserved: Iterable[int]) -> Need:
    """Return the bytes that decide, from what is `reserved` on ranks; empty: nothing reserves more than tensors take."""
    inputs, most = query.input_bytes, max(reserved, default=None)
    if most is None:
        return Need(peak.total + inputs, ALLOCATED, inputs=inputs)
    return Need(most + inputs, RESERVED, most, inputs)


def most_allocated(query: PlanQuery, limit: int) -> int:
    """Return the highest peak that could fit in `limit` bytes."""
    return max(0, limit - query.input_bytes)


def reserved_within(query: PlanQuery, choices: Choices, limit: int, ranks: Iterable[int] | None = None) -> list[int]:
    """Return the bytes that the caching allocator reserves on `ranks` (None: all), where a step may take `limit` bytes.

    Where `limit` does not suffice, they are what it would reserve on a larger device. Empty: there is no such allocator.
    """
    if query.device.cuda is None:
        return []
    every = range(query.pp.size) if ranks is None else ranks
    return [_within(query, StepLogs(query, rank, choices), limit - query.input_bytes) for rank in every]


def _within(query: PlanQuery, logs: StepLogs, memory: int) -> int:
    with suppress(DeviceMemoryError):
        run = replay(logs, query.device, query.job.allocator, memory)
        if not run.given_back:
            return run.reserved
    return replay(logs, query.device, query.job.allocator).reserved
