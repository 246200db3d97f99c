"""Layouts of a step over the GPUs, which `fit` searches, and the job of each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemo_like.flags import FLAGS
from nemo_like.job import Job
from nemo_like.options import (
    CONTEXT_METHODS,
    FSDP2,
    ChunkedLoss,
    ContextParallel,
    MemoryBudget,
    PipelineParallel,
    StepSpec,
    parse_ac,
)
from nemo_like.options.pipelining import SCHEDULES, Schedule

# Tokens of the shortest part that sequences are cut into, unless the caller pins ``cp``.
SHORTEST_PART = 4096
# Most tokens of one rank in one micro-batch, of one sequence or more, unless the caller pins ``micro_batch``.
MOST_TOKENS = 1 << 15
# Most stages of a rank that are searched, and most layers of the longest stage, as a multiple of an even share.
MOST_PER_RANK, MOST_UNEVEN = 10, 1.1
# Most ranks of ``cp`` and of ``pp`` that are searched, unless the caller pins more.
MOST_CONTEXT, MOST_STAGES = 64, 32

# Options of FSDP2 that are searched; the name of that which moves shards, gradients and optimizer state to CPU memory.
SHARDING = tuple(flag for flag in FLAGS.values() if flag.owner is FSDP2 and flag.searched)
MOVED = next(flag.name for flag in SHARDING if flag.moves)


@dataclass(frozen=True)
class Layout:
    """One way to train: the sizes of the axes, the batch, checkpointing and offloading, in words of `fit`'s pins."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1  # Ranks that share the experts, out of ``dp_shard x cp x tp``.
    pp: int = 1
    schedule: str | None = None
    micro_batch: int = 1  # Sequences of one rank (with `cp`: of one group) in one micro-batch.
    grad_accum: int = 1  # Micro-batches of a step; with `pp`, those of the pipeline.
    stages_per_rank: int | None = None  # Stages of a pipeline on one rank; None: the schedule's default.
    sequence_parallel: bool = False
    loss_parallel: bool = False
    cp_method: str = ContextParallel.method
    ac: str = "none"  # ``none``, ``full``, ``selective``, or ``plan``: the best within the memory.
    loss: str = "model"  # ``model``, or ``chunked``.
    offload: str = "none"
    fsdp: FSDP2 = FSDP2()
    sync: str = StepSpec.sync

    @property
    def words(self) -> dict[str, Any]:
        """Its values by the name of their pin."""
        of_fsdp = {flag.name: getattr(self.fsdp, flag.name) for flag in SHARDING}
        return {name: value for name, value in (vars(self) | of_fsdp).items() if name != "fsdp"}

    @property
    def gpus(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def sequences(self) -> int:
        """Sequences of all ranks in one step."""
        return self.dp_replicate * self.dp_shard * self.micro_batch * self.grad_accum

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Sizes of the axes, schedule and batch: a report has one line of each."""
        axes = self.dp_replicate, self.dp_shard, self.tp, self.cp, self.ep, self.pp
        return *axes, self.schedule, self.stages_per_rank, self.micro_batch, self.grad_accum

    @property
    def facts(self) -> Schedule:
        """Facts about its schedule, by default torch's first."""
        return SCHEDULES[self.schedule or PipelineParallel.schedule]

    @property
    def options(self) -> int:
        """Number of options that are not at their defaults, batch and data parallelism apart."""
        plain = Layout(dp_replicate=self.dp_replicate, dp_shard=self.dp_shard).words
        free = {"micro_batch", "grad_accum", "schedule", "cp_method", "ac"}
        return sum(value != plain[name] for name, value in self.words.items() if name not in free)

    def way(self, **words: Any) -> Layout:
        """Return the layout with other words; made again since `dataclasses.replace` is slow where thousands are made."""
        return Layout(**{**vars(self), **words})


def job_of(asked: Job, layout: Layout, limit: Callable[[Job], int], given: Job | None = None) -> Job:
    """Return the job that runs `layout`.

    Args:
        asked: options of all layouts: precision, optimizer, device, and those of each axis.
        limit: bytes that a step of a job may take on each GPU, for a plan.
        given: the caller's job, for the fields of its options that a layout does not set.

    Raises:
        ValueError: options of the layout exclude each other.
    """
    given = asked if given is None else given
    stages = PipelineParallel()
    if layout.pp > 1:
        stages = replace(
            given.pp,
            size=layout.pp,
            schedule=layout.schedule or PipelineParallel.schedule,
            microbatches=layout.grad_accum,
            stages_per_rank=layout.stages_per_rank,
        )
    sharding = asked.strategy if isinstance(asked.strategy, FSDP2) else FSDP2()
    accumulated = layout.grad_accum if layout.pp == 1 else 1
    job = asked.on(
        dp_shard=layout.dp_shard,
        dp_replicate=layout.dp_replicate,
        tp=replace(
            asked.tp,
            size=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            loss_parallel=layout.loss_parallel,
            asynchronous=asked.tp.asynchronous and layout.tp > 1 and layout.sequence_parallel,
        ),
        cp=replace(asked.cp, size=layout.cp, method=layout.cp_method),
        ep=replace(asked.ep, size=layout.ep, imbalance=asked.ep.imbalance if layout.ep > 1 else None),
        pp=stages,
        step=replace(asked.step, microbatches=accumulated, sync=layout.sync),
        ac=parse_ac("none" if layout.ac == "plan" else layout.ac),
        loss=None if layout.loss == "model" else given.loss or ChunkedLoss(),
        offload=replace(given.offload, mode=layout.offload),
        strategy=replace(sharding, **{flag.name: getattr(layout.fsdp, flag.name) for flag in SHARDING}),
    )
    return replace(job, ac=MemoryBudget(peak_bytes=limit(job))) if layout.ac == "plan" else job


@dataclass(frozen=True)
class Room:
    """Limits that layouts have to keep to."""

    gpus: int
    seq_len: int
    global_batch: int | None  # Sequences of a step over all GPUs; None: as many as fit, without accumulation.
    layers: int
    gpus_per_node: int = 8
    experts: int = 0  # Experts of one layer; 0: none, or not of a kind that is split.
    tensor_sizes: tuple[int, ...] = (1,)  # Sizes of ``tp`` that the model can have.
    beside_experts: tuple[int, ...] = (1,)  # Sizes of ``tp`` that it can have where its experts are split.
    sequence_parallel: bool = False  # Its tensor-parallel plan can cut sequences.
    heads: int = 0  # Heads of keys and values that ``ulysses`` divides over ``cp x tp`` ranks; 0: not known.
    stages: bool = True  # Stages are searched whatever ``tp`` is: there are several nodes.
    pins: Mapping[str, Collection[Any]] | None = None  # Allowed values by name of a field of `Layout`.

    def pinned(self, name: str) -> Collection[Any] | None:
        return (self.pins or {}).get(name)


def layouts(room: Room) -> tuple[list[Layout], Counter[str]]:
    """Return all layouts in `room`, and how many combinations were left out, by reason."""
    rejected: Counter[str] = Counter()
    every: list[Layout] = []
    most = min(room.layers, MOST_STAGES, room.gpus)
    for pp in _sizes(room, "pp", _powers(most if room.stages else min(most, room.gpus // 2))):
        sizes = sorted({*room.tensor_sizes, *room.beside_experts})
        for tp in _sizes(room, "tp", [t for t in sizes if t <= room.gpus_per_node]):
            if pp > 1 and room.pinned("pp") is None and not (room.stages or (tp > 1 and tp * pp == room.gpus)):
                continue  # on one node, stages are for the GPUs that tp leaves
            parts = [c for c in _powers(min(room.gpus, MOST_CONTEXT)) if c == 1 or room.seq_len // c >= SHORTEST_PART]
            for cp in _sizes(room, "cp", parts):
                rest, remainder = divmod(room.gpus, pp * tp * cp)
                if remainder or not rest:
                    rejected["the axes do not divide the GPUs"] += 1
                    continue
                for shape in _data_axes(room, rest, tp, cp):
                    for batch in _batches(room, shape, pp, cp, rejected):
                        sized = Layout(*shape[:2], tp, cp, shape[2], pp, None, *batch)
                        for layout in _with_methods(room, sized):
                            every += _with_schedule(room, layout, rejected)
    return every, rejected


def _with_methods(room: Room, layout: Layout) -> Iterator[Layout]:
    """Yield `layout` with the ways in which its ranks share tensors; sequences are cut where the plan of ``tp`` can."""
    sequences: Collection[bool] = (False,)
    if layout.tp > 1:
        can = room.sequence_parallel and room.seq_len // layout.cp % layout.tp == 0
        sequences = room.pinned("sequence_parallel") or ((True, False) if can else (False,))
    losses = (room.pinned("loss_parallel") or (False,)) if layout.tp > 1 else (False,)
    methods: Collection[str] = (ContextParallel.method,)
    if layout.cp > 1:
        ranks = layout.cp * layout.tp
        searched = [word for word, facts in CONTEXT_METHODS.items() if facts.is_searched(room.heads, ranks)]
        methods = room.pinned("cp_method") or searched
    for cut, kept, method in itertools.product(sequences, losses, methods):
        yield layout.way(sequence_parallel=cut, loss_parallel=kept, cp_method=method)


def _sizes(room: Room, name: str, free: Collection[int]) -> list[int]:
    pinned = room.pinned(name)
    return sorted(free if pinned is None else pinned)


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(max(1, most).bit_length()) if 1 << n <= max(1, most)]


def _data_axes(room: Room, ranks: int, tp: int, cp: int) -> Iterator[tuple[int, int, int]]:
    """Yield (dp_replicate, dp_shard, ep) for so many ranks that see other data."""
    for replicas in _sizes(room, "dp_replicate", [n for n in _powers(ranks) if ranks % n == 0]):
        shards, remainder = divmod(ranks, replicas)
        wanted = room.pinned("dp_shard")
        if remainder or (wanted is not None and shards not in wanted):
            continue
        if replicas > 1 and shards * cp == 1 and room.pinned("dp_replicate") is None:
            continue  # nothing is sharded: DDP, which has no place here
        splits = [n for n in _powers(room.experts) if room.experts % n == 0] if room.experts else [1]
        for ep in _sizes(room, "ep", splits):
            allowed = tp in (room.tensor_sizes if ep == 1 else room.beside_experts) or room.pinned("tp") is not None
            if allowed and (shards * cp * tp) % ep == 0:
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
    per_group, remainder = divmod(room.global_batch, groups)
    if remainder or not per_group:
        rejected["the global batch is not a multiple of the data-parallel ranks"] += 1
        return
    for batch in range(1, per_group + 1):
        if per_group % batch or (micro is None and batch > most) or (micro is not None and batch not in micro):
            continue
        if accum is None or per_group // batch in accum:
            yield batch, per_group // batch


def _with_schedule(room: Room, layout: Layout, rejected: Counter[str]) -> list[Layout]:
    if layout.pp == 1:
        return [layout]
    scheduled = []
    for word in room.pinned("schedule") or [name for name, facts in SCHEDULES.items() if facts.is_searched]:
        facts = SCHEDULES[word]
        if layout.grad_accum < layout.pp:
            rejected["fewer micro-batches than stages"] += 1
        elif facts.check(layout.pp, layout.grad_accum) is not None:
            rejected["the schedule cannot run so many micro-batches"] += 1
        else:
            for per_rank in _stages_per_rank(room, facts, layout.pp):
                if layout.pp * per_rank > room.layers:
                    rejected["more stages than layers"] += 1
                else:
                    scheduled.append(layout.way(schedule=word, stages_per_rank=per_rank))
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
    even = [
        n
        for n in range(2, min(MOST_PER_RANK, room.layers // ranks) + 1)
        # The layers of the longest stage, as a multiple of an even share.
        if -(-room.layers // (ranks * n)) * ranks * n / room.layers <= MOST_UNEVEN
    ]
    return even or [facts.default_per_rank]
