"""The stages of a pipeline that one rank holds, and the ranks that it shares them with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed.consistency_checks import mesh_groups
from nemo_like.distributed.context.parts import MARK, Parts
from nemo_like.distributed.context.sequence_ops import find_group
from nemo_like.distributed.context.verify_cut import compare, first_tokens, losses_of, wanted
from nemo_like.distributed.pipeline.cut import StageForward, StageSlice, StagesOfModel
from nemo_like.options import PipelineParallel


@dataclass
class HeldStage:
    """One stage that this rank holds."""

    slice: StageSlice
    module: nn.Module
    """Its tree, under the names of the original model; sharded, checkpointed and compiled."""
    forward: StageForward


class StagesOfRank:
    """The stages of one rank.

    Args:
        stages: of this rank, in order.
        parts: what all stages of the model have, and what they send.
        options: of the pipeline.
        mesh: all ranks of the job.
        device: where the stages are.
    """

    def __init__(
        self,
        stages: Sequence[HeldStage],
        parts: StagesOfModel,
        options: PipelineParallel,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.stages, self.parts, self.options, self.device = list(stages), parts, options, device
        self.group = mesh["pp"].get_group()
        self.groups = mesh_groups(mesh)
        """Groups of all axes: along them, every rank is heard."""
        self.groups_of_stage = [mesh[name].get_group() for name in mesh.mesh_dim_names or () if name != "pp"]

    def sequence_parts(self) -> list[Parts]:
        """Return how each stage cuts sequences; empty without ``cp``."""
        found = (
            next((getattr(module, MARK) for module in stage.module.modules() if hasattr(module, MARK)), None)
            for stage in self.stages
        )
        return [parts for parts in found if parts is not None]


# Context parallelism in a pipeline compared with whole sequences: every stage's hidden states, and the loss.


def verify_stages(
    held: StagesOfRank,
    batch: Mapping[str, Any],
    cut_batch: Callable[[Mapping[str, Any]], Any],
    forward: Callable[[Mapping[str, Any], list[Tensor]], Any],
) -> None:
    """Raise ValueError, on every rank, where the stages answer otherwise on parts than on whole sequences.

    Compared is what `nemo_like.distributed.context.verify_cut.wanted` returns: the first tokens, and with
    ``NEMO_LIKE_VERIFY=1`` the whole batch.

    Args:
        held: the stages of this rank.
        batch: whole.
        cut_batch: gives the stages a batch's micro-batches.
        forward: runs all stages on a batch, and adds what they give to a list.
    """
    cut = held.sequence_parts()
    length = next(value.shape[1] for value in batch.values() if isinstance(value, Tensor) and value.ndim > 1)
    tokens = wanted(length, cut[0].ranks) if cut else None
    if tokens is None:
        return
    models = [stage.module for stage in held.stages]
    inputs = first_tokens(batch, length, tokens, cut[0].ranks)
    cut_batch(inputs)  # what it calls the last stage for is none of the answers
    compare(models, cut, lambda: _answers(held, inputs, forward), [find_group(cut[0].group), held.group], held.device)


def _answers(
    held: StagesOfRank, inputs: Mapping[str, Any], forward: Callable[[Mapping[str, Any], list[Tensor]], Any]
) -> list[Tensor]:
    """Return what the stages of this rank give: hidden states, and of the last one the losses."""
    seen: list[Tensor] = []
    handles = [
        stage.forward.call.register_forward_hook(lambda module, args, output: seen.extend(losses_of(output)))
        for stage in held.stages
        if stage.slice.is_last
    ]
    try:
        forward(inputs, seen)
    finally:
        for handle in handles:
            handle.remove()
    return seen
