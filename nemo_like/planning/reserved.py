"""What the caching allocator reserves for a training step: the step's allocations, replayed.

`peak_bytes` counts what tensors take. A GPU runs out of what the allocator has *reserved*: whole segments, of which free
pieces may fit nothing that is asked for, and those of one stream serve no other. Several steps are replayed, from the
first one on, in which the optimizer's state comes into being, until one reserves nothing more.

Nobody has compared these bytes with ``torch.cuda.memory_reserved`` on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_like.options.allocator import AllocatorConfig
from nemo_like.options.optimizers import OptimizerMemory
from nemo_like.planning.allocator_model import CachingAllocator
from nemo_like.planning.block import Choice
from nemo_like.planning.step_events import Events, Pass, StepEvents

if TYPE_CHECKING:
    from nemo_like.planning.memory_blocks import MemoryBlock
    from nemo_like.planning.planner import Planner

MOST_STEPS = 4


@dataclass(frozen=True)
class Reserved:
    """Bytes of one rank."""

    reserved: int
    """Most that the allocator reserves, as ``torch.cuda.max_memory_reserved`` would say."""
    allocated: int
    """Most in blocks that are in use, rounded as the allocator rounds them."""
    tensors: int
    """Most in tensors: `Peak.total`, if the replay and the planner's arithmetic agree."""
    workspaces: int
    """Of `reserved`, what libraries take for themselves."""
    given_back: int = 0
    """How often in the last step free segments went back to the device, because its memory had run out."""


def replay(
    planner: Planner, choices: Sequence[Choice], config: AllocatorConfig | None = None, memory: int | None = None
) -> Reserved:
    """Replay the step of `planner` under `choices` through the allocator.

    Args:
        planner: of a CUDA device.
        choices: one for each layer call.
        config: the allocator's settings; None: torch's defaults.
        memory: bytes of the device; None: as many as are asked for.

    Raises:
        DeviceMemoryError: `memory` does not suffice.
    """
    replayed = Replayed(config, memory, planner.device.cuda)
    steps = _Steps(planner, choices)
    for number in range(MOST_STEPS):
        before = replayed.allocator.reserved
        steps.step(first=number == 0)
        replayed.play(steps.events)
        if number > 1 and replayed.allocator.reserved == before and memory is None:
            break
    return replayed.found()


class Replayed:
    """An allocator through which steps go, one after the other.

    Args:
        config, memory: as for `CachingAllocator`.
        capability: of the device, by which libraries take workspaces.
    """

    def __init__(self, config: AllocatorConfig | None, memory: int | None, capability: tuple[int, int] | None) -> None:
        self.allocator = CachingAllocator(config, memory)
        self._live: dict[int, MemoryBlock] = {}
        self._sizes: dict[int, int] = {}
        self._tensors = self._now = self._given_back = 0
        self._workspaces = _workspaces(capability)
        for size in self._workspaces:
            self.allocator.allocate(size)

    def play(self, events: Events) -> None:
        """A step's events, which are forgotten then."""
        retries, live, sizes = self.allocator.retries, self._live, self._sizes
        allocate, free, now, most = self.allocator.allocate, self.allocator.free, self._now, self._tensors
        for storage, size, stream in events.log:
            if size:
                live[storage] = allocate(size, stream)
                sizes[storage] = size
                now += size
                if now > most:
                    most = now
            else:
                free(live.pop(storage))
                now -= sizes.pop(storage)
        self._now, self._tensors = now, most
        events.log.clear()
        self._given_back = self.allocator.retries - retries

    def found(self) -> Reserved:
        """Of all steps so far; `Reserved.given_back` of the last."""
        allocator = self.allocator
        return Reserved(
            allocator.peak_reserved, allocator.peak_allocated, self._tensors, sum(self._workspaces), self._given_back
        )


class _Steps:
    """The events of a planner's steps, one after the other."""

    def __init__(self, planner: Planner, choices: Sequence[Choice]) -> None:
        self.planner, self.choices = planner, choices
        self.events, sharding = Events(), planner.sharding
        names = {id(p): name for name, p in planner.model.named_parameters(remove_duplicate=False)}
        self.writer = StepEvents(
            self.events, sharding, frozenset(names[p] for p in sharding.tail_params if p in names),
            in_chunks=planner.outer().in_chunks,
        )  # fmt: skip
        self.passes = {turn: planner.layer_events(choices, turn.accumulates) for turn in set(self._turns(first=True))}
        self.passes |= {turn: planner.layer_events(choices, turn.accumulates) for turn in set(self._turns(first=False))}
        self.optimizer = planner.optimizer
        make_state(self.events, planner)

    def step(self, *, first: bool) -> None:
        """All microbatches, and the optimizer."""
        writer, planner = self.writer, self.planner
        for turn in self._turns(first=first):
            writer.run(turn, self.passes[turn], planner.outer(turn.accumulates, self.choices).events)
        optimizer_passes(self.events, self.optimizer, first=first)
        if planner.job.step.zero_grad == "free":
            writer.zero_grad()

    def _turns(self, *, first: bool) -> list[Pass]:
        """The microbatches of a step. After the third they repeat."""
        step, job = self.planner.job.step, self.planner.job
        count = min(step.microbatches, 3)
        stays = step.zero_grad == "zero" and not first
        if not self.writer.on:
            if job.ddp:
                return [Pass(accumulates=True)] * count
            return [Pass(accumulates=stays or number > 0) for number in range(count)]
        if step.sync == "every" or count == 1:
            return [Pass(adds=stays or number > 0) for number in range(count)]
        cast = job.param_dtype is not None
        before = [
            Pass(accumulates=number > 0 and not cast, reduces=False, adds=number > 0) for number in range(count - 1)
        ]
        return [*before, Pass(accumulates=not cast, adds=stays)]


def _workspaces(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Of cuBLAS, bytes: one for each thread that multiplies, forward's and autograd's.

    ``parseChosenWorkspaceSize`` of ``aten/src/ATen/cuda/CublasHandlePool.cpp``: 32 MiB on compute capability 9.0, else
    8 MiB and 128 KiB. They are taken from the caching allocator and kept.
    """
    size = 32 << 20 if capability == (9, 0) else (8 << 20) + (128 << 10)
    return size, size


def make_state(events: Events, planner: Planner) -> None:
    """What is there before the first step: parameters, their running mean, DDP's buckets, remembered tables."""
    sharding = planner.sharding
    for _ in range(2 if planner.job.step.ema else 1):
        for unit in sharding.all:
            for size in unit.each_shard:
                events.make(size)
        events.make(sharding.replicated)
    events.make(planner.remembered)
    if planner.job.ddp:
        for unit in sharding.all:
            events.make(unit.grad)


def optimizer_passes(events: Events, optimizer: OptimizerMemory, *, first: bool) -> None:
    """The optimizer's step; the `first` one makes its state."""
    if first:
        for sizes in optimizer.states:
            for size in sizes:
                events.make(size)
    for each in optimizer.passes:
        before = 0
        for sizes in each.alone:
            made = [events.make(sizes[0])]
            if each.hands_over:
                events.drop(before)
            made += map(events.make, sizes[1:])
            if not each.hands_over:
                events.drop(before)
            events.drop_all(made[:-1])
            before = made[-1]
        events.drop(before)
        events.drop_all([events.make(size) for size in each.together])
