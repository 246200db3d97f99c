"""State that a module changes while it runs: replay must start from what forward started from, and change nothing.

Delayed FP8 scaling appends to an amax history, batch norm moves its running statistics: with a plain replay such
buffers are updated twice, and the second pass may compute with other scales than the first (TransformerEngine#1190).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

_Place = tuple[dict[str, Tensor | None], str]
"""The `_buffers` dict of a sub-module, and a name in it."""

_changed: weakref.WeakKeyDictionary[nn.Module, dict[bool, tuple[_Place, ...]]] = weakref.WeakKeyDictionary()


def _all_buffers(module: nn.Module) -> tuple[_Place, ...]:
    return tuple((child._buffers, name) for child in module.modules() for name in child._buffers)


class BufferSnapshot:
    """The buffers that `module` changes in its forward, as they were before it.

    Which ones those are is learned: the first forward of a module (once for training, once for evaluation mode)
    copies all its buffers and compares; later ones copy only what that found. Modules without buffers, as most
    transformer layers are, cost nothing.
    """

    __slots__ = ("_copies", "_learning", "_module")

    def __init__(self, module: nn.Module) -> None:
        known = _changed.get(module, {}).get(module.training)
        self._learning = known is None
        self._module = module
        self._copies = [
            (owner, name, buffer.detach().clone())
            for owner, name in (_all_buffers(module) if known is None else known)
            if (buffer := owner.get(name)) is not None
        ]

    def forward_done(self) -> bool:
        """Call after forward. Returns whether there is state to put back for a replay."""
        if self._learning:
            self._copies = [item for item in self._copies if _differs(item[0].get(item[1]), item[2])]
            places = tuple((owner, name) for owner, name, _ in self._copies)
            _changed.setdefault(self._module, {})[self._module.training] = places
        return bool(self._copies)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within it the module has copies of its earlier buffers to change; after it the present ones are back."""
        present = [(owner, name, owner.get(name)) for owner, name, _ in self._copies]
        try:
            for owner, name, copy in self._copies:
                owner[name] = copy.clone()
            yield
        finally:
            for owner, name, buffer in present:
                owner[name] = buffer


def _differs(now: Tensor | None, before: Tensor) -> bool:
    return now is None or now.shape != before.shape or not torch.equal(now, before)
