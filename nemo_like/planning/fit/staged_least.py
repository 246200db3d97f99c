"""Seconds and bytes that one pipeline is not below, stage by stage and action by action, before any stage is traced.

Its layers run as those of the whole model do in the same local shape, so that what each stage computes and sends is known
from that, and the schedule is walked through with it. What is left out only adds: what is around the layers (but for the
head's products), how unevenly gathers and reductions are dealt out, and what a layer needs while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nemo_like.distributed.pipeline.dealing import StageParts, StageSlice, counts_of, slices
from nemo_like.distributed.pipeline.order import BACKWARD, FORWARD, INPUTS, Action, actions_of
from nemo_like.distributed.pipeline.schedules import rank_of, stages_of
from nemo_like.options import PipelineParallel
from nemo_like.planning.fit import network
from nemo_like.planning.fit.layouts import Layout
from nemo_like.planning.fit.seconds import Links
from nemo_like.planning.fit.shapes import TracedShape
from nemo_like.planning.fit.stage_seconds import action_seconds_of, layer_parts, pipeline_of
from nemo_like.planning.fit.staged_bounds import StagedBounds
from nemo_like.planning.optimizers import optimizer_memory
from nemo_like.planning.schedule_time import timeline
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
        self._lies: dict[Any, list[tuple[int, int]]] = {}

    @property
    def is_known(self) -> bool:
        """Whether the whole model calls each layer once, in order: else it can't be cut either."""
        return tuple(call.fqn for call in self.whole.base.traced.calls) == self.parts.layers

    def seconds(self, layout: Layout, mode: str) -> float:
        """Of a step under `mode` (``none``, ``full``, ``selective``, ``plan``)."""
        key = (layout.pp, layout.schedule, layout.grad_accum, layout.gpus, mode)
        if key not in self._timelines:
            self._timelines[key] = self._timeline(layout, mode)
        return (self._timelines[key] + self.bounds.once(layout) / layout.pp) * _ROUNDING

    def _timeline(self, layout: Layout, mode: str) -> float:
        pp, links, whole = pipeline_of(layout), Links.of(layout, self.device), self.whole
        choices = self.bounds.choices("none" if mode == "plan" else mode)
        calls = [
            (whole.blocks[call.kind], whole.base.problems[call.kind], choice)
            for call, choice in zip(whole.base.traced.calls, choices)
        ]
        parts = [layer_parts((calls[i] for i in stage.layers), links) for stage in self._stages(pp)]
        parts[-1]["head and embedding"] = self.bounds.head(layout)
        handed = network.send_seconds(self.hidden, self.device.gpus_per_host > layout.gpus // layout.pp, self.device)
        return timeline(actions_of(pp), action_seconds_of(parts, pp), len(parts), handed).seconds

    def _stages(self, pp: PipelineParallel) -> list[StageSlice]:
        return slices(counts_of(self.parts, pp))

    # --- bytes ----------------------------------------------------------------------------------------------------

    def bytes(self, layout: Layout, mode: str) -> int:
        """Of the highest rank's peak: what lies there, and what its microbatches in flight hold."""
        pp, hidden = pipeline_of(layout), self.hidden
        stages = self._stages(pp)
        lies, choices = self._lying(layout, stages), self.bounds.choices("full" if mode == "plan" else mode)
        held = [sum(choices[i].held_bytes for i in stage.layers) for stage in stages]
        key, most = (layout.pp, layout.schedule, layout.grad_accum), 0
        if key not in self._states:
            actions = walked_actions(pp)
            self._states[key] = [set(_states(actions[rank], stages_of(pp, rank))) for rank in range(pp.size)]
        for rank, states in enumerate(self._states[key]):
            own = stages_of(pp, rank)
            # What a stage is called with is in a buffer, and what it hands on to the next one here takes the place of one.
            each = [max(0, held[n] - hidden * (n > 0) - hidden * (n + 1 in own)) for n in own]
            buffers = sum(hidden * ((n > 0) + (n + 1 < len(stages))) for n in own) * layout.grad_accum
            stay = buffers + sum(lies[n][0] for n in own)
            for flights, back in states:
                alive = sum(flight * size for flight, size in zip(flights, each))
                most = max(most, stay + alive + sum(lies[n][1] for n, begun in zip(own, back) if begun))
        return most

    def _lying(self, layout: Layout, stages: Sequence[StageSlice]) -> list[tuple[int, int]]:
        """Of each stage, parameters, stored and gathered, and optimizer state; and whole gradients, which come with its
        first backward."""
        pp = pipeline_of(layout)
        together = rank_of(pp, 0) == rank_of(pp, len(stages) - 1)
        key = (layout.shard_ranks, len(stages), together)
        if key not in self._lies:
            base, sharding = self.whole.base, self.bounds.sharding(layout)
            dtypes, ranks = base.setup.precision.dtypes, layout.shard_ranks
            expert_ranks = max(1, ranks * layout.tp // layout.ep)
            experts = {id(p) for each in base.experts for p in each.weights}
            states = iter(optimizer_memory(sharding.trained, base.setup.step.optimizer, foreach=False).states)
            found, where = [[0, 0] for _ in stages], self._places(stages)
            for name, param in base.model.named_parameters():
                size, gradient = param.numel() * param.element_size(), 0
                stays = size // (expert_ranks if id(param) in experts else ranks)
                trains = param.requires_grad and id(param) in base.trained
                if trains:
                    stays += sum(next(states))
                if sharding.on and param.is_floating_point() and param.dim():
                    stays += param.numel() * (dtypes["param_dtype"] or param.dtype).itemsize
                    reduced = dtypes["reduce_dtype"] or dtypes["param_dtype"] or param.dtype
                    gradient = param.numel() * reduced.itemsize if trains else 0
                # Of a tied parameter, stages of one rank have one copy, unless FSDP2 gives each its own.
                for n in where(name)[: 1 if together and not sharding.on else None]:
                    found[n][0] += stays
                    found[n][1] += gradient
            self._lies[key] = [(stays, gradients) for stays, gradients in found]
        return self._lies[key]

    def _places(self, stages: Sequence[StageSlice]) -> Any:
        """Which stages hold a parameter, by its name."""
        names = self.parts.layers
        layers = {names[i] + ".": stage.index for stage in stages for i in stage.layers}
        ends = ((self.parts.before, 0), (self.parts.after, len(stages) - 1))

        def stages_with(name: str) -> list[int]:
            inside = [index for prefix, index in layers.items() if name.startswith(prefix)]
            return inside or [index for held, index in ends if name in held]

        return stages_with


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
