"""Layouts of a step over the GPUs: sizes of the axes, micro-batch and accumulation."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from nemo_like.job import Job
from nemo_like.options import FSDP2, CheckpointConfig, ContextParallel, PipelineParallel
from nemo_like.options.pipelining import SCHEDULE_OBJECTS, Schedule

SHORTEST_PART = 4096
"""Tokens of the shortest part that sequences are cut into, unless the caller pins ``cp``."""
MOST_TOKENS = 1 << 15
"""Most tokens of one rank in one micro-batch, of one sequence or more, unless the caller pins ``micro_batch``."""
MOST_PER_RANK, MOST_UNEVEN = 10, 1.1
"""Most stages of a rank that are searched, and most layers of the longest stage, as a multiple of an even share."""
MOST_CONTEXT, MOST_STAGES = 64, 32
"""Most ranks of ``cp`` and of ``pp`` that are searched, unless the caller pins more."""


@dataclass(frozen=True)
class Layout:
    """The sizes of a configuration: which rank has which part, and how often a step goes through it."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    """Ranks that share the experts, out of ``dp_shard x cp x tp``."""
    pp: int = 1
    schedule: str | None = None
    micro_batch: int = 1
    """Sequences of one rank (with `cp`: of one group) in one micro-batch."""
    grad_accum: int = 1
    """Micro-batches of a step; with `pp`, those of the pipeline."""
    stages_per_rank: int | None = None
    """Stages of a pipeline on one rank; None: the schedule's default."""
    sequence_parallel: bool = False
    loss_parallel: bool = False
    cp_method: str = ContextParallel.method

    @property
    def gpus(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def sequences(self) -> int:
        """Sequences of all ranks in one step."""
        return self.dp_replicate * self.dp_shard * self.micro_batch * self.grad_accum


@dataclass(frozen=True)
class Configuration:
    """A job and the sequences of its micro-batch, as `fit` examines them."""

    job: Job
    micro_batch: int = 1

    @cached_property
    def layout(self) -> Layout:
        """Sizes of the configuration."""
        job, staged = self.job, self.job.pp.size > 1
        return Layout(
            job.dp_replicate,
            job.dp_shard,
            job.tp.size,
            job.cp.size,
            job.ep.size,
            job.pp.size,
            job.pp.schedule if staged else None,
            self.micro_batch,
            (job.pp.microbatches or 1) if staged else job.step.microbatches,
            job.pp.stages_per_rank if staged else None,
            job.tp.sequence_parallel,
            job.tp.loss_parallel,
            job.cp.method if job.cp.size > 1 else ContextParallel.method,
        )

    # Sizes are read from the job once.

    @property
    def dp_replicate(self) -> int:
        return self.layout.dp_replicate

    @property
    def dp_shard(self) -> int:
        return self.layout.dp_shard

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def cp(self) -> int:
        return self.layout.cp

    @property
    def ep(self) -> int:
        return self.layout.ep

    @property
    def pp(self) -> int:
        return self.layout.pp

    @property
    def schedule(self) -> str | None:
        return self.layout.schedule

    @property
    def grad_accum(self) -> int:
        return self.layout.grad_accum

    @cached_property
    def gpus(self) -> int:
        """Number of all ranks."""
        return self.job.ranks

    @cached_property
    def shard_ranks(self) -> int:
        """Ranks that a parameter is sharded over."""
        return self.job.shard_ranks

    @property
    def stages_per_rank(self) -> int:
        """Stages of a pipeline on one rank."""
        return self.job.pp.stages_per_rank or 1

    @property
    def sequences(self) -> int:
        """Sequences of all ranks in one step."""
        return self.layout.sequences

    @property
    def mode(self) -> str:
        """``none``, ``full``, ``selective``, or ``plan``: the best within the memory."""
        return self.job.ac.mode if isinstance(self.job.ac, CheckpointConfig) else "plan"

    @property
    def way(self) -> tuple[str, bool, str, bool | int | None, bool]:
        """Options that change no local shape: the mode, chunked loss, offloading, resharding, state in host memory."""
        return self.mode, self.job.loss is not None, self.job.offload.mode, self.reshard, self.cpu_offload

    @property
    def reshard(self) -> bool | int | None:
        """FSDP2's ``reshard_after_forward``; None: its default."""
        return self.job.strategy.reshard_after_forward if isinstance(self.job.strategy, FSDP2) else None

    @property
    def cpu_offload(self) -> bool:
        """True if parameters, gradients and optimizer state are in host memory."""
        return isinstance(self.job.strategy, FSDP2) and self.job.strategy.cpu_offload

    def change(self, **fields: Any) -> Configuration:
        """Return this configuration with other fields of its job."""
        return Configuration(replace(self.job, **fields), self.micro_batch)

    def with_strategy(self, **options: Any) -> Configuration:
        """Return this configuration with other options of FSDP2."""
        assert isinstance(self.job.strategy, FSDP2)
        return self.change(strategy=replace(self.job.strategy, **options))

    def sized(self, **sizes: Any) -> Configuration:
        """Return this configuration with other sizes, by the names of `Layout`."""
        return configuration(self.job, replace(self.layout, **sizes))


def configuration(job: Job, layout: Layout, pp: PipelineParallel | None = None) -> Configuration:
    """Return `job` in `layout`; `pp`: what a pipeline has besides sizes and schedule, by default that of `job`.

    Raises:
        ValueError: the two exclude each other.
    """
    stages = PipelineParallel()
    if layout.pp > 1:
        stages = replace(
            job.pp if pp is None else pp,
            size=layout.pp,
            schedule=layout.schedule or PipelineParallel.schedule,
            microbatches=layout.grad_accum,
            stages_per_rank=layout.stages_per_rank,
        )
    sized = job.on(
        dp_shard=layout.dp_shard,
        dp_replicate=layout.dp_replicate,
        **axes_inside(job, layout),
        pp=stages,
        step=replace(job.step, microbatches=layout.grad_accum if layout.pp == 1 else 1),
    )
    return Configuration(sized, layout.micro_batch)


class Inside(Protocol):
    """Sizes and ways of the axes that split what a rank computes."""

    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def loss_parallel(self) -> bool: ...
    @property
    def cp_method(self) -> str: ...


def axes_inside(job: Job, sizes: Inside) -> dict[str, Any]:
    """Return the fields of `job` for ``tp``, ``cp`` and ``ep`` with these sizes and ways."""
    ways: dict[str, Any] = {"sequence_parallel": sizes.sequence_parallel, "loss_parallel": sizes.loss_parallel}
    return {
        "tp": replace(job.tp, size=sizes.tp, **ways),
        "cp": replace(job.cp, size=sizes.cp, method=sizes.cp_method),
        "ep": replace(job.ep, size=sizes.ep),
    }


@dataclass(frozen=True)
class Room:
    """Limits that layouts have to keep to."""

    gpus: int
    seq_len: int
    global_batch: int | None
    """Sequences of a step over all GPUs; None: as many as fit, without accumulation."""
    layers: int
    gpus_per_host: int = 8
    experts: int = 0
    """Experts of one layer; 0: none, or not of a kind that is split."""
    tensor_sizes: tuple[int, ...] = (1,)
    """Sizes of ``tp`` that the model can have."""
    beside_experts: tuple[int, ...] = (1,)
    """Sizes of ``tp`` that it can have where its experts are split."""
    sequence_parallel: bool = False
    """Its tensor-parallel plan can cut sequences."""
    heads: int = 0
    """Heads of keys and values that ``ulysses`` divides over ``cp x tp`` ranks; 0: not known."""
    stages: bool = True
    """The model can be cut into stages."""
    pins: Mapping[str, Collection[Any]] | None = None
    """Allowed values by name of a field of `Layout`."""

    def pinned(self, name: str) -> Collection[Any] | None:
        return (self.pins or {}).get(name)


def layouts(room: Room) -> tuple[list[Layout], Counter[str]]:
    """Return all layouts in `room`, and how many combinations were left out, by reason."""
    rejected: Counter[str] = Counter()
    every: list[Layout] = []
    for pp in _sizes(room, "pp", _powers(min(room.layers, MOST_STAGES) if room.stages else 1)):
        sizes = sorted({*room.tensor_sizes, *room.beside_experts})
        for tp in _sizes(room, "tp", [t for t in sizes if t <= room.gpus_per_host]):
            for cp in _sizes(room, "cp", _context_sizes(room)):
                rest, left = divmod(room.gpus, pp * tp * cp)
                if left or not rest:
                    rejected["the axes do not divide the GPUs"] += 1
                    continue
                for shape in _data_axes(room, rest, tp, cp):
                    for batch in _batches(room, shape, pp, cp, rejected):
                        sized = Layout(*shape[:2], tp, cp, shape[2], pp, None, *batch)
                        for layout in _with_methods(room, sized):
                            every += _with_schedule(room, layout, rejected)
    return every, rejected


def _with_methods(room: Room, layout: Layout) -> Iterator[Layout]:
    """Yield `layout` with the ways in which its ranks share tensors.

    Sequences are cut wherever the plan of ``tp`` can: that takes less memory, and as much time to send.
    """
    sequences: Collection[bool] = (False,)
    if layout.tp > 1:
        can = room.sequence_parallel and room.seq_len // layout.cp % layout.tp == 0
        sequences = room.pinned("sequence_parallel") or (can,)
    losses = (room.pinned("loss_parallel") or (False,)) if layout.tp > 1 else (False,)
    methods: Collection[str] = (ContextParallel.method,)
    if layout.cp > 1:
        divided = room.heads and room.heads % (layout.cp * layout.tp) == 0
        methods = room.pinned("cp_method") or (ContextParallel.method, *(["ulysses"] if divided else []))
    for cut, kept, method in itertools.product(sequences, losses, methods):
        yield replace(layout, sequence_parallel=cut, loss_parallel=kept, cp_method=method)


def _sizes(room: Room, name: str, free: Collection[int]) -> list[int]:
    pinned = room.pinned(name)
    return sorted(free if pinned is None else pinned)


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(max(1, most).bit_length()) if 1 << n <= max(1, most)]


def _context_sizes(room: Room) -> list[int]:
    return [c for c in _powers(min(room.gpus, MOST_CONTEXT)) if c == 1 or room.seq_len // c >= SHORTEST_PART]


def _data_axes(room: Room, ranks: int, tp: int, cp: int) -> Iterator[tuple[int, int, int]]:
    """Yield (dp_replicate, dp_shard, ep) for so many ranks that see other data."""
    for replicas in _sizes(room, "dp_replicate", [n for n in _powers(ranks) if ranks % n == 0]):
        shards, left = divmod(ranks, replicas)
        wanted = room.pinned("dp_shard")
        if left or (wanted is not None and shards not in wanted):
            continue
        if replicas > 1 and shards * cp == 1 and room.pinned("dp_replicate") is None:
            continue  # nothing is sharded: DDP, which has no place here
        splits = [n for n in _powers(room.experts) if room.experts % n == 0] if room.experts else [1]
        for ep in _sizes(room, "ep", splits):
            known = tp in (room.tensor_sizes if ep == 1 else room.beside_experts) or room.pinned("tp") is not None
            if known and (shards * cp * tp) % ep == 0:
                yield replicas, shards, ep


def _batches(
    room: Room, shape: tuple[int, int, int], pp: int, cp: int, rejected: Counter[str]
) -> Iterator[tuple[int, int]]:
    """Yield (micro_batch, grad_accum)."""
    groups = shape[0] * shape[1]
    micro, accum = room.pinned("micro_batch"), room.pinned("grad_accum")
    most = max(1, MOST_TOKENS * cp // room.seq_len)
    if room.global_batch is None:
        for batch in micro or _powers(most):
            for turns in accum or ([1] if pp == 1 else [4 * pp]):
                yield batch, turns
        return
    each, left = divmod(room.global_batch, groups)
    if left or not each:
        rejected["the global batch is not a multiple of the data-parallel ranks"] += 1
        return
    for batch in range(1, each + 1):
        if each % batch or (micro is None and batch > most) or (micro is not None and batch not in micro):
            continue
        if accum is None or each // batch in accum:
            yield batch, each // batch


def _with_schedule(room: Room, layout: Layout, rejected: Counter[str]) -> list[Layout]:
    if layout.pp == 1:
        return [layout]
    scheduled = []
    for word in room.pinned("schedule") or [name for name, facts in SCHEDULE_OBJECTS.items() if facts.is_searched]:
        facts = SCHEDULE_OBJECTS[word]
        if layout.grad_accum < layout.pp:
            rejected["fewer micro-batches than stages"] += 1
        elif facts.check(layout.pp, layout.grad_accum) is not None:
            rejected["the schedule cannot run so many micro-batches"] += 1
        else:
            for per_rank in _stages_per_rank(room, facts, layout.pp):
                if layout.pp * per_rank > room.layers:
                    rejected["more stages than layers"] += 1
                else:
                    scheduled.append(replace(layout, schedule=word, stages_per_rank=per_rank))
    return scheduled


def _stages_per_rank(room: Room, facts: Schedule, ranks: int) -> Collection[int]:
    """Return how many stages a rank may have: of those that a schedule takes, those that divide the layers evenly.

    Each more shortens the bubble, and a longest stage that has more than its share lengthens all.
    """
    pinned = room.pinned("stages_per_rank")
    if pinned is not None:
        return [n for n in pinned if not facts.stages_per_rank or n in facts.stages_per_rank]
    if facts.stages_per_rank:
        return facts.stages_per_rank[:1]
    even = [n for n in range(2, MOST_PER_RANK + 1) if _longest(room.layers, ranks * n) <= MOST_UNEVEN]
    return even or [facts.default_per_rank]


def _longest(layers: int, stages: int) -> float:
    """Return the layers of the longest stage as a multiple of an even share."""
    return -(-layers // stages) * stages / layers if stages <= layers else math.inf
