"""How long a step takes in seconds, by what takes it: kernels, collectives that nothing hides, bubble, optimizer.

A kernel takes the longer of its FLOPs at the device's reachable rate and its bytes at the reachable bandwidth, and at
least a launch. A matrix product fills the device's processors in whole waves of tiles, so that one of few tiles is slower.
Backward is twice a forward, of attention two and a half times (five products for two). FSDP2 gathers a unit beside the one
before it, and reduces its gradients beside the next one's backward: only what is longer than that computing counts.
Shards in host memory (`cpu_offload`) come over the bus before they are gathered, and reduced gradients go there after.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_like.activation_checkpointing.ops import facts
from nemo_like.job import Job
from nemo_like.options import StepSpec
from nemo_like.planning import network
from nemo_like.planning.block import BlockProblem, Choice
from nemo_like.planning.block_trace import OpRecord
from nemo_like.planning.devices import Device
from nemo_like.planning.network import RankGroup, group_of
from nemo_like.planning.sharding import UnitBytes
from nemo_like.planning.step_time import exposed_seconds, kernel_kind, update_seconds

if TYPE_CHECKING:
    from nemo_like.planning.planner import Planner

KERNELS_PER_PARAMETER = 12
"""Of an AdamW step that goes through its parameters one by one."""

_TILE = (128, 256)
"""Rows and columns of the output that one multiprocessor works on at a time, in the large products of cuBLAS and CUTLASS."""
BACKWARD_TIMES = {True: 2.5, False: 2.0}
"""Of forward: attention, and all else."""


def kernel_seconds(op: OpRecord, device: Device) -> float:
    """One kernel; 0 for a view and for what is sent (see `exchanged`)."""
    known = facts(op.op)
    if op.view or known.exchange or _sequence_op(op):
        return 0.0
    computing = op.flops / device.flops_of(op.op, half=op.half)
    if op.flops and not known.attention:
        computing /= wave_share(op.shapes, device.processors)
    return max(computing, op.moved / device.bandwidth, device.launch_seconds if op.moved else 0.0)


def wave_share(shapes: Sequence[tuple[int, ...]], processors: int) -> float:
    """How much of the device a matrix product with an output of that shape keeps busy: tiles in whole waves.

    >>> round(wave_share([(8192, 4096)], 132), 3), wave_share([(128, 256)], 132) < 0.01
    (0.97, True)
    """
    if not processors or not shapes or len(shapes[0]) < 2:
        return 1.0
    rows, columns = math.prod(shapes[0][:-1]), shapes[0][-1]
    tiles = -(-rows // _TILE[0]) * -(-columns // _TILE[1])
    return tiles / (-(-tiles // processors) * processors)


def least_seconds(problem: BlockProblem, only: Collection[int] | None = None) -> tuple[float, float]:
    """Forward and backward of a block per call, as a bound for other numbers of tokens: a token's share of the kernels'
    FLOPs and bytes is at least this in any shape with the same weights, since launches, part waves and the bytes of
    weights, which are read once for all tokens, are left out. Attention over all keys of whole sequences has as many FLOPs
    per token however the sequences are cut. `only`: of these of its records; None: of all."""
    device, forward, backward = problem.device, 0.0, 0.0
    for number, op in enumerate(problem.records):
        known = facts(op.op)
        if known.exchange or _sequence_op(op) or (only is not None and number not in only):
            continue
        moved = 0 if known.attention else max(0, op.moved - problem.trace.param_bytes)
        least = max(op.flops / device.flops_of(op.op, half=op.half), moved / device.bandwidth)
        forward += least
        backward += least * BACKWARD_TIMES[known.attention]
    return forward, backward if problem.trace.saves_something else 0.0


_NOT_OF_SEQUENCES = ("nemo_like::route", "nemo_like::rows_of_all")


def _summed(records: Sequence[OpRecord], hidden: int) -> int:
    """Bytes that ranks of tensor parallelism sum up in a forward, behind attention and behind the FFN; a gather takes half
    the time of a sum. `hidden`: bytes of the hidden states, as of each of the two that the trace lacks: the sum of experts
    that are split inside is in place."""
    sums = [op.bytes for op in records if op.op.name() == "_c10d_functional::all_reduce"]
    gathered = ("_c10d_functional::all_gather_into_tensor", "nemo_like::rows_of_all")
    sums += [op.bytes // 2 for op in records if op.op.name() in gathered]
    return sum(sums) + max(0, 2 - len(sums)) * hidden


def _sequence_op(op: OpRecord) -> bool:
    return op.op.namespace == "nemo_like" and facts(op.op).collective and not facts(op.op).exchange


def fused(records: Sequence[OpRecord]) -> tuple[OpRecord, ...]:
    """The same operators as a compiler fuses them: of several in a row without a matrix product, attention or collective,
    the first reads from memory, and what is written is what the last one makes and what backward needs."""
    heavy = [bool(op.flops) or facts(op.op).attention or facts(op.op).collective for op in records]
    made = []
    for place, op in enumerate(records):
        if heavy[place]:
            made.append(op)
            continue
        first = place == 0 or heavy[place - 1]
        last = place + 1 == len(records) or heavy[place + 1]
        reads = max(0, op.moved - op.bytes) if first else 0
        made.append(replace(op, moved=reads + (op.bytes if last or op.needed else 0)))
    return tuple(made)


@dataclass(frozen=True)
class BlockSeconds:
    """One kind of layer in one local shape: seconds of its kernels, and bytes that it sends."""

    kernels: tuple[float, ...]
    """Of each of `BlockProblem.records`, forward."""
    forward: float
    backward: float
    sequence_bytes: int
    """Gathered over ``cp`` in a forward."""
    expert_bytes: int
    """Sent by all-to-all over ``ep`` in a forward."""
    boundary_bytes: int
    """What tensor parallelism sums up, behind attention and behind the FFN: of both the mean. The hidden states, where the
    trace has no such sum; half of them for what is gathered alone, as the rows of split experts."""
    kinds: tuple[str, ...] = ()
    """Of each of `kernels`: ``launch`` where that is what it takes, else `nemo_like.planning.step_time.kernel_kind`."""
    attends: tuple[bool, ...] = ()
    """Of each of `kernels`: whether it is attention."""

    @classmethod
    def of(cls, problem: BlockProblem, *, compiled: bool = False, fp8_flops: float = 0.0) -> BlockSeconds:
        """Of one traced block, at the rates of its device. `compiled`: what stands between matrix products is fused, see
        `fused`. `fp8_flops`: matrix products run at this rate, and their operands are read once more to be cast; 0: they
        do not."""
        records, device = fused(problem.records) if compiled else problem.records, problem.device
        kernels = problem.measured or tuple(kernel_seconds(op, device) for op in records)
        if fp8_flops:
            kernels = tuple(
                max(op.flops / fp8_flops / wave_share(op.shapes, device.processors), op.moved / 2 / device.bandwidth)
                + op.moved / device.bandwidth
                if op.flops and op.half and not facts(op.op).attention
                else seconds
                for op, seconds in zip(records, kernels)
            )
        attends = tuple(facts(op.op).attention for op in records)
        back = sum(seconds * BACKWARD_TIMES[attention] for seconds, attention in zip(kernels, attends))
        return cls(
            kernels,
            sum(kernels),
            back if problem.trace.saves_something else 0.0,
            sum(op.bytes for op in records if _sequence_op(op) and op.op.name() not in _NOT_OF_SEQUENCES),
            sum(op.moved // 2 for op in records if facts(op.op).exchange),
            _summed(records, problem.trace.input_bytes) // 2,
            tuple(
                "launch" if seconds == device.launch_seconds else kernel_kind(op.op, op.flops)
                for seconds, op in zip(kernels, records)
            ),
            attends,
        )

    def replay(self, choice: Choice, reachable: int) -> float:
        """Kernels that backward runs again."""
        return sum(
            s
            for k, (s, word) in enumerate(zip(self.kernels, choice.decisions))
            if word == "recompute" and k < reachable
        )


@dataclass(frozen=True)
class StepSeconds:
    """One optimizer step, in seconds by what takes them; their sum is the step."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class LayerRun:
    """Equal calls of layers in one step."""

    count: int
    block: BlockSeconds
    replay: float
    """Seconds of kernels."""
    replays_exchanges: bool
    """Collectives inside are run again: where nothing inside is kept."""
    unit: UnitBytes | None
    experts: UnitBytes | None = None
    copies: float = 0.0
    """Seconds of copies of activations to the host that computing does not hide."""
    moved: int = 0
    """Bytes of activations that go to the host, and back beside backward."""
    kind: int = 0
    """The number of the kind of layer among those that were traced."""
    choice: Choice | None = None


@dataclass(frozen=True)
class Links:
    """The groups of ranks of a job on a device."""

    device: Device
    tensor: RankGroup
    sequence: RankGroup
    shards: RankGroup
    replicas: RankGroup
    experts: RankGroup
    expert_shards: RankGroup

    @classmethod
    def of(cls, job: Job, device: Device) -> Links:
        tp, cp, host = job.tp.size, job.cp.size, device.gpus_per_host
        shards, ep = job.shard_ranks, job.ep.size
        inner = shards * tp
        return cls(
            device,
            group_of(tp, 1, host),
            group_of(cp, tp, host),
            group_of(shards, tp, host),
            group_of(job.dp_replicate, inner, host),
            group_of(ep, 1, host),
            group_of(max(1, inner // ep), ep, host),
        )


def step_seconds(
    runs: Sequence[LayerRun],
    outside: Sequence[UnitBytes],
    links: Links,
    step: StepSpec,
    *,
    outer: float,
    optimizer: float,
) -> StepSeconds:
    """A whole step without pipeline stages.

    Args:
        runs: the layer calls of one rank (of its stages), grouped.
        outside: FSDP2's units beside the layers: tail and root.
        links: who is connected how.
        step: how many micro-batches, which of them reduce gradients, and whether gradients of the step before are there.
        outer: seconds of one microbatch's embedding, head and loss, forward and backward.
        optimizer: seconds of the optimizer's step.
    """
    turns = step.microbatches
    reduced = turns if step.sync == "every" else 1
    summed = reduced - (0 if step.zero_grad == "zero" else 1)
    parts = dict.fromkeys(
        (
            "forward",
            "backward",
            "replay",
            "head and embedding",
            "tensor-parallel sums",
            "sequence gathers",
            "expert exchanges",
            "parameter gathers",
            "gradient reductions",
            "host copies",
            "gradient sums on the host",
        ),
        0.0,
    )
    for run in runs:
        block, n = run.block, run.count * turns
        sums, gathered, sent = inside_seconds(run, links)
        again = 1 if run.replays_exchanges else 0
        parts["forward"] += n * block.forward
        parts["backward"] += n * block.backward
        parts["replay"] += n * run.replay
        # Forward and backward sum up behind attention and FFN; replay stops before it has to behind the latter.
        parts["tensor-parallel sums"] += n * sums * (4 + again)
        parts["sequence gathers"] += n * gathered * (2 + again)
        parts["expert exchanges"] += n * sent * (2 + again)
        parts["host copies"] += n * run.copies
        if run.unit is None:
            continue
        waits = waits_of(run, links)
        parts["parameter gathers"] += n * (waits.forward + waits.backward)
        parts["gradient reductions"] += run.count * reduced * waits.reduction
        parts["host copies"] += n * (waits.fetch_forward + waits.fetch_backward) + run.count * reduced * waits.store
        parts["gradient sums on the host"] += run.count * summed * waits.summing
    for unit in outside:
        gather, reduce = unit_seconds(unit, links.shards, links)
        parts["parameter gathers"] += turns * gather  # a backward frees them, tail and root as well
        parts["gradient reductions"] += reduced * reduce
        fetch, store = copy_seconds((unit,), links.device)
        parts["host copies"] += turns * fetch + reduced * store
        parts["gradient sums on the host"] += summed * host_sum_seconds((unit,), links.device)
    parts["head and embedding"] = turns * outer
    parts["optimizer"] = optimizer
    return StepSeconds({name: value for name, value in parts.items() if value})


def planned_seconds(planner: Planner, choices: Sequence[Choice]) -> StepSeconds:
    """Return the seconds of the step of `planner` under `choices`, by what takes them."""
    sharding, step, device = planner.sharding, planner.job.step, planner.device
    trained = len(sharding.trained) + len(sharding.trained_on_host)  # the host's kernels are called as slowly
    loop = trained * KERNELS_PER_PARAMETER * device.launch_seconds
    return step_seconds(
        layer_runs(planner, choices),
        units_outside(planner),
        Links.of(planner.job, device),
        step,
        outer=planner.outer().seconds,
        optimizer=max(loop, update_seconds(sharding, step.optimizer, device)),
    )


def units_outside(planner: Planner) -> list[UnitBytes]:
    """FSDP2's units that are not layers."""
    sharding = planner.sharding
    return [unit for unit in (sharding.tail, sharding.root) if unit is not None] if sharding.on else []


def layer_runs(planner: Planner, choices: Sequence[Choice]) -> list[LayerRun]:
    """The layer calls of a micro-batch, equal ones together."""
    key = tuple(map(id, choices))
    if key in planner.runs:
        return planner.runs[key][1]
    sharding = planner.sharding
    units = dict(zip(sharding.modules, sharding.units))
    runs: Counter[tuple[Any, ...]] = Counter()
    for call, choice, moves in zip(planner.traced.calls, choices, planner.moved(choices)):
        runs[call.kind, choice, moves, units.get(id(call.module)), sharding.experts.get(id(call.module))] += 1
    made = []
    for (kind, choice, moves, unit, experts), count in runs.items():
        block = planner.blocks[kind]
        replay = block.replay(choice, planner.problems[kind].reachable)
        copies = exposed_seconds(moves, block.forward, planner.device)
        made.append(LayerRun(count, block, replay, choice.label == "full", unit, experts, copies, moves, kind, choice))
    planner.runs[key] = choices, made  # told apart by id, so the choices must live
    return made


def inside_seconds(run: LayerRun, links: Links) -> tuple[float, float, float]:
    """Of one of each: a sum of tensor parallelism, a layer's gathers of keys and values, its exchanges of experts' rows."""
    block, device = run.block, links.device
    return (
        network.reduce_seconds(block.boundary_bytes, links.tensor, device),
        network.gather_seconds(block.sequence_bytes, links.sequence, device),
        network.exchange_seconds(block.expert_bytes, links.experts, device),
    )


class Waits(NamedTuple):
    """FSDP2 in one layer call: what its collectives and copies take, and what of that computing does not hide; seconds."""

    gather: float
    reduce: float
    forward: float
    """For the gather before forward."""
    backward: float
    """For the one before backward; 0 where the layer stays gathered."""
    reduction: float
    fetch_forward: float = 0.0
    """For the copy of shards from host memory that is gathered before forward."""
    fetch_backward: float = 0.0
    store: float = 0.0
    """For the copy of reduced gradients to host memory."""
    copies: tuple[float, float] = (0.0, 0.0)
    """What a copy from there takes, and one to there."""
    summing: float = 0.0
    """To add gradients to those that are there. The host waits for reduction and copy first, and launches nothing, so that
    what else computing hides of both is among it."""


def waits_of(run: LayerRun, links: Links) -> Waits:
    """Of a call of a layer that is a unit."""
    assert run.unit is not None
    block, again = run.block, 1 if run.replays_exchanges else 0
    sums, gathered, sent = inside_seconds(run, links)
    ahead = block.forward + 2 * sums + gathered + sent
    behind = block.backward + run.replay + (2 + again) * sums + (1 + again) * (gathered + sent)
    gather, reduce = _run_seconds(run, links)
    units = [unit for unit in (run.unit, run.experts) if unit is not None]
    copies = fetch, store = copy_seconds(units, links.device)
    backward = 0.0
    if run.unit.reshard:
        # Activations come back over the same bus.
        bus = run.moved / links.device.host_link if fetch else 0.0
        behind = max(0.0, behind - bus)
        backward, behind = max(0.0, fetch + gather - behind), max(0.0, behind - fetch - gather)
    forward, reduction = max(0.0, fetch + gather - ahead), max(0.0, reduce + store - behind)
    # What comes last is what is waited for: gathers after copies, copies after reductions.
    late = min(gather, forward), min(gather, backward), min(store, reduction)
    adding = host_sum_seconds(units, links.device)
    summing = adding + reduce + store - reduction if adding else 0.0
    return Waits(
        gather,
        reduce,
        late[0],
        late[1],
        reduction - late[2],
        forward - late[0],
        backward - late[1],
        late[2],
        copies,
        summing,
    )


def _run_seconds(run: LayerRun, links: Links) -> tuple[float, float]:
    assert run.unit is not None
    gather, reduce = unit_seconds(run.unit, links.shards, links)
    if run.experts is not None:
        more = unit_seconds(run.experts, links.expert_shards, links)
        gather, reduce = gather + more[0], reduce + more[1]
    return gather, reduce


def copy_seconds(units: Sequence[UnitBytes], device: Device) -> tuple[float, float]:
    """To copy shards from host memory, and reduced gradients to it."""
    link = device.host_link
    return sum(unit.host_shard for unit in units) / link, sum(unit.host_grad for unit in units) / link


def host_sum_seconds(units: Sequence[UnitBytes], device: Device) -> float:
    """To add gradients to those of an earlier microbatch in host memory: both are read and one is written."""
    size = sum(unit.host_grad for unit in units)
    return 3 * size / (device.host_bandwidth or device.host_link) if size else 0.0


def unit_seconds(unit: UnitBytes, shards: RankGroup, links: Links) -> tuple[float, float]:
    """To gather a unit, and to reduce its gradients, over replicas too."""
    device = links.device
    gather = network.gather_seconds(unit.gathered, shards, device)
    reduce = network.gather_seconds(unit.reduce_input, shards, device)
    return gather, reduce + network.reduce_seconds(unit.reduce_output, links.replicas, device)
