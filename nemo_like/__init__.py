"""Fit a model's training into GPU memory with PyTorch FSDP2, at the least cost in speed.

>>> from nemo_like import parallelize
>>> model = parallelize(model, strategy="fsdp2", ac="selective")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from nemo_like.activation_checkpointing.plan import Plan
    from nemo_like.activation_checkpointing.policy import SelectivePolicy
    from nemo_like.activation_checkpointing.timesteps import checkpoint_timesteps
    from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
    from nemo_like.distributed.weights.materialize import materialize
    from nemo_like.fake_rank import dry_run
    from nemo_like.job import Job
    from nemo_like.legacy import ActivationCheckpointTransform, SelectiveCheckpointer
    from nemo_like.losses import chunked_cross_entropy
    from nemo_like.options import (
        DDP,
        FSDP2,
        CheckpointConfig,
        ChunkedLoss,
        ContextParallel,
        ExpertParallel,
        MemoryBudget,
        OffloadConfig,
        PipelineParallel,
        PlanSearch,
        Precision,
        Single,
        StepSpec,
        TensorParallel,
    )
    from nemo_like.parallelizer import apply_activation_checkpointing, parallelize
    from nemo_like.planning.fit import fit
    from nemo_like.planning.planner import plan_for
    from nemo_like.planning.stage_plans import plan_pipeline
    from nemo_like.profiling import MemoryProfiler, ProfileReport

__version__ = "0.1.0"
"""The only place that says it: packaging reads this line, without importing the package."""

_WHERE = {
    "activation_checkpointing.plan": ("Plan",),
    "activation_checkpointing.policy": ("SelectivePolicy",),
    "activation_checkpointing.timesteps": ("checkpoint_timesteps",),
    "activation_checkpointing.wrapper": ("CheckpointWrapper",),
    "distributed.weights.materialize": ("materialize",),
    "fake_rank": ("dry_run",),
    "job": ("Job",),
    "losses": ("chunked_cross_entropy",),
    "options": (
        "DDP", "FSDP2", "CheckpointConfig", "ChunkedLoss", "ContextParallel", "ExpertParallel", "MemoryBudget",
        "OffloadConfig", "PipelineParallel", "PlanSearch", "Precision", "Single", "StepSpec", "TensorParallel",
    ),
    "parallelizer": ("apply_activation_checkpointing", "parallelize"),
    "planning.fit": ("fit",),
    "planning.planner": ("plan_for",),
    "planning.stage_plans": ("plan_pipeline",),
    "profiling": ("MemoryProfiler", "ProfileReport"),
    "legacy": ("ActivationCheckpointTransform", "SelectiveCheckpointer"),
}  # fmt: skip
"""The public names by the module that each is imported from when it is first asked for."""
_MODULES = {name: f"nemo_like.{module}" for module, names in _WHERE.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'nemo_like' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
