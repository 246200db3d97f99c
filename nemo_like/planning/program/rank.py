"""The steps of one rank of a pipeline: its actions in their order, and all micro-batches that are in flight.

What `torch.distributed.pipelining` keeps (torch 2.13): a receiving buffer per micro-batch for each stage's input and for the
gradient of its output, made once; each output until its backward, and under schedules with several stages on a rank all
that was sent until the step ends; with a backward cut in two, what the second half needs, and the gradients of the
stages' inputs until the next step. Stages that follow each other on one rank hand tensors on instead of sending them. FSDP2
keeps whole gradients of a stage, and reduces them behind its last backward; schedules with several stages on a rank gather
all of a stage's parameters at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_like.activation_checkpointing.plan import Part
from nemo_like.distributed.pipeline.schedules import (
    FORWARD,
    INPUTS,
    REDUCE,
    RESHARD,
    UNSHARD,
    WEIGHTS,
    Action,
)
from nemo_like.planning.program.loop import make_optimizer_state, make_parameters, stage_step, start_with_gradients
from nemo_like.planning.program.readers import Bytes, Peak, StepPoint, Storages
from nemo_like.planning.program.step import Around, LayerCall, Microbatch
from nemo_like.planning.program.units import ROOT, TAIL, GatheredOnce, Pass
from nemo_like.planning.sharding import UnitBytes

if TYPE_CHECKING:
    from nemo_like.planning.block import Choice
    from nemo_like.planning.stages import PipelinePlanner, PlannedStage

_HALFWAY = "between the halves of backward"
_WAITING = "between forward and backward"


@dataclass(frozen=True)
class ActionBytes:
    """One action of a rank."""

    action: Action
    most: int
    """Bytes alive while it runs."""
    left: int
    """Bytes alive when it ends."""


class StageOfRank:
    """One stage while steps are written."""

    def __init__(self, pipeline: PipelinePlanner, stage: PlannedStage, choices: Sequence[Choice], e: Storages) -> None:
        self.index, self.planner, self.choices, self.e = stage.slice.index, stage.planner, choices, e
        self.is_first, self.is_last = stage.slice.is_first, stage.slice.is_last
        self.once = pipeline.pp.replay != "twice"
        self.step = stage_step(self.planner, e, units=GatheredOnce)
        self.cast = self.planner.casts
        self._calls: dict[tuple[bool, bool], list[LayerCall]] = {}
        self.running: dict[int, Microbatch] = {}
        self.going_back: dict[int, Microbatch] = {}
        self.first_done = self.fetched = False
        self.stays = False
        """Gradients of the step before are there."""
        self.received: dict[int, int] = {}
        """By micro-batch, the buffer that its input comes in."""
        self.received_grads: dict[int, int] = {}
        """The same of the gradient of its output."""

    def forward(self, number: int) -> None:
        turn = self._turn()
        self.running[number] = Microbatch(self.step, turn, self._layers(turn), self._around(turn))
        self.running[number].forward()

    def begin_backward(self, number: int, *, halves: bool) -> Microbatch:
        one = self.running.pop(number)
        self.go_on(one, halves=halves)
        if not self.is_last:
            one.given_gradient(self.received_grads[number])
        return one

    def go_on(self, one: Microbatch, *, halves: bool) -> None:
        """With the gradients that are there now, in one piece or in two."""
        turn = self._turn(halves=halves)
        one.go_on_as(turn, self._layers(turn, halves=halves), self._around(turn, halves=halves))

    def ended(self) -> None:
        """A microbatch has gone all the way back."""
        self.first_done = True

    def unshard(self) -> None:
        """Fetches all units; they are copied out by `copy_out`."""
        if self.step.on:
            self.fetched = True
            for key, unit in self._units():
                self.step.units.fetch(key, unit)

    def copy_out(self) -> None:
        """Of what `unshard` fetched."""
        if self.fetched:
            self.fetched = False
            for key, unit in self._units():
                self.step.units.copy_out(key, unit, forward=False)

    def reshard(self) -> None:
        """Frees all units."""
        for key, _ in self._units():
            self.step.units.reshard(key)

    def reduce(self) -> None:
        """After the last backward."""
        if self.step.on:
            units = self.step.units
            assert isinstance(units, GatheredOnce)
            units.end(self._units(), Pass(adds=self.stays))
        self.first_done = False

    def _units(self) -> list[tuple[Hashable, UnitBytes | None]]:
        """In the order of the stage's modules."""
        sharding, calls = self.planner.sharding, self._layers(self._turn())
        inside = [unit for i, layer in enumerate(calls) for unit in ((i, layer.unit), (("experts", i), layer.experts))]
        return [(ROOT, sharding.root), *inside, (TAIL, sharding.tail)]

    def _turn(self, *, halves: bool = False) -> Pass:
        """The first backward makes gradients, the others add to them; none is reduced before the end."""
        if not self.step.on:
            return Pass(accumulates=self.first_done or self.stays)
        if not self.cast:
            return Pass(accumulates=self.first_done, reduces=False)
        waiting = isinstance(self.step.units, GatheredOnce) and bool(self.step.units.waiting)
        return Pass(accumulates=waiting, reduces=False, waits=halves)

    def _layers(self, turn: Pass, *, halves: bool = False) -> list[LayerCall]:
        key = turn.accumulates, halves
        if key not in self._calls:
            self._calls[key] = self.planner.layer_calls(
                self.choices, turn.accumulates, received=not self.is_last, halves=self.once if halves else None
            )
        return self._calls[key]

    def _around(self, turn: Pass, *, halves: bool = False) -> Around:
        return self.planner.around(self.choices, turn.accumulates, halves=halves)


class RankSteps:
    """Writes the steps of one rank.

    Args:
        pipeline: the planner of all stages.
        rank: of the pipeline.
        choices: for each stage, one for each layer call.
        storages: what it is written into.
        kept_outputs: for each stage, bytes of a micro-batch's output that are there until the step ends.
    """

    def __init__(
        self,
        pipeline: PipelinePlanner,
        rank: int,
        choices: Sequence[Sequence[Choice]],
        storages: Storages,
        *,
        kept_outputs: Sequence[int] = (),
    ) -> None:
        self.e, self.kept_outputs = storages, kept_outputs
        self.actions, self.once = pipeline.actions[rank], pipeline.held_once(rank)
        # What 1F1B has sent it lets go of; schedules with several stages on a rank do when the step ends.
        self.holds_sent = not pipeline.pp.facts.frees_sent
        own = [pipeline.stages[index] for index in pipeline.of_rank(rank)]
        self.stages = {s.slice.index: StageOfRank(pipeline, s, choices[s.slice.index], storages) for s in own}
        self.input_grads: list[int] = []
        """Of stages whose backward is cut in two, till the next step."""
        self.log: list[ActionBytes] = []
        shares = self.once.params > 0
        for stage in self.stages.values():
            make_parameters(storages, stage.planner, less=self.once.params if shares and stage.is_first else 0)
            if shares and stage.is_first:
                stage.step.elsewhere = frozenset(pipeline.parts.tied)
            for number in range(pipeline.count):
                if not stage.is_first:
                    stage.received[number] = storages.make(pipeline.hidden_bytes, Part.RECEIVE_BUFFERS)
                if not stage.is_last:
                    stage.received_grads[number] = storages.make(pipeline.hidden_bytes, Part.RECEIVE_BUFFERS)
        self.stay = pipeline.job.step.zero_grad == "zero"

    def begin_later(self) -> None:
        """Make what is there when a later step begins."""
        for stage in self.stages.values():
            make_optimizer_state(self.e, stage.planner, less=self.once.state if stage.is_first else 0)
            if self.stay:
                stage.stays = True
                start_with_gradients(stage.step, less=self.once.grads if stage.is_first else 0)

    def run(self, *, first: bool = False) -> None:
        """All actions, the reductions, and the optimizer, whose state the `first` step makes."""
        e, sent, done = self.e, list[int](), 0
        e.drop_all(self.input_grads)
        self.input_grads.clear()
        warmup = next((at for at, action in enumerate(self.actions) if action.kind != FORWARD), 0)
        for action in self.actions:
            stage, number = self.stages[action.stage], action.microbatch
            if action.kind in (UNSHARD, RESHARD, REDUCE):
                {UNSHARD: stage.unshard, RESHARD: stage.reshard, REDUCE: stage.reduce}[action.kind]()
                continue
            self._begin(action)
            stage.copy_out()
            if action.kind == FORWARD:
                self._forward(stage, number)
                if self.kept_outputs:
                    sent.append(e.make(self.kept_outputs[action.stage], Part.KEPT_OUTPUT))
            elif action.kind == INPUTS and stage.is_first:
                pass  # torch runs it whole, in the place of the second half
            else:
                done += action.kind != WEIGHTS or stage.is_first
                sent += self._backward(stage, action, done, warmup)
            self._end(action)
        e.drop_all(sent)
        e.phase = "optimizer"
        e.mark("optimizer step")
        for stage in self.stages.values():
            if first:
                make_optimizer_state(e, stage.planner, less=self.once.state if stage.is_first else 0)
            e.optimizer_step(stage.planner.optimizer)
            stage.stays = self.stay
            if not self.stay:
                stage.step.zero_grad()

    def _forward(self, stage: StageOfRank, number: int) -> None:
        stage.forward(number)
        one, after = stage.running[number], self.stages.get(stage.index + 1)
        if after is not None:  # its output takes the place of the buffer of the step before
            self.e.drop(after.received[number])
            after.received[number] = 0
            for storage in one.sent_on():
                self.e.retag(storage, Part.RECEIVE_BUFFERS)
                after.received[number] = self.e.hold(storage)
        self.e.park(stage.index, number, _WAITING)

    def _backward(self, stage: StageOfRank, action: Action, done: int, warmup: int) -> list[int]:
        """Returns what stays till the step ends, of what went to other ranks."""
        e, number, halves = self.e, action.microbatch, action.kind in (INPUTS, WEIGHTS) and not stage.is_first
        if action.kind == WEIGHTS and halves:
            e.unpark(stage.index, number, _HALFWAY)
            one = stage.going_back.pop(number)
            stage.go_on(one, halves=True)
            one.backward_of_weights()
            e.drop_all([*one.output, *one.input_grads])
            stage.ended()
            return []
        e.unpark(stage.index, number, _WAITING)
        one = stage.begin_backward(number, halves=halves)
        one.backward_of_inputs()
        if not halves:
            one.backward_of_weights()
        output, grads = one.take_ends()
        e.retag(stage.received_grads.get(number, 0), Part.RECEIVE_BUFFERS)
        if stage.index + 1 in self.stages:
            e.retag(self.stages[stage.index + 1].received[number], Part.RECEIVE_BUFFERS)
        sent = self._sent(stage, output, grads, number, done, warmup, halves=halves)
        if halves:
            stage.going_back[number] = one
            e.park(stage.index, number, _HALFWAY)
        else:
            stage.ended()
        return sent

    def _sent(
        self,
        stage: StageOfRank,
        output: list[int],
        grads: list[int],
        number: int,
        done: int,
        warmup: int,
        *,
        halves: bool,
    ) -> list[int]:
        """What stays of the output of a micro-batch, and of the gradient of its input. Of 1F1B's one each does, that the
        last send of its warm-up and a later one hold on to.

        Args:
            done: how many backwards this was.
            warmup: forwards before the first of them.
        """
        e, before = self.e, self.stages.get(stage.index - 1)
        stays = []
        if not stage.is_last and stage.index + 1 not in self.stages and (self.holds_sent or done == warmup - 1):
            stays += output
        else:
            e.drop_all(output)
        if before is not None and grads:  # it takes the place of that stage's buffer
            e.drop(before.received_grads[number])
            before.received_grads[number] = grads[0]
            e.retag(grads[0], Part.RECEIVE_BUFFERS)
            e.drop_all(grads[1:])
        elif not stage.is_first and halves:
            self.input_grads += grads
        elif not stage.is_first and (self.holds_sent or done == 1):
            stays += grads
        else:
            e.drop_all(grads)
        for storage in (*stays, *self.input_grads):
            e.retag(storage, Part.SENT_TENSORS)
        return stays

    def _begin(self, action: Action) -> None:
        e = self.e
        e.stage, e.phase = action.stage, "forward"
        e.suffix = f" of stage {action.stage}, microbatch {action.microbatch}"
        e.begin_action()

    def _end(self, action: Action) -> None:
        self.e.suffix = ""
        found = self.e.end_action()
        if found is not None:
            self.log.append(ActionBytes(action, *found))


def rank_peak(
    pipeline: PipelinePlanner,
    rank: int,
    choices: Sequence[Sequence[Choice]],
    log: list[ActionBytes] | None = None,
    points: list[StepPoint] | None = None,
) -> Peak:
    """The highest point of a later step of one rank. `log`: gets each action, `points`: every stretch, in order."""
    storages = Bytes(points)
    steps = RankSteps(pipeline, rank, choices, storages)
    steps.begin_later()
    steps.run()
    if log is not None:
        log += steps.log
    return storages.peak()
