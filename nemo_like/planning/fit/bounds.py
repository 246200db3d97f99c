"""Seconds and bytes that no configuration of a shape is below, by shapes that are traced: what they exclude cannot win.

Three kinds of bounds, each with the inequality that it proves:

- `WholeBounds`, for other micro-batches and parts of sequences of one stage. Launches, part waves, and the bytes of weights
  are left out, so a token takes at least its share of the traced kernels. Bytes are compared at the point where the traced
  shape peaks. What is sharded is the same there, and what is computed takes at least its share of rows or tokens.
- `StagedBounds`, for all pipelines of a layout. All stages together compute, send and save what the whole model does; the
  busiest rank has no less than an even share of it.
- `StagedLeast`, for one pipeline of a traced shape, stage by stage and action by action. Three things are left out, and
  each would only add: what runs outside the layers (but for the head's products), how unevenly gathers and reductions are
  divided, and what a layer needs while it runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from nemo_like.activation_checkpointing.plan import OF_HEAD, OF_LAYERS, Part
from nemo_like.distributed.pipeline.cut import StageParts, StageSlice, counts_of, slices
from nemo_like.distributed.pipeline.schedules import BACKWARD, FORWARD, INPUTS, Action, actions_of, rank_of, stages_of
from nemo_like.losses.model_loss import find_head
from nemo_like.options import PipelineParallel
from nemo_like.options.optimizers import optimizer_memory
from nemo_like.options.pipelining import SCHEDULE_OBJECTS
from nemo_like.planning import roofline
from nemo_like.planning.answers.seconds import (
    Links,
    layer_runs,
    loop_seconds,
    microbatch_seconds,
    runs_of_calls,
    seconds_of_actions,
    units_seconds,
)
from nemo_like.planning.choose.layer import Choice
from nemo_like.planning.choose.layer_seconds import least_seconds
from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.fit.shapes import Shape, ShapeKey
from nemo_like.planning.program.timeline import timeline
from nemo_like.planning.query import RNG_STATE, walked_actions
from nemo_like.planning.roofline import optimizer_seconds
from nemo_like.planning.sharding import Sharding
from nemo_like.torch_compat import local_part

_COMPUTED = (*OF_LAYERS, *OF_HEAD)
"""Parts of a peak that depend on a micro-batch's rows and tokens."""

_ROUNDING = 1 - 1e-9
"""Sums of seconds in another order differ by less."""


class WholeBounds:
    """Bounds by a traced shape in one stage, for shapes with the same weights, or another share of the experts."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.part, self.question = shape, shape.whole.part, shape.question
        self._least: dict[int, tuple[float, float]] = {}
        self._least_of: dict[Hashable, tuple[list[Choice], int]] = {}

    def least(self, conf: Configuration) -> tuple[list[Choice], int]:
        """Return choices that no fitting ones of `conf` are faster than, and bytes that their peak is not below.

        The bytes are saved activations at the end of forward, parameters and optimizer state. Nothing runs for it.
        """
        key = (conf.shard_ranks, conf.dp_replicate, conf.mode, conf.job.offload.mode, conf.cpu_offload)
        if key not in self._least_of:
            self._least_of[key] = self._least_choices(conf)
        return self._least_of[key]

    def _least_choices(self, conf: Configuration) -> tuple[list[Choice], int]:
        stage, shape = self.shape.query(conf).stages[0], self.shape
        static = stage.sharding.params + stage.optimizer.state

        def bytes_of(choices: list[Choice]) -> int:
            return static + sum(choice.held_bytes for choice in choices) - sum(stage.moved(choices))

        if conf.mode != "plan":
            return shape.uniform[conf.mode], bytes_of(shape.uniform[conf.mode])
        mixes = shape.stack.mixes
        key = lambda mix: bytes_of(shape.stack.assignment(mix))  # noqa: E731
        index = max(0, bisect_right(mixes, shape.most_allocated(conf), key=key) - 1)
        choices = shape.stack.assignment(mixes[index])
        return choices, bytes_of(choices)

    def least_peak(self, conf: Configuration) -> int:
        """Return the bytes that no step of `conf` is below, whose local shape was not traced but has the same weights.

        The bound is taken at the point where this shape peaks. What is sharded, gathered and reduced is the same there.
        What is computed takes at least the share that its rows or tokens are of this shape's; what does not grow with them
        is more than that. Saved activations grow with rows and tokens.
        """
        rows = conf.micro_batch / self.shape.key.micro_batch
        tokens = rows * self.shape.key.cp / conf.cp
        choices = self.shape.choices(conf)
        peak = self.shape.peak(conf, choices)
        computed = sum(peak.parts.get(name, 0) for name in _COMPUTED)
        least = peak.total - computed + int(min(1.0, rows, tokens) * computed)
        growing = peak.parts.get(Part.SAVED_ACTIVATIONS, 0) - self.part.traced.shared_bytes - self._constant
        return least + int(max(0.0, min(rows, tokens) - 1.0) * max(0, growing))

    @cached_property
    def _constant(self) -> int:
        """Upper bound of the saved bytes of layers that may not grow with rows: random states, tensors that they make."""
        return sum(
            self.part.problems[call.kind].trace.state_bytes + self._leaves(call.kind) + RNG_STATE
            for call in self.part.traced.calls
        )

    def _leaves(self, kind: int) -> int:
        """Return the bytes that a block saves under any choice: tensors that it makes and that require a gradient."""
        full = self.part.problems[kind].full()
        routing = full.held_bytes - self.part.problems[kind].trace.input_bytes
        return self.part.memory(kind, full).held - routing if full.decisions else 0

    def least_step(self, conf: Configuration) -> float:
        """Return the seconds that no step of `conf` is faster than.

        Its local shape was not traced, but has the same weights, or another share of the experts. Counted are kernels
        without launches, part waves and the bytes of weights, and collectives. Not counted are collectives between parts of
        sequences, where this shape has none, and those of split experts, where this shape has all experts.
        """
        key, device = ShapeKey.of(conf), self.question.device
        rows = key.micro_batch / self.shape.key.micro_batch  # whole sequences
        share = rows * self.shape.key.cp / key.cp  # tokens
        resharding = self.question.pins.get("reshard_after_forward", (None, False))
        host = False not in self.question.pins.get("cpu_offload", (False,))
        way = conf.change(ac="none", loss=None, offload="none").with_strategy(
            reshard_after_forward=False if False in resharding else resharding[0], cpu_offload=host
        )
        runs = []
        for run in layer_runs(self.shape.query(way).stages[0], self.shape.uniform["none"]):
            if run.kind not in self._least:
                self._least[run.kind] = least_seconds(self.part.problems[run.kind], compiled=self.part.compiled)
            forward, backward = (seconds * share for seconds in self._least[run.kind])
            block = replace(
                run.block,
                kernels=(),
                forward=forward,
                backward=backward,
                sequence_bytes=int(run.block.sequence_bytes * rows) if key.cp > 1 else 0,
                expert_bytes=int(run.block.expert_bytes * share),
                boundary_bytes=int(run.block.boundary_bytes * share),
            )
            known = key.ep == self.shape.key.ep or (key.ep > 1 and self.shape.key.ep > 1)
            unit, experts = (run.unit, run.experts) if known else (None, None)
            if experts is not None:
                # Of more ranks that share a layer's experts, each gathers fewer; its shard of them all is as large.
                gathered, reduced = (
                    size * self.shape.key.ep // key.ep for size in (experts.gathered, experts.reduce_input)
                )
                experts = replace(experts, gathered=gathered, reduce_input=reduced)
            runs.append(replace(run, block=block, unit=unit, experts=experts))
        head = self.head_seconds(key.micro_batch * self.question.seq_len / key.cp)
        step = replace(conf.job.step, sync="last")  # which reduces least
        return loop_seconds(runs, [], Links.of(conf.job, device), step, outer=head, optimizer=0.0).total

    def head_seconds(self, tokens: float) -> float:
        """Return the least seconds of the head's products with so many tokens: with its weights, and with what trains."""
        head = find_head(self.part.model)
        if head is None:
            return 0.0
        head_trains = any(p.requires_grad for p in head.parameters())
        layers_train = any(p.requires_grad for layer in self.part.layers for p in layer.module.parameters())
        products = 1 + head_trains + layers_train
        return 2.0 * products * self.head_weights() * tokens / self.question.device.matmul_flops["half"]

    def head_weights(self) -> int:
        """Return the number of the head's parameters on one rank; 0: it is not known."""
        head = find_head(self.part.model)
        return 0 if head is None else sum(local_part(p).numel() for p in head.parameters())


class StagedBounds:
    """Bounds by the whole model, for all pipelines that have its local weights."""

    def __init__(self, whole: WholeBounds) -> None:
        self.whole, self.shape, self.part = whole, whole.shape, whole.part
        self.device = whole.question.device
        self._least: dict[int, tuple[float, float]] = {}
        self._again: dict[tuple[int, str], float] = {}
        self._one: dict[Any, float] = {}
        self._ends: dict[Any, float] = {}
        self._lies: dict[int, int] = {}

    @cached_property
    def counts(self) -> Counter[int]:
        """Number of layer calls by kind."""
        return Counter(call.kind for call in self.part.traced.calls)

    def seconds(self, conf: Configuration, mode: str, *, exchanges: bool = True, once: bool = True) -> float:
        """Return the least seconds of a step under `mode` (``none``, ``full``, ``selective``).

        Args:
            conf: a configuration with stages.
            mode: decides what is recomputed.
            exchanges: the traced shape splits experts, as the conf does, possibly over other ranks.
            once: it splits them over as many; else what is gathered, reduced and stepped once is left out.
        """
        pp = conf.pp
        one = self._microbatch(conf, mode, exchanges)
        facts = SCHEDULE_OBJECTS[conf.schedule or PipelineParallel.schedule]
        stages = pp * conf.stages_per_rank
        even = self._even(stages)
        fill = one * (pp - 1) / pp * even * facts.fill / conf.stages_per_rank
        return conf.grad_accum * one / pp + fill + (self.once(conf) / pp if once else 0.0)

    def _microbatch(self, conf: Configuration, mode: str, exchanges: bool) -> float:
        """Return the least seconds of one micro-batch in all stages."""
        key = (conf.micro_batch, conf.cp, conf.ep, mode, exchanges)
        if key not in self._one:
            links, share = Links.of(conf.job, self.device), self._share(conf)
            one = self.head(conf)
            for kind, count in self.counts.items():
                block = self.part.blocks[kind]
                sent = roofline.reduce_seconds(int(block.boundary_bytes * share), links.tensor, self.device) * 4
                if conf.cp == self.shape.key.cp:
                    size = int(block.sequence_bytes * self._rows(conf))
                    sent += roofline.gather_seconds(size, links.sequence, self.device) * 2
                if exchanges:
                    size = int(block.expert_bytes * share)
                    sent += roofline.exchange_seconds(size, links.experts, self.device) * 2
                one += count * (share * (sum(self._of(kind)) + self._replay(kind, mode)) + sent)
            self._one[key] = one
        return self._one[key]

    def bytes(self, conf: Configuration, mode: str) -> int:
        """Return the least bytes of the first rank's peak: stored for its layers, and saved by micro-batches in flight."""
        if conf.reshard or conf.job.offload.mode != "none":
            return 0  # less is stored there, or saved
        held = sum(choice.held_bytes for choice in self.choices("full" if mode == "plan" else mode))
        lies = self._lying(conf)
        facts = SCHEDULE_OBJECTS[conf.schedule or PipelineParallel.schedule]
        flight = facts.in_flight(conf.pp, conf.grad_accum, conf.stages_per_rank)
        stages = conf.pp * conf.stages_per_rank
        return int(self._even(stages) / conf.pp * (lies + held * self._share(conf) * flight))

    def _lying(self, conf: Configuration) -> int:
        """Return the bytes of all layers: parameters, stored and gathered, whole gradients and optimizer state."""
        if conf.shard_ranks not in self._lies:
            sharding, optimizer = self.sharding(conf), self.shape.question.job.step.optimizer
            layers = (*sharding.units, *sharding.experts.values())
            trained = [p for p in sharding.trained if p.in_layer]
            lies = (
                sum(unit.shard for unit in layers) + optimizer_memory(trained, optimizer, device=self.device.kind).state
            )
            if sharding.on:
                lies += sum(unit.gathered + unit.whole_grad for unit in layers)
            self._lies[conf.shard_ranks] = lies
        return self._lies[conf.shard_ranks]

    def _share(self, conf: Configuration) -> float:
        """Return the tokens of a micro-batch, as a share of the traced shape's."""
        return self._rows(conf) * self.shape.key.cp / conf.cp

    def _rows(self, conf: Configuration) -> float:
        """Return the sequences of a micro-batch, as a share of the traced shape's."""
        return conf.micro_batch / self.shape.key.micro_batch

    def _even(self, stages: int) -> float:
        """Return the least that a stage has, of its even share of the layers."""
        layers = sum(self.counts.values())
        return layers // stages * stages / layers

    def _of(self, kind: int) -> tuple[float, float]:
        if kind not in self._least:
            self._least[kind] = least_seconds(self.part.problems[kind], compiled=self.part.compiled)
        return self._least[kind]

    def _replay(self, kind: int, mode: str) -> float:
        if (kind, mode) not in self._again:
            problem = self.part.problems[kind]
            choice = self._choice(kind, mode)
            reach = problem.reachable
            run = {k for k, word in enumerate(choice.decisions) if word == "recompute" and k < reach}
            self._again[kind, mode] = least_seconds(problem, run, compiled=self.part.compiled)[0] if run else 0.0
        return self._again[kind, mode]

    def choices(self, mode: str) -> list[Choice]:
        """Return the choices of a mode that needs no budget, one for each layer call."""
        return self.shape.uniform[mode]

    def _choice(self, kind: int, mode: str) -> Choice:
        choices = self.choices("none" if mode == "plan" else mode)
        return next(c for call, c in zip(self.part.traced.calls, choices) if call.kind == kind)

    def head(self, conf: Configuration) -> float:
        """Return the least seconds of the head's products with one micro-batch."""
        return self.whole.head_seconds(conf.micro_batch * self.shape.question.seq_len / conf.cp)

    def once(self, conf: Configuration) -> float:
        """Return the seconds of gathers, reductions and the optimizer, of all stages."""
        key = (conf.shard_ranks, conf.dp_replicate)
        if key not in self._ends:
            sharding, links = self.sharding(conf), Links.of(conf.job, self.device)
            optimizer = optimizer_seconds(sharding.trained, self.shape.question.job.step.optimizer, self.device)
            self._ends[key] = optimizer + sum(units_seconds(sharding, links))
        return self._ends[key]

    def sharding(self, conf: Configuration) -> Sharding:
        """Return the sharding of the whole model over the ranks that share a stage."""
        whole = conf.sized(pp=1, schedule=None, grad_accum=1, micro_batch=1)
        plain = whole.change(ac="none", loss=None, offload="none").with_strategy(
            reshard_after_forward=None, cpu_offload=False
        )
        return self.shape.query(plain).stages[0].sharding


State = tuple[tuple[int, ...], tuple[bool, ...]]
"""State at the end of an action, of each stage of a rank: micro-batches in flight, and whether one has gone back."""


class StagedLeast:
    """Bounds of all pipelines that have one local shape."""

    def __init__(self, bounds: StagedBounds, parts: StageParts, hidden: int) -> None:
        """Keep `bounds` of the model in one stage in that shape; `hidden`: bytes that a stage sends for one micro-batch."""
        self.bounds, self.parts, self.hidden, self.device = bounds, parts, hidden, bounds.device
        self.part, self.question = bounds.part, bounds.shape.question
        self._timelines: dict[Any, float] = {}
        self._states: dict[Any, list[set[State]]] = {}
        self._lies: dict[Any, list[int]] = {}
        self._flights: dict[Any, list[int]] = {}
        self._cuts: dict[int, list[StageSlice]] = {}
        self._placed: dict[Any, list[tuple[int, ...]]] = {}

    @classmethod
    def of(cls, bounds: StagedBounds) -> StagedLeast | None:
        """Return the bounds of the pipelines of one shape; None: the model cannot be cut, or calls its layers otherwise."""
        shape = bounds.shape
        try:
            parts, hidden = shape.traced.cut(shape.whole.job), shape.traced.hidden(shape.whole.job).nbytes
        except ValueError:
            return None
        in_order = tuple(call.fqn for call in bounds.part.traced.calls) == parts.layers
        return cls(bounds, parts, hidden) if in_order else None

    def seconds(self, conf: Configuration, mode: str) -> float:
        """Return the least seconds of a step under `mode` (``none``, ``full``, ``selective``, ``plan``)."""
        key = (conf.job.pp, conf.gpus, mode)
        if key not in self._timelines:
            self._timelines[key] = self._timeline(conf, mode)
        return (self._timelines[key] + self.bounds.once(conf) / conf.pp) * _ROUNDING

    def _timeline(self, conf: Configuration, mode: str) -> float:
        pp, links = conf.job.pp, Links.of(conf.job, self.device)
        kinds, choices = (
            (call.kind for call in self.part.traced.calls),
            self.bounds.choices("none" if mode == "plan" else mode),
        )
        calls = list(zip(kinds, choices))
        stages = ([calls[i] for i in stage.layers] for stage in self._stages(pp))
        parts = [microbatch_seconds(runs_of_calls(self.part, stage_calls), links) for stage_calls in stages]
        parts[-1]["head and embedding"] = self.bounds.head(conf)
        handed = roofline.send_seconds(self.hidden, self.device.gpus_per_host > conf.gpus // conf.pp, self.device)
        return timeline(actions_of(pp), seconds_of_actions(parts), len(parts), handed).seconds

    def _stages(self, pp: PipelineParallel) -> list[StageSlice]:
        if pp.stages not in self._cuts:
            self._cuts[pp.stages] = slices(counts_of(self.parts, pp))
        return self._cuts[pp.stages]

    # --- bytes ----------------------------------------------------------------------------------------------------

    def bytes(self, conf: Configuration, mode: str) -> int:
        """Return the least bytes of the highest rank's peak: stored there, and saved by its micro-batches in flight."""
        if conf.reshard or conf.job.offload.mode != "none":
            return 0  # less is stored there, or saved
        pp = conf.job.pp
        stages = self._stages(pp)
        lies, flies = self._lying(conf, stages), self._flying(conf, stages, "full" if mode == "plan" else mode)
        return max(0, *(sum(lies[n] for n in stages_of(pp, rank)) + most for rank, most in enumerate(flies)))

    def _flying(self, conf: Configuration, stages: Sequence[StageSlice], mode: str) -> list[int]:
        """Return, for each rank, the most that buffers, micro-batches in flight and whole gradients take.

        The number of ranks that share a stage's parameters does not change it.
        """
        on = self.bounds.sharding(conf).on
        key = (conf.job.pp, mode, on)
        if key not in self._flights:
            pp, hidden, choices = conf.job.pp, self.hidden, self.bounds.choices(mode)
            held = [sum(choices[i].held_bytes for i in stage.layers) for stage in stages]
            gradients, rank_bytes = self._gradients(pp, stages, on=on), []
            for rank, states in enumerate(self._states_of(pp, conf)):
                indices = stages_of(pp, rank)
                # A stage's input is in a buffer, and what it hands on to the next one here takes the place of one.
                each = [max(0, held[n] - hidden * (n > 0) - hidden * (n + 1 in indices)) for n in indices]
                buffers = sum(hidden * ((n > 0) + (n + 1 < len(stages))) for n in indices) * conf.grad_accum
                most = 0
                for flights, back in states:
                    alive = sum(flight * size for flight, size in zip(flights, each))
                    most = max(most, alive + sum(gradients[n] for n, begun in zip(indices, back) if begun))
                rank_bytes.append(buffers + most)
            self._flights[key] = rank_bytes
        return self._flights[key]

    def _states_of(self, pp: PipelineParallel, conf: Configuration) -> list[set[State]]:
        key = conf.job.pp
        if key not in self._states:
            actions = walked_actions(pp)
            self._states[key] = [set(_states(actions[rank], stages_of(pp, rank))) for rank in range(pp.size)]
        return self._states[key]

    def _lying(self, conf: Configuration, stages: Sequence[StageSlice]) -> list[int]:
        """Return, for each stage, the bytes of parameters, stored and gathered, and optimizer state."""
        pp = conf.job.pp
        key = (conf.shard_ranks, len(stages), _shares_ends(pp, stages))
        if key not in self._lies:
            sharding = self.bounds.sharding(conf)
            ranks = conf.shard_ranks
            expert_ranks = max(1, ranks * conf.tp // conf.ep)
            memory = optimizer_memory(sharding.trained, self.question.job.step.optimizer, device=self.device.kind)
            states, sizes = map(sum, memory.states), [0] * len(stages)
            for param, where in zip(self._parameters, self._places(pp, stages, on=sharding.on)):
                stays = param.size // (expert_ranks if param.is_expert else ranks)
                if param.trains:
                    stays += next(states)
                if sharding.on:
                    stays += param.gathered
                for n in where:
                    sizes[n] += stays
            self._lies[key] = sizes
        return self._lies[key]

    def _gradients(self, pp: PipelineParallel, stages: Sequence[StageSlice], *, on: bool) -> list[int]:
        """Return, for each stage, the bytes of whole gradients, which its first backward makes."""
        sizes = [0] * len(stages)
        for param, where in zip(self._parameters, self._places(pp, stages, on=on)):
            for n in where if on else ():
                sizes[n] += param.gradient
        return sizes

    @cached_property
    def _parameters(self) -> list[_Parameter]:
        part, dtypes = self.part, self.question.job.precision.dtypes
        experts = {weight for each in part.experts for weight in each.weights}
        parameters = []
        for name, param in part.model.named_parameters():
            cut = param.is_floating_point() and param.dim() > 0
            trains = param.requires_grad and name in part.trained
            reduced = dtypes["reduce_dtype"] or dtypes["param_dtype"] or param.dtype
            parameters.append(
                _Parameter(
                    local_part(param).numel() * param.element_size(),
                    param in experts,
                    trains,
                    local_part(param).numel() * (dtypes["param_dtype"] or param.dtype).itemsize if cut else 0,
                    local_part(param).numel() * reduced.itemsize if cut and trains else 0,
                )
            )
        return parameters

    def _places(self, pp: PipelineParallel, stages: Sequence[StageSlice], *, on: bool) -> list[tuple[int, ...]]:
        """Return, for each parameter, the stages that hold it."""
        once = _shares_ends(pp, stages)  # of a tied parameter, stages of one rank have one
        key = (len(stages), once)
        if key not in self._placed:
            names = self.parts.layers
            layers = {names[i]: stage.index for stage in stages for i in stage.layers}
            ends = ((self.parts.before, 0), (self.parts.after, len(stages) - 1))
            places = []
            for name, _ in self.part.model.named_parameters():
                inside = [layers[prefix] for prefix in _prefixes(name) if prefix in layers]
                where = inside or [index for held, index in ends if name in held]
                places.append(tuple(where[:1] if once else where))
            self._placed[key] = places
        return self._placed[key]


class _Parameter(NamedTuple):
    """Sizes of a parameter that do not depend on how many ranks share it."""

    size: int
    is_expert: bool
    trains: bool
    gathered: int
    gradient: int
    """Bytes of the whole gradient; 0: it has none."""


def _shares_ends(pp: PipelineParallel, stages: Sequence[StageSlice]) -> bool:
    """Return whether one rank has the first stage and the last one."""
    return rank_of(pp, 0) == rank_of(pp, len(stages) - 1)


def _prefixes(name: str) -> Iterator[str]:
    """Yield the names of the modules that a parameter is in, from the outermost.

    >>> list(_prefixes("layers.0.weight"))
    ['layers', 'layers.0']
    """
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)


def _states(actions: Sequence[Action], indices: Sequence[int]) -> Iterator[State]:
    """Yield the state of one rank at the end of each of its actions.

    With a backward cut in two, what the second half needs counts as nothing; the first stage's is not cut.
    """
    flights, back = dict.fromkeys(indices, 0), dict.fromkeys(indices, False)
    for action in actions:
        stage = action.stage
        if action.kind == FORWARD:
            flights[stage] += 1
        elif action.kind == BACKWARD or (action.kind == INPUTS) == (stage > 0):
            flights[stage] -= 1
        back[stage] |= action.kind not in (FORWARD, INPUTS)
        yield tuple(flights.values()), tuple(back.values())
