"""Many ranks: mesh, FSDP2 over the layers, materializing, clipping, state dicts, the process group's life."""

from nemo_like.distributed.context.sequence_ops import shard_sequence, unshard_sequence
from nemo_like.distributed.gradients import clip_grad_norm_, set_gradient_sync, with_unused_sample
from nemo_like.distributed.launch import init_distributed, shutdown, world_size
from nemo_like.distributed.mesh import build_mesh, validate_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.distributed.weights.materialize import materialize
from nemo_like.distributed.weights.state_dict import (
    get_model_state,
    get_optimizer_state,
    set_model_state,
    set_optimizer_state,
)

__all__ = [
    "build_mesh",
    "clip_grad_norm_",
    "get_model_state",
    "get_optimizer_state",
    "init_distributed",
    "materialize",
    "set_gradient_sync",
    "set_model_state",
    "set_optimizer_state",
    "shard_layers",
    "shard_sequence",
    "shutdown",
    "unshard_sequence",
    "validate_mesh",
    "with_unused_sample",
    "world_size",
]
