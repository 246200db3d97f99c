"""The fastest plan of each stage of a pipeline within a rank's bytes: a stage with more in flight keeps less of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from torch import nn

from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import BudgetError, Plan
from nemo_like.job import AllKeywords, Job
from nemo_like.options import MemoryBudget
from nemo_like.planning.block import Choice
from nemo_like.planning.planner import asked_job
from nemo_like.planning.program.readers import Peak
from nemo_like.planning.reserved import StepLogs, ranks_to_replay, replay
from nemo_like.planning.sharding import same_on_all_ranks
from nemo_like.planning.stage_balance import balanced
from nemo_like.planning.stage_seconds import pipeline_seconds
from nemo_like.planning.stages import Choices, PipelinePlanner


def plan_pipeline(
    model: nn.Module, job: Job | None = None, *, sample_input: Any = None, **asked: Unpack[AllKeywords]
) -> Plan:
    """Find the fastest plan of every stage within the budget of a job with ``pp``, as one `Plan` of the whole model.

    Early stages of most schedules have more micro-batches in flight than late ones, so their layers keep less. With
    ``PipelineParallel(replay="auto")``, a backward that is cut in two recomputes once or twice, whichever makes the faster
    plan; with ``balance="memory"`` layers are divided for the lowest peak. `Plan.step` says what was taken (``replay``,
    ``balance``).

    Args:
        model, job, asked: as for `nemo_like.planning.plan_for`, which calls this.
        sample_input: one micro-batch of one rank, as the model is called with it.

    Raises:
        BudgetError: (a ValueError) a rank has no plan that fits, with the least that one peaks at.
        ValueError, TypeError: as `nemo_like.planning.plan_for`.
    """
    made = asked_job(job, asked, sample_input)

    def make() -> Plan:
        with PipelinePlanner(model, sample_input, made) as planner:
            dealt = balanced(planner, "full") if made.pp.balance == "memory" else planner
            assert isinstance(made.ac, MemoryBudget)
            return best_replay(dealt, made.ac, str(made.ac))

    return same_on_all_ranks(make)


def balance_for_memory(model: nn.Module, sample_input: Any, job: Job, mode: str) -> list[int]:
    """How many layers each stage gets under ``balance="memory"``, the same on all ranks; `mode`: as `balanced` takes it."""

    def make() -> list[int]:
        with PipelinePlanner(model, sample_input, job) as planner:
            return balanced(planner, mode).counts

    return same_on_all_ranks(make)


def best_replay(planner: PipelinePlanner, budget: MemoryBudget, asked: str) -> Plan:
    """The plan for `budget`, with the number of replays that is faster where ``replay="auto"`` leaves that open."""
    if planner.pp.replay != "auto" or not planner.pp.facts.splits_backward:
        return describe(planner, choose(planner, budget, asked), asked)
    plans, errors = [], []
    for word in ("once", "twice"):
        other = planner.replaying(word)
        try:
            plans.append(describe(other, choose(other, budget, asked), asked))
        except BudgetError as error:
            errors.append(error)
    if not plans:
        raise min(errors, key=lambda error: error.smallest_bytes)
    return min(plans, key=lambda plan: plan.step_seconds)


def choose(planner: PipelinePlanner, budget: MemoryBudget, asked: str = "") -> list[list[Choice]]:
    """The choices of every stage, of which each rank's peak is at most what `budget` says.

    Raises:
        BudgetError: a rank has no plan that fits.
    """
    asked = asked or str(budget)
    if budget.fraction is not None:
        return [stage.planner.choose(budget, asked)[0] for stage in planner.stages]
    share = budget.device_share or 0.0
    limit = int(planner.device.memory_bytes * share) if budget.peak_bytes is None else budget.peak_bytes
    chosen: dict[int, list[Choice]] = {}
    for rank in range(planner.pp.size):
        chosen |= _of_rank(planner, rank, limit, asked)
    return [chosen[index] for index in range(len(planner.stages))]


def _of_rank(planner: PipelinePlanner, rank: int, limit: int, asked: str) -> dict[int, list[Choice]]:
    """The fastest choices of the stages of one rank within `limit` bytes.

    From what holds least, step by step to the next mix of that stage where a byte saves most time; a byte of a stage counts
    for each microbatch that it has in flight.
    """
    own = planner.of_rank(rank)
    stacks = {index: planner.stages[index].planner.stack for index in own}
    flights = {index: max(1, planner.most_in_flight(index)) for index in own}
    steps = []
    for index, stack in stacks.items():
        for number, (low, high) in enumerate(zip(stack.mixes, stack.mixes[1:])):
            gain = (low.cost - high.cost) / max(1, (high.bytes - low.bytes) * flights[index])
            steps.append((-gain, number, index))
    path = [dict.fromkeys(own, 0)]
    for index in _in_order(steps):
        path.append({**path[-1], index: path[-1][index] + 1})

    def choices(at: dict[int, int]) -> dict[int, list[Choice]]:
        return {
            index: planner.stages[index].planner.proved_all(stacks[index].assignment(stacks[index].mixes[number]))
            for index, number in at.items()
        }

    def peak(found: dict[int, list[Choice]]) -> Peak:
        return planner.rank_peak(rank, [found.get(index, []) for index in range(len(planner.stages))])

    best = bisect_right(path, limit, key=lambda at: peak(choices(at)).total) - 1
    if best < 0:
        raise _too_small(planner, rank, limit, asked, peak(choices(path[0])))
    found = choices(path[best])
    # What the next step on the path would take too much of, in part; and then the other stages, as far as they go.
    ahead = [index for index in own if best + 1 < len(path) and path[best + 1][index] != path[best][index]]
    for index in [*ahead, *(other for other in own if other not in ahead)]:
        stack, number = stacks[index], path[best][index]
        if number + 1 >= len(stack.mixes):
            continue
        stage, mix, limit_bytes = planner.stages[index].planner, stack.mixes[number], stack.mixes[number + 1].bytes
        finer = stack.finer(mix, stage.problems, skip=stage.skip, host=stage.host)
        between = [m for m in finer.mixes if m.bytes < limit_bytes and m.cost < mix.cost]
        tried = [{**found, index: stage.proved_all(finer.assignment(m))} for m in between]
        last = bisect_right(tried, limit, key=lambda each: peak(each).total) - 1
        found = tried[last] if last >= 0 else found
    return found


def _in_order(steps: list[tuple[float, int, int]]) -> list[int]:
    """Stages, the dearest step first; of one stage, steps in their order."""
    return [index for _, _, index in sorted(steps)]


def _too_small(planner: PipelinePlanner, rank: int, limit: int, asked: str, peak: Peak) -> BudgetError:
    return BudgetError(
        f"Budget {asked!r} is {write_bytes(limit)} per rank, and the least that any plan peaks at on rank {rank} of the "
        f"pipeline is {write_bytes(peak.total)} ({peak.words}). Give it at least that, or lower it with smaller "
        f"microbatches, more stages (now {len(planner.stages)}), more ranks to shard over (now {planner.job.shard_ranks}), "
        "or PipelineParallel(balance='memory').",
        peak.total,
    )


def describe(planner: PipelinePlanner, choices: Choices, asked: str, reserved: Sequence[int] | None = None) -> Plan:
    """Choices for all stages as one `Plan` of the whole model, with the peak of the rank that has the highest.

    `reserved`: `reserved_on_ranks`, where that was asked for already.
    """
    if reserved is None:
        reserved = reserved_on_ranks(planner, choices, ranks_to_replay(planner, choices))
    peaks = planner.peaks(choices)
    rank = max(range(len(peaks)), key=lambda r: peaks[r].total)
    plans = [stage.planner.describe(own, asked) for stage, own in zip(planner.stages, choices)]
    layers = []
    for stage, plan in zip(planner.stages, plans):
        names = dict(zip((layer.fqn for layer in stage.planner.layers), stage.names))
        layers += [replace(layer, fqn=names[layer.fqn]) for layer in plan.layers]
    sums: dict[str, Any] = {
        name: sum(getattr(plan, name) for plan in plans)
        for name in (
            "held_bytes",
            "none_bytes",
            "full_bytes",
            "forward_flops",
            "forward_seconds",
            "replay_flops",
            "replay_seconds",
            "gap_seconds",
        )
    }
    pipeline = {
        "pp": planner.pp.size,
        "schedule": planner.pp.schedule,
        "microbatches": planner.count,
        "replay": planner.pp.replay,
        "balance": list(planner.counts),
    }
    return replace(
        plans[0],
        model=type(planner.whole).__name__,
        layers=tuple(layers),
        step_seconds=pipeline_seconds(planner, choices).total,
        peak=peaks[rank].parts,
        peak_at=f"{peaks[rank].at}, on rank {rank}",
        step=dict(plans[0].step) | pipeline,
        reserved_bytes=None if reserved is None else max(reserved),
        **sums,
    )


def reserved_on_ranks(
    planner: PipelinePlanner, choices: Choices, ranks: Sequence[int] | None = None
) -> list[int] | None:
    """What CUDA's caching allocator reserves on each of `ranks` (None: all), bytes; None: another one runs (the CPU's)."""
    if planner.device.cuda is None:
        return None
    every = range(planner.pp.size) if ranks is None else ranks
    how = planner.device, planner.job.allocator
    return [replay(StepLogs.of_rank(planner, rank, choices), *how).reserved for rank in every]
