"""Lightning's `ModelParallelStrategy`, in Fabric and in its Trainer, with `nemo_like.parallelize` doing the work.

    fabric = Fabric(strategy=ModelParallelStrategy(parallelize_fn(ac="selective"), data_parallel_size=8))

    class Module(LightningModule):
        def configure_model(self):
            self.model = parallelize_fn(ac="selective")(self.model, self.device_mesh)

Lightning itself is not imported here.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed.weights.materialize import materialize
from nemo_like.parallelizer import is_parallelized, parallelize

__all__ = ["parallelize_fn"]

# Lightning's names for the axes of its mesh, and ours.
_AXES = {"data_parallel": "dp_shard", "tensor_parallel": "tp"}


def parallelize_fn(**settings: Any) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """Return a function for `ModelParallelStrategy`: of the model and Lightning's mesh, it returns the sharded model.

    Called again with a model that it has made (Lightning calls ``configure_model`` for fitting and for validation), the
    function returns the model as it is. One on the meta device is given memory and initialised.

    Args:
        settings: those of `nemo_like.parallelize`, but for `mesh` and `strategy`, which are Lightning's.

    Raises:
        ValueError, TypeError: when the function is made, for `mesh` and `strategy`; when it is called, as `parallelize`,
            and for a mesh with other axes than Lightning's.
    """
    for name in ("mesh", "strategy"):
        if name in settings:
            raise TypeError(
                f"{name}= is set by Lightning: its ModelParallelStrategy shards by FSDP2 on a mesh of its own."
            )

    def parallelize_on(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if is_parallelized(model):
            return model
        parallelized: nn.Module = parallelize(model, "fsdp2", mesh=_renamed(device_mesh), **settings)
        if any(tensor.is_meta for tensor in (*parallelized.parameters(), *parallelized.buffers())):
            materialize(parallelized)
        return parallelized

    return parallelize_on


def _renamed(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of the same ranks under our names, without an axis of one rank next to ``dp_shard``."""
    names = mesh.mesh_dim_names or ()
    if not names or any(name not in _AXES for name in names):
        raise ValueError(
            f"The mesh has the axes {names}; Lightning's has {', '.join(_AXES)}. Call nemo_like.parallelize(mesh=...) "
            "with other meshes."
        )
    kept = [axis for axis, name in enumerate(names) if _AXES[name] == "dp_shard" or mesh.size(axis) > 1]
    ranks = mesh.mesh.reshape([mesh.size(axis) for axis in kept])
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=tuple(_AXES[names[axis]] for axis in kept))
