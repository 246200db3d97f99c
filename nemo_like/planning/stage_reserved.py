"""What the caching allocator reserves on one rank of a pipeline: its actions in their order, as allocations and frees.

Each microbatch is a pass of its own through its stage, begun by its forward and ended by its backward; between the two other
microbatches run. FSDP2 gathers a stage's parameters once, keeps whole gradients, and reduces them at the end of the step, or
behind the stage's own last backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from nemo_like.distributed.pipeline.order import BACKWARD, FORWARD, Action
from nemo_like.options import PipelineParallel
from nemo_like.options.allocator import AllocatorConfig
from nemo_like.planning.reserved import Replayed, Reserved, make_state, optimizer_passes
from nemo_like.planning.sharding import UnitBytes
from nemo_like.planning.step_events import Events, LayerEvents, Microstep, Pass, StepEvents, UnitEvents

if TYPE_CHECKING:
    from nemo_like.planning.block import Choice
    from nemo_like.planning.stages import PipelinePlanner, PlannedStage

_STEPS = 3
"""In the second one the optimizer's state is there from the beginning; the third one reserves nothing more, as a rule."""


def replay_rank(
    planner: PipelinePlanner, rank: int, choices: Sequence[Sequence[Choice]], config: AllocatorConfig | None = None,
    memory: int | None = None, *, kept_outputs: Sequence[int] = (), reduces_each: bool = False,
) -> Reserved | None:  # fmt: skip
    """Replay steps of one rank through the allocator; None: the schedule cuts backward in two, which is not modelled.

    Args:
        planner: of a CUDA device.
        rank: of the pipeline.
        choices: for each stage, one for each layer call.
        config, memory: as for `nemo_like.planning.reserved.replay`.
        kept_outputs: for each stage, bytes of a microbatch's output that are there until the step ends.
        reduces_each: a stage's gradients are reduced and its parameters freed behind its own last backward, while other
            stages of the rank still have theirs before them. Default: all of them when the step ends.

    Raises:
        DeviceMemoryError: `memory` does not suffice.
    """
    actions = planner.actions[rank]
    if any(action.kind not in (FORWARD, BACKWARD) for action in actions):
        return None
    replayed = Replayed(config, memory, planner.device.cuda)
    stages = [planner.stages[index] for index in planner.of_rank(rank)]
    walk = _Rank(planner, stages, choices, kept_outputs, reduces_each=reduces_each)
    for number in range(_STEPS):
        walk.step(actions, first=number == 0)
        replayed.play(walk.events)
    return replayed.found()


def is_replayed(pp: PipelineParallel) -> bool:
    """Whether `replay_rank` models the schedule: backward stays in one piece."""
    return not pp.facts.splits_backward


def ranks_to_replay(planner: PipelinePlanner, choices: Sequence[Sequence[Choice]]) -> list[int]:
    """The ranks of which one reserves most: of those that run the same layers in the same way, which differ in how many
    microbatches are in flight, the one with the highest peak. Arguments as for `replay_rank`."""
    alike: dict[Hashable, list[int]] = {}
    for rank in range(planner.pp.size):
        runs = tuple((id(planner.stages[index].planner), tuple(choices[index])) for index in planner.of_rank(rank))
        alike.setdefault(runs, []).append(rank)
    return [
        ranks[0] if len(ranks) == 1 else max(ranks, key=lambda rank: planner.rank_peak(rank, choices).total)
        for ranks in alike.values()
    ]


class _HeldUnits(UnitEvents):
    """A stage's units: gathered until `end`, which reduces them."""

    def close(self, key: Hashable) -> None:
        """Not yet."""

    def close_all(self) -> None:
        """Not yet."""

    def finish(self) -> None:
        """Not yet."""

    def end(self, units: Sequence[tuple[Hashable, UnitBytes | None]]) -> None:
        for key, unit in units:
            super().close(key)
            self.reduce(key, unit, [], Pass())
        super().close_all()
        super().finish()


class _ReplayedStage:
    def __init__(
        self, planner: PipelinePlanner, stage: PlannedStage, choices: Sequence[Choice], events: Events
    ) -> None:
        self.index, self.planner, self.choices = stage.slice.index, stage.planner, choices
        self.is_first, self.is_last, self.hidden = stage.slice.is_first, stage.slice.is_last, planner.hidden_bytes
        sharding = self.planner.sharding
        names = {id(p): name for name, p in self.planner.model.named_parameters(remove_duplicate=False)}
        self.writer = StepEvents(
            events, sharding, frozenset(names[p] for p in sharding.tail_params if p in names),
            in_chunks=self.planner.outer().in_chunks,
        )  # fmt: skip
        self.units = self.writer.units = _HeldUnits(events)
        self.cast = self.planner.job.param_dtype is not None
        self._layers: dict[bool, list[LayerEvents]] = {}
        self.running: dict[int, Microstep] = {}
        self.first_done = False
        self.received = 0
        """A buffer that gradients of its output come in."""

    def forward(self, number: int) -> None:
        turn = self._turn()
        one = self.running[number] = Microstep(
            self.writer, turn, self._events(turn), self.planner.outer(turn.accumulates, self.choices).events
        )
        one.forward()

    def backward(self, number: int) -> None:
        one, grads, turn = self.running.pop(number), self.writer.grads, self._turn()
        before = len(grads)
        one.go_on_as(turn, self._events(turn), self.planner.outer(turn.accumulates, self.choices).events)
        if not self.is_last:
            one.given_gradient(self.received)
        one.backward()
        if self.first_done:  # where it was begun before there were gradients and made its own, they are added to those
            self.writer.e.drop_all(grads[before:])
            del grads[before:]
        self.first_done = True
        self.writer.let_go()  # its output and the gradient of its input: the schedule holds what it sends

    def end(self) -> None:
        """Reductions, after the last backward."""
        if self.writer.on:
            sharding = self.planner.sharding
            calls = self._events(self._turn())
            keys: list[tuple[Hashable, UnitBytes | None]] = [(i, layer.unit) for i, layer in enumerate(calls)]
            keys += [(("experts", i), layer.experts) for i, layer in enumerate(calls) if layer.experts is not None]
            keys += [("tail", sharding.tail)] if sharding.tail is not None else []
            self.units.end([*keys, ("root", sharding.root)])
        self.first_done = False

    def _turn(self) -> Pass:
        """The first backward makes gradients, the others add to them; none is reduced before the end."""
        if not self.writer.on:
            return Pass(accumulates=self.first_done)
        return Pass(accumulates=self.first_done and not self.cast, reduces=False, adds=self.first_done)

    def _events(self, turn: Pass) -> list[LayerEvents]:
        if turn.accumulates not in self._layers:
            self._layers[turn.accumulates] = self.planner.layer_events(
                self.choices, turn.accumulates, received=not self.is_last
            )
        return self._layers[turn.accumulates]


class _Rank:
    """The events of one rank's steps, one after the other."""

    def __init__(
        self, planner: PipelinePlanner, stages: Sequence[PlannedStage], choices: Sequence[Sequence[Choice]],
        kept_outputs: Sequence[int], *, reduces_each: bool,
    ) -> None:  # fmt: skip
        self.events, self.kept_outputs, self.count = Events(), kept_outputs, planner.count
        self.reduces_each = reduces_each
        # What 1F1B has sent it lets go of; schedules with several stages on a rank do when the step ends.
        self.holds_sent = not planner.pp.facts.frees_sent
        self.stages = {s.slice.index: _ReplayedStage(planner, s, choices[s.slice.index], self.events) for s in stages}
        for stage in self.stages.values():
            make_state(self.events, stage.planner)
            for _ in range(self.count * ((not stage.is_first) + (not stage.is_last))):
                stage.received = self.events.make(stage.hidden)

    def step(self, actions: Sequence[Action], *, first: bool) -> None:
        """All actions, the reductions, and the optimizer."""
        kept, done = [], 0
        left = Counter(action.stage for action in actions if action.kind == BACKWARD)
        warmup = next((at for at, action in enumerate(actions) if action.kind != FORWARD), 0)
        for action in actions:
            stage = self.stages[action.stage]
            if action.kind == FORWARD:
                stage.forward(action.microbatch)
                if self.kept_outputs:
                    kept.append(self.events.make(self.kept_outputs[action.stage]))
                continue
            stage.backward(action.microbatch)
            done += 1
            kept += [self.events.make(stage.hidden) for _ in range(self._sent(stage, done, warmup))]
            left[action.stage] -= 1
            if self.reduces_each and not left[action.stage]:
                stage.end()
        for stage in () if self.reduces_each else self.stages.values():
            stage.end()
        self.events.drop_all(kept)
        for stage in self.stages.values():
            optimizer_passes(self.events, stage.planner.optimizer, first=first)
            if stage.planner.job.step.zero_grad == "free":
                stage.writer.zero_grad()

    def _sent(self, stage: _ReplayedStage, done: int, warmup: int) -> int:
        """Tensors that stay till the step ends, of those that went to other ranks: the output of a microbatch, and the
        gradient of its input. Of 1F1B's one each does, that the last send of its warm-up and a later one hold on to.

        Args:
            stage: that went backward.
            done: how many backwards this was.
            warmup: forwards before the first of them.
        """
        on = not stage.is_last and stage.index + 1 not in self.stages and (self.holds_sent or done == warmup - 1)
        back = not stage.is_first and stage.index - 1 not in self.stages and (self.holds_sent or done == 1)
        return on + back
