"""What forward keeps of one tracked call, and walks over an operator's outputs and arguments."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from nemo_like.activation_checkpointing.engine.placeholder import placeholder
from nemo_like.activation_checkpointing.engine.transfer import WaitingTensor
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.activation_checkpointing.policy import Decision
from nemo_like.op_lookup import Op
from nemo_like.tensors import SEQUENCES, tensors_in


class Kept:
    """One tracked call of forward: what it was, what was decided, and its output where that was kept."""

    __slots__ = ("decision", "op", "packs_before", "private", "rng_after", "value", "version")

    def __init__(self, op: Op, decision: Decision, packs_before: int) -> None:
        self.op = op
        self.decision = decision
        self.packs_before = packs_before
        self.value: Any = None
        self.version: Any = None
        self.rng_after: Any = None
        """The random-number state after a call that drew and is kept."""
        self.private = False
        """The value is a copy of our own, made because the original was about to be changed in place."""

    def recompute(self) -> None:
        """Drop what is kept: replay computes it, unless it must never run twice."""
        if self.decision is Decision.SKIP or not facts(self.op).pinned:
            self.decision, self.value, self.rng_after = Decision.RECOMPUTE, None, None


decision_of: Callable[[Kept], Decision] = attrgetter("decision")


class OnHost:
    """A tensor of an output that waits in host memory."""

    __slots__ = ("handle",)

    def __init__(self, handle: WaitingTensor) -> None:
        self.handle = handle


class Skipped:
    """What is known of the output of a skipped call: enough for a placeholder."""

    __slots__ = ("like",)

    def __init__(self, output: Tensor) -> None:
        self.like = placeholder(output)

    def placeholder(self) -> Tensor:
        return placeholder(self.like)


def from_host(item: OnHost) -> Tensor:
    """The tensor, on its own device again."""
    return item.handle.get()


def private_copy(tensor: Tensor) -> Tensor:
    """A copy of our own, which may be changed in place."""
    return tensor.detach().clone(memory_format=torch.preserve_format)


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` on each tensor of an operator's output (a tensor, or a tuple or list of tensors and others)."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, SEQUENCES):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def map_kept(function: Callable[[Any], Any], value: Any) -> Any:
    """As `map_tensors`, also on tensors that are on the host or skipped."""
    if isinstance(value, (OnHost, Skipped)):
        return function(value)
    if isinstance(value, SEQUENCES):
        return type(value)(map_kept(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value


def on_host(value: Any) -> list[OnHost]:
    """The parts of a kept output that wait in host memory."""
    if isinstance(value, OnHost):
        return [value]
    return [item for part in value for item in on_host(part)] if isinstance(value, SEQUENCES) else []


def versions(value: Any) -> Any:
    """How often the tensors of an operator's output were changed in place."""
    return value._version if isinstance(value, Tensor) else [tensor._version for tensor in tensors_in(value)]


def storages(tensor: Tensor) -> set[int]:
    """What identifies the memory behind `tensor`, through wrapper subclasses (DTensor, quantised types)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        parts = (getattr(tensor, name) for name in flatten()[0])
        return {
            key for part in parts if isinstance(part, Tensor) for key in storages(part)
        }  # a DTensor names its mesh, too
    if tensor.layout is not torch.strided:
        return set()  # sparse, mkldnn: no storage of their own to name; their version counters tell of changes
    return {tensor.untyped_storage()._cdata}
