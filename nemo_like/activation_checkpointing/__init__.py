"""Activation checkpointing of given modules: regions, tensors they keep, and the eager engine. Needs torch alone."""

from nemo_like.activation_checkpointing.apply import apply_specs
from nemo_like.activation_checkpointing.checkpointed import SELECTIVE_AC_WRAPPER_FLAG, is_checkpointed
from nemo_like.activation_checkpointing.contexts import make_selective_checkpoint_context_fn
from nemo_like.activation_checkpointing.engine.global_state import attention_back_end, register
from nemo_like.activation_checkpointing.kv_sharing import detect_kv_sharing_and_maybe_disable_cache
from nemo_like.activation_checkpointing.legacy import (
    CheckpointWrapper,
    apply_full_layer_checkpointing_to_layers,
    apply_selective_checkpointing_to_layers,
    apply_submodule_checkpointing,
    is_selective_activation_checkpointing,
    unwrap_checkpoint_wrapper,
)
from nemo_like.activation_checkpointing.policy import Decision, DecisionTable, FullPolicy, Policy, SelectivePolicy
from nemo_like.activation_checkpointing.spec import CheckpointSpec

__all__ = [
    "SELECTIVE_AC_WRAPPER_FLAG",
    "CheckpointSpec",
    "CheckpointWrapper",
    "Decision",
    "DecisionTable",
    "FullPolicy",
    "Policy",
    "SelectivePolicy",
    "apply_full_layer_checkpointing_to_layers",
    "apply_selective_checkpointing_to_layers",
    "apply_specs",
    "apply_submodule_checkpointing",
    "detect_kv_sharing_and_maybe_disable_cache",
    "is_checkpointed",
    "is_selective_activation_checkpointing",
    "make_selective_checkpoint_context_fn",
    "unwrap_checkpoint_wrapper",
]

register("Transformer Engine's attention back end", attention_back_end)
