"""The mesh of the experts: the same ranks as the dense mesh, cut in another way."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed.mesh import axis_size
from nemo_like.torch_compat import root_mesh


@dataclass(frozen=True)
class ExpertMesh:
    """Where experts live. For 8 ranks with ``tp=2, ep=4``: ``dense`` is (dp_shard 4, tp 2), ``whole`` is (efsdp 2, ep 4)."""

    whole: DeviceMesh
    """Axes ``dp_replicate`` (where there are replicas), ``efsdp`` and ``ep``."""
    dense: DeviceMesh
    """The mesh of all other parameters."""

    @property
    def ep(self) -> DeviceMesh:
        """The ranks that tokens travel between: each holds other experts."""
        return self.whole["ep"]

    @property
    def fsdp(self) -> DeviceMesh:
        """What FSDP2 shards over: the ranks that hold the same experts, ``(efsdp,)`` or ``(dp_replicate, efsdp)``."""
        if "dp_replicate" in (self.whole.mesh_dim_names or ()):
            return self.whole["dp_replicate", "efsdp"]
        return self.whole["efsdp"]

    @property
    def data_ranks(self) -> int:
        """Ranks with tokens of their own: what the sum of an expert's gradients is divided by, as FSDP2 does elsewhere."""
        return axis_size(self.dense, "dp_replicate") * axis_size(self.dense, "dp_shard") * axis_size(self.dense, "cp")


def check_expert_ranks(mesh: DeviceMesh, size: int) -> None:
    """Raise ValueError unless `size` divides the ranks that hold one copy of the model between them."""
    inside = axis_size(mesh, "dp_shard") * axis_size(mesh, "cp") * axis_size(mesh, "tp")
    if inside % size:
        raise ValueError(
            f"ep is {size}, and dp_shard x cp x tp is {inside} ranks, which it does not divide: experts are split within "
            f"one copy of the model. Use a divisor of {inside}."
        )


def make_expert_mesh(mesh: DeviceMesh, size: int) -> ExpertMesh:
    """Cut the ranks of `mesh` for experts that are split over `size` of them. A collective: it makes process groups.

    ``ep`` is the innermost axis, so that tokens travel between neighbours, over the fastest network.

    Raises:
        ValueError: as `check_expert_ranks`.
    """
    check_expert_ranks(mesh, size)
    root = root_mesh(mesh)
    shape: list[int] = [-1, size]
    names: list[str] = ["efsdp", "ep"]
    # Every rank of the job takes part in making process groups, so the other stages of a pipeline are in here, too.
    for axis in ("dp_replicate", "pp"):
        if axis_size(root, axis) > 1:
            shape.insert(0, axis_size(root, axis))
            names.insert(0, axis)
    return ExpertMesh(DeviceMesh(root.device_type, root.mesh.reshape(shape), mesh_dim_names=tuple(names)), mesh)
