"""Bytes that a training step takes of a GPU: those that the caching allocator reserves, by which it fits, and all others.

`peak_bytes` counts the bytes of tensors. A GPU runs out of memory that the allocator has *reserved*, in whole segments.
Their free pieces may be too small for any request, and those of one stream serve no other. So the step's allocations
are run through a model of the allocator. Several steps are run, from the first one on, in which the optimizer's state
is made, until one reserves nothing more.

A step fits where this ends with no more memory than the limit, and without giving segments back in every step, since the
device would have to wait for that. Where nothing reserves more than tensors take (the CPU), tensors decide. In a pipeline,
the rank that reserves most decides.

These bytes have not been compared with ``torch.cuda.memory_reserved`` on a GPU yet.

The allocator neither has nor counts the CUDA context, and NCCL's buffers.
None of their numbers was measured by this package. Those of NCCL are from its logs and issues:

- https://github.com/NVIDIA/nccl/issues/964: 4 A100 with NVLink; a group takes 544 MiB for 2 ranks, 688 for more. That is
  24 channels of 12 and 18 MiB, and 256 MiB besides: a ring's buffers, those of a tree's end, and a rest that is fitted.
- https://github.com/NVIDIA/nccl/issues/1685: 8 H100; buffers are of 10 and 2 MiB, since a connection has 4 MiB (Simple),
  4.7 (LL128) and 0.5 (LL), rounded to 2 MiB. The first all-to-all over 32 channels and 7 peers takes 3.28 GB: 14 MiB each.
- https://github.com/NVIDIA/nccl/issues/1450: between nodes, sends and receives share one buffer. Rings do not.
- NCCL's ``nvls.cc`` and logs: 32 MiB per GPU of a node for sums within NVSwitch, on Hopper and later. An earlier NCCL took
  288: https://github.com/vllm-project/vllm/issues/9699.
- A log of p5.48xlarge in aws-samples/aws-do-eks (NCCL tests): 24 channels, 32 per peer on one node; on two, 16 and 2.

Assumptions: 4 channels, 2 per peer, without NVLink; 20 MiB for a ring's channel from node to node; at most 8 GPUs count as
near, in a rack, too; the default group is used like any other; RCCL takes as much as NCCL.

cuBLAS's workspaces are inside: torch takes them from its allocator (`workspaces_of`). No part of
this package captures a CUDA graph, so graphs' pools are not counted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial

from nemo_like._util.table import ByteUnit, byte_word
from nemo_like._util.words import MIB
from nemo_like.job import Job
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.devices import MARGIN, Device, step_limit
from nemo_like.planning.memory_model.allocator import CachingAllocator, DeviceMemoryError, MemoryBlock
from nemo_like.planning.memory_model.storages import Events, Peak
from nemo_like.planning.predictions.rank import RankSteps, fullest_rank, note_labels
from nemo_like.planning.predictions.seconds import Links
from nemo_like.planning.query import Choices, PlanQuery
from nemo_like.planning.roofline import RankGroup, group_of
from nemo_like.planning.selection.layer import Choice

CONTEXT, NCCL = "CUDA context", "NCCL"
_NVLINK = 100e9  # Bytes per second above which GPUs of a node are taken to have NVLink.


@dataclass(frozen=True)
class Outside:
    """Bytes that one GPU has outside of torch's allocator."""

    # Bytes by part; empty: the device has no such allocator.
    parts: Mapping[str, int] = field(default_factory=dict)
    memory: int = 0  # Bytes of the device.

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fraction(self) -> float | None:
        """Share of the device that leaves them room, rounded down to two decimals; None: nothing is outside."""
        return max(0, 100 * (self.memory - self.total) // self.memory) / 100 if self.total else None

    def words(self) -> str:
        """Return the parts, and the call that leaves them room, in a sentence; empty where nothing is outside."""
        if self.fraction is None:
            return ""
        unit = ByteUnit.for_sizes([self.total])
        return (
            f"Of the GPU's {byte_word(self.memory)}, {unit.word(self.total)} are outside of torch's allocator ("
            + ", ".join(f"{name} {unit.number(size)}" for name, size in self.parts.items() if size)
            + f"); torch.cuda.set_per_process_memory_fraction({self.fraction:.2f}) leaves them room. By default "
            f"{100 * MARGIN:.0f} % stay free, because predictions are off; --memory changes it."
        )

    def note(self, unit: ByteUnit, limit: int) -> str:
        """Return the note below a table of sizes in `unit`: of which memory, and the bytes of it that may be reserved."""
        bound = f"; {unit.number(limit)} of {unit.number(self.memory)} may be reserved (--memory)" if self.total else ""
        return f"{unit.name} of one device, predicted{bound}."


def outside_of(job: Job, device: Device) -> Outside:
    """Return the bytes that a rank of `job` has outside of the allocator, with those of its device."""
    on_cpu = device.cuda is None
    parts = {} if on_cpu else {CONTEXT: device.context_bytes, NCCL: sum(_communicators(job, device))}
    return Outside(parts, device.memory_bytes)


def default_limit(job: Job, device: Device) -> int:
    """Return the bytes that a step of `job` may take by default: all but those outside of the allocator, and a margin."""
    return max(1, step_limit(device) - outside_of(job, device).total)


def _communicators(job: Job, device: Device) -> Iterator[int]:
    """Yield the bytes of each communicator; all ranks have one, which an axis of all ranks shares."""
    if job.is_single:
        return
    links, node = Links.for_job(job, device), device.gpus_per_node
    exchanging = job.cp.facts.peers(job.cp.size)
    stages = group_of(job.pp.size, job.ranks // job.pp.size, node)
    axes = [
        (links.shards, 0, True),
        (links.replicas, 0, True),
        (links.tensor, 0, True),
        (links.sequence, exchanging, not exchanging),
        (links.experts, job.ep.size, False),
        (links.expert_shards if job.ep.size > 1 else RankGroup(1, 1), 0, True),
        (stages, 2, False),
    ]
    if all(group.ranks < job.ranks for group, _, _ in axes):
        axes.append((group_of(job.ranks, 1, node), 0, True))
    yield from (communicator_bytes(*axis, device) for axis in axes if axis[0].ranks > 1)


def communicator_bytes(group: RankGroup, peers: int, collects: bool, device: Device) -> int:
    """Return the bytes that NCCL takes on a rank for one communicator.

    Args:
        peers: ranks that it sends to one by one; only those on its node have buffers of their own.
        collects: it gathers, scatters or sums, over rings and trees.
    """
    fast, near = device.nvlink >= _NVLINK, min(group.per_node, 8)
    channels, pairs = ((24, 32) if group.nodes == 1 else (16, 2)) if fast else (4, 2)
    size = 256 * channels // 24 + min(peers, near - 1) * pairs * 14
    if collects:
        size += channels * (20 if near == 1 else 12 if group.ranks == 2 else 18)
        size += 32 * near if fast and near > 2 and device.capability >= (9, 0) else 0
    return size * MIB


# Most steps to run. In the second, optimizer state exists from the start; the third usually reserves nothing more.
_MOST_STEPS = 4


@dataclass(frozen=True)
class Reserved:
    """Reserved bytes of one rank."""

    # Most bytes that the allocator reserves, as ``torch.cuda.max_memory_reserved`` would report.
    reserved: int
    allocated: int  # Most bytes in blocks that are in use, rounded as the allocator rounds them.
    tensors: int  # Most bytes in tensors: `Peak.total`.
    workspaces: int  # Bytes of `reserved` that libraries take for themselves.
    # Times in the last step that free segments went back to the device, because its memory had run out.
    given_back: int = 0


class StepLogs:
    """The allocations of a rank's steps: of the first one, in which the optimizer's state is made, and of any later one."""

    def __init__(
        self,
        query: PlanQuery,
        rank: int,
        choices: Sequence[Sequence[Choice]],
        *,
        kind: Callable[..., RankSteps] = RankSteps,
    ) -> None:
        """Write both; `kind`: writes them, other arguments as for it."""
        storages = Events()
        steps = kind(query, rank, choices, storages)
        steps.run(first=True)
        self.first, storages.log = storages.log, []
        self.between = before = dict(storages.sizes)  # Storages that exist between the two, with their bytes.
        steps.run()
        self.later, self.labels = storages.log, storages.labels
        gone = {number: size for number, size in before.items() if number not in storages.sizes}
        new = {number: size for number, size in storages.sizes.items() if number not in before}
        assert list(gone.values()) == list(new.values()), "a step does not end as it begins"
        # Storages that exist when a later step ends, each with the one that was in its place when the step began.
        self.renewed = dict(zip(new, gone))


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
    allocator, live = CachingAllocator(config, memory), dict[int, MemoryBlock]()
    workspaces = workspaces_of(device.cuda)
    for size in workspaces:
        allocator.allocate(size)
    now = most = given_back = 0
    for number in range(_MOST_STEPS):
        before, retries = allocator.reserved, allocator.retries
        for event in logs.later if number else logs.first:
            if event.size > 0:
                live[event.storage] = allocator.allocate(event.size, event.stream)
                now += event.size
                most = max(most, now)
            elif event.size:
                allocator.free(live.pop(event.storage))
                now += event.size
        given_back = allocator.retries - retries
        if number:
            live.update({other: live.pop(storage) for storage, other in logs.renewed.items()})
        if number > 1 and allocator.reserved == before and not given_back:
            break
    return Reserved(allocator.peak_reserved, allocator.peak_allocated, most, sum(workspaces), given_back)


def reserved_on(query: PlanQuery, rank: int, choices: Sequence[Sequence[Choice]]) -> Reserved:
    """Return the bytes that the allocator reserves on one rank; arguments as for `StepLogs`."""
    return replay(_reported(query, rank, choices), query.device, query.job.allocator)


def _reported(query: PlanQuery, rank: int, choices: Sequence[Sequence[Choice]]) -> StepLogs:
    """Return the steps of a rank. Of the fullest one, reports tell the parts of the peak, too."""
    logs = StepLogs(query, rank, choices)
    if rank == fullest_rank(query, choices):
        note_labels(query, rank, choices, logs.first, logs.later)
    return logs


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
    by: str  # Kind of `bytes`: `RESERVED` or `ALLOCATED`.
    # Most bytes that the caching allocator reserves; None: the device has no such allocator.
    reserved: int | None = None
    # Part of `bytes` that is the step's input (token ids and labels), which peaks and reserved bytes leave out.
    inputs: int = 0


def verdict(query: PlanQuery, choices: Choices, peaks: Mapping[int, Peak], limit: int) -> Need:
    """Return the bytes that decide whether a step fits in `limit` on each rank; of the first rank that does not fit.

    `peaks`: those of `choices` on the fullest ranks (`nemo_like.planning.predictions.rank.fullest_peaks`).
    """
    sizes = {rank: peak.total for rank, peak in peaks.items()}
    reserved = list[int]()
    for rank in sorted(sizes, key=lambda rank: -sizes[rank]) if query.device.cuda is not None else ():
        # Bytes reserved above the peak are at most twice those of another rank, which runs the same kinds of layers.
        if reserved and sizes[rank] + 2 * (reserved[0] - max(sizes.values())) < max(reserved):
            continue
        reserved += reserved_within(query, choices, limit, [rank])
        if reserved[-1] + query.input_bytes > limit:
            break
    return need_of(query, max(peaks.values(), key=lambda peak: peak.total), reserved)


def need_of(query: PlanQuery, peak: Peak, reserved: Iterable[int]) -> Need:
    """Return the bytes that decide, from those `reserved` on ranks; empty: nothing reserves more than tensors take."""
    inputs, most = query.input_bytes, max(reserved, default=None)
    size, by = (peak.total, ALLOCATED) if most is None else (most, RESERVED)
    return Need(size + inputs, by, most, inputs)


def most_allocated(query: PlanQuery, limit: int) -> int:
    """Return the highest peak that could fit in `limit` bytes."""
    return max(0, limit - query.input_bytes)


def reserved_within(query: PlanQuery, choices: Choices, limit: int, ranks: Iterable[int] | None = None) -> list[int]:
    """Return the bytes that the caching allocator reserves on `ranks` (None: all), where a step may take `limit` bytes.

    Where `limit` does not suffice, they are those of a larger device. Empty: there is no such allocator.
    """
    if query.device.cuda is None:
        return []
    written, which = (_reported, range(query.pp.size)) if ranks is None else (StepLogs, ranks)
    return [_within(query, rank, choices, limit - query.input_bytes, written) for rank in which]


def _within(query: PlanQuery, rank: int, choices: Choices, memory: int, written: Callable[..., StepLogs]) -> int:
    """Return the bytes reserved on one rank; `written`: writes its steps. They are kept for other limits and losses."""
    stages = [query.stages[index] for index in query.of_rank(rank)]
    # A stage that sends its output has no loss, whatever the last one has; and no rate of a GPU changes a byte.
    job = replace(
        query.job,
        gpu=None,
        attention=None,
        loss=query.job.loss if any(stage.slice.is_last for stage in stages) else None,
    )
    about = (job, query.device.cuda, [[choice.told for choice in choices[stage.slice.index]] for stage in stages], rank)
    logs = cache(partial(written, query, rank, choices))

    def reserved(within: int | None) -> int:
        with suppress(DeviceMemoryError):
            run = replay(logs(), query.device, query.job.allocator, within)
            return run.reserved if within is None or not run.given_back else 0
        return 0

    stored = stages[0].part.stored
    most = stored(("reserved", *about), partial(reserved, None))
    # Where it is within the memory, a step with no more memory than that takes the same segments.
    return most if most <= memory else stored(("reserved", memory, *about), partial(reserved, memory)) or most
