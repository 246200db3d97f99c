"""Handles, which autograd saves in place of tensors. A handle owns its data; nothing looks tensors up by id.

So a graph may be walked twice, two graphs may be alive at once in any order, and a dropped graph frees what it saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nemo_like.offload.copies import Reader
from nemo_like.offload.mover import Mover
from nemo_like.torch_compat import version_of


class Handle(Protocol):
    """One saved tensor, wherever its bytes wait."""

    def get(self) -> torch.Tensor:
        """The tensor on its device, with the values, strides and offset it was saved with. May be called again.

        Raises:
            RuntimeError: the tensor was changed in place after it was saved.
        """


class InPlaceGuard:
    """Raises, as autograd does, where a tensor was changed in place after it was saved.

    It keeps an empty tensor that shares the original's version counter, so it holds none of its memory.
    """

    __slots__ = ("description", "expected", "probe")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.expected = version_of(tensor)
        self.probe: torch.Tensor | None = None
        self.description = f"{type(tensor).__name__} {tensor.dtype} {list(tensor.shape)}"
        if self.expected is not None:
            self.probe = tensor.detach()
            if is_wrapper_subclass(self.probe):
                for name, value in take_apart(self.probe)[0].items():
                    if isinstance(value, torch.Tensor):
                        setattr(self.probe, name, torch.empty(0))  # the probe is only ever asked for its version
            else:
                # Assigning `.data` swaps the storage and leaves the version counter.
                self.probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def check(self) -> None:
        """Raises RuntimeError, in autograd's words, where the counter has moved."""
        if self.probe is None:
            return
        version = version_of(self.probe)
        if version != self.expected:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.description}], saved for backward and offloaded, is at version {version}; expected version "
                f"{self.expected} instead. Change a copy instead (tensor.clone()), or use the out-of-place operator."
            )


class KeptHandle:
    """A tensor that stays on the device."""

    __slots__ = ("guard_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # The original of an operator's output would be a reference cycle (output, graph, handle); a leaf has no graph.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.guard_version = version_of(self.tensor)

    def get(self) -> torch.Tensor:
        version = version_of(self.tensor)
        if version != self.guard_version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.shape)}] is at version {version}; expected version "
                f"{self.guard_version} instead."
            )
        return self.tensor


class HostHandle:
    """A plain strided tensor whose storage waits on the host."""

    __slots__ = ("conjugate", "dtype", "guard", "mover", "offset", "reader", "shape", "stride")

    def __init__(self, tensor: torch.Tensor, mover: Mover, reader: Reader, guard: InPlaceGuard | None) -> None:
        self.mover = mover
        self.reader = reader
        self.guard = guard
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()  # elements
        self.conjugate = tensor.is_conj()

    def get(self) -> torch.Tensor:
        if self.guard is not None:
            self.guard.check()
        with torch.no_grad():
            data, start = self.mover.fetch(self.reader)
            itemsize = self.dtype.itemsize
            data = data[: data.numel() - data.numel() % itemsize].view(self.dtype)
            # A view, not a new tensor on the storage: a write into it is then seen by the buffer's version counter.
            tensor = data.as_strided(self.shape, self.stride, self.offset - start // itemsize)
            return tensor.conj() if self.conjugate else tensor


@dataclass
class SubclassHandle:
    """A wrapper subclass (DTensor, a quantised tensor) whose inner tensors wait wherever they wait."""

    kind: Any
    context: Any
    inner: dict[str, Any]
    """By attribute: a `Handle` for a tensor, anything else (a DTensor's mesh) as it is."""
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

    Unlike a saved tensor it may be changed in place later, if `before_change` is called first; what was chosen stays. It
    stays on the device until `start`: an engine drops what turns out to be needless, and that need not be copied.
    """

    __slots__ = ("__weakref__", "_alias", "_inner", "_move", "_source", "_source_changed", "_version")

    def __init__(self, source: torch.Tensor, move: Callable[[torch.Tensor], Handle]) -> None:
        # Not the output itself, which is about to get a graph: that would be a reference cycle.
        self._alias: torch.Tensor | None = source.detach()
        self._move = move
        self._inner: Handle | None = None
        self._source_changed = False
        # Below autograd no probe can share the version counter; the tensor itself lives as long as one of its views.
        self._source = weakref.ref(source)
        self._version = version_of(source)

    def start(self) -> Handle:
        """Move it now."""
        if self._inner is None:
            assert self._alias is not None
            self._inner, self._alias = self._move(self._alias), None
        return self._inner

    def get(self) -> torch.Tensor:
        source = self._source()
        if not self._source_changed and source is not None and version_of(source) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{source.dtype} {list(source.shape)}], saved by activation checkpointing, was changed after its "
                "region had ended. Change a copy instead (tensor.clone()), or use the out-of-place operator."
            )
        inner = self.start()
        tensor = inner.get()
        # Whoever changes the source writes into it, in recomputation too: the next recomputation must find it as it was.
        return tensor.clone() if self._source_changed and isinstance(inner, KeptHandle) else tensor

    def prefetch(self) -> None:
        """Start the way back."""
        for handle in _host_handles(self.start()):
            handle.mover.prefetch_for(handle.reader)

    def before_change(self) -> None:
        """The source is about to change."""
        if self._source_changed:
            return
        self._source_changed = True
        inner = self.start()
        if isinstance(inner, KeptHandle):
            self._inner = KeptHandle(inner.get().clone())
        for handle in _host_handles(inner):
            handle.mover.part_from_source(handle.reader.copy)


def _host_handles(handle: Handle) -> Iterator[HostHandle]:
    if isinstance(handle, HostHandle):
        yield handle
    elif isinstance(handle, SubclassHandle):
        for name in handle.handles:
            yield from _host_handles(handle.inner[name])


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is made of other tensors and tells how (PyTorch's traceable-subclass protocol)."""
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def take_apart(tensor: Any) -> tuple[dict[str, Any], Any]:
    """A wrapper subclass's inner values by attribute (tensors, and for a DTensor its mesh), and its context."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes [lo, hi) of its storage that a plain strided, non-empty tensor reads."""
    itemsize = tensor.element_size()
    lo = int(tensor.storage_offset()) * itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return lo, lo + (int(last) + 1) * itemsize


def move_plain(
    tensor: torch.Tensor, mover: Mover, guard: InPlaceGuard | None, version: tuple[Any, ...]
) -> HostHandle | None:
    """A handle for a plain strided, non-empty tensor on the mover's device; None where the host refused the bytes.

    Args:
        guard: checks the tensor when it is asked for; None where an outer tensor's guard does.
        version: tells two contents of one storage apart (see `Mover.offload`).
    """
    lo, hi = byte_range(tensor)
    copy = mover.offload(tensor.untyped_storage(), lo, hi, version)
    return None if copy is None else HostHandle(tensor, mover, mover.reader(copy, lo, hi), guard)
