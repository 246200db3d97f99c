"""The errors of the eager engine. All of them name the region."""

from collections.abc import Callable
from dataclasses import dataclass
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
    """Recomputation and forward of a region disagree, or a plan leaves out a tensor that backward needs."""


# Placeholders for outputs of skipped calls in recomputation: shape, strides, dtype and device of a tensor, no numbers.


class Placeholder(Tensor):
    """Answers every question about a tensor except for its numbers.

    So ``x.to(placeholder.dtype)``, ``x.type_as(placeholder)`` and ``torch.ones(..., device=placeholder.device)`` give
    the same as in forward. Whatever computes with it is answered by the recomputation's dispatch mode.
    """

    __torch_function__ = nn.Parameter.__torch_function__  # PyTorch's own: functions are not overridden

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} was given a tensor that the plan skips, outside of the recomputation that skips it")


def placeholder(like: Tensor, device: torch.device | None = None) -> Placeholder:
    """One with the layout of `like`, on `device` (default: that of `like`)."""
    return shape_only(Placeholder, tuple(like.shape), like.dtype, device or like.device, like.stride())


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


# The record that forward keeps of one tracked call, and walks over an operator's outputs and arguments.


@dataclass(slots=True, eq=False)
class Kept:
    """One tracked call of forward: its operator, its decision, and its output where that was saved."""

    op: Op
    decision: Decision
    packs_before: int
    value: Any = None
    version: Any = None
    rng_after: Any = None  # The random-number state after a call that drew and is saved.
    private: bool = False  # The value is a copy of our own: the original was about to be changed in place.
    label: str = ""  # The name for which the output is kept (`names`).

    def to_hand_out(self) -> Any:
        """The saved output, cut from the graph, for a recomputation whose own graph it becomes a part of."""
        return map_output(private_copy if self.private else Tensor.detach, self.value)

    def recompute(self) -> None:
        """Drop the saved output: recomputation computes it, unless the operator must never run twice."""
        if self.decision is Decision.SKIP or not facts(self.op).pinned:
            self.decision, self.value, self.rng_after = Decision.RECOMPUTE, None, None


decision_of: Callable[[Kept], Decision] = attrgetter("decision")


@dataclass(frozen=True, slots=True, eq=False)
class OnHost:
    """A tensor of an output that waits in CPU memory."""

    handle: WaitingTensor


def private_copy(tensor: Tensor) -> Tensor:
    """A copy of our own, which may be changed in place."""
    return tensor.detach().clone(memory_format=torch.preserve_format)


def map_output(function: Callable[[Any], Any], value: object) -> Any:
    """`function` on each tensor of an operator's output (a tensor, or a tuple or list of tensors and others)."""
    if isinstance(value, Tensor):
        return function(value)
    return type(value)(map_output(function, item) for item in value) if isinstance(value, SEQUENCES) else value


def from_host(value: object) -> Any:
    """A saved output with the tensors that wait in CPU memory on their own device again."""
    if isinstance(value, OnHost):
        return value.handle.get()
    return type(value)(map(from_host, value)) if isinstance(value, SEQUENCES) else value


def on_host(value: object) -> list[OnHost]:
    """The parts of a saved output that wait in CPU memory."""
    if isinstance(value, OnHost):
        return [value]
    return [item for part in value for item in on_host(part)] if isinstance(value, SEQUENCES) else []
