"""Seconds of a step by part: kernels, collectives that nothing hides, bubble, optimizer.

FSDP2 gathers a unit while the one before it computes, and reduces its gradients during the next one's backward. Only the
part that is longer than that computing counts. Shards in CPU memory come over the bus before they are
gathered, and reduced gradients go there after. The stages of a pipeline run by its schedule, gathered and reduced once in a
step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_like.distributed.pipeline.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, actions_of
from nemo_like.job import Job
from nemo_like.planning import roofline
from nemo_like.planning.devices import Device
from nemo_like.planning.query import Choices, PlanQuery, Stage
from nemo_like.planning.roofline import (
    RankGroup,
    exposed_seconds,
    group_of,
    host_optimizer_seconds,
    host_seconds,
    optimizer_seconds,
)
from nemo_like.planning.selection.layer import Choice, Collectives, LayerRun
from nemo_like.planning.sharding import UnitBytes

HOST = "waiting for the host"
"""The part of a step in which the device has no kernel left, since the host launches them more slowly than it runs them."""
# Kernels per parameter of an AdamW step that goes through its parameters one by one.
KERNELS_PER_PARAMETER = 12


@dataclass(frozen=True)
class Row:
    """Seconds, or bytes, of one part of a step, or of a share of it."""

    part: str  # A key of `Candidate.peak.parts` or `Candidate.seconds.parts`.
    what: str  # Share of the part, in words; empty: the whole part.
    amount: float  # Bytes (whole numbers), or seconds.
    hidden: float = 0.0  # Seconds in addition to `amount` that computing hides.


@dataclass(frozen=True)
class StepSeconds:
    """One optimizer step, in seconds by part; their sum is the step."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


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
    sequence_parallel: bool = False  # Tensor parallelism gathers and scatters sequences.
    asynchronous: bool = False  # It does so in pieces, beside matmuls.

    @classmethod
    def for_job(cls, job: Job, device: Device) -> Links:
        tp, cp, node = job.tp.size, job.cp.size, device.gpus_per_node
        shards, ep = job.shard_ranks, job.ep.size
        inner = shards * tp
        return cls(
            device,
            group_of(tp, 1, node),
            group_of(cp, tp, node),
            group_of(shards, tp, node),
            group_of(job.dp_replicate, inner, node),
            group_of(ep, 1, node),
            group_of(max(1, inner // ep), ep, node),
            job.tp.sequence_parallel,
            job.tp.asynchronous,
        )


def step_seconds(query: PlanQuery, choices: Choices) -> StepSeconds:
    """Return the seconds of a step, by part.

    In a pipeline, they are those in which the busiest rank computes, sends and waits. The gathers and reductions of its
    stages, once in a step, are added.
    """
    if not query.is_pipeline:
        return _loop_seconds(query.stages[0], choices[0])
    links = Links.for_job(query.job, query.device)
    stages, ranks = seconds_of_stages(query, choices), [query.of_rank(rank) for rank in range(query.pp.size)]
    busiest = ranks[busiest_rank(ranks, stages)]
    parts = {name: sum(stages[index][name] for index in busiest) * query.microbatches for name in stages[0]}
    actions, seconds = actions_of(query.pp), action_seconds(stages)
    computing = timeline(actions, seconds, len(stages)).seconds
    parts["pipeline bubble"] = max(0.0, computing - sum(parts.values()))
    sending = timeline(actions, seconds, len(stages), handing_on(query)).seconds
    parts["pipeline sends"] = max(0.0, sending - computing)
    once = [_once_seconds(query, indices, links) for indices in ranks]
    for number, name in enumerate(("parameter gathers", "gradient reductions", "optimizer")):
        parts[name] = max(each[number] for each in once)
    return StepSeconds({name: value for name, value in parts.items() if value})


_SUMS = "gradient sums on the host"
_SENT = ("tensor-parallel sums", "sequence gathers", "expert exchanges", "host copies", HOST)
_PARTS = ("forward", "backward", "replay", "head and embedding", *_SENT)


def microbatch_seconds(stage: Stage, choices: Sequence[Choice], links: Links, turns: int = 1) -> dict[str, float]:
    """Return the seconds of `turns` micro-batches in a stage, by part, without FSDP2."""
    parts = dict.fromkeys(_PARTS, 0.0)
    for row in microbatch_rows(stage, choices, links, turns):
        parts[row.part] += row.amount
    launching = sum(run.count * turns * launching_seconds(run, links) for run in layer_runs(stage, choices))
    parts[HOST] = max(0.0, launching - sum(parts.values()))
    return parts


def _loop_seconds(stage: Stage, choices: Sequence[Choice]) -> StepSeconds:
    """Return the seconds of a whole step without a pipeline."""
    links = Links.for_job(stage.job, stage.device)
    parts = microbatch_seconds(stage, choices, links, stage.job.step.microbatches)
    waiting, inside = parts[HOST], sum(parts.values())
    parts |= dict.fromkeys(("parameter gathers", "gradient reductions", _SUMS), 0.0)
    for row in fsdp_rows(stage, choices, links):
        parts[row.part] += row.amount
    parts[HOST] = max(0.0, waiting - (sum(parts.values()) - inside))  # it goes on while the device waits for FSDP2
    parts["optimizer"] = optimizer_seconds_of(stage)
    return StepSeconds({name: value for name, value in parts.items() if value})


# --- rows -----------------------------------------------------------------------------------------------------------


def microbatch_rows(
    stage: Stage, choices: Sequence[Choice], links: Links, turns: int, where: str = ""
) -> Iterator[Row]:
    """Yield rows of `turns` micro-batches in a stage, without FSDP2; `where`: words before each kind of kernel."""
    for kind, seconds in stage.outside().kinds.items():
        yield Row("head and embedding", f"{where}{kind}", turns * seconds)
    for run in layer_runs(stage, choices):
        yield from _kernel_rows(run, stage.part.problems[run.kind].reachable, run.count * turns, where)
        yield from _inside_rows(run, links, run.count * turns)


def _kernel_rows(run: LayerRun, reachable: int, count: float, where: str) -> Iterator[Row]:
    block, choice = run.block, run.choice
    assert choice is not None
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for number, (seconds, kind) in enumerate(zip(block.kernels, block.kinds)):
        sums["forward", kind] += seconds
        if block.backward:
            sums["backward", kind] += seconds * block.backward_times[number]
        if number < reachable and choice.decisions and choice.decisions[number] == "recompute":
            sums["replay", kind] += seconds
    for (part, kind), seconds in sums.items():
        yield Row(part, f"{where}{kind}", count * seconds)


def _inside_rows(run: LayerRun, links: Links, count: int) -> Iterator[Row]:
    """The collectives that nothing hides: sums of ``tp``, gathers of ``cp``, exchanges of ``ep``."""
    sums, gathered, sent = inside_seconds(run, links)
    for part, what, each, times, again in (
        ("tensor-parallel sums", f"all-reduce ({axis_words('tp', links.tensor)})", sums, (2, 2), run.again.sums),
        (
            "sequence gathers",
            f"all-gather of keys and values ({axis_words('cp', links.sequence)})",
            gathered,
            (1, 1),
            run.again.gathers,
        ),
        (
            "expert exchanges",
            f"all-to-all of rows ({axis_words('ep', links.experts)})",
            sent,
            (1, 1),
            run.again.exchanges,
        ),
    ):
        for phase, often in zip(("forward", "backward", "replay"), (*times, again)):
            yield Row(part, f"{what}, {phase}", count * often * each)
    again_seconds = roofline.gather_seconds(run.block.gathered_again, links.sequence, links.device)
    yield Row("sequence gathers", "all-gather of keys and values again, backward", count * again_seconds)
    yield Row("host copies", "layers' inputs to CPU memory and back", count * run.copies)


def fsdp_rows(stage: Stage, choices: Sequence[Choice], links: Links) -> Iterator[Row]:
    """Yield rows of FSDP2's gathers and reductions without a pipeline, with the seconds that computing hides."""
    step = stage.job.step
    turns = step.microbatches
    reduced = turns if step.sync == "every" else 1
    # Reductions whose gradients are added to others in CPU memory, for which the CPU waits.
    summed = reduced - (0 if step.zero_grad == "zero" else 1)
    for run in layer_runs(stage, choices):
        if run.unit is not None:
            yield from _unit_rows(run, links, run.count * turns, run.count * reduced, run.count * summed)
    for unit in stage.sharding.outside if stage.sharding.on else ():
        yield from _end_rows(unit, links, turns, reduced, summed)


def axis_words(axis: str, group: RankGroup) -> str:
    """Return an axis in words."""
    return f"{axis}={group.ranks}" + (f" on {group.nodes} nodes" if group.nodes > 1 else "")


def _unit_rows(run: LayerRun, links: Links, count: int, reductions: int, summed: int) -> Iterator[Row]:
    """Yield the rows of FSDP2 in calls of a layer that is a unit: collectives and copies, exposed and hidden."""
    assert run.unit is not None
    units = [unit for unit in (run.unit, run.experts) if unit is not None]
    gather, reduce = units_seconds(units, links)
    fetch, store = copy_seconds(units, links.device)
    block, again = run.block, run.again
    sums, gathered, sent = inside_seconds(run, links)
    ahead = block.forward + 2 * sums + gathered + sent
    behind = block.backward + run.replay + (2 + again.sums) * sums
    behind += (1 + again.gathers) * gathered + (1 + again.exchanges) * sent
    fetching = [("forward", max(0.0, fetch + gather - ahead))]  # Exposed seconds before forward, and before backward.
    if run.unit.reshard:
        # Activations come back over the same bus.
        bus = run.moved / links.device.host_link if fetch else 0.0
        behind = max(0.0, behind - bus)
        fetching.append(("backward", max(0.0, fetch + gather - behind)))
        behind = max(0.0, behind - fetch - gather)
    over = axis_words("dp_shard", links.shards) + (f"; experts: {links.expert_shards.ranks}" if run.experts else "")
    for phase, exposed in fetching:
        late = min(gather, exposed)  # The last one is waited for: gathers come after copies.
        copied = exposed - late
        words = f"all-gather of layers ({over}), {phase}"
        yield Row("parameter gathers", words, count * late, count * (gather - late))
        words = f"layers' parameters from CPU memory, {phase}"
        yield Row("host copies", words, count * copied, count * (fetch - copied))
    exposed = max(0.0, reduce + store - behind)
    stored = min(store, exposed)  # Here the copies come last.
    replicas = sum(roofline.reduce_seconds(unit.reduce_output, links.replicas, links.device) for unit in units)
    # The replicas' sum comes after the reduce-scatter, which is hidden first.
    late = min(replicas, exposed - stored)
    # To add gradients to existing ones, the host waits for reduction and copy first, and launches nothing. So the part
    # of both that computing would hide counts there.
    adding = host_sum_seconds(units, links.device)
    summing = adding + reduce + store - exposed if adding else 0.0
    first, hiding = exposed - stored - late, reductions - (summed if summing else 0)
    scatter = f"reduce-scatter of layers ({over})"
    total = f"all-reduce of layers' gradients ({axis_words('dp_replicate', links.replicas)})"
    yield Row("gradient reductions", scatter, reductions * first, hiding * (reduce - replicas - first))
    yield Row("gradient reductions", total, reductions * late, hiding * (replicas - late))
    yield Row("host copies", "layers' gradients to CPU memory", reductions * stored, hiding * (store - stored))
    yield Row(_SUMS, "of layers, with their reductions and copies", summed * summing)


def _end_rows(unit: UnitBytes, links: Links, gathers: int, reductions: int, summed: int) -> Iterator[Row]:
    gather, reduce = unit_seconds(unit, links.shards, links)
    replicas = roofline.reduce_seconds(unit.reduce_output, links.replicas, links.device)
    name = "head" if unit.kind == "tail" else "embedding and last norm"
    over, replicated = axis_words("dp_shard", links.shards), axis_words("dp_replicate", links.replicas)
    fetch, store = copy_seconds((unit,), links.device)
    yield Row("parameter gathers", f"all-gather of {name} ({over})", gathers * gather)
    yield Row("host copies", f"parameters of {name} from CPU memory", gathers * fetch)
    yield Row("host copies", f"gradients of {name} to CPU memory", reductions * store)
    yield Row(_SUMS, f"of {name}", summed * host_sum_seconds((unit,), links.device))
    yield Row("gradient reductions", f"reduce-scatter of {name} ({over})", reductions * (reduce - replicas))
    yield Row("gradient reductions", f"all-reduce of {name} ({replicated})", reductions * replicas)


def launching_seconds(run: LayerRun, links: Links) -> float:
    """Return the seconds of the host in one call of a layer; 0 where the host is the device."""
    if links.device.kind == "cpu" or run.choice is None:
        return 0.0
    split = run.block.products if links.tensor.ranks > 1 else 0
    units = sum(unit is not None for unit in (run.unit, run.experts))
    label, parallel = run.choice.mode, links.sequence_parallel
    return host_seconds(run.block.launched, label, units=units, split_products=split, sequence_parallel=parallel)


def seconds_of_stages(query: PlanQuery, choices: Choices) -> list[dict[str, float]]:
    """Return the seconds of one micro-batch in each stage, by part."""
    links = Links.for_job(query.job, query.device)
    return [microbatch_seconds(stage, chosen, links) for stage, chosen in zip(query.stages, choices)]


def timeline_of(query: PlanQuery, choices: Choices) -> Timeline:
    """Return when each action runs, without the time that tensors take from stage to stage."""
    seconds = action_seconds(seconds_of_stages(query, choices))
    return timeline(actions_of(query.pp), seconds, len(query.stages))


def handing_on(query: PlanQuery) -> float:
    """Return the seconds that a tensor takes from one stage to the next."""
    device = query.device
    same_node = device.gpus_per_node > query.job.ranks // query.pp.size
    return query.hidden_bytes / (device.nvlink if same_node else device.network) + device.hop_seconds


def busiest_rank(ranks: Sequence[Sequence[int]], stages: Sequence[Mapping[str, float]]) -> int:
    """Return the rank of a pipeline that is busy longest; `ranks`: the stages of each, `stages`: seconds of each stage."""
    return max(range(len(ranks)), key=lambda rank: sum(sum(stages[index].values()) for index in ranks[rank]))


def _once_seconds(query: PlanQuery, indices: Sequence[int], links: Links) -> tuple[float, float, float]:
    """Return the seconds of one rank with the stages `indices`: gathers, reductions and the optimizer.

    Nothing is assumed to hide gathers and reductions.
    """
    gathers = reductions = optimizer = 0.0
    for index in indices:
        stage = query.stages[index]
        optimizer += optimizer_seconds_of(stage)
        gather, reduction = units_seconds(stage.sharding.all if stage.sharding.on else (), links)
        gathers += _gathers(query, index) * gather
        reductions += reduction
    return gathers, reductions, optimizer


def _gathers(query: PlanQuery, index: int) -> int:
    """Return how often a step gathers the parameters of stage `index`.

    It is once; if each forward frees them, again before each action that follows a forward.
    """
    if not query.stages[index].sharding.root.reshard:
        return 1
    kinds = [action.kind for rank in actions_of(query.pp) for action in rank if action.stage == index]
    return 1 + kinds[:-1].count(FORWARD)


def optimizer_seconds_of(stage: Stage) -> float:
    """Return the seconds of the optimizer's step on one rank."""
    sharding, device = stage.sharding, stage.device
    trained = len(sharding.trained) + len(sharding.trained_on_host)  # the host's kernels are called as slowly
    loop, name = trained * KERNELS_PER_PARAMETER * device.launch_seconds, stage.job.step.optimizer
    updating = optimizer_seconds(sharding.trained, name, device)
    return max(loop, updating + host_optimizer_seconds(sharding.trained_on_host, name, device))


def layer_runs(stage: Stage, choices: Sequence[Choice]) -> list[LayerRun]:
    """Return the layer calls of a micro-batch, equal ones together."""
    key = tuple(choices)
    if key not in stage.runs:
        counts = Counter(
            zip((call.kind for call in stage.part.traced.calls), choices, stage.moved(choices), stage.units)
        )
        stage.runs[key] = [_run(stage, count, *same) for same, count in counts.items()]
    return stage.runs[key]


def _run(stage: Stage, count: int, kind: int, choice: Choice, moved: int, units: tuple[Any, ...]) -> LayerRun:
    problem, (unit, experts, _) = stage.part.problems[kind], units
    block = stage.part.block(kind, compiled=stage.job.compile is not None and problem.compiles(choice))
    replay = block.replay(choice, problem.reachable)
    copies = exposed_seconds(moved, block.forward, stage.device)
    return LayerRun(
        count, block, replay, Collectives.again(choice, problem), unit, experts, copies, moved, kind, choice
    )


def inside_seconds(run: LayerRun, links: Links) -> tuple[float, float, float]:
    """Return the seconds of one of each collective inside a layer.

    They are a sum of tensor parallelism, a layer's gathers of keys and values, and its exchanges of experts' rows.
    """
    block, device = run.block, links.device
    sums = roofline.reduce_seconds(block.boundary_bytes, links.tensor, device)
    if links.asynchronous:
        sums = sum(shown_seconds(size, beside, links) for size, beside in block.pieces) / 2
    return (
        sums,
        roofline.gather_seconds(block.sequence_bytes, links.sequence, device),
        roofline.exchange_seconds(block.expert_bytes, links.experts, device),
    )


def shown_seconds(size: int, beside: float, links: Links) -> float:
    """Return the exposed seconds of a collective of `size` bytes that runs in pieces, one a rank, during a matmul of
    `beside` seconds: its excess over that, and a piece of the shorter one, since the first piece runs alone."""
    sending = roofline.gather_seconds(size, links.tensor, links.device)
    return max(0.0, sending - beside) + min(sending, beside) / links.tensor.ranks


def copy_seconds(units: Sequence[UnitBytes], device: Device) -> tuple[float, float]:
    """Return the seconds to copy shards from CPU memory, and reduced gradients to it."""
    link = device.host_link
    return sum(unit.host_shard for unit in units) / link, sum(unit.host_grad for unit in units) / link


def host_sum_seconds(units: Sequence[UnitBytes], device: Device) -> float:
    """Return the seconds to add gradients to those of an earlier micro-batch in CPU memory.

    Both are read and one is written.
    """
    size = sum(unit.host_grad for unit in units)
    return 3 * size / (device.host_bandwidth or device.host_link) if size else 0.0


def units_seconds(units: Iterable[UnitBytes], links: Links) -> tuple[float, float]:
    """Return the seconds to gather units once, and to reduce all of their gradients."""
    gather = reduce = 0.0
    for unit in units:
        one = unit_seconds(unit, links.expert_shards if unit.kind == "experts" else links.shards, links)
        gather, reduce = gather + one[0], reduce + one[1]
    return gather, reduce


def unit_seconds(unit: UnitBytes, shards: RankGroup, links: Links) -> tuple[float, float]:
    """Return the seconds to gather a unit, and to reduce its gradients, over replicas too."""
    device = links.device
    gather = roofline.gather_seconds(unit.gathered, shards, device)
    reduce = roofline.gather_seconds(unit.reduce_input, shards, device)
    return gather, reduce + roofline.reduce_seconds(unit.reduce_output, links.replicas, device)


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline."""

    seconds: float  # Seconds from the first action to the end of the last.
    busy: float  # Seconds in which ranks compute, of all ranks.
    ranks: int

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        total = self.seconds * self.ranks
        return 1 - self.busy / total if total else 0.0


def action_seconds(stages: Iterable[Mapping[str, float]]) -> dict[tuple[str, int], float]:
    """Return seconds by kind of action and stage; both halves of a cut backward recompute.

    stages: of one micro-batch in each stage, by part (`microbatch_seconds`).
    """
    seconds: dict[tuple[str, int], float] = {}
    for index, parts in enumerate(stages):
        forward, backward, recompute = parts["forward"], parts["backward"], parts["replay"]
        third = parts.get("head and embedding", 0.0) / 3  # forward takes a third
        sent = sum(parts.get(name, 0.0) for name in _SENT) / 2  # forward and backward send as much
        seconds[FORWARD, index] = forward + third + sent
        seconds[BACKWARD, index] = backward + recompute + 2 * third + sent
        # torch runs the first stage's backward whole, in the place of the second half.
        seconds[INPUTS, index] = 0.0 if index == 0 else backward / 2 + recompute + third + sent
        seconds[WEIGHTS, index] = seconds[BACKWARD, index] if index == 0 else backward / 2 + recompute + third
    return seconds


def timeline(
    actions: Sequence[Sequence[Action]], seconds: Mapping[tuple[str, int], float], stages: int, sending: float = 0.0
) -> Timeline:
    """Run the schedule.

    Args:
        actions: actions of each rank, in its order.
        seconds: seconds by kind of action and stage.
        stages: number of stages.
        sending: seconds from the end of an action to the begin of one on another rank that needs it.

    Raises:
        ValueError: in this order, an action never gets the results it needs.
    """
    done: dict[tuple[str, int, int], float] = {}
    free, at, busy = [0.0] * len(actions), [0] * len(actions), 0.0
    remaining = sum(map(len, actions))
    ranks = {action.stage: rank for rank, rank_actions in enumerate(actions) for action in rank_actions}
    late = {
        (stage, other): sending if ranks[stage] != ranks[other] else 0.0
        for stage in ranks
        for other in (stage - 1, stage, stage + 1)
        if other in ranks
    }
    while remaining:
        before = remaining
        for rank, rank_actions in enumerate(actions):
            while at[rank] < len(rank_actions):
                action = rank_actions[at[rank]]
                ready = _ready(action, done, stages, late)
                if ready is None:
                    break
                took = seconds[action.kind, action.stage]
                free[rank] = end = max(ready, free[rank]) + took
                result = INPUTS if action.kind == BACKWARD else action.kind
                done[result, action.stage, action.microbatch] = end
                busy += took
                at[rank], remaining = at[rank] + 1, remaining - 1
        if remaining == before:
            stuck = next(
                rank_actions[at[rank]] for rank, rank_actions in enumerate(actions) if at[rank] < len(rank_actions)
            )
            raise ValueError(f"The schedule comes to a standstill at {stuck}: its inputs are never made.")
    return Timeline(max(free, default=0.0), busy, len(actions))


def _ready(
    action: Action, done: Mapping[tuple[str, int, int], float], stages: int, late: Mapping[tuple[int, int], float]
) -> float | None:
    """Return the time at which the inputs of `action` exist; None: not yet. `late`: seconds between two stages."""
    stage, number = action.stage, action.microbatch
    needed: list[tuple[str, int, int]] = []
    if action.kind == FORWARD and stage:
        needed = [(FORWARD, stage - 1, number)]
    elif action.kind in (BACKWARD, INPUTS):
        needed = [(FORWARD, stage, number)] + ([(INPUTS, stage + 1, number)] if stage + 1 < stages else [])
    elif action.kind == WEIGHTS:
        needed = [(INPUTS, stage, number)]
    if any(key not in done for key in needed):
        return None
    return max((done[key] + late[stage, key[1]] for key in needed), default=0.0)
