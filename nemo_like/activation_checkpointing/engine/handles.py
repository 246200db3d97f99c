"""The errors of the eager engine. All of them name the region."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from nemo_like._util.op_lookup import Op
from nemo_like._util.tensors import SEQUENCES, map_tensors, tensors_in
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.activation_checkpointing.policy import Decision
from nemo_like.activation_checkpointing.transfer import WaitingTensor
from nemo_like.torch_compat import shape_only


class RegionError(CheckpointError):
    """Recomputation and forward of a region disagree, or a plan leaves out what backward needs."""


# What takes the place of the output of a skipped call in recomputation: shape, strides, dtype and device of a tensor,
# no numbers.


class Placeholder(Tensor):
    """Answers what can be asked of a tensor without its numbers.

    So ``x.to(placeholder.dtype)``, ``x.type_as(placeholder)`` and ``torch.ones(..., device=placeholder.device)`` give what
    they gave in forward. Whatever computes with it is answered by the recomputation's dispatch mode.
    """

    __torch_function__ = nn.Parameter.__torch_function__  # PyTorch's own: functions are not overridden

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} was given a tensor that the plan skips, outside of the recomputation that skips it")


def placeholder(like: Tensor, device: torch.device | None = None) -> Placeholder:
    """One with the layout of `like`, on `device` (default: that of `like`)."""
    stand_in: Placeholder = shape_only(Placeholder, tuple(like.shape), like.dtype, device or like.device, like.stride())
    return stand_in


def beside_placeholders(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the output of `func` as placeholders, from the shapes of its arguments alone.

    A placeholder that `func` writes into is returned itself.
    """
    shapes: dict[int, Tensor] = {}
    placeholders: dict[int, Placeholder] = {}

    def shape_of(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in shapes:
            shapes[id(tensor)] = fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            if isinstance(tensor, Placeholder):
                placeholders[id(fake)] = tensor
        return shapes[id(tensor)]

    first = next(t for t in tensors_in((args, kwargs)) if isinstance(t, Placeholder))
    device = kwargs.get("device")
    target = first.device if device is None else torch.device(device)
    if device is not None:
        kwargs = kwargs | {"device": torch.device("meta")}
    output = func(*map_tensors(shape_of, args), **map_tensors(shape_of, kwargs))
    return map_tensors(lambda t: placeholders[id(t)] if id(t) in placeholders else placeholder(t, target), output)


# What forward keeps of one tracked call, and walks over an operator's outputs and arguments.


class Kept:
    """One tracked call of forward: what it was, what was decided, and its output where that was saved."""

    __slots__ = ("decision", "op", "packs_before", "private", "rng_after", "value", "version")

    def __init__(self, op: Op, decision: Decision, packs_before: int) -> None:
        self.op = op
        self.decision = decision
        self.packs_before = packs_before
        self.value: Any = None
        self.version: Any = None
        self.rng_after: Any = None  # The random-number state after a call that drew and is saved.
        # The value is a copy of our own, made because the original was about to be changed in place.
        self.private = False

    def recompute(self) -> None:
        """Drop what is saved: recomputation computes it, unless it must never run twice."""
        if self.decision is Decision.SKIP or not facts(self.op).pinned:
            self.decision, self.value, self.rng_after = Decision.RECOMPUTE, None, None


decision_of: Callable[[Kept], Decision] = attrgetter("decision")


class OnHost:
    """A tensor of an output that waits in CPU memory."""

    __slots__ = ("handle",)

    def __init__(self, handle: WaitingTensor) -> None:
        self.handle = handle


class Skipped:
    """Facts about the output of a skipped call: enough for a placeholder."""

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


def map_output(function: Callable[[Any], Any], value: object) -> Any:
    """`function` on each tensor of an operator's output (a tensor, or a tuple or list of tensors and others)."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, SEQUENCES):
        return type(value)(map_output(function, item) for item in value)
    return value


def map_kept(function: Callable[[Any], Any], value: object) -> Any:
    """As `map_output`, also on tensors that are on the host or skipped."""
    if isinstance(value, (OnHost, Skipped)):
        return function(value)
    if isinstance(value, SEQUENCES):
        return type(value)(map_kept(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value


def on_host(value: object) -> list[OnHost]:
    """The parts of a saved output that wait in CPU memory."""
    if isinstance(value, OnHost):
        return [value]
    return [item for part in value for item in on_host(part)] if isinstance(value, SEQUENCES) else []
