"""The steps of one rank: its actions in their order, all micro-batches that are in flight, and the optimizer.

A rank that holds the whole model runs forward and backward of one micro-batch after the other.

In a pipeline, `torch.distributed.pipelining` (torch 2.13) keeps tensors:

- a receiving buffer per micro-batch for each stage's input and for the gradient of its output, made once;
- each output until its backward, and under schedules with several stages on a rank all that was sent until the step ends;
- with a backward cut in two, tensors of the second half, and the gradients of the stages' inputs until the next step.

Stages that follow each other on one rank hand tensors on instead of sending them. FSDP2 keeps whole gradients of a stage,
and reduces them behind its last backward. Schedules with several stages on a rank gather all of a stage's parameters at
once.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from nemo_like.activation_checkpointing.plan import Part
from nemo_like.distributed.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUTS,
    REDUCE,
    RESHARD,
    UNSHARD,
    WEIGHTS,
    Action,
    rank_of,
)
from nemo_like.planning.memory_model.fsdp_units import (
    EMBEDDING,
    ROOT,
    TAIL,
    FsdpBuffers,
    GatheredOnce,
    GradientRule,
    rules_of,
)
from nemo_like.planning.memory_model.microbatch import Microbatch, StageStep, without
from nemo_like.planning.memory_model.storages import Bytes, Event, Events, Label, Peak, Storages, at_peak, part_bytes
from nemo_like.planning.query import PlanQuery, Stage
from nemo_like.planning.selection.layer import Choice
from nemo_like.planning.sharding import UnitBytes

_UNITS = {"tail": "head and last norm", "embedding": "embedding and last norm", "root": "embedding and last norm"}
_HALFWAY = "between the halves of backward"
_WAITING = "between forward and backward"
AnyStorages = TypeVar("AnyStorages", bound=Storages)


class StageOfRank(StageStep):
    """One stage while steps are written."""

    def __init__(self, query: PlanQuery, stage: Stage, choices: Sequence[Choice], storages: Storages) -> None:
        super().__init__(
            storages,
            stage.sharding,
            buffers=GatheredOnce if query.is_pipeline else FsdpBuffers,
            offload=stage.job.offload,
            copies_at_once=stage.device.kind == "cpu",
        )
        self.index, self.stage, self.choices = stage.slice.index, stage, choices
        self.is_first, self.is_last = stage.slice.is_first, stage.slice.is_last
        # Backward actions of a step, in their order: kind and micro-batch. Torch runs backward of the first stage whole, in
        # the place of the second half.
        actions = [each for each in query.actions[rank_of(query.pp, self.index)] if each.stage == self.index]
        if self.is_first:
            self.backs = [(BACKWARD, action.microbatch) for action in actions if action.kind in (BACKWARD, WEIGHTS)]
        else:
            self.backs = [
                (action.kind, action.microbatch) for action in actions if action.kind in (BACKWARD, INPUTS, WEIGHTS)
            ]
        # Rules of the gradients of each micro-batch, without a pipeline.
        self.rules: Sequence[GradientRule] = ()
        self._layers = functools.cache(functools.partial(stage.layer_calls, choices, received=not self.is_last))
        self.running: dict[int, Microbatch] = {}
        self.fetched = False
        self.stays = False  # True if gradients of the step before exist.
        self.received: dict[int, int] = {}  # Buffer that each micro-batch's input comes in, by micro-batch.
        # Buffer that the gradient of its output comes in, by micro-batch.
        self.received_grads: dict[int, int] = {}

    def forward(self, number: int) -> None:
        rule, halves = self._rule(number), self.halves(number)
        outside = self.stage.outside(rule.accumulates, self.choices, halves=halves)
        self.running[number] = Microbatch(self, rule, self._layers(rule.accumulates, halves=halves), outside)
        self.running[number].forward()

    def halves(self, number: int) -> bool:
        """Return whether backward of a micro-batch runs in two halves."""
        return (INPUTS, number) in self.backs

    def unshard(self) -> None:
        """Gather all units; they are copied out by `copy_out`."""
        if self.on:
            self.fetched = True
            for key, unit in self._units():
                self.buffers.gather(key, unit)

    def copy_out(self) -> None:
        """Copy out the units that `unshard` gathered."""
        if self.fetched:
            self.fetched = False
            for key, unit in self._units():
                self.buffers.copy_out(key, unit, forward=False)

    def reshard(self) -> None:
        """Free all units."""
        for key, _ in self._units():
            self.buffers.reshard(key)

    def reduce(self) -> None:
        """Reduce the gradients after the last backward."""
        if self.on:
            assert isinstance(self.buffers, GatheredOnce)
            self.buffers.end(self._units(), GradientRule(adds=self.stays))

    def _units(self) -> list[tuple[Hashable, UnitBytes | None]]:
        """Return the stage's units in the order of its modules."""
        sharding, calls = self.sharding, enumerate(self.stage.units)
        inside = [pair for i, (unit, experts, _) in calls for pair in ((i, unit), (("experts", i), experts))]
        return [(ROOT, sharding.root), (EMBEDDING, sharding.embedding), *inside, (TAIL, sharding.tail)]

    def _rule(self, number: int) -> GradientRule:
        """Return how a micro-batch treats its gradients.

        In a pipeline, the first backward makes gradients, and the others add to them; none is reduced before the end.
        """
        if self.rules:
            return self.rules[number]
        at = max(at for at, (kind, other) in enumerate(self.backs) if other == number)
        before = [kind for kind, _ in self.backs[:at]]
        ended = any(kind != INPUTS for kind in before)
        if not self.on:
            return GradientRule(accumulates=ended or self.stays)
        if not self.stage.casts:
            return GradientRule(accumulates=ended, reduces=False)
        # FSDP2 sees gradients of a second half in the next backward, or first half of one.
        return GradientRule(accumulates=before[-1:] == [WEIGHTS], reduces=False, waits=self.halves(number))


class RankSteps:
    """Writes the steps of one rank.

    Args:
        query: the job, and its stages.
        rank: rank of the pipeline; 0 without one.
        choices: for each stage, one for each layer call.
        storages: receives the allocations and frees.
    """

    def __init__(self, query: PlanQuery, rank: int, choices: Sequence[Sequence[Choice]], storages: Storages) -> None:
        self.storages, self.query = storages, query
        self.actions = query.actions[rank]
        self.once = query.held_once(rank)
        # 1F1B frees the tensors it has sent; schedules with several stages on a rank do so when the step ends.
        self.holds_sent = not query.pp.facts.frees_sent
        own_stages = [query.stages[index] for index in query.of_rank(rank)]
        self.stages = {
            one.slice.index: StageOfRank(query, one, choices[one.slice.index], storages) for one in own_stages
        }
        # Gradients of the inputs of stages whose backward is cut in two, kept until the next step.
        self.input_grads: list[int] = []
        shares = self.once.params > 0
        for stage in self.stages.values():
            self._make_parameters(stage.stage, less=self.once.params if shares and stage.is_first else 0)
            if shares and stage.is_first:
                stage.elsewhere = frozenset(query.traced.cut(query.job).tied)
            for number in range(query.microbatches):
                if not stage.is_first:
                    stage.received[number] = storages.make(
                        query.hidden_bytes, Part.RECEIVE_BUFFERS, origin="received tensors"
                    )
                if not stage.is_last:
                    stage.received_grads[number] = storages.make(
                        query.hidden_bytes, Part.RECEIVE_BUFFERS, origin="received tensors"
                    )
        self.stay = query.job.step.zero_grad == "zero"

    # --- storages that stay from step to step -------------------------------------------------------------------------

    def _make_parameters(self, stage: Stage, *, less: int) -> None:
        """Make the storages before the first step: parameters, their running mean, DDP's buckets, remembered tables.

        `less`: bytes that another stage of the rank has made.
        """
        sharding, make, units = stage.sharding, self.storages.make, stage.sharding.units
        self.storages.stage = stage.slice.index
        kinds = [f"{len(units)} layers"] * len(units) + ["their experts"] * len(sharding.experts)
        kinds += [_UNITS[unit.kind] for unit in sharding.outside]
        sizes = [(size, kind) for unit, kind in zip(sharding.all, kinds) if unit.shard for size in unit.each_shard]
        sizes.append((sharding.replicated, "whole on every rank"))
        for part in (Part.PARAMETERS, *([Part.AVERAGED_WEIGHTS] if stage.job.step.ema else [])):
            for size, (_, kind) in zip(without([size for size, _ in sizes], less), sizes):
                make(size, part, origin=kind)
        make(stage.part.traced.table_bytes, Part.REMEMBERED_TABLES)
        if stage.job.ddp:
            for unit in sharding.all:
                make(unit.grad, Part.GRADIENTS)

    def _make_optimizer_state(self) -> None:
        """Make the state that the optimizer's first step leaves.

        State of tied parameters that another stage of the rank has is left out.
        """
        for stage in self.stages.values():
            self.storages.stage, states = stage.index, stage.stage.optimizer.states
            places = [
                "of layers" if param.in_layer else "of modules around them" for param in stage.stage.sharding.trained
            ]
            sizes = [(size, place) for each, place in zip(states, places) for size in each]
            remaining = without([size for size, _ in sizes], self.once.state if stage.is_first else 0)
            for size, (_, place) in zip(remaining, sizes):
                self.storages.make(size, Part.OPTIMIZER_STATE, origin=place)

    def begin_later(self) -> None:
        """Make the storages that exist when a later step begins."""
        self._make_optimizer_state()
        starts = self.stay
        if not self.query.is_pipeline:
            stage = self.stages[0]
            output_bytes = stage.stage.outside(choices=stage.choices).kept_bytes
            stage.kept.append(self.storages.make(output_bytes, Part.KEPT_OUTPUT))
            rules, ddp = self._rules(first=False), self.query.job.ddp
            alike = len(rules) > 1 and rules[-1].reduces and all(rule.reduces and not rule.frees for rule in rules)
            starts = (alike or self.stay) and not (ddp and ddp.gradient_as_bucket_view)
            # The one with the highest peak.
            stage.rules = rules[-1:] if alike else rules
        for stage in self.stages.values() if starts else ():
            stage.stays = self.stay
            stage.start_with_gradients(less=self.once.grads if stage.is_first else 0)

    def _rules(self, *, first: bool) -> list[GradientRule]:
        """Return the rules of the gradients of a step's micro-batches, without a pipeline."""
        stage, job = self.stages[0].stage, self.query.job
        return rules_of(
            job.step,
            sharded=stage.sharding.on,
            views=job.ddp is not None and job.ddp.gradient_as_bucket_view,
            cast=stage.casts,
            first=first,
            device=stage.device.kind,
        )

    # --- a step -------------------------------------------------------------------------------------------------------

    def run(self, *, first: bool = False) -> None:
        """Run all actions, the reductions, and the optimizer, whose state the `first` step makes."""
        storages, self.sent, done = self.storages, list[int](), 0
        storages.empty(self.input_grads)
        actions: Sequence[Action] = self.actions
        if not self.query.is_pipeline:
            stage = self.stages[0]
            stage.rules = stage.rules or self._rules(first=first)
            actions = [Action(kind, 0, n) for n in range(len(stage.rules)) for kind in (FORWARD, BACKWARD)]
        warmup = next((at for at, action in enumerate(actions) if action.kind != FORWARD), 0)
        for action in actions:
            stage, number = self.stages[action.stage], action.microbatch
            if action.kind in (UNSHARD, RESHARD, REDUCE):
                {UNSHARD: stage.unshard, RESHARD: stage.reshard, REDUCE: stage.reduce}[action.kind]()
                continue
            storages.stage = action.stage
            if self.query.is_pipeline:
                storages.suffix = f" of stage {action.stage}, micro-batch {number}"
            stage.copy_out()
            if action.kind == FORWARD:
                self.forward(stage, number)
            elif action.kind == INPUTS and stage.is_first:
                pass  # torch runs it whole, in the place of the second half
            else:
                done += action.kind != WEIGHTS or stage.is_first
                self.backward(stage, action, done, warmup)
            storages.suffix = ""
        storages.drop_all(self.sent)
        storages.mark("optimizer step")
        if first:
            self._make_optimizer_state()
        for stage in self.stages.values():
            if not self.query.job.step.in_backward:
                storages.optimizer_step(stage.stage.optimizer)
            stage.stays, stage.rules = self.stay, ()
            if not self.stay:
                stage.zero_grad()

    def forward(self, stage: StageOfRank, number: int) -> None:
        stage.forward(number)
        one, after = stage.running[number], self.stages.get(stage.index + 1)
        if after is not None:  # its output takes the place of the buffer of the step before
            self.storages.drop(after.received[number])
            after.received[number] = 0
            for storage in one.sent_on():
                self.storages.relabel(storage, Part.RECEIVE_BUFFERS)
                after.received[number] = self.storages.hold(storage)
        self.storages.park(stage.index, number, _WAITING)

    def backward(self, stage: StageOfRank, action: Action, done: int, warmup: int) -> None:
        """Run a backward action; arguments as for `_send`."""
        storages, number, halves = self.storages, action.microbatch, stage.halves(action.microbatch)
        if action.kind == WEIGHTS and halves:
            storages.unpark(stage.index, number, _HALFWAY)
            stage.running.pop(number).backward_of_weights()
            return
        storages.unpark(stage.index, number, _WAITING)
        one = stage.running[number] if halves else stage.running.pop(number)
        if not stage.is_last:
            one.given_gradient(stage.received_grads[number])
        one.backward_of_inputs()
        output, grads = one.take_ends()
        if not halves:
            one.backward_of_weights()
        storages.relabel(stage.received_grads.get(number, 0), Part.RECEIVE_BUFFERS)
        if stage.index + 1 in self.stages:
            storages.relabel(self.stages[stage.index + 1].received[number], Part.RECEIVE_BUFFERS)
        self._send(stage, output, grads, number, done, warmup)
        if halves:
            storages.park(stage.index, number, _HALFWAY)

    def _send(
        self, stage: StageOfRank, output: list[int], grads: list[int], number: int, done: int, warmup: int
    ) -> None:
        """Pass on the output of a micro-batch and the gradient of its input; tensors that were sent may stay.

        Under 1F1B one of each stays: the last send of its warm-up and a later send have references to them.

        Args:
            done: number of backwards so far, with this one.
            warmup: forwards before the first of them.
        """
        storages, before = self.storages, self.stages.get(stage.index - 1)
        if not self.query.is_pipeline:
            stage.kept += output
            storages.drop_all(grads)
            return
        if not stage.is_last and stage.index + 1 not in self.stages and (self.holds_sent or done == warmup - 1):
            self._keep(output, self.sent)
        else:
            storages.drop_all(output)
        if before is not None and grads:  # it takes the place of that stage's buffer
            storages.drop(before.received_grads[number])
            before.received_grads[number] = grads[0]
            storages.relabel(grads[0], Part.RECEIVE_BUFFERS)
            storages.drop_all(grads[1:])
        elif not stage.is_first and stage.halves(number):
            self._keep(grads, self.input_grads)
        elif not stage.is_first and (self.holds_sent or done == 1):
            self._keep(grads, self.sent)
        else:
            storages.drop_all(grads)

    def _keep(self, storages: list[int], where: list[int]) -> None:
        for storage in storages:
            self.storages.relabel(storage, Part.SENT_TENSORS)
        where += storages


def rank_peak(query: PlanQuery, rank: int, choices: Sequence[Sequence[Choice]]) -> Peak:
    """Return the highest point of a later step of one rank; arguments as for `RankSteps`."""
    return _written(query, rank, choices, Bytes, Bytes.peak)


def _written(
    query: PlanQuery,
    rank: int,
    choices: Sequence[Sequence[Choice]],
    kind: type[AnyStorages],
    read: Callable[[AnyStorages], Any],
) -> Any:
    """Return the result of `read` on the storages of a later step; it is read once."""
    key = _key(kind, query, rank, choices)
    if key not in query.written:
        query.written[key] = read(later_step(query, rank, choices, kind()))
    return query.written[key]


def _key(kind: type[Storages], query: PlanQuery, rank: int, choices: Sequence[Sequence[Choice]]) -> Hashable:
    return (kind, rank, *(tuple(choices[index]) for index in query.of_rank(rank)))


def note_labels(
    query: PlanQuery, rank: int, choices: Sequence[Sequence[Choice]], first: Sequence[Event], later: Sequence[Event]
) -> None:
    """Keep the labels at the highest point of steps that were written, so that `labels_at_peak` writes none again."""
    query.written[_key(Events, query, rank, choices)] = at_peak([*first, *later], len(first))


def fullest_rank(query: PlanQuery, choices: Sequence[Sequence[Choice]]) -> int:
    """Return the rank of the pipeline that has the highest peak."""
    peaks = peaks_of(query, choices)
    return max(range(len(peaks)), key=lambda rank: peaks[rank].total)


def labels_at_peak(query: PlanQuery, rank: int, choices: Sequence[Sequence[Choice]]) -> dict[Label, int]:
    """Return the bytes of each label at the highest point of a later step of one rank."""
    return _written(query, rank, choices, Events, lambda events: at_peak(events.log))


def parts_at_peak(query: PlanQuery, rank: int, choices: Sequence[Sequence[Choice]]) -> dict[str, int]:
    """Return the bytes of each part at the highest point of a later step of one rank."""
    return part_bytes(labels_at_peak(query, rank, choices))


def later_step(query: PlanQuery, rank: int, choices: Sequence[Sequence[Choice]], storages: AnyStorages) -> AnyStorages:
    """Write the storages at the begin of a later step of one rank, and that step, into `storages`; return them."""
    steps = RankSteps(query, rank, choices, storages)
    steps.begin_later()
    steps.run()
    return storages


def peaks_of(query: PlanQuery, choices: Sequence[Sequence[Choice]]) -> list[Peak]:
    """Return the peak of every rank of the pipeline; without a pipeline, of one rank."""
    return [rank_peak(query, rank, choices) for rank in range(query.pp.size)]


def fullest_peaks(query: PlanQuery, choices: Sequence[Sequence[Choice]]) -> dict[int, Peak]:
    """Return the peaks of the ranks of which one has the highest, by rank.

    Of ranks that run the same layers in the same way, it is the one with the most micro-batches in flight; where halves of
    backwards wait too, all are looked at.
    """
    alike: dict[Hashable, dict[int, tuple[int, ...]]] = {}
    for rank in range(query.pp.size):
        indices = query.of_rank(rank)
        runs = tuple((query.stages[index].part, tuple(choices[index])) for index in indices)
        alike.setdefault(runs, {})[rank] = tuple(query.most_in_flight(index) for index in indices)
    highest: dict[int, Peak] = {}
    for flights in alike.values():
        most = tuple(map(max, zip(*flights.values())))
        first = next((rank for rank, flight in flights.items() if flight == most), None)
        ranks = flights if first is None or query.pp.facts.splits_backward else [first]
        peaks = {rank: rank_peak(query, rank, choices) for rank in ranks}
        rank = max(peaks, key=lambda rank: peaks[rank].total)
        highest[rank] = peaks[rank]
    return highest


def peak_of(query: PlanQuery, choices: Sequence[Sequence[Choice]]) -> Peak:
    """Return the peak of the rank that has the highest."""
    return max(fullest_peaks(query, choices).values(), key=lambda peak: peak.total)
