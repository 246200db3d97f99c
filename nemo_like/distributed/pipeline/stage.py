"""The stages of a pipeline that one rank holds, and the ranks that it shares them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed.agreement import mesh_groups
from nemo_like.distributed.context_parallel.parts import MARK, Parts
from nemo_like.distributed.pipeline.cut import StageForward
from nemo_like.distributed.pipeline.dealing import StageSlice, StagesOfModel
from nemo_like.options import PipelineParallel


@dataclass
class Stage:
    """One stage that this rank holds."""

    slice: StageSlice
    module: nn.Module
    """Its tree, under the names of the bare model; sharded, checkpointed and compiled."""
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
        stages: Sequence[Stage],
        parts: StagesOfModel,
        options: PipelineParallel,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.stages, self.parts, self.options, self.device = list(stages), parts, options, device
        self.group = mesh["pp"].get_group()
        self.groups = mesh_groups(mesh)
        """Of all axes: along them, every rank is heard."""
        self.groups_of_stage = [mesh[name].get_group() for name in mesh.mesh_dim_names or () if name != "pp"]

    def sequence_parts(self) -> list[Parts]:
        """Return how each stage cuts sequences; empty without ``cp``."""
        found = (
            next((getattr(module, MARK) for module in stage.module.modules() if hasattr(module, MARK)), None)
            for stage in self.stages
        )
        return [parts for parts in found if parts is not None]
