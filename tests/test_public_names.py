"""The names that callers may import: each from its own folder, and all of them from `nemo_like`."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import nemo_like

PATHS = {
    "nemo_like.activation_checkpointing": (
        "SELECTIVE_AC_WRAPPER_FLAG",
        "CheckpointSpec",
        "apply_full_layer_checkpointing_to_layers",
        "apply_selective_checkpointing_to_layers",
        "apply_specs",
        "apply_submodule_checkpointing",
        "detect_kv_sharing_and_maybe_disable_cache",
        "is_selective_activation_checkpointing",
        "make_selective_checkpoint_context_fn",
        "unwrap_checkpoint_wrapper",
    ),
    "nemo_like.compile": ("compile_layers",),
    "nemo_like.distributed": ("materialize", "shard_layers", "shard_sequence", "unshard_sequence"),
    "nemo_like.distributed.pipeline": ("Pipeline",),
    "nemo_like.integrations": (
        "ActivationOffloadingMixin",
        "NoOpManager",
        "OffloadActivations",
        "get_lora_act_offloading_ctx_manager",
    ),
    "nemo_like.layers": ("layer_groups",),
    "nemo_like.losses": ("chunked_cross_entropy",),
    "nemo_like.options": (
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
    "nemo_like.planning": ("Plan", "plan_for"),
    "nemo_like.planning.fit": ("FitReport", "fit"),
    "nemo_like.profiling": ("MemoryProfiler", "ProfileReport"),
}
"""The contract's, by the path that does not change."""
ELSEWHERE = (
    "ActivationCheckpointTransform",
    "CheckpointWrapper",
    "DryRun",
    "Job",
    "SelectiveCheckpointer",
    "SelectivePolicy",
    "TorchPolicy",
    "apply_activation_checkpointing",
    "checkpoint_timesteps",
    "dry_run",
    "is_recomputing",
    "PlanReport",
    "parallelize",
    "predict",
)
"""Names that are promised from `nemo_like` alone."""


@pytest.mark.parametrize("path", PATHS)
def test_a_name_is_one_object_by_both_paths(path: str) -> None:
    module = importlib.import_module(path)
    for name in PATHS[path]:
        assert getattr(nemo_like, name) is getattr(module, name)


def test_the_public_names_are_these() -> None:
    # Frozen on purpose: a name that users import is added or taken away knowingly.
    assert nemo_like.__all__ == sorted({*ELSEWHERE, *(name for names in PATHS.values() for name in names)})
    assert all(getattr(nemo_like, name).__doc__ for name in nemo_like.__all__)


def test_type_checkers_see_the_names_that_are_imported_when_asked_for() -> None:
    tree = ast.parse(Path(nemo_like.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {(node.module, each.name) for node in block.body if isinstance(node, ast.ImportFrom) for each in node.names}
    assert seen == {(module, name) for name, module in nemo_like._MODULES.items()}
