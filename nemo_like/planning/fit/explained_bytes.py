"""Where each byte of a predicted peak comes from: a part of the peak by layers, stages and kinds of operators."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from nemo_like.activation_checkpointing.plan import Part
from nemo_like.losses.model_loss import find_head
from nemo_like.planning.block import BlockProblem, Choice
from nemo_like.planning.fit.explained import Row, rows_of
from nemo_like.planning.planner import RNG_STATE, Planner
from nemo_like.planning.program.readers import StepPoint
from nemo_like.planning.stages import Choices, PipelinePlanner
from nemo_like.planning.step_time import kernel_kind

_INPUTS = "layers' inputs"
_HEAD = ("forward of the head", "loss", "backward of the head")


def highest(points: Sequence[StepPoint]) -> StepPoint:
    """The first of the highest points."""
    return max(points, key=lambda point: point.total)


def byte_rows(planner: Planner, choices: Sequence[Choice], point: StepPoint) -> tuple[Row, ...]:
    """Of the highest point of a step without stages; they add up to it."""
    finer = _static_rows(planner) | {
        Part.HELD_ACTIVATIONS: _rows(Part.HELD_ACTIVATIONS, held_by_kind(planner, choices, point.upto)),
        Part.RUNNING_LAYER: _running_rows(planner, choices, point),
        Part.OUTSIDE_OF_LAYERS: _outside_rows(planner, choices, point),
    }
    return rows_of({part: size for part, size in point.parts.items() if size}, finer, 0)


def staged_byte_rows(planner: PipelinePlanner, choices: Choices, rank: int, point: StepPoint) -> tuple[Row, ...]:
    """The same of one rank of a pipeline, by stage."""
    finer: dict[str, list[Row]] = {}
    for index in planner.of_rank(rank):
        for part, rows in _static_rows(planner.stages[index].planner).items():
            finer.setdefault(part, []).extend(Row(part, f"stage {index}: {row.what}", row.amount) for row in rows)
    running = planner.stages[point.stage].planner
    held = held_by_kind(running, choices[point.stage], point.upto)
    if point.stage and _INPUTS in held:  # the first layer's is in a receive buffer
        held[_INPUTS] -= min(held[_INPUTS], planner.hidden_bytes)
    for part, rows in (
        (Part.HELD_ACTIVATIONS, _rows("", held)),
        (Part.RUNNING_LAYER, _running_rows(running, choices[point.stage], point)),
        (Part.OUTSIDE_OF_LAYERS, _outside_rows(running, choices[point.stage], point)),
    ):
        finer[part] = [Row(part, f"stage {point.stage}: {row.what}", row.amount) for row in rows]
    waiting: Counter[tuple[int, str]] = Counter()
    sizes: Counter[tuple[int, str]] = Counter()
    for stage, what, size in point.in_flight:
        waiting[stage, what] += 1
        sizes[stage, what] += size
    finer[Part.MICROBATCHES_IN_FLIGHT] = [
        Row(Part.MICROBATCHES_IN_FLIGHT, f"stage {stage}: {waiting[stage, what]} {what}", size)
        for (stage, what), size in sizes.items()
    ]
    return rows_of({part: size for part, size in point.parts.items() if size}, finer, 0)


def held_by_kind(planner: Planner, choices: Sequence[Choice], upto: int) -> dict[str, int]:
    """What the first `upto` layer calls keep for backward, bytes by kind of operator that made it; what waits in host
    memory is not among it."""
    sizes: Counter[str] = Counter()
    moved = planner.moved(choices)
    outer = planner.outer()
    for position, (call, choice) in enumerate(zip(planner.traced.calls, choices)):
        if position < upto and position not in outer.dropped:
            sizes.update(_kept(planner.problems[call.kind], choice))
            sizes[_INPUTS] -= min(moved[position], sizes[_INPUTS])
            draws = bool(choice.decisions) and planner.problems[call.kind].trace.draws
            sizes["random states"] += RNG_STATE if draws and planner.device.kind == "cpu" else 0
    return {what: size for what, size in sizes.items() if size > 0}


def _kept(problem: BlockProblem, choice: Choice) -> dict[str, int]:
    """What one layer holds, by kind of operator."""
    trace = problem.trace
    sizes: Counter[str] = Counter()
    if choice.decisions:
        sizes[_INPUTS] = trace.input_bytes
        for record, word in zip(problem.records, choice.decisions):
            if word == "save":
                sizes[_made_by(kernel_kind(record.op, record.flops))] += record.bytes
        return sizes
    sizes[_INPUTS] = trace.kept_input_bytes
    left = choice.held_bytes - trace.kept_input_bytes
    for record in problem.records:
        if record.needed and left > 0:
            size = min(left, record.bytes)
            sizes[_made_by(kernel_kind(record.op, record.flops))] += size
            left -= size
    return sizes


def _made_by(kind: str) -> str:
    names = {"matmul": "outputs of matrix products", "attention": "outputs of attention"}
    return f"kept {names.get(kind, 'outputs of norms and elementwise operators')}"


def _rows(part: str, sizes: dict[str, int]) -> list[Row]:
    return [Row(part, what, size) for what, size in sizes.items()]


def _static_rows(planner: Planner) -> dict[str, list[Row]]:
    """Parameters and optimizer state, of layers and of what is around them."""
    sharding, name = planner.sharding, planner.job.step.optimizer
    parameters = {
        f"{len(sharding.units)} layers": sum(unit.shard for unit in sharding.units),
        "their experts": sum(unit.shard for unit in sharding.experts.values()),
        "head and last norm" if sharding.tail else "": sharding.tail.shard if sharding.tail else 0,
        "embedding and what else is around the layers": sharding.root.shard,
        "whole on every rank": sharding.replicated,
    }
    memory = planner.optimizer
    states: Counter[str] = Counter()
    for param, own in zip(sharding.trained, memory.states):
        states[f"{name}, of layers" if param.in_layer else f"{name}, of what is around them"] += sum(own)
    return {
        Part.PARAMETERS: _rows(Part.PARAMETERS, parameters),
        Part.OPTIMIZER_STATE: _rows(Part.OPTIMIZER_STATE, states),
        Part.OPTIMIZER_STEP: [Row(Part.OPTIMIZER_STEP, f"temporaries of {name}", memory.step)],
    }


def _running_rows(planner: Planner, choices: Sequence[Choice], point: StepPoint) -> list[Row]:
    """Of the layer whose backward is the highest point."""
    found = re.fullmatch(r"backward of layer (\d+)", point.where)
    if found is None:
        return []
    position = int(found[1])
    call, choice = planner.traced.calls[position], choices[position]
    trace = planner.problems[call.kind].trace
    held = trace.input_bytes if choice.decisions else trace.kept_input_bytes
    memory = planner.memory(call.kind, choice)
    kept = min(memory.held, memory.backward_peak)
    left = point.parts[Part.RUNNING_LAYER]
    rows = []
    for what, size in (
        ("its inputs", held),
        ("what it kept", kept),
        ("gradients of its output", memory.output_grad),
        ("what it runs again, makes on the way, and its gradients", left),
    ):
        rows.append(Row(Part.RUNNING_LAYER, f"layer {position}: {what}", min(size, left)))
        left -= min(size, left)
    return rows


def _outside_rows(planner: Planner, choices: Sequence[Choice], point: StepPoint) -> list[Row]:
    """What is as wide as the vocabulary, where the head or the loss is the highest point."""
    head = find_head(planner.model)
    weight = None if head is None else next(head.parameters(), None)  # a stage of a pipeline may have none
    if weight is None or point.where not in _HEAD:
        return []
    events = planner.outer(choices=choices).events
    begin = events.calls[-1].end if events.calls else 0
    ends = {"forward of the head": events.forward_end}
    end = ends.get(point.where, events.backs[0].begin if events.backs else events.backward_end)
    begin = begin if point.where in ends else events.forward_end
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    for place, (number, size) in enumerate(events.log[:end]):
        if size:
            alive[number] = size
        else:
            alive.pop(number, None)
        if place >= begin and sum(alive.values()) > sum(most.values()):
            most = dict(alive)
    weights = weight.numel() * weight.element_size()
    least = weight.shape[0] * 2 * 16  # of a chunk of a few tokens, two bytes each
    wide = [size for size in most.values() if size % weight.shape[0] == 0 and size >= least and size != weights]
    grads = [size for size in most.values() if size == weights]
    left = point.parts[Part.OUTSIDE_OF_LAYERS]
    rows = []
    for what, sizes in (("logits, their copies and gradients", wide), ("gradients of the head", grads)):
        size = min(sum(sizes), left)
        rows.append(Row(Part.OUTSIDE_OF_LAYERS, f"{what} ({len(sizes)} tensors)", size))
        left -= size
    return [*rows, Row(Part.OUTSIDE_OF_LAYERS, "hidden states, norm and loss", left)]
