"""Many ranks: mesh, FSDP2 over the layers, materializing, clipping, state dicts, the process group's life."""

from nemo_like.distributed.launch import init_distributed, shutdown, world_size
from nemo_like.distributed.mesh import build_mesh, validate_mesh
from nemo_like.distributed.shard import shard_layers

__all__ = ["build_mesh", "init_distributed", "shard_layers", "shutdown", "validate_mesh", "world_size"]
