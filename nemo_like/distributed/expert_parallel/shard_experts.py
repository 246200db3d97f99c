"""FSDP2 over the ranks that hold the same experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from nemo_like.distributed.expert_parallel.expert_mesh import ExpertMesh
from nemo_like.distributed.expert_parallel.find_experts import Experts
from nemo_like.distributed.shard import shard_unit
from nemo_like.options import FSDP2


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

    The gradient of an expert is the sum over all ranks that sent it tokens, divided by the number of ranks with data of
    their own, as that of any other parameter. FSDP2 alone would divide by the ranks that hold the same experts.
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
