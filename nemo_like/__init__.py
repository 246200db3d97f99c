"""Fit a model's training into GPU memory with PyTorch FSDP2, at the least cost in speed.

>>> from nemo_like import parallelize
>>> model = parallelize(model, strategy="fsdp2", ac="selective")  # doctest: +SKIP
"""

from nemo_like.activation_checkpointing.policy import SelectivePolicy
from nemo_like.activation_checkpointing.timesteps import checkpoint_timesteps
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from nemo_like.distributed.materialize import materialize
from nemo_like.options import (
    DDP,
    FSDP2,
    CheckpointConfig,
    ChunkedLoss,
    ContextParallel,
    MemoryBudget,
    OffloadConfig,
    Precision,
    StepSpec,
    TensorParallel,
)
from nemo_like.parallelizer import apply_activation_checkpointing, parallelize
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.planning.planner import plan_for
from nemo_like.profiling import MemoryProfiler, ProfileReport
from nemo_like.strategies import ActivationCheckpointTransform, SelectiveCheckpointer

__version__ = "0.1.0"
"""The only place that says it: packaging reads this line, without importing the package."""

__all__ = [
    "DDP",
    "FSDP2",
    "ActivationCheckpointTransform",
    "CheckpointConfig",
    "CheckpointWrapper",
    "ChunkedLoss",
    "ContextParallel",
    "MemoryBudget",
    "MemoryProfiler",
    "OffloadConfig",
    "Plan",
    "Precision",
    "ProfileReport",
    "SelectiveCheckpointer",
    "SelectivePolicy",
    "StepSpec",
    "TensorParallel",
    "apply_activation_checkpointing",
    "checkpoint_timesteps",
    "materialize",
    "parallelize",
    "plan_for",
]
