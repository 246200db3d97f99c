"""What a planned step runs with, besides its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_like.options import FSDP2, ChunkedLoss, ContextParallel, OffloadConfig, Precision, StepSpec
from nemo_like.options.allocator import AllocatorConfig


@dataclass(frozen=True)
class Setup:
    """What a step runs with, besides the model."""

    shard_ranks: int = 1
    """Ranks that FSDP2 shards parameters over (``dp_shard`` x ``cp``); 1: none."""
    replicas: int = 1
    """Copies of what these share (``dp_replicate``): several reduce gradients by FSDP2 also where nothing is sharded."""
    step: StepSpec = field(default_factory=StepSpec)
    """How the loop goes through a step."""
    precision: Precision = field(default_factory=Precision)
    fsdp: FSDP2 | None = field(default_factory=FSDP2)
    """None: the model stays whole, and computes under autocast where `precision` lowers its dtype."""
    ddp: bool = False
    """`DistributedDataParallel` averages gradients, in buckets that stay."""
    tp: int = 1
    """Tensor-parallel ranks (see `nemo_like.planning.tensor_twin`)."""
    tp_plan: Mapping[str, Any] | None = None
    """Which weights they split, where the caller says."""
    sequence_parallel: bool = False
    """Between attention and MLP each of them has its part of the sequence."""
    loss_parallel: bool = False
    """Each of them has its part of the logits, by vocabulary, and the loss is computed of that."""
    ep: int = 1
    """Ranks that each layer's experts are split over."""
    expert_plan: Mapping[str, str] | None = None
    """Which modules hold experts, where the caller says."""
    imbalance: float | None = None
    """Rows of the fullest rank's experts, as a multiple of those of a balanced router; None:
    `nemo_like.planning.expert_twin.IMBALANCE`, and at most `ep`."""
    cp: ContextParallel = field(default_factory=ContextParallel)
    """How sequences are split: the sample has whole ones, the plan is of one rank's part."""
    offload: OffloadConfig = field(default_factory=lambda: OffloadConfig("none"))
    """What waits in host memory between forward and backward."""
    loss: ChunkedLoss | None = None
    """The chunks that the model's loss is computed in; None: as the model does."""
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    """The settings of CUDA's caching allocator, which decide what it reserves."""
