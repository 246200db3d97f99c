"""Seconds and bytes that one pipeline is not below, stage by stage and action by action, before any stage is traced.

Its layers run as those of the whole model do in the same local shape, so that what each stage computes and sends is known
from that, and the schedule is walked through with it. What is left out only adds: what is around the layers (but for the
head's products), how unevenly gathers and reductions are dealt out, and what a layer needs while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from nemo_like.distributed.pipeline.cut import StageParts, StageSlice, counts_of, slices
from nemo_like.distributed.pipeline.schedules import BACKWARD, FORWARD, INPUTS, Action, actions_of, rank_of, stages_of
from nemo_like.options import PipelineParallel
from nemo_like.options.optimizers import optimizer_memory
from nemo_like.planning import network
from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.fit.shapes import TracedShape
from nemo_like.planning.fit.staged_bounds import StagedBounds
from nemo_like.planning.schedule_time import timeline
from nemo_like.planning.seconds import Links
from nemo_like.planning.stage_seconds import action_seconds_of, layer_parts
from nemo_like.planning.stages import walked_actions

_ROUNDING = 1 - 1e-9
"""Sums of seconds in another order differ by less."""

State = tuple[tuple[int, ...], tuple[bool, ...]]
"""At the end of an action, of each stage of a rank: microbatches in flight, and whether one has gone back."""


class StagedLeast:
    """Of all pipelines that have one local shape."""

    def __init__(self, whole: TracedShape, parts: StageParts, hidden: int) -> None:
        """`whole`: the model in one stage in that shape. `hidden`: bytes that a stage sends for one microbatch."""
        self.whole, self.parts, self.hidden, self.device = whole, parts, hidden, whole.question.device
        self.bounds = StagedBounds(whole)
        self._timelines: dict[Any, float] = {}
        self._states: dict[Any, list[set[State]]] = {}
        self._lies: dict[Any, list[int]] = {}
        self._flights: dict[Any, list[int]] = {}
        self._cuts: dict[int, list[StageSlice]] = {}
        self._placed: dict[Any, list[tuple[int, ...]]] = {}

    @property
    def is_known(self) -> bool:
        """Whether the whole model calls each layer once, in order: else it can't be cut either."""
        return tuple(call.fqn for call in self.whole.base.traced.calls) == self.parts.layers

    def seconds(self, conf: Configuration, mode: str) -> float:
        """Of a step under `mode` (``none``, ``full``, ``selective``, ``plan``)."""
        key = (conf.pp, conf.schedule, conf.grad_accum, conf.gpus, mode)
        if key not in self._timelines:
            self._timelines[key] = self._timeline(conf, mode)
        return (self._timelines[key] + self.bounds.once(conf) / conf.pp) * _ROUNDING

    def _timeline(self, conf: Configuration, mode: str) -> float:
        pp, links, whole = conf.job.pp, Links.of(conf.job, self.device), self.whole
        choices = self.bounds.choices("none" if mode == "plan" else mode)
        calls = [
            (whole.blocks[call.kind], whole.base.problems[call.kind], choice)
            for call, choice in zip(whole.base.traced.calls, choices)
        ]
        parts = [layer_parts((calls[i] for i in stage.layers), links) for stage in self._stages(pp)]
        parts[-1]["head and embedding"] = self.bounds.head(conf)
        handed = network.send_seconds(self.hidden, self.device.gpus_per_host > conf.gpus // conf.pp, self.device)
        return timeline(actions_of(pp), action_seconds_of(parts, pp), len(parts), handed).seconds

    def _stages(self, pp: PipelineParallel) -> list[StageSlice]:
        if pp.stages not in self._cuts:
            self._cuts[pp.stages] = slices(counts_of(self.parts, pp))
        return self._cuts[pp.stages]

    # --- bytes ----------------------------------------------------------------------------------------------------

    def bytes(self, conf: Configuration, mode: str) -> int:
        """Of the highest rank's peak: what lies there, and what its microbatches in flight hold."""
        if conf.reshard or conf.job.offload.mode != "none":
            return 0  # less lies there, or is held
        pp = conf.job.pp
        stages = self._stages(pp)
        lies, flies = self._lying(conf, stages), self._flying(conf, stages, "full" if mode == "plan" else mode)
        return max(0, *(sum(lies[n] for n in stages_of(pp, rank)) + most for rank, most in enumerate(flies)))

    def _flying(self, conf: Configuration, stages: Sequence[StageSlice], mode: str) -> list[int]:
        """Of each rank, the most that buffers, microbatches in flight and whole gradients take, however many ranks share a
        stage's parameters."""
        on = self.bounds.sharding(conf).on
        key = (conf.pp, conf.schedule, conf.grad_accum, mode, on)
        if key not in self._flights:
            pp, hidden, choices = conf.job.pp, self.hidden, self.bounds.choices(mode)
            held = [sum(choices[i].held_bytes for i in stage.layers) for stage in stages]
            gradients, found = self._gradients(pp, stages, on=on), []
            for rank, states in enumerate(self._states_of(pp, conf)):
                own = stages_of(pp, rank)
                # What a stage is called with is in a buffer, and what it hands on to the next one here takes the place of
                # one.
                each = [max(0, held[n] - hidden * (n > 0) - hidden * (n + 1 in own)) for n in own]
                buffers = sum(hidden * ((n > 0) + (n + 1 < len(stages))) for n in own) * conf.grad_accum
                most = 0
                for flights, back in states:
                    alive = sum(flight * size for flight, size in zip(flights, each))
                    most = max(most, alive + sum(gradients[n] for n, begun in zip(own, back) if begun))
                found.append(buffers + most)
            self._flights[key] = found
        return self._flights[key]

    def _states_of(self, pp: PipelineParallel, conf: Configuration) -> list[set[State]]:
        key = (conf.pp, conf.schedule, conf.grad_accum)
        if key not in self._states:
            actions = walked_actions(pp)
            self._states[key] = [set(_states(actions[rank], stages_of(pp, rank))) for rank in range(pp.size)]
        return self._states[key]

    def _lying(self, conf: Configuration, stages: Sequence[StageSlice]) -> list[int]:
        """Of each stage, parameters, stored and gathered, and optimizer state."""
        pp = conf.job.pp
        key = (conf.shard_ranks, len(stages), _shares_ends(pp, stages))
        if key not in self._lies:
            base, sharding = self.whole.base, self.bounds.sharding(conf)
            ranks = conf.shard_ranks
            expert_ranks = max(1, ranks * conf.tp // conf.ep)
            memory = optimizer_memory(sharding.trained, base.job.step.optimizer, device=self.device.kind)
            states, found = map(sum, memory.states), [0] * len(stages)
            for param, where in zip(self._parameters, self._places(pp, stages, on=sharding.on)):
                stays = param.size // (expert_ranks if param.is_expert else ranks)
                if param.trains:
                    stays += next(states)
                if sharding.on:
                    stays += param.gathered
                for n in where:
                    found[n] += stays
            self._lies[key] = found
        return self._lies[key]

    def _gradients(self, pp: PipelineParallel, stages: Sequence[StageSlice], *, on: bool) -> list[int]:
        """Of each stage, whole gradients, which come with its first backward."""
        found = [0] * len(stages)
        for param, where in zip(self._parameters, self._places(pp, stages, on=on)):
            for n in where if on else ():
                found[n] += param.gradient
        return found

    @cached_property
    def _parameters(self) -> list[_Parameter]:
        base = self.whole.base
        dtypes = base.job.precision.dtypes
        experts = {id(p) for each in base.experts for p in each.weights}
        found = []
        for _, param in base.model.named_parameters():
            cut = param.is_floating_point() and param.dim() > 0
            trains = param.requires_grad and id(param) in base.trained
            reduced = dtypes["reduce_dtype"] or dtypes["param_dtype"] or param.dtype
            found.append(
                _Parameter(
                    param.numel() * param.element_size(),
                    id(param) in experts,
                    trains,
                    param.numel() * (dtypes["param_dtype"] or param.dtype).itemsize if cut else 0,
                    param.numel() * reduced.itemsize if cut and trains else 0,
                )
            )
        return found

    def _places(self, pp: PipelineParallel, stages: Sequence[StageSlice], *, on: bool) -> list[tuple[int, ...]]:
        """Of each parameter, which stages hold it."""
        once = _shares_ends(pp, stages)  # of a tied parameter, stages of one rank have one
        key = (len(stages), once)
        if key not in self._placed:
            names = self.parts.layers
            layers = {names[i]: stage.index for stage in stages for i in stage.layers}
            ends = ((self.parts.before, 0), (self.parts.after, len(stages) - 1))
            found = []
            for name, _ in self.whole.base.model.named_parameters():
                inside = [layers[prefix] for prefix in _prefixes(name) if prefix in layers]
                where = inside or [index for held, index in ends if name in held]
                found.append(tuple(where[:1] if once else where))
            self._placed[key] = found
        return self._placed[key]


class _Parameter(NamedTuple):
    """What of a parameter's bytes does not depend on how many ranks share it."""

    size: int
    is_expert: bool
    trains: bool
    gathered: int
    gradient: int
    """Whole; 0: it has none."""


def _shares_ends(pp: PipelineParallel, stages: Sequence[StageSlice]) -> bool:
    """Whether one rank has the first stage and the last one."""
    return rank_of(pp, 0) == rank_of(pp, len(stages) - 1)


def _prefixes(name: str) -> Iterator[str]:
    """Names of the modules that a parameter is in, from the outermost.

    >>> list(_prefixes("layers.0.weight"))
    ['layers', 'layers.0']
    """
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)


def _states(actions: Sequence[Action], own: Sequence[int]) -> Iterator[State]:
    """Of one rank, at the end of each of its actions. With a backward cut in two, what the second half needs counts as
    nothing; the first stage's is not cut."""
    flights, back = dict.fromkeys(own, 0), dict.fromkeys(own, False)
    for action in actions:
        stage = action.stage
        if action.kind == FORWARD:
            flights[stage] += 1
        elif action.kind == BACKWARD or (action.kind == INPUTS) == (stage > 0):
            flights[stage] -= 1
        back[stage] |= action.kind not in (FORWARD, INPUTS)
        yield tuple(flights.values()), tuple(back.values())
