"""What the first and the last stage of a pipeline have in common where both are on one rank: a tied embedding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from nemo_like.options.optimizers import TrainedParameter, optimizer_memory


class HeldOnce(NamedTuple):
    """Bytes that two stages of one rank count, and that are there once."""

    params: int = 0
    grads: int = 0
    state: int = 0
    """The optimizer's."""


def held_once(params: Iterable[nn.Parameter], optimizer: str, device: str) -> HeldOnce:
    """Of tied parameters whose stages share a rank that FSDP2 does not shard over, for it gives each stage a copy.

    Those on `meta` are not counted: they are materialized stage by stage, as two.
    """
    there = [p for p in params if not p.is_meta]
    trained = [p for p in there if p.requires_grad]
    state = optimizer_memory(
        [TrainedParameter(tuple(p.shape), p.numel(), p.element_size()) for p in trained], optimizer, device=device
    ).state
    return HeldOnce(sum(map(_size, there)), sum(map(_size, trained)), state)


def _size(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
