"""The model as the first rank of ``tp`` has it, to be run on tensors without values."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from nemo_like.distributed.tensor.apply import apply_tensor_parallel, set_edges_aside
from nemo_like.fake.model_copy import copy_on_meta
from nemo_like.fake.ranks import fake_mesh
from nemo_like.options import TensorParallel


def first_of_tensor_ranks(model: nn.Module, options: TensorParallel, whole: Collection[str] = ()) -> nn.Module:
    """A copy of `model` with one rank's part of the weights, on the meta device; its buffers are the model's.

    The cuts of sequence parallelism where stacks of layers begin and end act within
    `nemo_like.distributed.tensor.apply.edges`. `whole`: names of modules that the plan is not followed in.

    Raises:
        ValueError: as `nemo_like.distributed.apply_tensor_parallel`.
    """
    mine, (ranks, mesh) = copy_on_meta(model), fake_mesh(tp=options.size)
    with ranks:
        apply_tensor_parallel(
            mine,
            mesh,
            options.plan,
            sequence_parallel=options.sequence_parallel,
            loss_parallel=options.loss_parallel,
            whole=whole,
        )
    set_edges_aside(mine)
    return mine
