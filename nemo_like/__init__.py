"""Fit a model's training into GPU memory with PyTorch FSDP2, at the least cost in speed.

>>> from nemo_like import parallelize
>>> model = parallelize(model, strategy="fsdp2", ac="selective")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from nemo_like.activation_checkpointing.apply import apply_specs
    from nemo_like.activation_checkpointing.engine import make_selective_checkpoint_context_fn
    from nemo_like.activation_checkpointing.kv_sharing import detect_kv_sharing_and_maybe_disable_cache
    from nemo_like.activation_checkpointing.legacy import (
        apply_full_layer_checkpointing_to_layers,
        apply_selective_checkpointing_to_layers,
        apply_submodule_checkpointing,
        is_selective_activation_checkpointing,
    )
    from nemo_like.activation_checkpointing.plan import Plan
    from nemo_like.activation_checkpointing.policy import SelectivePolicy, TorchPolicy
    from nemo_like.activation_checkpointing.spec import CheckpointSpec
    from nemo_like.activation_checkpointing.timesteps import checkpoint_timesteps
    from nemo_like.activation_checkpointing.wrapper import (
        SELECTIVE_AC_WRAPPER_FLAG,
        CheckpointWrapper,
        unwrap_checkpoint_wrapper,
    )
    from nemo_like.compile import compile_layers
    from nemo_like.distributed.context_parallel.sequence_ops import shard_sequence, unshard_sequence
    from nemo_like.distributed.pipeline import Pipeline
    from nemo_like.distributed.shard import shard_layers
    from nemo_like.distributed.weights.materialize import materialize
    from nemo_like.fake_rank import DryRun, dry_run
    from nemo_like.integrations import (
        ActivationOffloadingMixin,
        NoOpManager,
        OffloadActivations,
        get_lora_act_offloading_ctx_manager,
    )
    from nemo_like.job import Job
    from nemo_like.layers import layer_groups
    from nemo_like.legacy import ActivationCheckpointTransform, SelectiveCheckpointer
    from nemo_like.losses import chunked_cross_entropy
    from nemo_like.options import (
        DDP,
        FSDP2,
        AllocatorConfig,
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
    from nemo_like.planning.fit import FitReport, fit
    from nemo_like.planning.planner import plan_for
    from nemo_like.planning.stage_plans import plan_pipeline
    from nemo_like.profiling import MemoryProfiler, ProfileReport

__version__ = "0.1.0"
"""The only place that says it: packaging reads this line, without importing the package."""

_WHERE = {
    "activation_checkpointing.apply": ("apply_specs",),
    "activation_checkpointing.engine": ("make_selective_checkpoint_context_fn",),
    "activation_checkpointing.kv_sharing": ("detect_kv_sharing_and_maybe_disable_cache",),
    "activation_checkpointing.legacy": (
        "apply_full_layer_checkpointing_to_layers",
        "apply_selective_checkpointing_to_layers",
        "apply_submodule_checkpointing",
        "is_selective_activation_checkpointing",
    ),
    "activation_checkpointing.plan": ("Plan",),
    "activation_checkpointing.policy": (
        "SelectivePolicy",
        "TorchPolicy",
    ),
    "activation_checkpointing.spec": ("CheckpointSpec",),
    "activation_checkpointing.timesteps": ("checkpoint_timesteps",),
    "activation_checkpointing.wrapper": (
        "SELECTIVE_AC_WRAPPER_FLAG",
        "CheckpointWrapper",
        "unwrap_checkpoint_wrapper",
    ),
    "compile": ("compile_layers",),
    "distributed.context_parallel.sequence_ops": (
        "shard_sequence",
        "unshard_sequence",
    ),
    "distributed.pipeline": ("Pipeline",),
    "distributed.shard": ("shard_layers",),
    "distributed.weights.materialize": ("materialize",),
    "fake_rank": (
        "DryRun",
        "dry_run",
    ),
    "integrations": (
        "ActivationOffloadingMixin",
        "NoOpManager",
        "OffloadActivations",
        "get_lora_act_offloading_ctx_manager",
    ),
    "job": ("Job",),
    "layers": ("layer_groups",),
    "legacy": (
        "ActivationCheckpointTransform",
        "SelectiveCheckpointer",
    ),
    "losses": ("chunked_cross_entropy",),
    "options": (
        "DDP",
        "FSDP2",
        "AllocatorConfig",
        "CheckpointConfig",
        "ChunkedLoss",
        "ContextParallel",
        "ExpertParallel",
        "MemoryBudget",
        "OffloadConfig",
        "PipelineParallel",
        "PlanSearch",
        "Precision",
        "Single",
        "StepSpec",
        "TensorParallel",
    ),
    "parallelizer": (
        "apply_activation_checkpointing",
        "parallelize",
    ),
    "planning.fit": (
        "FitReport",
        "fit",
    ),
    "planning.planner": ("plan_for",),
    "planning.stage_plans": ("plan_pipeline",),
    "profiling": (
        "MemoryProfiler",
        "ProfileReport",
    ),
}
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
