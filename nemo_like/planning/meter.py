"""Counting live bytes: every storage that an op makes, until the last tensor on it is gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nemo_like.torch_compat import TorchDispatchMode, tree_flatten


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside it that are alive, and their peak. For real and for fake tensors.

    A storage counts from the op that makes it to the moment its memory would be returned. Memory that a kernel takes
    and gives back within one op is not seen.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        for tensor in known:
            self._seen[tensor.untyped_storage()] = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in tree_flatten((args, kwargs))[0]:
            if isinstance(tensor, torch.Tensor):
                self._seen.setdefault(tensor.untyped_storage(), True)  # made outside: not ours to count
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return out

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor` from now on, unless it is known already."""
        storage = tensor.untyped_storage()
        if tensor.is_meta or storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = True
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, size).atexit = False

    def _freed(self, size: int) -> None:
        self.live -= size

    def lap(self) -> int:
        """The peak since the last lap."""
        peak, self.peak = self.peak, self.live
        return peak
