"""Ranks that are not there, for runs on tensors without values: a mesh that splits weights, on which nothing is sent."""

import functools
import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nemo_like.torch_compat import FakeRanks, root_mesh

# The number of the second rank. DTensor remembers operators by mesh, and no job has a mesh of these ranks.
_SECOND = 1 << 12


@functools.cache
def fake_mesh(**axes: int) -> tuple[FakeRanks, DeviceMesh]:
    """Return ranks, of which this process is the first, and their mesh of such axes, which is to be used within them."""
    size = math.prod(axes.values())
    numbers = torch.arange(_SECOND - 1, _SECOND - 1 + size)
    numbers[0] = 0
    with _world(size) as ranks:
        return ranks, DeviceMesh("cpu", numbers.view(tuple(axes.values())), mesh_dim_names=tuple(axes))


def ranks_of(model: nn.Module) -> FakeRanks | None:
    """Return the ranks that weights of `model` are split over by a `fake_mesh`; None: they are not."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            numbers = root_mesh(parameter.device_mesh).mesh.flatten()
            if len(numbers) > 1 and numbers[1] == _SECOND:
                return _world(len(numbers))
    return None


@functools.cache
def _world(size: int) -> FakeRanks:
    return FakeRanks(0, _SECOND + size)
