"""Fit a model's training into GPU memory with PyTorch FSDP2, at the least cost in speed.

>>> from nemo_like import parallelize
>>> model = parallelize(model, strategy="fsdp2", ac="selective")  # doctest: +SKIP
"""

from nemo_like.activation_checkpointing.regions import CheckpointWrapper
from nemo_like.config import CheckpointConfig, MemoryBudget, OffloadConfig
from nemo_like.parallelizer import apply_activation_checkpointing, parallelize

__all__ = [
    "CheckpointConfig",
    "CheckpointWrapper",
    "MemoryBudget",
    "OffloadConfig",
    "apply_activation_checkpointing",
    "parallelize",
]
