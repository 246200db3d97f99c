"""Where autograd adds gradients in place in a real step, but not where a dispatch mode is on, as in a fake run.

Several gradients of one tensor that meet, and what a backward formula writes into zeros of its own: a fake run would
count one buffer too many. `SumsInPlace` works in place there as a real step would.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch

from nemo_like._util.tensors import is_wrapped
from nemo_like.torch_compat import TorchDispatchMode, storage_use_count, use_count, without_dispatch_modes

_ADD = torch.ops.aten.add.Tensor
_PUT = torch.ops.aten.index_put.default
_IN_PLACE = {
    _ADD: torch.ops.aten.add_.Tensor,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    _PUT: torch.ops.aten.index_put_.default,
}
_ENGINE = "torch.autograd.graph"
"""The module whose frame is the caller of whatever autograd's engine runs on the CPU by itself."""


class SumsInPlace(TorchDispatchMode):
    """Enter it last, so that it sees operators first: who else holds a tensor is only to be seen from there.

    In place is added what autograd would: no gradients of gradients, and nobody else holds the first of the two
    (`can_accumulate_inplace` in PyTorch's ``accumulate_grad.h``).
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = _counts_of_the_last_holder()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch puts a frame of its own between the engine's and ours

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        in_place = _IN_PLACE.get(func)
        if is_wrapped(types):
            in_place = None  # into a tensor made of others (DTensor) autograd adds nothing
        if in_place is not None and self.counts is not None and _by_the_engine(inspect.currentframe()):
            into = args[0]
            # The zeros that the gradient of an index is added to are the engine's own; it writes into a copy of those of
            # what rows were put into.
            alone = len(args) > 3 and args[3] if func is _PUT else _holders(into) == self.counts
            if alone and into.is_contiguous() and (func is not _ADD or _like(into, args[1])):
                return in_place(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _by_the_engine(frame: Any) -> bool:
    """Whether the engine called the function that `frame` belongs to."""
    caller = None if frame is None else frame.f_back
    return caller is not None and not torch.is_grad_enabled() and caller.f_globals.get("__name__") == _ENGINE


def _holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How often it, its storage and its Python object are referenced.

    All that Python holds of a tensor (what a hook was given and keeps) is one reference to the tensor. In a real step only
    such a tensor has a Python object; in a fake one each does.
    """
    return use_count(tensor), storage_use_count(tensor), sys.getrefcount(tensor)


def _like(into: Any, other: Any) -> bool:
    return (
        isinstance(into, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and into.shape == other.shape
        and into.dtype == other.dtype
        and into.is_contiguous()
    )


class _CountHolders(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: tuple[int, int, int] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is _ADD and _by_the_engine(inspect.currentframe()):
            into = args[0]
            self.counts = _holders(into)
        return func(*args, **(kwargs or {}))


@functools.cache
def _counts_of_the_last_holder() -> tuple[int, int, int] | None:
    """How often a tensor, its storage and its Python object are referenced in a sum of gradients that nobody else looks at.

    Measured once, as the dispatch itself takes references, and how many is torch's own affair. A mode of the first caller,
    which may keep what it sees, has no part in it.
    """
    with without_dispatch_modes(), _CountHolders() as counting:
        x = torch.ones(2, requires_grad=True) * 2
        torch.autograd.grad((x.exp() + x.sin()).sum(), x)
    return counting.counts
