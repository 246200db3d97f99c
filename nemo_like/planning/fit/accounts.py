"""The account of one configuration, from the shape that was traced for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from nemo_like._util.words import write_bytes
from nemo_like.options.optimizers import TrainedParameter
from nemo_like.planning.block import Choice
from nemo_like.planning.devices import Device
from nemo_like.planning.fit.explained import Account, RankPeak, Row, rows_of
from nemo_like.planning.fit.explained_bytes import byte_rows, highest, staged_byte_rows
from nemo_like.planning.fit.explained_seconds import (
    Rows,
    inside_rows,
    kernel_rows,
    merged,
    outer_rows,
    ranks,
    second_rows,
)
from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.fit.shapes import TracedShape
from nemo_like.planning.fit.staged import StagedShape
from nemo_like.planning.program.readers import StepPoint
from nemo_like.planning.seconds import KERNELS_PER_PARAMETER, LayerRun, Links, StepSeconds, layer_runs, units_outside
from nemo_like.planning.stage_seconds import busiest_rank, handing_on, parts_of_stages
from nemo_like.planning.stages import Choices, PipelinePlanner
from nemo_like.planning.step_time import host_optimizer_seconds, optimizer_seconds

_NOTHING = 1e-12
"""A share of a step that rounding may leave over."""


def account_of(shape: TracedShape | StagedShape, conf: Configuration, choices: Any, seconds: StepSeconds) -> Account:
    """Where the bytes of the peak and the `seconds` of a configuration come from."""
    if isinstance(shape, StagedShape):
        return _of_stages(shape, conf, choices, seconds)
    planner, device, name = shape.planner(conf), shape.question.device, shape.question.job.step.optimizer
    links, took = Links.of(conf.job, device), seconds.parts.get("optimizer", 0.0)
    finer = second_rows(layer_runs(planner, choices), units_outside(planner), planner, links, conf)
    sharding = planner.sharding
    finer["optimizer"] = [Row("optimizer", _optimizer(sharding.trained, name, device, sharding.trained_on_host), took)]
    points = planner.points(choices)
    return Account(
        byte_rows(planner, choices, highest(points)),
        rows_of(seconds.parts, finer, seconds.total * _NOTHING),
        lines={"": partial(planner.points, choices)},
    )


def _of_stages(shape: StagedShape, conf: Configuration, choices: Choices, seconds: StepSeconds) -> Account:
    planner = shape.planner(conf)
    finer = _staged_second_rows(shape, planner, conf, choices, seconds)
    lines = {f"rank {rank}": partial(_rank_points, planner, choices, rank) for rank in range(planner.pp.size)}
    peaks = planner.peaks(choices)
    most = max(range(planner.pp.size), key=lambda rank: peaks[rank].total)
    point = highest(_rank_points(planner, choices, most))
    return Account(
        staged_byte_rows(planner, choices, most, point),
        rows_of(seconds.parts, finer, seconds.total * _NOTHING),
        tuple(RankPeak(tuple(planner.of_rank(rank)), peak.total, peak.at) for rank, peak in enumerate(peaks)),
        lines,
    )


def _rank_points(planner: PipelinePlanner, choices: Choices, rank: int) -> list[StepPoint]:
    points: list[StepPoint] = []
    planner.rank_peak(rank, choices, points=points)
    return points


def _staged_second_rows(
    shape: StagedShape, planner: PipelinePlanner, conf: Configuration, choices: Choices, seconds: StepSeconds
) -> Rows:
    device, turns = shape.question.device, conf.grad_accum
    links = Links.of(conf.job, device)
    parts = parts_of_stages(planner, choices)
    busiest = busiest_rank([planner.of_rank(rank) for rank in range(planner.pp.size)], parts)
    made: list[Rows] = []
    for index in planner.of_rank(busiest):
        where = f"stage {index}: "
        one = planner.stages[index].planner
        made.append({"head and embedding": outer_rows(one.outer().kinds, turns, where)})
        for (kind, choice), count in _calls(one.traced.calls, choices[index]):
            block, reachable = one.blocks[kind], one.problems[kind].reachable
            made.append(kernel_rows(block, choice, reachable, count * turns, where))
            run = LayerRun(count, block, 0.0, choice.label == "full", None)
            made.append(inside_rows(run, links, count * turns))
    finer = merged(made)
    handed = handing_on(planner)
    late = seconds.parts.get("pipeline sends", 0.0)
    sent = handed * turns * _sends(planner, busiest)
    finer["pipeline sends"] = [Row("pipeline sends", f"hand-overs (pp, {conf.pp} ranks)", late, max(0.0, sent - late))]
    finer["pipeline bubble"] = [
        Row("pipeline bubble", f"rank {busiest} waits", seconds.parts.get("pipeline bubble", 0.0))
    ]
    name, own = shape.question.job.step.optimizer, [planner.stages[index] for index in planner.of_rank(busiest)]
    trained = [param for stage in own for param in stage.planner.sharding.trained]
    finer["optimizer"] = [Row("optimizer", _optimizer(trained, name, device), seconds.parts.get("optimizer", 0.0))]
    over = ranks("dp_shard", links.shards)
    finer["parameter gathers"] = [
        Row("parameter gathers", f"all-gather of a rank's stages ({over})", seconds.parts.get("parameter gathers", 0.0))
    ]
    reductions = f"reduce-scatter ({over}), then all-reduce ({ranks('dp_replicate', links.replicas)})"
    finer["gradient reductions"] = [
        Row("gradient reductions", reductions, seconds.parts.get("gradient reductions", 0.0))
    ]
    return finer


def _calls(calls: Sequence[Any], choices: Sequence[Choice]) -> list[tuple[tuple[int, Choice], int]]:
    return list(Counter((call.kind, choice) for call, choice in zip(calls, choices)).items())


def _sends(planner: PipelinePlanner, rank: int) -> int:
    """Tensors that `rank` sends for one microbatch: outputs forward, gradients back, to other ranks."""
    own = planner.of_rank(rank)
    edges = [(index, other) for index in own for other in (index - 1, index + 1) if 0 <= other < len(planner.stages)]
    return sum(other not in own for _, other in edges)


def _optimizer(
    trained: Sequence[TrainedParameter], name: str, device: Device, on_host: Sequence[TrainedParameter] = ()
) -> str:
    """What the optimizer's step waits for; `on_host`: trained parameters in host memory, where none is elsewhere."""
    kernels, where = len([*trained, *on_host]) * KERNELS_PER_PARAMETER, " in host memory" if on_host else ""
    passes = optimizer_seconds(trained, name, device) + host_optimizer_seconds(on_host, name, device)
    if kernels * device.launch_seconds > passes:
        return f"{name}{where}: launches of {kernels} kernels"
    size = write_bytes(sum(param.size for param in [*trained, *on_host]))
    return f"{name}{where}: passes over {size} of parameters, gradients and states"
