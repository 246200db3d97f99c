"""Handles, which autograd saves in place of tensors. A handle owns its data; nothing looks tensors up by id.

So a graph may be walked twice, two graphs may be alive at once in any order, and a dropped graph frees its tensors.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nemo_like.offload.mover import HostCopy, Mover
from nemo_like.offload.stays import is_wrapper_subclass, take_apart
from nemo_like.torch_compat import version_of


class Handle(Protocol):
    """One saved tensor, wherever its bytes wait."""

    def get(self) -> torch.Tensor:
        """Return the tensor on its device, as it was saved. Raises RuntimeError where it was changed in place since."""


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


class InPlaceGuard:
    """An empty tensor that shares the version counter of a saved one: tells of changes and holds none of its memory."""

    __slots__ = ("described", "expected", "probe")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.expected = version_of(tensor)
        self.described = _described(tensor)
        self.probe: torch.Tensor | None = None if self.expected is None else _emptied(tensor.detach())

    def check(self) -> None:
        """Raise RuntimeError where the counter has moved."""
        if self.probe is not None:
            _refuse_change(self.probe, self.expected, self.described)


def _emptied(probe: torch.Tensor) -> torch.Tensor:
    """Return `probe`, which is only ever asked for its version, without its memory."""
    if is_wrapper_subclass(probe):
        for name, value in take_apart(probe)[0].items():
            if isinstance(value, torch.Tensor):
                setattr(probe, name, torch.empty(0))
    else:
        # Assigning `.data` swaps the storage and leaves the version counter.
        probe.data = torch.empty(0, dtype=probe.dtype, device=probe.device)
    return probe


class KeptHandle:
    """A tensor that stays on the device."""

    __slots__ = ("expected", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # The original of an operator's output would be a reference cycle (output, graph, handle); a leaf has no graph.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.expected = version_of(self.tensor)

    def get(self) -> torch.Tensor:
        _refuse_change(self.tensor, self.expected)
        return self.tensor


class HostHandle:
    """A plain strided tensor whose storage waits on the host."""

    __slots__ = ("conjugate", "copy", "dtype", "guard", "mover", "offset", "reader", "shape", "stride")

    def __init__(
        self, tensor: torch.Tensor, mover: Mover, copy: HostCopy, reader: object, guard: InPlaceGuard | None
    ) -> None:
        self.mover, self.copy, self.reader, self.guard = mover, copy, reader, guard
        self.dtype, self.conjugate = tensor.dtype, tensor.is_conj()
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def get(self) -> torch.Tensor:
        if self.guard is not None:
            self.guard.check()
        with torch.no_grad():
            data = self.mover.fetch(self.copy, self.reader)
            data = data[: data.numel() - data.numel() % self.dtype.itemsize].view(self.dtype)
            # A view, not a new tensor on the storage: a write into it is then seen by the buffer's version counter.
            tensor = data.as_strided(self.shape, self.stride, self.offset)
            return tensor.conj() if self.conjugate else tensor

    def __del__(self) -> None:
        # Any thread, any time, the collector's included: leave a note and touch nothing.
        self.mover.dead.append((self.copy, self.reader))


@dataclass
class SubclassHandle:
    """A wrapper subclass (DTensor, a quantised tensor) whose inner tensors wait wherever they wait."""

    kind: Any
    context: Any
    inner: dict[str, Any]  # By attribute: a `Handle` for a tensor, anything else (a DTensor's mesh) as it is.
    handles: frozenset[str]
    shape: torch.Size
    stride: tuple[int, ...]
    guard: InPlaceGuard | None

    def get(self) -> torch.Tensor:
        if self.guard is not None:
            self.guard.check()
        with torch.no_grad():
            inner = {name: value.get() if name in self.handles else value for name, value in self.inner.items()}
            return self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)


class ChosenHandle:
    """An operator's output that an engine chose, before autograd has seen it.

    Unlike a saved tensor it may be changed in place later, if `before_change` is called first; the chosen values stay.
    They stay on the device until `start`: an engine drops needless outputs, and those need not be copied.
    """

    __slots__ = ("__weakref__", "_alias", "_expected", "_inner", "_move", "_source", "_source_changed")

    def __init__(self, source: torch.Tensor, move: Callable[[torch.Tensor], Handle]) -> None:
        # Not the output itself, which is about to get a graph: that would be a reference cycle.
        self._alias: torch.Tensor | None = source.detach()
        self._move = move
        self._inner: Handle | None = None
        self._source_changed = False
        # Below autograd no probe can share the version counter; the tensor itself lives as long as one of its views.
        self._source = weakref.ref(source)
        self._expected = version_of(source)

    def start(self) -> Handle:
        """Move it now."""
        if self._inner is None:
            assert self._alias is not None
            self._inner, self._alias = self._move(self._alias), None
        return self._inner

    def get(self) -> torch.Tensor:
        source = self._source()
        if not self._source_changed and source is not None:
            _refuse_change(source, self._expected)
        inner = self.start()
        tensor = inner.get()
        # Whoever changes the source writes into it, in recomputation too: the next recomputation must find it as it was.
        return tensor.clone() if self._source_changed and isinstance(inner, KeptHandle) else tensor

    def prefetch(self) -> None:
        """Start the way back."""
        for handle in _host_handles(self.start()):
            handle.mover.prefetch_for(handle.copy)

    def before_change(self) -> None:
        """The source is about to change."""
        if self._source_changed:
            return
        self._source_changed = True
        inner = self.start()
        if isinstance(inner, KeptHandle):
            self._inner = KeptHandle(inner.get().clone())
        for handle in _host_handles(inner):
            handle.mover.part_from_source(handle.copy)


def _host_handles(handle: Handle) -> Iterator[HostHandle]:
    if isinstance(handle, HostHandle):
        yield handle
    elif isinstance(handle, SubclassHandle):
        for name in handle.handles:
            yield from _host_handles(handle.inner[name])
