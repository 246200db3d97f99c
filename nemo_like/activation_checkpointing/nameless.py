"""Wrappers that add no name of their own to a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class Nameless(nn.Module):
    """Mixed into PyTorch's activation wrappers, which clean the names in state dicts but not those in the module tree.

    Put it in front of the wrapper class: parameters and modules of the whole model then have their bare names.
    """

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As `nn.Module.named_modules`, with the wrapper and the module inside under one and the same name."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self._checkpoint_wrapped_module.named_modules(memo, prefix, remove_duplicate)  # type: ignore[union-attr]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the module inside has (a flag, a child, a weight) there, from where it is read, too.

        On the wrapper it would change nothing: ``model.layers[0].mlp = adapted`` must be what runs from then on.
        """
        mine = name in self.__dict__ or name in self.__dict__.get("_modules", ()) or hasattr(type(self), name)
        inner = None if mine else self.__dict__.get("_modules", {}).get("_checkpoint_wrapped_module")
        if inner is not None and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)
