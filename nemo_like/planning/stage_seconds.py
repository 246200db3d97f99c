"""What one microbatch takes in the layers of one stage, and a schedule of such stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nemo_like.distributed.pipeline.schedules import FORWARD, actions_of
from nemo_like.options import PipelineParallel
from nemo_like.planning import network
from nemo_like.planning.block import BlockProblem, Choice
from nemo_like.planning.schedule_time import StageSeconds, Timeline, action_seconds, timeline
from nemo_like.planning.seconds import KERNELS_PER_PARAMETER, BlockSeconds, Links, StepSeconds, unit_seconds
from nemo_like.planning.stages import Choices, PipelinePlanner, PlannedStage
from nemo_like.planning.step_time import optimizer_seconds

_SENT = ("tensor-parallel sums", "sequence gathers", "expert exchanges")
_PARTS = ("forward", "backward", "replay", *_SENT, "head and embedding")


def layer_parts(calls: Iterable[tuple[BlockSeconds, BlockProblem, Choice]], links: Links) -> dict[str, float]:
    """Seconds of one microbatch in these layer calls, by what takes them; ``"head and embedding"`` is 0."""
    parts, device = dict.fromkeys(_PARTS, 0.0), links.device
    alike: dict[tuple[int, int], list[tuple[BlockSeconds, BlockProblem, Choice]]] = {}
    for call in calls:
        alike.setdefault((id(call[1]), id(call[2])), []).append(call)
    for same in alike.values():
        count, (block, problem, choice) = len(same), same[0]
        again = 1 if choice.label == "full" else 0
        parts["forward"] += count * block.forward
        parts["backward"] += count * block.backward
        parts["replay"] += count * block.replay(choice, problem.reachable)
        sums = network.reduce_seconds(block.boundary_bytes, links.tensor, device)
        parts["tensor-parallel sums"] += count * sums * (4 + again)
        gathered = network.gather_seconds(block.sequence_bytes, links.sequence, device)
        parts["sequence gathers"] += count * gathered * (2 + again)
        sent = network.exchange_seconds(block.expert_bytes, links.experts, device)
        parts["expert exchanges"] += count * sent * (2 + again)
    return parts


def action_seconds_of(stages: Sequence[Mapping[str, float]], pp: PipelineParallel) -> dict[tuple[str, int], float]:
    """Seconds by kind of action and stage, of stages by their `layer_parts`."""
    made = (
        StageSeconds(
            forward=parts["forward"],
            backward=parts["backward"],
            replay=parts["replay"],
            outer=parts["head and embedding"],
            sent=sum(parts[name] for name in _SENT),
        )
        for parts in stages
    )
    return action_seconds(made, pp.replay)


def pipeline_seconds(planner: PipelinePlanner, choices: Choices) -> StepSeconds:
    """Return the seconds of a step: what the busiest rank of the pipeline computes and sends, what it waits for, and what
    its stages gather and reduce, which is once in a step."""
    job, device = planner.job, planner.device
    links = Links.of(job, device)
    parts = parts_of_stages(planner, choices)
    ranks = [planner.of_rank(rank) for rank in range(planner.pp.size)]
    sums = [{name: sum(parts[index][name] for index in own) for name in parts[0]} for own in ranks]
    found = {name: value * planner.count for name, value in sums[busiest_rank(ranks, parts)].items()}
    actions, count = actions_of(planner.pp), len(planner.stages)
    seconds = action_seconds_of(parts, planner.pp)
    computing = timeline(actions, seconds, count).seconds
    found["pipeline bubble"] = max(0.0, computing - sum(found.values()))
    found["pipeline sends"] = max(0.0, timeline(actions, seconds, count, handing_on(planner)).seconds - computing)
    gathers, reductions, steps = [], [], []
    for own in ranks:
        units = [_unit_seconds(planner.stages[index], links) for index in own]
        gathers.append(sum(_gathers(planner, index) * gather for index, (gather, _) in zip(own, units)))
        reductions.append(sum(reduction for _, reduction in units))
        steps.append(sum(_optimizer_seconds(planner.stages[index]) for index in own))
    found["parameter gathers"], found["gradient reductions"] = max(gathers), max(reductions)
    found["optimizer"] = max(steps)
    return StepSeconds({name: value for name, value in found.items() if value})


def times(planner: PipelinePlanner, choices: Choices) -> Timeline:
    """Return when each action runs, without the time that tensors take from stage to stage."""
    seconds = action_seconds_of(parts_of_stages(planner, choices), planner.pp)
    return timeline(actions_of(planner.pp), seconds, len(planner.stages))


def handing_on(planner: PipelinePlanner) -> float:
    """Seconds that a tensor takes from one stage to the next."""
    same_host = planner.device.gpus_per_host > planner.job.ranks // planner.pp.size
    return network.send_seconds(planner.hidden_bytes, same_host, planner.device)


def parts_of_stages(planner: PipelinePlanner, choices: Choices) -> list[dict[str, float]]:
    """Seconds of one micro-batch in each stage, by what takes them."""
    links, made = Links.of(planner.job, planner.device), []
    for stage, own in zip(planner.stages, choices):
        one = stage.planner
        calls = (
            (one.blocks[call.kind], one.problems[call.kind], choice) for call, choice in zip(one.traced.calls, own)
        )
        made.append(layer_parts(calls, links) | {"head and embedding": one.outer().seconds})
    return made


def busiest_rank(ranks: Sequence[Sequence[int]], parts: Sequence[Mapping[str, float]]) -> int:
    """The rank of a pipeline that is busy longest; `ranks`: the stages of each, `parts`: seconds of each stage."""
    return max(range(len(ranks)), key=lambda rank: sum(sum(parts[index].values()) for index in ranks[rank]))


def _gathers(planner: PipelinePlanner, index: int) -> int:
    """How often a step gathers the parameters of stage `index`: once; if each forward frees them, before whatever follows a
    forward."""
    if not planner.stages[index].planner.sharding.root.reshard:
        return 1
    own = [action.kind for rank in actions_of(planner.pp) for action in rank if action.stage == index]
    return 1 + own[:-1].count(FORWARD)


def _unit_seconds(stage: PlannedStage, links: Links) -> tuple[float, float]:
    """To gather a stage's parameters and to reduce its gradients; nothing is taken to hide them."""
    sharding = stage.planner.sharding
    if not sharding.on:
        return 0.0, 0.0
    own = [unit_seconds(unit, links.shards, links) for unit in sharding.all if unit not in sharding.experts.values()]
    own += [unit_seconds(unit, links.expert_shards, links) for unit in sharding.experts.values()]
    return sum(gather for gather, _ in own), sum(reduction for _, reduction in own)


def _optimizer_seconds(stage: PlannedStage) -> float:
    planner = stage.planner
    trained = planner.sharding.trained
    loop = len(trained) * KERNELS_PER_PARAMETER * planner.device.launch_seconds
    return max(loop, optimizer_seconds(trained, planner.job.step.optimizer, planner.device))
