"""A region's arguments: the tensors among them are saved by autograd, everything else is held as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nemo_like.activation_checkpointing.errors import RegionError
from nemo_like.torch_compat import save_tensor


class _Place:
    """Where a saved tensor goes."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Box:
    """A container that holds saved tensors somewhere inside."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: type, value: Any) -> None:
        self.kind = kind
        self.value = value


class SavedInputs:
    """The arguments of one call, to be had again in backward.

    Tensors directly among the arguments, or in tuples, lists and dicts of them, are saved as autograd saves a tensor:
    hooks that are active outside the region see them, and a change in place before backward is an error. Anything
    else (a cache object, a flag) is held by reference.
    """

    __slots__ = ("_args", "_kwargs", "_saved")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._saved: list[Callable[[], Tensor]] = []
        self._args = [self._strip(value) for value in args]
        self._kwargs = {key: self._strip(value) for key, value in kwargs.items()}

    def _strip(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._saved.append(save_tensor(value))
            return _Place(len(self._saved) - 1)
        kind = type(value)
        if kind is tuple or kind is list or hasattr(kind, "_make"):
            before = len(self._saved)
            items = [self._strip(item) for item in value]
            return value if len(self._saved) == before else _Box(kind, items)
        if kind is dict:
            before = len(self._saved)
            pairs = {key: self._strip(item) for key, item in value.items()}
            return value if len(self._saved) == before else _Box(kind, pairs)
        return value

    def get(self, region: str) -> tuple[list[Any], dict[str, Any]]:
        """The arguments again; raises RegionError if a tensor among them was changed in place."""
        tensors = []
        for unpack in self._saved:
            try:
                tensors.append(unpack())
            except RegionError:
                raise
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                raise RegionError(
                    f"Region {region!r}: one of its inputs was changed in place between forward and backward, so it "
                    "can't be replayed. Change a copy, or move the in-place operation out of the region."
                ) from error
        restore = self._restore
        return [restore(v, tensors) for v in self._args], {k: restore(v, tensors) for k, v in self._kwargs.items()}

    def _restore(self, value: Any, tensors: list[Tensor]) -> Any:
        kind = type(value)
        if kind is _Place:
            return tensors[value.index]
        if kind is _Box:
            if value.kind is dict:
                return {key: self._restore(item, tensors) for key, item in value.value.items()}
            items = [self._restore(item, tensors) for item in value.value]
            return value.kind._make(items) if hasattr(value.kind, "_make") else value.kind(items)
        return value
