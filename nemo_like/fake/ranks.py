"""Ranks that are not there, for runs on tensors without values: a mesh that splits weights, on which nothing is sent."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nemo_like.torch_compat import FakeRanks, root_mesh

_OTHERS = 1 << 12
"""The number of the second rank. DTensor remembers operators by mesh, and no job has a mesh of these ranks."""
_ranks: dict[DeviceMesh, FakeRanks] = {}


@functools.cache
def fake_mesh(**axes: int) -> tuple[FakeRanks, DeviceMesh]:
    """Return ranks, of which this process is the first, and their mesh of such axes, which is to be used within them."""
    sizes = tuple(axes.values())
    numbers = torch.arange(_OTHERS - 1, _OTHERS - 1 + torch.Size(sizes).numel())
    numbers[0] = 0
    ranks = FakeRanks(0, int(numbers[-1]) + 1)
    with ranks:
        mesh = DeviceMesh("cpu", numbers.view(sizes), mesh_dim_names=tuple(axes))
    _ranks[mesh] = ranks
    return ranks, mesh


def ranks_of(model: nn.Module) -> FakeRanks | None:
    """Return the ranks that the weights of `model` are split over on a `fake_mesh`; None: they are not."""
    meshes = (root_mesh(p.device_mesh) for p in model.parameters() if isinstance(p, DTensor))
    return next((_ranks[mesh] for mesh in meshes if mesh in _ranks), None)
