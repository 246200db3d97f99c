"""The steps of a rank that holds the whole model: its micro-batches, one after the other, and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_like.activation_checkpointing.plan import Part
from nemo_like.planning.program.readers import Bytes, Peak, StepPoint, Storages
from nemo_like.planning.program.step import StageStep
from nemo_like.planning.program.units import Pass, passes_of

if TYPE_CHECKING:
    from nemo_like.planning.block import Choice
    from nemo_like.planning.planner import Planner


class Loop:
    """Writes the steps of `planner` under `choices`, one for each layer call, into `storages`."""

    def __init__(self, planner: Planner, choices: Sequence[Choice], storages: Storages) -> None:
        self.planner, self.choices, self.e = planner, choices, storages
        self.stage = stage_step(planner, storages)
        make_parameters(storages, planner)

    def run(self, turns: Sequence[Pass]) -> None:
        """Forward and backward of these micro-batches."""
        planner = self.planner
        for turn in turns:
            calls = planner.layer_calls(self.choices, turn.accumulates)
            self.stage.run(turn, calls, planner.around(self.choices, turn.accumulates))

    def update(self) -> None:
        """The optimizer's step."""
        planner = self.planner
        self.e.phase = "optimizer"
        self.e.mark("optimizer step")
        self.e.optimizer_step(planner.optimizer)
        if planner.job.step.zero_grad == "free":
            self.stage.zero_grad()

    def turns(self, *, first: bool) -> list[Pass]:
        """The micro-batches of a step."""
        job = self.planner.job
        return passes_of(job.step, sharded=self.stage.on, ddp=job.ddp is not None, cast=self.planner.casts, first=first)

    def begin_later(self) -> Sequence[Pass]:
        """Make what is there when a later step begins; returns those of its micro-batches among which is the one with the
        highest peak."""
        e, planner, stage = self.e, self.planner, self.stage
        make_optimizer_state(e, planner)
        stage.kept.append(e.make(planner.outer(choices=self.choices).events.kept_bytes, Part.KEPT_OUTPUT))
        turns = self.turns(first=False)
        all_alike = len(turns) > 1 and turns[-1].reduces and all(turn.reduces and not turn.frees for turn in turns)
        if (all_alike or planner.job.step.zero_grad == "zero") and planner.job.ddp is None:
            start_with_gradients(stage)
        return turns[-1:] if all_alike else turns


def peak_of(planner: Planner, choices: Sequence[Choice], points: list[StepPoint] | None = None) -> Peak:
    """The highest point of a later step; `points`: gets every stretch of it, in order."""
    storages = Bytes(points)
    loop = Loop(planner, choices, storages)
    loop.run(loop.begin_later())
    loop.update()
    return storages.peak()


def stage_step(planner: Planner, storages: Storages, **units: type) -> StageStep:
    """What writes micro-batches through the layers of `planner`."""
    sharding = planner.sharding
    names = {id(p): name for name, p in planner.model.named_parameters(remove_duplicate=False)}
    return StageStep(
        storages,
        sharding,
        frozenset(names[p] for p in sharding.tail_params if p in names),
        offload=planner.job.offload,
        copies_at_once=planner.device.kind == "cpu",
        **units,
    )


def start_with_gradients(stage: StageStep, *, less: int = 0) -> None:
    """Those of the step before are there, but for so many bytes that another stage of the rank has."""
    if stage.on:
        stage.units.start_with_gradients(without([unit.grad for unit in stage.s.all], less))
    else:
        stage.grads["before"] = [stage.e.make(sum(unit.grad for unit in stage.s.all) - less, Part.GRADIENTS)]


def make_parameters(storages: Storages, planner: Planner, *, less: int = 0) -> None:
    """What is there before the first step: parameters, their running mean, DDP's buckets, remembered tables. `less`: bytes
    that another stage of the rank has made."""
    sharding = planner.sharding
    sizes = [size for unit in sharding.all if unit.shard for size in unit.each_shard]
    for part in (Part.PARAMETERS, *([Part.AVERAGED_WEIGHTS] if planner.job.step.ema else [])):
        for size in without([*sizes, sharding.replicated], less):
            storages.make(size, part)
    storages.make(planner.remembered, Part.REMEMBERED_TABLES)
    if planner.job.ddp:
        for unit in sharding.all:
            storages.make(unit.grad, Part.GRADIENTS)


def make_optimizer_state(storages: Storages, planner: Planner, *, less: int = 0) -> None:
    """What the optimizer's first step leaves. `less`: bytes that another stage of the rank has, of large parameters."""
    for size in without([size for own in planner.optimizer.states for size in own], less):
        storages.make(size, Part.OPTIMIZER_STATE)


def without(sizes: Sequence[int], less: int) -> Sequence[int]:
    """Storages of these bytes, of which `less` in the largest ones are another stage's."""
    if not less:
        return sizes
    found = []
    for size in sorted(sizes, reverse=True):
        found.append(size - min(less, size))
        less -= min(less, size)
    return found
