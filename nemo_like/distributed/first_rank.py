"""The model as the first rank of ``tp`` and ``ep`` has it, to be run on tensors without values."""

from __future__ import annotations

import functools
from collections.abc import Collection

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed.expert import Experts, split_experts
from nemo_like.distributed.expert.expert_mesh import ExpertMesh, make_expert_mesh
from nemo_like.distributed.expert.split_experts import check_experts
from nemo_like.distributed.tensor.apply import apply_tensor_parallel, set_edges_aside
from nemo_like.fake.model_copy import copy_on_meta
from nemo_like.fake.ranks import fake_mesh
from nemo_like.options import ExpertParallel, TensorParallel


def first_rank(
    model: nn.Module,
    tp: TensorParallel,
    ep: ExpertParallel = ExpertParallel(),
    whole: Collection[str] = (),
    ends: tuple[bool, bool] = (True, True),
) -> tuple[nn.Module, tuple[Experts, ...]]:
    """A copy of `model` with one rank's part of the weights, on the meta device, and its experts, if `ep` splits them.

    Its buffers are the model's. The cuts of sequence parallelism where stacks of layers begin and end act within
    `nemo_like.distributed.tensor.apply.edges`. `whole`: names of modules that the plan of `tp` is not followed in, besides
    experts that `ep` splits. `ends`: as for `apply_tensor_parallel`.

    Raises:
        ValueError: as `apply_tensor_parallel` and `check_experts`.
    """
    mine, (ranks, mesh) = copy_on_meta(model), fake_mesh(dp_shard=ep.size, tp=tp.size)
    experts: tuple[Experts, ...] = ()
    with ranks:
        if ep.size > 1:
            experts = check_experts(mine, mesh, ep)
        if tp.size > 1:
            apply_tensor_parallel(
                mine,
                mesh["tp"],
                tp.plan,
                sequence_parallel=tp.sequence_parallel,
                loss_parallel=tp.loss_parallel,
                whole=[*whole, *(each.fqn for each in experts)],
                ends=ends,
            )
        if experts:
            split_experts(mine, experts, _expert_mesh(mesh, ep.size))
    set_edges_aside(mine)
    return mine, experts


@functools.cache
def _expert_mesh(mesh: DeviceMesh, size: int) -> ExpertMesh:
    return make_expert_mesh(mesh, size)
