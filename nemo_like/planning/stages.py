"""Plans for a pipeline: each stage traced as a model of its own, and each rank's peak over all microbatches in flight."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.module_tree import bare_modules
from nemo_like._util.tensors import split_sample, tensors_in
from nemo_like.distributed.context.sequence_ops import padded_length
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
from nemo_like.fake.model_copy import model_copy
from nemo_like.job import Job
from nemo_like.layers import find_layers
from nemo_like.options import PipelineParallel
from nemo_like.planning.block import Choice
from nemo_like.planning.devices import device_of
from nemo_like.planning.kinds import settings_of
from nemo_like.planning.known_blocks import KnownBlocks
from nemo_like.planning.planner import Planner
from nemo_like.planning.program.rank import ActionBytes, rank_peak
from nemo_like.planning.program.readers import Peak, StepPoint
from nemo_like.planning.tied_stages import HeldOnce, held_once

Choices = Sequence[Sequence[Choice]]
"""For each stage, one choice per layer call."""


@dataclass(frozen=True)
class PlannedStage:
    """One stage, and what answers for it: stages of the same layers share one planner."""

    slice: StageSlice
    names: tuple[str, ...]
    """Of its layers, in the whole model."""
    planner: Planner


class PipelinePlanner:
    """One model in stages on one device type: answers for any number of budgets and modes without tracing again."""

    def __init__(
        self,
        model: nn.Module,
        microbatch: Any,
        job: Job,
        *,
        parts: StageParts | None = None,
        parts_sent: int = 1,
        known: KnownBlocks | None = None,
    ) -> None:
        """Cut and trace `model`, which is not changed.

        Args:
            model: bare; on any device, `meta` included.
            microbatch: what the model is called with for one microbatch on one rank.
            job: the whole job, with the cut and the schedule in ``job.pp``.
            known: as for `Planner`.
            parts_sent: ranks of ``tp`` each of which sends its part of the sequence to the next stage.
            parts: of `model`, as `parts_of` found them for any number of sequences; None: they are looked for.

        Raises:
            ValueError: a model that cannot be cut or traced.
        """
        if job.layers is not None:
            job = replace(job, layers=tuple(layer.fqn for layer in find_layers(model, job.layers)))  # of the copy, then
        model = model_copy(model)
        self.job, self.device, self.whole = job, device_of(job), model
        self.parts = parts_of(model, microbatch, job) if parts is None else parts
        self.batch = _by_name(model, microbatch)
        self.hidden = hidden_of(model, microbatch, self.parts, job.cp.size * parts_sent)
        self.planners = dict[Any, Planner]()
        self._alike, self._numbers = dict[str, int](), dict[Any, int]()
        self._known = KnownBlocks() if known is None else known
        try:
            self.scheduled_as(job.pp)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PipelinePlanner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Under ``cp``, the model's layers are as they were again; the planner answers no longer."""
        for planner in reversed(self.planners.values()):
            planner.__exit__()

    @property
    def pp(self) -> PipelineParallel:
        """The cut and the schedule."""
        return self.job.pp

    def scheduled_as(self, pp: PipelineParallel) -> None:
        self.job = self.job.on(dp_shard=self.job.dp_shard, pp=pp)
        self.count = pp.microbatches or 1
        self.actions = walked_actions(pp)
        self.counts = counts_of(self.parts, pp)
        self.stages = self.stages_for(self.counts)

    def scheduled(self, pp: PipelineParallel) -> PipelinePlanner:
        """This planner for another cut or schedule; stages of the same layers are not traced again."""
        other = copy.copy(self)
        other.scheduled_as(pp)
        return other

    def for_job(self, job: Job) -> PipelinePlanner:
        """Return this planner for another number of ranks, schedule, offloading or loss. But for stages of other layers and
        the last stage of another loss, nothing is traced again."""
        other = copy.copy(self)
        other.job, other.planners = job, {}
        for key, planner in self.planners.items():
            if key[1] and job.loss != self.job.loss:
                continue
            _ = planner.trained  # traced once for all copies
            made = copy.copy(planner)
            own = planner.job
            made.job = replace(job.of_stage(), loss=own.loss, step=own.step, layers=own.layers)
            made.__dict__.pop("sharding", None)
            other.planners[key] = made
        other.scheduled_as(job.pp)
        return other

    def dealt(self, counts: Sequence[int]) -> PipelinePlanner:
        """This planner for another number of layers on each stage."""
        other = copy.copy(self)
        other.job, other.counts = replace(self.job, pp=replace(self.pp, balance=tuple(counts))), list(counts)
        other.stages = other.stages_for(other.counts)
        return other

    def with_all_microbatches(self) -> PipelinePlanner:
        """This planner with all actions of a step, also those of which nothing new is to be learned."""
        other = copy.copy(self)
        other.actions = all_actions_of(self.pp)
        return other

    def replaying(self, replay: str) -> PipelinePlanner:
        """This planner for one replay or two of what is checkpointed, where backward is cut in two."""
        other = copy.copy(self)
        other.job = replace(self.job, pp=replace(self.pp, replay=replay))
        return other

    def stages_for(self, counts: Sequence[int]) -> list[PlannedStage]:
        """The stages for so many layers each; what was traced is used again."""
        modules = dict(bare_modules(self.whole))
        made = []
        for piece in slices(counts):
            names = tuple(self.parts.layers[i] for i in piece.layers)
            key = (piece.is_first, piece.is_last, tuple(self._settings(name, modules[name]) for name in names))
            if key not in self.planners:
                self.planners[key] = self._planner(piece, names)
            made.append(PlannedStage(piece, names, self.planners[key]))
        return made

    def _settings(self, name: str, layer: nn.Module) -> int:
        """A number, equal for equal layers: what is trained of them, too."""
        if name not in self._alike:
            self._alike[name] = self._numbers.setdefault(settings_of(layer), len(self._numbers))
        return self._alike[name]

    def _planner(self, piece: StageSlice, names: tuple[str, ...]) -> Planner:
        job = self.job.of_stage()
        dtype = None if job.fsdp is None else job.param_dtype
        tree, received = cut(self.whole, self.parts, piece, torch.device("cpu"), dtype)
        setattr(tree, STAGE_MARK, True)
        given = self.batch if piece.is_first else self.batch | {"given": self.hidden}
        step = replace(self.job.step, microbatches=1, keeps_output=True, loss_fn=None)
        job = replace(
            job,
            loss=self.job.loss if piece.is_last else None,
            layers=names,
            step=step if piece.is_last else replace(step, loss_fn=_sent),
        )
        return Planner(planned_stage(tree, received), given, job, known=self._known)

    # --- memory ---------------------------------------------------------------------------------------------------

    def uniform(self, mode: str) -> list[list[Choice]]:
        """``none``, ``full`` or ``selective`` for every layer of every stage."""
        return [stage.planner.uniform(mode) for stage in self.stages]

    def of_rank(self, rank: int) -> list[int]:
        """Numbers of the stages that `rank` of the pipeline holds."""
        return stages_of(self.pp, rank)

    def most_in_flight(self, index: int) -> int:
        """Of stage `index`, the most microbatches that have gone forward and not all the way back."""
        most = now = 0
        for action in self.actions[rank_of(self.pp, index)]:
            if action.stage == index:
                now += {FORWARD: 1, BACKWARD: -1, WEIGHTS: -1}.get(action.kind, 0)
                most = max(most, now)
        return most

    def rank_peak(
        self, rank: int, choices: Choices, log: list[ActionBytes] | None = None, points: list[StepPoint] | None = None
    ) -> Peak:
        """Predicted peak of a whole step on `rank` of the pipeline with these choices. `log`: gets what each action reaches,
        `points` every stretch of the step."""
        return rank_peak(self, rank, choices, log, points)

    def held_once(self, rank: int) -> HeldOnce:
        """What the first and the last stage both count, and have in common."""
        ends = [self.stages[index] for index in self.of_rank(rank)]
        ends = [stage for stage in ends if stage.slice.is_first or stage.slice.is_last]
        if len(ends) < 2:
            return HeldOnce()
        named, planner = dict(self.whole.named_parameters()), ends[0].planner
        tied, ranks = [named[name] for name in self.parts.tied], planner.sharding.world if planner.sharding.on else 1
        return held_once(tied, ranks, self.job.step.optimizer, planner.device.kind)

    def peaks(self, choices: Choices) -> list[Peak]:
        """Of every rank of the pipeline."""
        return [self.rank_peak(rank, choices) for rank in range(self.pp.size)]

    @property
    def input_bytes(self) -> int:
        """What the pipeline's step is called with, which peaks leave out."""
        given = tensors_in(self.batch)
        return sum(tensor.numel() * tensor.element_size() for tensor in given) * self.count

    @property
    def hidden_bytes(self) -> int:
        """What a stage sends for one microbatch."""
        return self.hidden.numel() * self.hidden.element_size()


def parts_of(model: nn.Module, microbatch: Any, job: Job) -> StageParts:
    """Return what stands before, in and after the layers; raises ValueError where the model cannot be cut."""
    dtype = job.param_dtype
    lowered = {} if dtype is None else {"autocast" if job.of_stage().fsdp is None else "dtype": dtype}
    return stage_parts(model, find_layers(model, job.layers), microbatch, **lowered)


class _ReceivedGradient(torch.autograd.Function):
    """In the place of a loss: the gradient of a stage's output comes from the next stage."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype)


def _sent(hidden: Tensor) -> Tensor:
    """What backward begins with in a stage that sends `hidden`; where it trains nothing, that goes nowhere."""
    return _ReceivedGradient.apply(hidden if hidden.requires_grad else hidden.new_empty(0).requires_grad_())


def planned_stage(tree: nn.Module, received: Received) -> nn.Module:
    """A stage's `tree` as a model that is called with ``given=`` hidden states beside the batch, and can be copied."""
    base = type(tree)

    def forward(self: Any, given: Tensor | None = None, **batch: Any) -> Tensor:
        own = self._planned_received
        own.tensors = () if given is None else (given.requires_grad_(),)
        try:
            output = call_of(self)(**batch)
        except StageEnd as end:
            return end.sent
        finally:
            own.tensors = ()
        return loss_of(output)

    MicrobatchCall(tree, types.MethodType(base.forward, tree))
    tree.__class__ = type(base.__name__, (base,), {"forward": forward})
    tree.__dict__["_planned_received"] = received
    return tree


def _by_name(model: nn.Module, microbatch: Any) -> dict[str, Any]:
    """What the model is called with, by the names of its arguments."""
    args, batch = split_sample(microbatch)
    return dict(zip(inspect.signature(model.forward).parameters, args)) | dict(batch)


def hidden_of(model: nn.Module, microbatch: Any, parts: StageParts, cp: int) -> Tensor:
    """What one of `cp` ranks sends to the next stage for such a microbatch, without data."""
    batch = _by_name(model, microbatch)
    first = next(value for value in batch.values() if isinstance(value, Tensor) and value.dim() >= 2)
    rows, tokens = first.shape[:2]
    tokens = padded_length(tokens, cp) // cp
    return torch.empty((rows, tokens, *parts.hidden_width), dtype=parts.hidden_dtype, device="meta")


def walked_actions(pp: PipelineParallel) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank runs, up to the microbatch from which on its memory repeats itself."""
    count, repeats_after = pp.microbatches or 1, pp.facts.repeats_after
    enough = count if repeats_after is None else min(count, repeats_after(pp.size))
    return all_actions_of(replace(pp, microbatches=enough))
