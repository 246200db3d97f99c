"""`Pipeline`: the result of `parallelize` with ``pp=``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nemo_like.distributed.consistency_checks import check_same_batch, sharing_groups
from nemo_like.distributed.context.sequence_ops import padded_length
from nemo_like.distributed.gradients import Stages, clip_grad_norm_
from nemo_like.distributed.pipeline.cut import (
    HeldStage,
    StageSlice,
    StagesOfModel,
    StagesOfRank,
    TensorForm,
    merged,
    size_of,
    verify_stages,
)
from nemo_like.distributed.pipeline.loss_mean import LossMean
from nemo_like.distributed.pipeline.schedules import make_schedule, rank_of, stages_of
from nemo_like.distributed.weights.materialize import materialize
from nemo_like.distributed.weights.tensor_locations import STAGES_MARK, find_slots, show_shards
from nemo_like.options import PipelineParallel
from nemo_like.torch_compat import local_part, voting_stage


class Pipeline(StagesOfRank, Stages):
    """A model in stages over the ranks of ``pp``; each rank holds, saves and trains its own.

    Names of parameters are those of the whole original model. Batches are whole: the same one on every rank of a pipeline.
    """

    def __init__(
        self,
        stages: Sequence[HeldStage],
        parts: StagesOfModel,
        options: PipelineParallel,
        mesh: DeviceMesh,
        device: torch.device,
        loss_mean: LossMean,
    ) -> None:
        StagesOfRank.__init__(self, stages, parts, options, mesh, device)
        Stages.__init__(self)
        self._sharing = sharing_groups(mesh, ("pp", "cp", "tp"))
        self.loss_mean = loss_mean
        self._last_rank = rank_of(options, options.stages - 1)
        self._schedules: dict[Any, Any] = {}
        self._tied_group = _tied_group(mesh) if parts.tied and self._last_rank else None
        self.verified = False
        # Called with each batch that `step` trains on, and how many micro-batches it becomes.
        self.sees: Callable[[Mapping[str, Any], int], None] | None = None
        tie(self)

    # --- a step ---------------------------------------------------------------------------------------------------

    def step(self, **batch: object) -> Tensor:
        """Forward and backward of all micro-batches; gradients are added to those that are there.

        Args:
            batch: the model's arguments, for all micro-batches together: tensors with as many rows as there are
                are cut along them, all else goes to every micro-batch. The rows must be a multiple of the micro-batches,
                or the loss must be a mean over labels: then rows are added that count for nothing. On the host, where
                labels are counted without a wait, or on the device.

        Returns:
            The model's loss of the whole batch, 0-dim, the same on every rank of the pipeline.

        Raises:
            ValueError: a batch that cannot be cut; losses of micro-batches that do not add up to that of the batch as
                `PipelineParallel.loss_mean` has it.
        """
        if self.sees is not None:
            self.sees(batch, self.options.microbatches or 1)
        schedule = self._schedule(*self._verified_cut(batch))
        numbers = torch.arange(self.options.microbatches or 1)
        args = (numbers,) if self.stages[0].slice.is_first else ()
        losses: list[Tensor] = []  # of the last stage; others leave it empty
        schedule.step(*args, microbatch=numbers, target=numbers, losses=losses)
        self._add_up_tied()
        return self._mean(losses)

    @torch.no_grad()
    def eval_step(self, **batch: object) -> Tensor:
        """The loss of a batch, as `step` takes and returns it, without gradients.

        One stage after the other; torch's own way for this fails for schedules with several stages on a rank (torch 2.13).
        """
        return self._mean(self._forward(self._verified_cut(batch)))

    def _verified_cut(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        """Cut the batch, and check `loss_mean` on it. In the first call also check that all ranks have this batch, and
        under ``cp`` compare as `nemo_like.distributed.context.verify_cut` does for whole models."""
        if not self.verified:
            self.verified = True
            check_same_batch(batch, self._sharing)
            verify_stages(self, batch, self._cut, self.forward)
        sizes = self._cut(batch)
        self.loss_mean.check(self, batch)
        return sizes

    def forward(self, batch: Mapping[str, Any], seen: list[Tensor] | None = None) -> Sequence[Tensor]:
        """The losses of all micro-batches where this rank has the last stage, else nothing.

        seen: gets the hidden states, (rows, tokens, width), that this rank's other stages give for each micro-batch.
        """
        return self._forward(self._cut(batch), seen)

    @torch.no_grad()
    def _forward(self, sizes: tuple[int, int], seen: list[Tensor] | None = None) -> Sequence[Tensor]:
        """`forward` of a batch that is cut already, into micro-batches of these `sizes`.

        One micro-batch goes through all stages before the next one begins: NCCL runs the sends and receives of two ranks in
        the order of each one's calls, and a send may wait for its receive, so two ranks that go through several stages of
        their own, each with all micro-batches, would wait for each other.
        """
        rank_of = {index: rank for rank in range(self.options.size) for index in stages_of(self.options, rank)}
        mine = dist.get_rank(self.group)
        losses: list[Tensor] = []
        sent: list[Any] = []
        for number in range(self.options.microbatches or 1):
            output: tuple[Tensor, ...] = ()
            for stage in self.stages:
                before, after = rank_of.get(stage.slice.index - 1), rank_of.get(stage.slice.index + 1)
                inputs = (torch.tensor([number]),) if stage.slice.is_first else output
                if before not in (None, mine):
                    forms = self._received_by(stage.slice, *sizes)
                    inputs = tuple(torch.empty(form.shape, dtype=form.dtype, device=self.device) for form in forms)
                    for tensor in inputs:
                        dist.recv(tensor, group=self.group, group_src=before)
                result = stage.module(*inputs, microbatch=torch.tensor([number]))
                output = tuple(t.contiguous() for t in (result if isinstance(result, tuple) else (result,)))
                if stage.slice.is_last:
                    losses += output
                elif seen is not None:
                    seen.extend(output)
                if after not in (None, mine):
                    sent += [dist.isend(tensor, group=self.group, group_dst=after) for tensor in output]
        for work in sent:
            work.wait()
        return losses

    def _cut(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        """Give the stages the batch's micro-batches; returns rows and tokens of each, those of one rank of ``cp``."""
        batch = self.stages[0].forward.whole_batch(batch)
        microbatches, shares = self.loss_mean.cut(batch, self.options.microbatches or 1, self.device)
        rows, tokens = size_of(microbatches[0])
        for stage in self.stages:
            stage.forward.microbatches, stage.forward.shares = microbatches, shares
        cut = self.sequence_parts()
        whole = not cut or cut[0].verifying == "whole"
        return rows, tokens if whole else padded_length(tokens, cut[0].ranks) // cut[0].ranks

    def _mean(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the sum of the last stage's losses of all micro-batches, on every rank."""
        for stage in self.stages:
            stage.forward.microbatches = stage.forward.shares = ()
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for loss in losses:
            value = loss.detach()  # of logits that stay split by vocabulary a DTensor, whole on every rank of `tp`
            total += (value.full_tensor() if isinstance(value, DTensor) else value).reshape(())
        dist.broadcast(total, group=self.group, group_src=self._last_rank)
        return total

    def _schedule(self, rows: int, tokens: int) -> Any:
        """torch's schedule for micro-batches of this shape; the receiving buffers are made for it."""
        key = tuple(
            (
                self._received_by(stage.slice, rows, tokens),
                () if stage.slice.is_last else self._sent_by(stage.slice.index, rows, tokens),
            )
            for stage in self.stages
        )
        if key not in self._schedules:
            number, loss = torch.empty(1, dtype=torch.int64, device="meta"), torch.empty(1, device="meta")
            schedules = [
                voting_stage(
                    stage.module,
                    stage.slice.index,
                    stage.slice.count,
                    self.device,
                    input_args=(number,) if stage.slice.is_first else _on_meta(received),
                    output_args=(loss.requires_grad_(),) if stage.slice.is_last else _on_meta(sent),
                    group=self.group,
                )
                for stage, (received, sent) in zip(self.stages, key)
            ]
            self._schedules = {key: make_schedule(self.options, schedules, lambda share, _: share.sum())}
        return self._schedules[key]

    def _received_by(self, stage: StageSlice, rows: int, tokens: int) -> tuple[TensorForm, ...]:
        """Return the forms of the tensors that `stage` is sent for a micro-batch of the batch that was cut."""
        return () if stage.is_first else self._sent_by(stage.index - 1, rows, tokens)

    def _sent_by(self, index: int, rows: int, tokens: int) -> tuple[TensorForm, ...]:
        return self.parts.sent(index, self.stages[0].forward.microbatches[0], rows, tokens)

    def _add_up_tied(self) -> None:
        """A parameter that the first and the last stage hold each a copy of: both get the sum of the gradients."""
        for name in self.parts.tied:
            copies = [
                parameter
                for stage in self.stages
                for other, parameter in stage.module.named_parameters(remove_duplicate=True)
                if self.parts.aliases.get(other, other) == name and (stage.slice.is_first or stage.slice.is_last)
            ]
            grads = [local_part(parameter.grad) for parameter in copies if parameter.grad is not None]
            if self._last_rank == 0 and len(grads) == 2 and copies[0] is not copies[1]:
                total = grads[0] + grads[1]
                for grad in grads:
                    grad.copy_(total)
            elif self._tied_group is not None and grads:
                dist.all_reduce(grads[0], group=self._tied_group)

    @functools.cached_property
    def module(self) -> nn.Module:
        """All that this rank holds as one module, under the original model's names: for state dicts. Not to be called."""
        module = merged([stage.module for stage in self.stages])
        setattr(module, STAGES_MARK, self.group)
        return module

    # --- parameters and state -------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages, under the original model's names."""
        seen: set[nn.Parameter] = set()
        for stage in self.stages:
            show_shards(stage.module)
            for name, parameter in stage.module.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """For the optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`."""
        for stage in self.stages:
            stage.module.zero_grad(set_to_none)

    def train(self, mode: bool = True) -> Pipeline:
        """As `nn.Module.train`."""
        for stage in self.stages:
            stage.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """As `nn.Module.eval`."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the whole original model's."""
        state: dict[str, Any] = {}
        for stage in self.stages:
            show_shards(stage.module)
            state |= stage.module.state_dict()
        return state

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole original model's tensors, whole, in CPU memory, on rank 0 only (others get ``{}``). A collective.

        For files of other tools: ``model.save_pretrained(folder, state_dict=pipeline.full_state_dict())``. Gathered and sent
        one tensor at a time.
        """
        first = dist.get_global_rank(self.group, 0) == 0  # other pipelines have the same weights
        mine = dist.get_rank(self.group)
        state: dict[str, Tensor] = {}
        for owner in range(self.options.size):
            own = self.state_dict() if mine == owner else {}
            forms: list[Any] = [[(name, tuple(t.shape), t.dtype) for name, t in own.items()]]
            dist.broadcast_object_list(forms, group=self.group, group_src=owner)
            for name, shape, dtype in forms[0]:
                tensor = own.get(name)
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if not first:
                    continue
                if owner and mine == owner and whole is not None:
                    dist.send(whole.contiguous().to(self.device), group=self.group, group_dst=0)
                elif mine == 0:
                    if whole is None:
                        whole = torch.empty(shape, dtype=dtype, device=self.device)
                        dist.recv(whole, group=self.group, group_src=owner)
                    state[name] = whole.detach().to("cpu", copy=True)
        return state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part out of the whole original model's state, or out of this rank's own.

        Raises:
            RuntimeError: `strict`, and a name of this rank's is missing.
        """
        for stage in self.stages:
            stage.module.load_state_dict(
                {name: state[name] for name in stage.module.state_dict() if name in state}, strict=strict
            )

    def materialize(
        self, *, state_dict: Mapping[str, Tensor] | None = None, checkpoint: str | os.PathLike[str] | None = None
    ) -> Pipeline:
        """Give stages that were built on the meta device their values: `nemo_like.distributed.materialize`, stage by stage.

        Each rank reads its own part of the whole original model's tensors. Drawn weights would be others than the whole
        model's, since a stage draws only its own: build the model on the CPU for those.

        Raises:
            ValueError, CheckpointUnreadableError: as `materialize`; no source, or two.
        """
        if (state_dict is None) == (checkpoint is None):
            raise ValueError("A pipeline is materialized from a state_dict or from a checkpoint: give one of the two.")
        for stage in self.stages:
            materialize(stage.module, state_dict=state_dict, checkpoint=checkpoint, strict=False)
        tie(self)
        self.__dict__.pop("module", None)  # it has the parameters from before
        return self

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """`nemo_like.distributed.gradients.clip_grad_norm_` over all stages: one norm, the same on every rank.

        A parameter that two stages hold counts once.
        """
        return clip_grad_norm_(self, max_norm, norm_type, error_if_nonfinite, foreach)

    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Parameters that the first stage's rank holds, too."""
        only_last = self._last_rank and self.stages[-1].slice.is_last and not self.stages[0].slice.is_first
        names = {*self.parts.tied, *self.parts.aliases} if only_last else ()
        return [parameter for name, parameter in self.named_parameters() if name in names]


def _on_meta(forms: Sequence[TensorForm]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(form.shape, dtype=form.dtype, device="meta").requires_grad_() for form in forms)


def tie(pipeline: Pipeline) -> None:
    """Give both the first and the last stage the first one's tied parameters, where this rank has both.

    FSDP2 shards the stages one by one. It takes the parameters registered when the first forward begins, and adds the
    gradients of both stages into it.
    """
    first, last = pipeline.stages[0], pipeline.stages[-1]
    if first is last or not (first.slice.is_first and last.slice.is_last):
        return
    tensors = {name: slot.tensor for slot in find_slots(first.module) for name in slot.names}
    for slot in find_slots(last.module):
        tied = pipeline.parts.aliases.get(slot.name, slot.name)
        if tied in pipeline.parts.tied and slot.tensor is not tensors[tied]:
            for module, name in slot.places:
                module.register_parameter(name, cast("nn.Parameter", tensors[tied]))


def trust(pipeline: Pipeline) -> None:
    """Compare nothing: for runs on tensors without values."""
    pipeline.verified, pipeline.loss_mean.has_values = True, False


def _tied_group(mesh: DeviceMesh) -> Any:
    """The first and the last rank of this rank's pipeline; made on every rank, for every pipeline in turn."""
    pipelines = mesh.mesh.movedim((mesh.mesh_dim_names or ()).index("pp"), -1).flatten(0, -2)
    return dist.new_subgroups_by_enumeration(pipelines[:, [0, -1]].tolist())[0]
