"""What the first and the last stage of a pipeline have in common where both are on one rank: a tied embedding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from nemo_like.distributed.units import padded_rows
from nemo_like.options.optimizers import TrainedParameter, optimizer_memory


class HeldOnce(NamedTuple):
    """Bytes that two stages of one rank count, and that are there once."""

    params: int = 0
    grads: int = 0
    state: int = 0
    """The optimizer's."""


def held_once(params: Iterable[nn.Parameter], ranks: int, optimizer: str, device: str) -> HeldOnce:
    """Of tied parameters, for which stages of one rank have one parameter, sharded over `ranks`."""
    tied = [(p, padded_rows(p, ranks) * math.prod(p.shape[1:]) // ranks) for p in params]
    trained = [TrainedParameter(tuple(p.shape), elements, p.element_size()) for p, elements in tied if p.requires_grad]
    state = optimizer_memory(trained, optimizer, device=device).state
    return HeldOnce(sum(n * p.element_size() for p, n in tied), sum(param.size for param in trained), state)
