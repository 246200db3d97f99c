"""The mesh of the experts: the same ranks as the dense mesh, cut in another way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from nemo_like.distributed.expert.find_experts import Experts
from nemo_like.distributed.mesh import axis_size
from nemo_like.distributed.shard import shard_unit
from nemo_like.options import FSDP2
from nemo_like.torch_compat import root_mesh


@dataclass(frozen=True)
class ExpertMesh:
    """The meshes on which experts live. For 8 ranks with ``tp=2, ep=4``: ``dense`` is (dp_shard 4, tp 2), ``whole`` is
    (efsdp 2, ep 4)."""

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
        """Return the mesh that FSDP2 shards over: the ranks that hold the same experts, ``(efsdp,)`` or
        ``(dp_replicate, efsdp)``."""
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


# FSDP2 over the ranks that hold the same experts.


def shard_experts(
    found: Sequence[Experts],
    mesh: ExpertMesh,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    options: FSDP2 | None = None,
) -> None:
    """Make the weights of each module's split experts a unit of FSDP2 on ``mesh.fsdp``. Call it after `shard_layers`, which
    leaves them out (``apart=``) and takes what these modules have for all experts (`Experts.shared`): FSDP2 does not look
    into units for parameters of a larger one.

    The gradient of an expert is the sum over all ranks that sent it tokens. As that of any other parameter, it is divided
    by the number of ranks with data of their own. FSDP2 alone would divide by the ranks that hold the same experts.
    """
    options = FSDP2() if options is None else options
    policy = dataclasses.replace(mp_policy or MixedPrecisionPolicy(), output_dtype=None, cast_forward_inputs=False)
    shards = mesh.whole["efsdp"].size()
    for experts in found:
        reshard = options.reshard_after_forward
        shard_unit(
            [experts.module],
            mesh.fsdp,
            options,
            policy=policy,
            reshard=reshard if isinstance(reshard, bool) else True,
            placement=lambda parameter: Shard(expert_shard_dim(parameter, shards)),
            ignored_params=set(experts.shared.values()),
        )
        unit = experts.module
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(float(mesh.data_ranks))
        if shards > 1:
            # Gloo has no sum that scales. With one rank there is nothing to sum, and torch would then divide twice.
            unit.set_force_sum_reduction_for_comms(True)


def expert_shard_dim(parameter: nn.Parameter, ranks: int) -> int:
    """The dim that this rank's experts are cut on for `ranks` ranks: whole experts, where there are enough of them."""
    shape = parameter.to_local().shape if hasattr(parameter, "to_local") else parameter.shape
    if shape[0] % ranks == 0:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), 0)
