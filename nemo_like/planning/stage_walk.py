"""The peak of a step on one rank of a pipeline: its actions in their order, and all microbatches that are in flight.

What `torch.distributed.pipelining` holds (torch 2.13): a receiving buffer per microbatch for each stage's input and for the
gradient of its output, made once; each output until its backward, and under schedules with several stages on a rank all
that was sent until the step ends; with a backward cut in two, what the second half needs, and the gradients of the
stages' inputs until the next step. Stages that follow each other on one rank hand tensors on instead of sending them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_like.distributed.pipeline.dealing import StageSlice
from nemo_like.distributed.pipeline.order import BACKWARD, FORWARD, INPUTS, Action
from nemo_like.options import OffloadConfig
from nemo_like.planning.communication import Communication, StepPoint, StepWalk
from nemo_like.planning.halves_memory import HalvesMemory
from nemo_like.planning.microbatch import Microbatch
from nemo_like.planning.outer import OuterMemory
from nemo_like.planning.parts import Part
from nemo_like.planning.peak import LayerMemory, Peak, held_bytes, walk_backward, walk_forward
from nemo_like.planning.sharding import Sharding, UnitBytes
from nemo_like.planning.tied_stages import HeldOnce

Log = list[tuple[Action, int, int]]
"""Per action: the most bytes alive while it runs, and those alive when it ends."""


@dataclass(frozen=True)
class StageRound:
    """One microbatch through a stage: the first one's backward makes gradients, that of others adds to them."""

    layers: tuple[LayerMemory, ...]
    outer: OuterMemory
    root_grads: int
    tail_grads: int
    micro: Microbatch
    halves: tuple[HalvesMemory, ...] = ()
    """Of each layer; empty where backward stays in one piece."""
    outer_halves: OuterMemory | None = None


@dataclass(frozen=True)
class StageMemory:
    """One stage on one rank."""

    slice: StageSlice
    first: StageRound
    rest: StageRound
    sharding: Sharding
    hidden: int
    """What a stage sends for one microbatch, bytes."""
    offload: OffloadConfig
    shared: int
    """What several layers are called with (position tables, masks), bytes."""
    remembered: int
    """What stays from step to step and is no state, bytes."""


class _Gathered(Communication):
    """FSDP2 in a stage: its parameters stay gathered for the whole step, and its gradients whole."""

    def before_forward(self, i: int) -> None:
        """Nothing: the parameters are there."""

    after_forward = before_backward = before_forward

    def before_tail(self) -> None:
        """Nothing."""

    after_model = before_tail_backward = before_tail

    def before_experts(self, unit: UnitBytes | None) -> None:
        """Nothing."""

    after_experts = before_experts

    def gathered_in_backward(self, unit: UnitBytes | None) -> int:
        """Nothing that is not there."""
        return 0

    def reduce_experts(self, unit: UnitBytes, grads: int) -> None:
        self.reduce(unit, grads)

    def after_tail_backward(self, grads: int) -> None:
        if not self.on:
            super().after_tail_backward(grads)
        elif self.s.tail is not None:
            self.reduce(self.s.tail, 0)

    def after_backward(self, i: int, grads: int, before: int) -> None:
        unit = self.units[i]
        if not self.on or unit is None:
            super().after_backward(i, grads, before)
        else:
            self.reduce(unit, grads)


@dataclass
class _Running:
    """One stage while the step is walked through."""

    memory: StageMemory
    comm: Communication
    after_here: bool
    """The next stage is on this rank."""
    before_here: bool
    first_done: bool = False
    gathered: bool = False


def rank_peak(
    stages: Sequence[StageMemory], actions: Sequence[Action], *, microbatches: int, optimizer: tuple[int, int],
    holds_sent: bool, stay: bool = False, averages: bool = False, once: HeldOnce = HeldOnce(),  # noqa: B008 - frozen
    log: Log | None = None, points: list[StepPoint] | None = None,
) -> Peak:  # fmt: skip
    """The highest point of a step on one rank.

    Args:
        stages: those that the rank holds.
        actions: what it runs.
        microbatches: how many there are: each has its receiving buffers.
        optimizer: bytes of state, and of the step's temporaries.
        holds_sent: the schedule holds what it has sent until the step ends; 1F1B does not.
        stay: gradients stay between steps, zeroed.
        averages: the loop keeps a running mean of the parameters.
        once: what the first and the last stage both count, and have in common.
        log: gets, for each action, the most bytes alive while it runs, and those alive when it ends.
        points: gets every stretch of the step, in order.
    """
    warmup = next((i for i, action in enumerate(actions) if action.kind != FORWARD), 0)
    rank = _RankWalk(stages, microbatches, holds_sent, stay, warmup, once)
    now = rank.walk.now
    rank.walk.log, rank.walk.in_flight = points, rank.waiting
    now[Part.OPTIMIZER_STATE] = optimizer[0] - once.state
    now[Part.AVERAGED_WEIGHTS] = now[Part.PARAMETERS] if averages else 0
    for action in actions:
        most = rank.run(action)
        if log is not None:
            log.append((action, most, sum(rank.now.values())))
    rank.finish(optimizer[1])
    parts = with_inputs_counted_once(rank.walk.best)
    return Peak({part: value for part, value in parts.items() if value}, rank.walk.best_at, 0)


def with_inputs_counted_once(parts: Mapping[str, int]) -> dict[str, int]:
    """What a first layer holds of its input is a receiving buffer, which is taken from what is outside of layers: bytes by
    part of which none is less than 0."""
    found = dict(parts)
    twice = min(0, found[Part.OUTSIDE_OF_LAYERS])
    found[Part.OUTSIDE_OF_LAYERS] -= twice
    found[Part.RECEIVE_BUFFERS] += twice
    return found


class _RankWalk:
    def __init__(
        self, stages: Sequence[StageMemory], microbatches: int, holds_sent: bool, stay: bool, warmup: int, once: HeldOnce
    ) -> None:  # fmt: skip
        self.walk, self.holds_sent, self.done = StepWalk(), holds_sent, 0
        self.now = self.walk.now
        self.first_sent = warmup - 1
        """Of 1F1B: how many backwards until the output is done with that the last send of its warm-up holds on to."""
        self.once = once
        self.now[Part.PARAMETERS] -= once.params
        self.now[Part.GRADIENTS] -= once.grads if stay else 0
        here = {stage.slice.index for stage in stages}
        self.stages = {}
        for stage in stages:
            units = [layer.unit for layer in stage.first.layers]
            comm = _Gathered(self.walk, stage.sharding, units, stage.first.micro)
            index = stage.slice.index
            self.stages[index] = _Running(stage, comm, index + 1 in here, index - 1 in here, stay)
            self.now[Part.PARAMETERS] += stage.sharding.params
            self.now[Part.REMEMBERED_TABLES] += stage.remembered
            self.now[Part.RECEIVE_BUFFERS] += (
                microbatches * stage.hidden * ((not stage.slice.is_first) + (not stage.slice.is_last))
            )
            if stay:
                self.now[Part.GRADIENTS] += stage.rest.micro.gradients
        self.in_flight: dict[tuple[int, int], int] = {}
        self.between: dict[tuple[int, int], int] = {}
        self.input_grads = 0

    def waiting(self) -> tuple[tuple[int, str, int], ...]:
        """See `StepPoint.in_flight`."""
        forward = [(stage, "between forward and backward", size) for (stage, _), size in self.in_flight.items()]
        return *forward, *((stage, "between the halves of backward", size) for (stage, _), size in self.between.items())

    def run(self, action: Action) -> int:
        """Returns the most bytes alive meanwhile."""
        stage, key, walk = self.stages[action.stage], (action.stage, action.microbatch), self.walk
        walk.stage = action.stage
        best = (walk.best_total, walk.best_at, walk.best)
        walk.best_total = -1
        walk.look("beginning")
        if not stage.gathered:
            self._gather(stage)
        if action.kind == FORWARD:
            self._forward(stage, key)
        elif action.kind == BACKWARD:
            self._backward(stage, key)
        elif action.kind == INPUTS:
            self._inputs(stage, key)
        elif stage.memory.slice.is_first:
            self._backward(stage, key)  # torch runs it whole, in the place of the second half
        else:
            self._weights(stage, key)
        most = walk.best_total
        walk.best_at = f"{walk.best_at} of stage {action.stage}, microbatch {action.microbatch}"
        if best[0] >= most:
            walk.best_total, walk.best_at, walk.best = best
        return most

    def _round(self, stage: _Running) -> StageRound:
        return stage.memory.rest if stage.first_done else stage.memory.first

    def _forward(self, stage: _Running, key: tuple[int, int]) -> None:
        one, now = self._round(stage), self.now
        outer = one.outer.counted_once([layer.inputs for layer in one.layers])
        walk_forward(self.walk, stage.comm, one.layers, outer, stage.memory.offload)
        left = now[Part.HELD_ACTIVATIONS] + now[Part.OUTSIDE_OF_LAYERS]
        now[Part.HELD_ACTIVATIONS] = now[Part.OUTSIDE_OF_LAYERS] = 0
        left -= stage.memory.hidden if stage.after_here else 0  # it takes the place of the buffer of the step before
        now[Part.MICROBATCHES_IN_FLIGHT] += left
        self.in_flight[key] = left

    def _begin_backward(self, stage: _Running, one: StageRound, outer: OuterMemory, key: tuple[int, int]) -> int:
        """What was in flight is what the microbatch holds now; returns the output's bytes that it counts itself."""
        now, hidden = self.now, stage.memory.hidden
        now[Part.MICROBATCHES_IN_FLIGHT] -= self.in_flight.pop(key)
        own = 0 if stage.after_here or stage.memory.slice.is_last else hidden
        now[Part.HELD_ACTIVATIONS] = held_bytes(one.layers, stage.memory.offload)
        now[Part.OUTSIDE_OF_LAYERS] = outer.head.left
        now[Part.KEPT_OUTPUT] = own if not stage.memory.slice.is_last else outer.kept
        if not stage.memory.slice.is_last:
            now[Part.RECEIVE_BUFFERS] -= hidden  # the one that is counted as the gradient of the last layer's output
        return own

    def _sent(self, stage: _Running, own: int) -> None:
        """At the end of a backward, or of its first half."""
        now, hidden = self.now, stage.memory.hidden
        now[Part.KEPT_OUTPUT] = now[Part.OUTSIDE_OF_LAYERS] = now[Part.HELD_ACTIVATIONS] = 0
        self.done += 1
        now[Part.SENT_TENSORS] += own if self.holds_sent or self.done == self.first_sent else 0
        if not (stage.memory.slice.is_first or stage.before_here):
            now[Part.SENT_TENSORS] += hidden if self.holds_sent or self.done == 1 else 0

    def _backward(self, stage: _Running, key: tuple[int, int]) -> None:
        one, memory = self._round(stage), stage.memory
        outer = one.outer.counted_once([layer.inputs for layer in one.layers])
        stage.comm.micro = one.micro
        own = self._begin_backward(stage, one, outer, key)
        walk_backward(
            self.walk, stage.comm, one.layers, outer, memory.offload, one.tail_grads,
            after_last_layer=0 if memory.slice.is_last else memory.hidden,
        )  # fmt: skip
        self._sent(stage, own)
        self._first_gradients(stage, one.root_grads)

    def _first_gradients(self, stage: _Running, more: int) -> None:
        if not stage.first_done:
            again = stage.memory.slice.is_first  # the last stage, which comes before, has made those of what both have
            self.now[Part.GRADIENTS] += more - (self.once.grads if again else 0)
        stage.first_done = True

    def _inputs(self, stage: _Running, key: tuple[int, int]) -> None:
        memory = stage.memory
        if memory.slice.is_first:
            return
        one, now, walk = self._round(stage), self.now, self.walk
        walk.phase = "backward"
        assert one.outer_halves is not None
        outer = one.outer_halves.counted_once([layer.inputs for layer in one.layers])
        own = self._begin_backward(stage, one, one.outer, key)
        now[Part.OUTSIDE_OF_LAYERS] = 0
        last, kept = len(one.layers) - 1, 0
        peak = max(outer.loss.peak, outer.middle.peak)
        walk.look("first half of backward of the head", {Part.OUTSIDE_OF_LAYERS: peak - outer.kept})
        for i in reversed(range(len(one.layers))):
            layer, halves = one.layers[i], one.halves[i]
            stretch = outer.middle if i == last else outer.backward[last - 1 - i]
            now[Part.HELD_ACTIVATIONS] = held_bytes(one.layers[:i], memory.offload)
            walk.upto = i
            now[Part.OUTSIDE_OF_LAYERS] = stretch.left - outer.kept - layer.memory.output_grad
            walk.look(
                f"first half of backward of layer {i}",
                {Part.RUNNING_LAYER: halves.inputs_peak + layer.inputs, Part.MICROBATCHES_IN_FLIGHT: kept},
            )
            kept += halves.kept + layer.inputs - (0 if i else memory.hidden)  # that is in a receiving buffer
            if i == last and not memory.slice.is_last:
                now[Part.RECEIVE_BUFFERS] += memory.hidden
                kept -= halves.kept_output_grad  # that one
        outside = outer.tail.left - outer.kept - memory.hidden + memory.shared
        self._sent(stage, own)
        self.input_grads += 0 if stage.before_here else memory.hidden
        self.between[key] = kept + outside
        now[Part.MICROBATCHES_IN_FLIGHT] += self.between[key]

    def _weights(self, stage: _Running, key: tuple[int, int]) -> None:
        one, now = self._round(stage), self.now
        self.walk.phase = "backward"
        assert one.outer_halves is not None and one.outer_halves.weights is not None
        adds = [halves.weights_peak - halves.kept for halves in one.halves]
        outer = one.outer_halves.weights.peak - one.outer_halves.tail.left
        made = sum(halves.param_grad for halves in one.halves)
        self.walk.look("second half of backward", {Part.RUNNING_LAYER: max(*adds, outer, made)})
        now[Part.MICROBATCHES_IN_FLIGHT] -= self.between.pop(key)
        self._first_gradients(stage, made + one.root_grads + one.tail_grads)

    # --- FSDP2 ----------------------------------------------------------------------------------------------------

    def _gather(self, stage: _Running) -> None:
        """A stage's parameters are gathered once, before its first microbatch."""
        stage.gathered = True
        sharding = stage.memory.sharding
        if not sharding.on:
            return
        units = [
            sharding.root,
            *sharding.units,
            *([sharding.tail] if sharding.tail else []),
            *sharding.experts.values(),
        ]
        for unit in units:
            self.now[Part.GATHERED_LAYERS] += unit.gathered
            self.walk.look("gathering", {Part.GATHERED_LAYERS: unit.flat + unit.copied + unit.gather_input})

    def finish(self, temporaries: int) -> None:
        """Gradients are reduced, stage by stage; then the optimizer's step."""
        for stage in self.stages.values():
            sharding, comm = stage.memory.sharding, stage.comm
            if not sharding.on:
                continue
            comm.micro = Microbatch(frees=True)
            for unit in sharding.all:
                self.now[Part.GATHERED_LAYERS] -= unit.gathered
                comm.reduce(unit, 0)
            self.now[Part.REDUCE_BUFFERS] = 0
        # With a backward cut in two, gradients of the stages' inputs stay until the next step.
        self.now[Part.SENT_TENSORS] = self.input_grads
        self.walk.phase = "optimizer"
        self.walk.look("optimizer step", {Part.OPTIMIZER_STEP: temporaries})
