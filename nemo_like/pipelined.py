"""A model cut into the stages of a pipeline, each of which `parallelize` makes ready to train as a model of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like._util.log import is_rank_zero, logger
from nemo_like.activation_checkpointing import kv_sharing
from nemo_like.activation_checkpointing.names import check_lists
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.distributed.documents import packed_calls
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.distributed.pipeline.cut import (
    STAGE_MARK,
    HeldStage,
    StageForward,
    StageParts,
    counts_of,
    cut,
    slices,
)
from nemo_like.distributed.pipeline.loss_mean import LossMean
from nemo_like.distributed.pipeline.schedules import stages_of
from nemo_like.distributed.pipeline.stage_parts import SplitParts, check_stages, stage_parts
from nemo_like.job import Job
from nemo_like.options import CheckpointConfig, MemoryBudget, NamedLists, PipelineParallel
from nemo_like.profiling.larger_batch import size_watch
from nemo_like.resolve import check_axes, layers_for, place_of


@dataclass
class CutModel:
    """A model that can be cut: its stages, and the ranks that hold them. Nothing is changed yet."""

    model: nn.Module
    parts: StageParts | SplitParts
    job: Job
    mesh: DeviceMesh
    device: torch.device
    loss_mean: LossMean

    @property
    def stage_mesh(self) -> DeviceMesh | None:
        """The ranks that share a stage; None where one rank holds it."""
        names = tuple(name for name in self.mesh.mesh_dim_names or () if name != "pp")
        return None if self.job.of_stage().is_single else self.mesh[names]

    def own_stages(self) -> Iterator[tuple[HeldStage, Job]]:
        """Yield this rank's stages, cut one after the other, and the job that each is made ready for, as a model."""
        job, parts = self.job, self.parts
        pieces = parts.slices if isinstance(parts, SplitParts) else slices(counts_of(parts, job.pp))
        if is_rank_zero():
            counts = [len(piece.layers) for piece in pieces]
            logger.info(
                f"Pipeline of {len(counts)} stages on {job.pp.size} ranks ({job.pp.schedule}): {counts} layers each."
            )
        of_stage = job.of_stage()
        dtype = None if of_stage.fsdp is None else job.param_dtype
        packed = packed_calls(self.model)  # of the whole: a stage does not see the mixers of other stages
        for index in stages_of(job.pp, self.mesh.get_local_rank("pp")):
            piece = pieces[index]
            if isinstance(parts, SplitParts):
                tree, received = parts.take(index)
                packed = packed_calls(tree)
            else:
                tree, received = cut(self.model, parts, piece, self.device, dtype)
            forward = StageForward(tree, received, piece, packed, job.chunks).put()
            setattr(tree, STAGE_MARK, True if isinstance(parts, SplitParts) else piece)
            names = tuple(parts.layers[i] for i in piece.layers)
            ac = job.ac.only(names) if isinstance(job.ac, Plan) else job.ac
            stage_job = replace(of_stage, layers=names, ac_scope="all", ac=ac, loss=None, planned_tokens=None)
            yield HeldStage(piece, tree, forward), stage_job
        if isinstance(parts, SplitParts):
            parts.forget_weights()

    def pipeline(self, stages: Sequence[HeldStage]) -> Pipeline:
        """Return the pipeline of this rank's `stages`, which are ready to train."""
        pipeline = Pipeline(stages, self.parts, self.job.pp, self.mesh, self.device, self.loss_mean)
        watch = size_watch(self.job.ac if isinstance(self.job.ac, Plan) else None, self.job.planned_tokens)
        if watch is not None and is_rank_zero():
            pipeline.sees = watch.see
        return pipeline


def cut_into_stages(model: nn.Module, job: Job, mesh: DeviceMesh, sample_input: object) -> CutModel:
    """Check that `model` can be cut for `job`, and plan its budget; changes nothing.

    Args:
        model: the original model, the same on every rank; it shares its layers with the stages.
        job: on its ranks, with ``pp``.
        mesh: all its ranks.
        sample_input: one micro-batch.

    Raises:
        ValueError: no sample input, a plain model without ``loss_mean``, a model that cannot be cut, a budget that
            cannot be met.
    """
    if sample_input is None:
        raise ValueError(
            "pp needs sample_input=, one micro-batch as the model is called with it ({'input_ids': ..., 'labels': ...}): it "
            "shows which parameters run before and after the layers, and the shape of the tensors that stages send."
        )
    layers_found, chosen = layers_for(model, job)
    _refuse(model, layers_found, job.pp)
    if isinstance(job.ac, NamedLists):  # a stage has some of the layers
        check_lists({layer.fqn: layer.module for layer in chosen}, job.ac, None if job.ac.whole else job.compile)
    if isinstance(job.ac, Plan):  # before stages are cut
        job.ac.check_matmuls(job.precision.matmuls)
    check_axes(model, job, mesh, layers_found, sample_input)
    dtype = job.param_dtype
    lowered = {} if dtype is None else {"autocast" if job.of_stage().fsdp is None else "dtype": dtype}
    parts: StageParts | SplitParts
    if job.pp.split is None:
        parts = stage_parts(model, layers_found, sample_input, **lowered)
    else:
        parts = SplitParts(model, job.pp.split, job.pp.stages, layers_found, sample_input, **lowered)
    planned = _planned(model, job, sample_input)
    if isinstance(parts, StageParts):
        check_stages(model, parts, slices(counts_of(parts, planned.pp)), sample_input, **lowered)
        parts = replace(parts, sent_by=job.tp.sequence_ranks)
    return CutModel(model, parts, planned, mesh, place_of(job, mesh), LossMean(model, job.pp))


def _planned(model: nn.Module, job: Job, sample_input: object) -> Job:
    """Return `job` with its budget as a plan, and with the pipeline's options that a plan decides."""
    pp = job.pp
    if isinstance(job.ac, MemoryBudget) or (
        isinstance(job.ac, NamedLists) and job.ac.whole and job.compile is not None
    ):
        from nemo_like.planning.planner import plan_for  # only a budget uses the planner

        job = replace(job, ac=plan_for(model, job, sample_input=sample_input))
    elif pp.balance == "memory":
        from nemo_like.planning.planner import balance_for_memory

        mode = job.ac.mode if isinstance(job.ac, CheckpointConfig) and job.ac.mode in ("none", "selective") else "full"
        return replace(job, pp=replace(pp, balance=tuple(balance_for_memory(model, sample_input, job, mode))))
    if isinstance(job.ac, Plan) and pp.balance == "memory" and "balance" in job.ac.step:
        pp = replace(pp, balance=tuple(job.ac.step["balance"]))
    return replace(job, pp=pp)


def _refuse(model: nn.Module, layers: Any, pp: PipelineParallel) -> None:
    """Raise ValueError for a model that no pipeline can have, or none without ``split=``."""
    kind = type(model).__name__
    groups = {layer.group for layer in layers}
    if len(groups) > 1 and pp.split is None:
        raise ValueError(
            f"pp cannot cut {kind}: it has layers in {len(groups)} groups ({', '.join(sorted(groups))}), and a pipeline is "
            "one chain. Name one group's with layers=, define each stage with PipelineParallel(split=...), or use "
            "strategy='fsdp2' with tp or cp."
        )
    if kv_sharing.has_kv_sharing(model):
        raise ValueError(
            f"pp cannot cut {kind}: its layers share keys and values, which stay on one stage. Use fsdp2 or tp."
        )
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and pp.split is None:
        raise ValueError(
            f"pp cannot cut {kind}: encoder and decoder are two chains. Define each stage with "
            "PipelineParallel(split=...), or use strategy='fsdp2' with tp."
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"pp cannot cut {kind} with output_router_logits=True: the balance loss is made of all layers' routers, which "
            "the last stage does not have. Set config.output_router_logits=False."
        )
