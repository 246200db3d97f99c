"""Handles, which autograd saves in place of tensors. A handle owns its data; nothing looks tensors up by id.

So a graph may be walked twice, two graphs may be alive at once in any order, and a dropped graph frees its tensors.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_like.offload.mover import HostCopy
from nemo_like.offload.stays import is_wrapper_subclass, take_apart
from nemo_like.torch_compat import version_of


def _refuse_change(tensor: torch.Tensor, expected: int | None, described: str | None = None) -> None:
    """Raise RuntimeError, in autograd's words, where the version counter of `tensor` is not at `expected`."""
    version = version_of(tensor)
    if version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{described or _described(tensor)}] was saved for backward at version {expected}, and is at version "
            f"{version} now. Change a copy instead (tensor.clone()), or use the out-of-place operator."
        )


def _described(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} {tensor.dtype} {list(tensor.shape)}"


class KeptHandle:
    """A tensor that stays on the device."""

    __slots__ = ("described", "expected", "tensor")
    copies = ()

    def __init__(self, tensor: torch.Tensor, described: str | None = None) -> None:
        # The original of an operator's output would be a reference cycle (output, graph, handle); a leaf has no graph.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.expected, self.described = version_of(self.tensor), described

    def get(self) -> torch.Tensor:
        """Return the tensor as it was saved. Raises RuntimeError where it was changed in place since."""
        _refuse_change(self.tensor, self.expected, self.described)
        return self.tensor


def guard_of(tensor: torch.Tensor) -> KeptHandle | None:
    """An empty tensor that shares the version counter of `tensor`: tells of changes and holds none of its memory."""
    if version_of(tensor) is None:
        return None
    probe = tensor.detach()
    if is_wrapper_subclass(probe):
        for name, value in take_apart(probe)[0].items():
            if isinstance(value, torch.Tensor):
                setattr(probe, name, torch.empty(0))
    else:
        # Assigning `.data` swaps the storage and leaves the version counter.
        probe.data = torch.empty(0, dtype=probe.dtype, device=probe.device)
    return KeptHandle(probe, _described(tensor))


class HostHandle:
    """A plain strided tensor whose storage waits on the host."""

    __slots__ = ("__weakref__", "conjugate", "copies", "dtype", "guard", "place")

    def __init__(self, tensor: torch.Tensor, copy: HostCopy, guard: KeptHandle | None) -> None:
        self.copies, self.guard, self.dtype, self.conjugate = (copy,), guard, tensor.dtype, tensor.is_conj()
        self.place = tensor.shape, tensor.stride(), tensor.storage_offset()
        copy.add_reader(self)

    def get(self) -> torch.Tensor:
        """Return the tensor as it was saved. Raises RuntimeError where it was changed in place since."""
        if self.guard is not None:
            self.guard.get()
        with torch.no_grad():
            data = self.copies[0].mover.fetch(self.copies[0], self)
            data = data[: data.numel() - data.numel() % self.dtype.itemsize].view(self.dtype)
            # A view, not a new tensor on the storage: a write into it is then seen by the buffer's version counter.
            tensor = data.as_strided(*self.place)
            return tensor.conj() if self.conjugate else tensor


@dataclass
class SubclassHandle:
    """A wrapper subclass (DTensor, a quantised tensor) whose inner tensors wait wherever they wait."""

    rebuild: Callable[[dict[str, Any]], torch.Tensor]
    inner: dict[str, Any]  # By attribute: a handle for a tensor, anything else (a DTensor's mesh) as it is.
    copies: Sequence[HostCopy]
    guard: KeptHandle | None

    def get(self) -> torch.Tensor:
        """Return the tensor as it was saved. Raises RuntimeError where it was changed in place since."""
        if self.guard is not None:
            self.guard.get()
        with torch.no_grad():
            return self.rebuild(
                {n: value.get() if isinstance(value, Handle) else value for n, value in self.inner.items()}
            )


Handle = KeptHandle | HostHandle | SubclassHandle
"""One saved tensor, wherever its bytes wait."""


class ChosenHandle:
    """An operator's output that an engine chose, before autograd has seen it.

    Unlike a saved tensor it may be changed in place later, if `before_change` is called first; the chosen values stay.
    They stay on the device until `start`: an engine drops needless outputs, and those need not be copied.
    """

    __slots__ = ("__weakref__", "_alias", "_expected", "_inner", "_move", "_source")

    def __init__(self, source: torch.Tensor, move: Callable[[torch.Tensor], Handle]) -> None:
        # Not the output itself, which is about to get a graph: that would be a reference cycle.
        self._alias = source.detach()
        self._move = move
        self._inner: Handle | None = None
        # Below autograd no probe can share the version counter; the tensor itself lives as long as one of its views.
        self._source: weakref.ref[torch.Tensor] | None = weakref.ref(source)  # None: it was changed, by `before_change`
        self._expected = version_of(source)

    def start(self) -> Handle:
        """Move it now."""
        if self._inner is None:
            self._inner = self._move(self._alias)
            del self._alias
        return self._inner

    def get(self) -> torch.Tensor:
        """Return the chosen values. Raises RuntimeError where they were changed without `before_change`."""
        source = None if self._source is None else self._source()
        if source is not None:
            _refuse_change(source, self._expected)
        inner = self.start()
        # Whoever changes the source writes into it, in recomputation too: the next recomputation must find it as it was.
        return inner.get().clone() if self._source is None and isinstance(inner, KeptHandle) else inner.get()

    def prefetch(self) -> None:
        """Start the way back."""
        for copy in self.start().copies:
            copy.mover.prefetch(copy)

    def before_change(self) -> None:
        """The source is about to change."""
        if self._source is None:
            return
        self._source, inner = None, self.start()
        if isinstance(inner, KeptHandle):
            self._inner = KeptHandle(inner.get().clone())
        for copy in inner.copies:
            copy.mover.part_from_source(copy)
