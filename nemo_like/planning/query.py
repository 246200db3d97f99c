"""Query that a plan answers: a job, on a model that is traced once. A job without a pipeline has one stage."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nemo_like._util.forwards import Forward
from nemo_like._util.module_tree import bare_modules
from nemo_like._util.tensors import split_sample, tensors_in
from nemo_like.activation_checkpointing.engine.buffers import copied_in_forward
from nemo_like.distributed.context.sequence_ops import padded_length
from nemo_like.distributed.expert.split_experts import experts_to_split
from nemo_like.distributed.pipeline.cut import (
    STAGE_MARK,
    MicrobatchCall,
    Received,
    StageEnd,
    StageParts,
    StageSlice,
    call_of,
    counts_of,
    cut,
    loss_of,
    slices,
)
from nemo_like.distributed.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Action,
    all_actions_of,
    rank_of,
    stages_of,
)
from nemo_like.distributed.pipeline.stage_parts import stage_parts
from nemo_like.distributed.units import padded_rows
from nemo_like.fake.model_copy import model_copy
from nemo_like.job import Job
from nemo_like.layers import find_layers
from nemo_like.losses.model_loss import check_head
from nemo_like.options import FSDP2, NamedList, NamedLists, PipelineParallel, Precision
from nemo_like.options.names import NO_NAMES, read_json
from nemo_like.options.optimizers import OptimizerMemory, TrainedParameter, UpdateInBackward, optimizer_memory
from nemo_like.options.parallel import moves_state
from nemo_like.planning.devices import Device
from nemo_like.planning.memory_model.microbatch import LayerCall
from nemo_like.planning.model.traced import StepLoss, TraceCache, TracedPart, local_shape
from nemo_like.planning.roofline import exposed_seconds
from nemo_like.planning.selection.layer import BlockProblem, Choice, LayerRun, Stack
from nemo_like.planning.sharding import Sharding, UnitBytes, sharding_of
from nemo_like.planning.trace.kinds import settings_of
from nemo_like.planning.trace.records import OuterEvents

RNG_STATE = torch.get_rng_state().numel()  # Bytes of the state of the CPU's generator.

Choices = Sequence[Sequence[Choice]]  # Choices of each stage: one per layer call.


class Traced:
    """A model and the input of one micro-batch.

    The model is traced for a job that requires it, once for all jobs that run the same operators.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        layers: Any = None,
        *,
        cache: TraceCache | None = None,
    ) -> None:
        """Trace nothing yet.

        Args:
            model: an original model on any device, `meta` included. It is not changed.
            sample_input: the input of one micro-batch on one rank.
            layers: the layers of the job; None: all that are found.
            cache: results of other traces of the same model, with the same device and dtypes.
        """
        self.given, self.sample, self.cache = model, sample_input, TraceCache() if cache is None else cache
        self.layers = None if layers is None else tuple(layer.fqn for layer in find_layers(model, layers))
        self._parts: dict[Hashable, TracedPart] = {}

    def query(self, job: Job) -> PlanQuery:
        """Return the query of `job`, and trace the parts of it that are not traced yet.

        Raises:
            ValueError: the model cannot be traced, or cut into the stages of the job.
        """
        job = replace(job, layers=self.layers)
        if job.pp.size == 1:
            part = self._part(job, "whole", lambda: (self.given, self.sample))
            names = tuple(layer.fqn for layer in part.layers)
            return PlanQuery(self, job, (Stage(part, job, StageSlice(0, 1, range(len(names))), names),))
        if job.ep.size > 1:
            experts_to_split(self.given, job.ep)  # a stage may have none
        return PlanQuery(
            self, job, tuple(self._stage(job, piece) for piece in slices(counts_of(self.cut(job), job.pp)))
        )

    def cut(self, job: Job) -> StageParts:
        """Return the parts before, in and after the layers; they are determined once.

        Raises:
            ValueError: the model cannot be cut.
        """
        if self.cache.cut is None:
            try:
                dtype = job.param_dtype
                lowered = {} if dtype is None else {"autocast" if job.of_stage().fsdp is None else "dtype": dtype}
                self.cache.cut = stage_parts(self.whole, find_layers(self.whole, job.layers), self.sample, **lowered)
            except ValueError as error:
                self.cache.cut = str(error)
        if isinstance(self.cache.cut, str):
            raise ValueError(self.cache.cut)
        return self.cache.cut

    def hidden(self, job: Job) -> Tensor:
        """Return the tensor that one rank sends to the next stage for a micro-batch, without data."""
        parts, batch = self.cut(job), by_name(self.given, self.sample)
        first = next(value for value in batch.values() if isinstance(value, Tensor) and value.dim() >= 2)
        rows, tokens = first.shape[:2]
        tokens = padded_length(tokens, job.cp.size) // job.cp.size // job.tp.sequence_ranks
        return torch.empty((rows, tokens, *parts.hidden_width), dtype=parts.hidden_dtype, device="meta")

    @cached_property
    def whole(self) -> nn.Module:
        """Copy of the model that stages are cut from."""
        return model_copy(self.given)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the model's input for one micro-batch."""
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(self.sample))

    @cached_property
    def _settings(self) -> dict[str, int]:
        """Number of each layer that is equal for equal layers, of which the same is trained."""
        modules, cut = dict(bare_modules(self.whole)), self.cache.cut
        assert isinstance(cut, StageParts)
        return {name: self.cache.number(settings_of(modules[name])) for name in cut.layers}

    def _part(self, job: Job, which: Hashable, make: Callable[[], tuple[nn.Module, Any]]) -> TracedPart:
        key = (which, local_shape(job))
        if key not in self._parts:
            model, sample = make()
            self._parts[key] = TracedPart(model, sample, job, self.cache)
        part = self._parts[key]
        if job.loss is not None:
            check_head(part.model)
        return part

    def _stage(self, job: Job, piece: StageSlice) -> Stage:
        """Return one stage; stages of the same layers are traced once."""
        parts = self.cut(job)
        names = tuple(parts.layers[i] for i in piece.layers)
        step = replace(job.step, microbatches=1, keeps_output=True, loss_fn=None if piece.is_last else _sent)
        stage_job = replace(job.of_stage(), loss=job.loss if piece.is_last else None, layers=names, step=step)

        def make() -> tuple[nn.Module, Any]:
            dtype = None if stage_job.fsdp is None else stage_job.param_dtype
            tree, received = cut(self.whole, parts, piece, torch.device("cpu"), dtype)
            setattr(tree, STAGE_MARK, piece)
            batch = by_name(self.given, self.sample)
            PlannedStage(tree, received).put()
            return tree, batch if piece.is_first else batch | {"given": self.hidden(job)}

        which = (piece.is_first, piece.is_last, tuple(self._settings[name] for name in names))
        return Stage(self._part(stage_job, which, make), stage_job, piece, names)


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage under one job; without a pipeline, the whole model."""

    part: TracedPart
    job: Job  # Job of the ranks that hold a copy of the stage: it has no pipeline.
    slice: StageSlice
    names: tuple[str, ...]  # Names of its layers in the whole model.
    # Results of `nemo_like.planning.predictions.seconds.layer_runs`.
    runs: dict[tuple[Choice, ...], list[LayerRun]] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> Device:
        """The device that is predicted for."""
        return self.part.device

    @cached_property
    def loss(self) -> StepLoss:
        """Way in which its step computes the loss."""
        return StepLoss.from_job(self.job)

    @property
    def skip(self) -> bool:
        """True if plans may skip operators. A placeholder cannot replace a DTensor."""
        return self.job.tp.size == 1

    @property
    def host(self) -> int:
        """Bytes of CPU memory that one layer call may take."""
        return int(self.job.search.host_memory) // len(self.part.traced.calls) if self.job.search.host else 0

    def stack(self, fixed: NamedList = NO_NAMES) -> Stack:
        """Stack of layers that may make the same choices (of one kind, and all in scope or none), and their best mixes.

        fixed: names that all choices keep.
        """
        return self.part.stack(skip=self.skip, host=self.host, fixed=fixed, compiled=self.job.compile is not None)

    def uniform(self, mode: str) -> list[Choice]:
        """Return the choice of each layer call under ``none``, ``full``, ``selective``, or lists of names as a word."""
        return self.by_names(NamedLists.of(read_json(mode))) if mode[0] in "[{" else self.part.uniform(mode)

    def by_names(self, lists: NamedLists) -> list[Choice]:
        """Return the choice of each layer call under lists of names.

        Raises:
            ValueError: as `check_lists`; nothing is checked in a pipeline.
        """
        names = dict(zip((layer.fqn for layer in self.part.layers), self.names))
        return self.part.by_names(lists, names, skip=self.skip, whole=self.slice.is_first and self.slice.is_last)

    @cached_property
    def casts(self) -> bool:
        """True if it computes in another dtype than parameters are stored in."""
        dtype = self.job.param_dtype
        return dtype is not None and any(p.dtype != dtype for p in self.part.model.parameters() if p.requires_grad)

    @cached_property
    def sharding(self) -> Sharding:
        """FSDP2 units of the stage on one rank."""
        job, part = self.job, self.part
        alone = job.fsdp is not None
        ranks, experts = job.shard_ranks, job.shard_ranks * job.tp.size // job.ep.size
        forms, number = part.forms(whole=ranks == 1, ends="apart" if job.fsdp is None else job.fsdp.ends)
        shardings, key = part.cache.shardings, (number, ranks, experts, job.dp_replicate, alone, job.fsdp, part.shape)
        if key not in shardings:
            shardings[key] = sharding_of(
                forms,
                shard_ranks=ranks,
                precision=Precision() if job.fsdp is None else job.precision,
                fsdp=job.fsdp or FSDP2(),
                expert_ranks=experts,
                gloo=self.device.kind == "cpu",
                alone=alone,
                replicas=job.dp_replicate,
                host=job.fsdp is not None and moves_state(job.fsdp, self.device.kind),
            )
        return shardings[key]

    @cached_property
    def optimizer(self) -> OptimizerMemory:
        """Optimizer state on this rank's device."""
        return optimizer_memory(self.sharding.trained, self.job.step.optimizer, device=self.device.kind)

    @cached_property
    def state_on_host(self) -> int:
        """Bytes of parameters, gradients, optimizer state and averaged weights that one rank has in CPU memory."""
        sharding, step = self.sharding, self.job.step
        shards = sum(unit.host_shard for unit in sharding.all)
        state = optimizer_memory(sharding.trained_on_host, step.optimizer, device="cpu").state
        return shards * (2 if step.ema else 1) + sum(unit.host_grad for unit in sharding.all) + state

    @cached_property
    def units(self) -> tuple[tuple[UnitBytes | None, UnitBytes | None, int], ...]:
        """FSDP2 unit of each layer call, that of its experts, and a number, equal for calls that have equal units."""
        sharding = self.sharding
        by_name, numbers = dict(zip(sharding.modules, sharding.units)), dict[Any, int]()
        units = []
        for call in self.part.traced.calls:
            unit, experts = by_name.get(call.fqn), sharding.experts.get(call.fqn)
            units.append((unit, experts, numbers.setdefault((call.kind, unit, experts), len(numbers))))
        return tuple(units)

    # --- a step ---------------------------------------------------------------------------------------------------

    def outside(
        self,
        accumulate: bool | UpdateInBackward = False,
        choices: Sequence[Choice] | None = None,
        *,
        halves: bool = False,
    ) -> OuterEvents:
        """Return the memory that it allocates outside the layers; arguments as `TracedPart.outside`."""
        return self.part.outside(self.loss, accumulate=accumulate, choices=choices, halves=halves)

    def layer_calls(
        self,
        choices: Sequence[Choice],
        accumulate: bool | UpdateInBackward,
        *,
        received: bool = False,
        halves: bool = False,
    ) -> list[LayerCall]:
        """Return the tensors that each layer call allocates, frees and saves.

        Args:
            choices: one for each.
            accumulate: backward adds to existing gradients, or steps with them.
            received: the gradient of the last call's output comes from a pipeline's next stage, into a buffer that stays.
            halves: as for `TracedPart.memory`.
        """
        part, by_key, layers = self.part, dict[Any, LayerCall](), []
        last = len(part.traced.calls) - 1
        top = self._last_trained if halves else 0
        every = zip(part.traced.calls, choices, self._copies(choices), self.units)
        for position, (call, choice, copies, (unit, experts, number)) in enumerate(every):
            stays = received and position == last
            is_held = position < top
            key = (number, choice, copies, stays, is_held)
            if key not in by_key:
                trace = choice.around or part.problems[call.kind].trace
                regions = [(region.path, region.problem.trace) for region in choice.inside]
                regions = regions or ([("", trace)] if choice.decisions else [])
                # On the CPU, a region that draws random numbers saves the generator's state among its tensors.
                rng = RNG_STATE if self.device.kind == "cpu" else 0
                events = part.memory(
                    call.kind,
                    choice,
                    accumulate,
                    loss=self.loss,
                    received=stays,
                    halves=halves,
                    held=is_held,
                    compiler=self.job.partitioner,
                )
                inputs = None if regions and not choice.inside else trace.kept_inputs
                by_key[key] = LayerCall(
                    events,
                    unit,
                    experts,
                    inputs if events.kept_inputs is None else events.kept_inputs,
                    frozenset() if experts is None else part.expert_names(call),
                    sum(rng * traced.draws + traced.state_bytes for _, traced in regions),
                    max((copied_in_forward(call.module.get_submodule(path)) for path, _ in regions), default=0),
                    *copies,
                )
            layers.append(by_key[key])
        return layers

    @cached_property
    def _last_trained(self) -> int:
        """Position of the last layer call that trains a parameter; their number where a norm or head behind them does."""
        trains = [any(p.requires_grad for p in call.module.parameters()) for call in self.part.traced.calls]
        trains.append(bool(self.outside(halves=True).param_grads))
        return max(position for position, each in enumerate(trains) if each or not position)

    def moved(self, choices: Sequence[Choice]) -> list[int]:
        """Return the bytes of each call that ``offload=`` moves to the host: of regions, and of all layers but the last.

        The tensors that a layer without a region saves are counted as staying, also with ``"all"``.
        """
        if self.job.offload.mode == "none":
            return [0] * len(choices)
        inputs = (self.part.problems[call.kind].trace.input_bytes for call in self.part.traced.calls)
        every = zip(inputs, choices, self._copies(choices))
        return [max(0, size * moves + sum(others) - choice.host_bytes) for size, choice, (moves, others) in every]

    def _copies(self, choices: Sequence[Choice]) -> list[tuple[bool, tuple[int, ...]]]:
        """Return, for each call, whether its inputs are moved to the host, and the bytes of other moved tensors.

        These are in the order in which they are copied.
        """
        offload, calls = self.job.offload, self.part.traced.calls
        decided = [_decided_on(choice, self.part.problems[call.kind]) for call, choice in zip(calls, choices)]
        if offload.mode == "none":
            return [(False, sizes) for sizes in decided]
        budget = float("inf") if offload.host_budget_bytes is None else offload.host_budget_bytes
        copies = []
        for call, choice, others in zip(calls, choices, decided):
            problem = self.part.problems[call.kind]
            sizes = [problem.trace.input_bytes]
            if offload.mode != "boundary" and choice.decisions:
                sizes += self.part.memory(call.kind, choice, loss=self.loss, compiler=self.job.partitioner).saved
            moves = choice.decisions and call.fqn != calls[-1].fqn
            going = dict[int, int]()
            for at, size in enumerate(sizes if moves else ()):
                if offload.min_bytes <= size and offload.host_bytes(size) <= budget:
                    budget -= offload.host_bytes(size)
                    going[at] = size
            more = tuple(size for at, size in going.items() if at)
            copies.append((0 in going, more if moves and offload.mode != "boundary" else others))
        return copies

    def exposed(self, choices: Sequence[Choice]) -> list[float]:
        """Return, of each call, the seconds of the copies that ``offload=`` makes and computing does not hide."""
        return [
            exposed_seconds(moved, self.part.problems[call.kind].forward_seconds, self.device)
            for call, moved in zip(self.part.traced.calls, self.moved(choices))
        ]


def _decided_on(choice: Choice, problem: BlockProblem) -> tuple[int, ...]:
    """Return the bytes of each storage that a choice keeps in CPU memory."""
    if not choice.host_bytes:
        return ()
    return tuple(size for op, word in zip(problem.records, choice.decisions) if word == "host" for size in op.parts)


class HeldOnce(NamedTuple):
    """Bytes that two stages of one rank count, but that exist once: those of a tied embedding."""

    params: int = 0
    grads: int = 0
    state: int = 0  # Bytes of the optimizer's state.


@dataclass(frozen=True, eq=False)
class PlanQuery:
    """A job on a traced model. Functions of other files compute its bytes, seconds, plans and report."""

    traced: Traced
    job: Job
    stages: tuple[Stage, ...]
    # Readings of steps that were written (`nemo_like.planning.predictions.rank.rank_peak`, `labels_at_peak`).
    written: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    # Saved bytes and peak of the choices that were last made for a rank: others are near.
    near: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_model(cls, model: nn.Module, sample_input: Any, job: Job, **how: Any) -> PlanQuery:
        """Trace `model` for `job`; arguments as for `Traced`."""
        return Traced(model, sample_input, job.layers, **how).query(job)

    def under(self, job: Job) -> PlanQuery:
        """Return the query of another job on the same model and input; only parts that differ in it are traced again.

        Raises:
            ValueError: as `Traced.query`.
        """
        return self.traced.query(job)

    def changed(self, job: Job) -> PlanQuery | None:
        """Return `under` for a job that may have its loss in chunks; None: the logits would be whole anyway."""
        if job.loss is not None and self.job.loss is None and not self.stages[-1].part.can_chunk():
            return None
        return self.under(job)

    @property
    def pp(self) -> PipelineParallel:
        """The cut and the schedule."""
        return self.job.pp

    @property
    def is_pipeline(self) -> bool:
        """True if there are ranks that hold other stages."""
        return self.pp.size > 1

    @property
    def device(self) -> Device:
        """The device that is predicted for."""
        return self.stages[0].device

    @property
    def microbatches(self) -> int:
        """Micro-batches of one step."""
        return self.pp.microbatches or 1 if self.is_pipeline else self.job.step.microbatches

    @property
    def counts(self) -> list[int]:
        """Number of layers of each stage."""
        return [len(stage.names) for stage in self.stages]

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Actions of each rank of the pipeline, up to the micro-batch from which on its memory repeats itself."""
        return all_actions_of(self.pp, repeats=False) if self.is_pipeline else ((),)

    def of_rank(self, rank: int) -> list[int]:
        """Return the numbers of the stages that `rank` of the pipeline holds."""
        return stages_of(self.pp, rank)

    def most_in_flight(self, index: int) -> int:
        """Return the most micro-batches of a stage that have gone forward and not all the way back."""
        change = {FORWARD: 1, BACKWARD: -1, WEIGHTS: -1}
        actions = (action for action in self.actions[rank_of(self.pp, index)] if action.stage == index)
        return max(itertools.accumulate((change.get(action.kind, 0) for action in actions), initial=0))

    def idle_layers(self) -> str:
        """Return in words the layers that the sample input did not go through; empty where all layers ran."""
        return ", ".join(words for stage in self.stages if (words := stage.part.idle_layers()))

    def uniform(self, mode: str) -> list[list[Choice]]:
        """Return the choices of each layer call of each stage; `mode`: as for `Stage.uniform`."""
        return [stage.uniform(mode) for stage in self.stages]

    def held_once(self, rank: int) -> HeldOnce:
        """Return the bytes that the first and the last stage of a rank both count, but share."""
        ends = [self.stages[index] for index in self.of_rank(rank)]
        ends = [stage for stage in ends if stage.slice.is_first or stage.slice.is_last]
        if len(ends) < 2:
            return HeldOnce()
        named, sharding = dict(self.traced.whole.named_parameters()), ends[0].sharding
        ranks, tied = sharding.world if sharding.on else 1, [named[name] for name in self.traced.cut(self.job).tied]
        sizes = [(p, padded_rows(p, ranks) * math.prod(p.shape[1:]) // ranks) for p in tied]
        trained = [TrainedParameter(tuple(p.shape), n, p.element_size()) for p, n in sizes if p.requires_grad]
        state = optimizer_memory(trained, self.job.step.optimizer, device=self.device.kind).state
        return HeldOnce(sum(n * p.element_size() for p, n in sizes), sum(param.size for param in trained), state)

    @property
    def input_bytes(self) -> int:
        """Bytes of a step's input at one time, which peaks leave out; in a pipeline, of all micro-batches."""
        return self.traced.input_bytes * (self.microbatches if self.is_pipeline else 1)

    @cached_property
    def hidden_bytes(self) -> int:
        """Bytes that a stage sends for one micro-batch."""
        return self.traced.hidden(self.job).nbytes if self.is_pipeline else 0


# --- stages ---------------------------------------------------------------------------------------------------------


class _ReceivedGradient(torch.autograd.Function):
    """Replacement of a loss: the gradient of a stage's output comes from the next stage."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype)


def _sent(hidden: Tensor) -> Tensor:
    """Begin backward in a stage that sends `hidden`; where it trains nothing, the gradient goes nowhere."""
    return _ReceivedGradient.apply(hidden if hidden.requires_grad else hidden.new_empty(0).requires_grad_())


class PlannedStage(Forward):
    """The forward of a stage's tree as of a model, which is called with hidden states and the batch, and can be copied."""

    def __init__(self, tree: nn.Module, received: Received) -> None:
        super().__init__(tree)
        self.received = received
        MicrobatchCall(tree, self.next)

    def __call__(self, given: Tensor | None = None, **batch: Any) -> Tensor:
        """`given`: the hidden states of the stage before; None: it is the first one."""
        self.received.tensors = () if given is None else (given.requires_grad_(),)
        try:
            output = call_of(self.module)(**batch)
        except StageEnd as end:
            return end.sent
        finally:
            self.received.tensors = ()
        return loss_of(output)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__call__)


def by_name(model: nn.Module, microbatch: Any) -> dict[str, Any]:
    """Return the model's arguments by their names."""
    args, batch = split_sample(microbatch)
    return dict(zip(inspect.signature(model.forward).parameters, args)) | dict(batch)
