"""Counted memory on any device: the bytes of every storage that ops made and that is still alive."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Watches every op that runs inside it; `count()` is what is still held of what they made.

    >>> with LiveBytes() as live:
    ...     kept = torch.ones(4)
    ...     _ = torch.ones(1000)
    >>> del _
    >>> live.count()
    16
    """

    def __init__(self, ignore: Iterable[torch.Tensor] = ()) -> None:
        """`ignore`: tensors that were there before (parameters), whose views are not memory made here."""
        super().__init__()
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignore}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage._cdata not in self._ignored:
                    reference = StorageWeakRef(storage)
                    self._made[reference.cdata] = (reference, storage.nbytes())
        return result

    def count(self) -> int:
        """Bytes alive now."""
        self._made = {key: (ref, size) for key, (ref, size) in self._made.items() if not ref.expired()}
        return sum(size for _, size in self._made.values())
