"""A region's arguments: the tensors among them are saved by autograd, containers as they were."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_like._util.op_lookup import Op
from nemo_like._util.tensors import storages
from nemo_like.activation_checkpointing.engine.containers import map_leaves
from nemo_like.activation_checkpointing.engine.handles import RegionError, private_copy
from nemo_like.activation_checkpointing.ops import written_tensors
from nemo_like.torch_compat import save_tensor


class _Place:
    """Mark of the place where a saved tensor goes."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


_place = functools.cache(_Place)


class SavedInputs:
    """The arguments of one call, to be had again in backward.

    Tensors directly among the arguments, or in containers of them (see `map_leaves`), are saved as autograd saves a
    tensor: hooks that are active outside the region see them, and a change in place before backward is an error.
    Containers are saved as they are now. Anything else (a cache object, a flag) is a reference. Tensors that the call
    itself changes in place are copied before, see `before_change`.
    """

    __slots__ = ("_arguments", "_originals", "_saved", "changed")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._saved: list[Callable[[], Tensor]] = []
        self._originals: list[Tensor] = []  # The tensors themselves, for as long as the call lasts.
        self.changed = False  # The call has changed one of them in place.
        self._arguments = map_leaves(self._strip, (list(args), kwargs))

    def _strip(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            return value
        for place, original in enumerate(self._originals):
            if original is value:  # attention compares its query with its key
                return _place(place)
        self._saved.append(save_tensor(value))
        self._originals.append(value)
        return _place(len(self._saved) - 1)

    def before_change(self, func: Op, args: Any, kwargs: Any) -> None:
        """The operator `func` is about to write: keep a copy of the input that it writes into.

        Not where several inputs share that memory: their copies would not. Recomputation then reports that it was changed.
        """
        if not self._originals:
            return
        written = {key for tensor in written_tensors(func, args, kwargs) for key in storages(tensor)}
        touched = [place for place, tensor in enumerate(self._originals) if storages(tensor) & written]
        self.changed = self.changed or bool(touched)
        for place in touched if len(touched) == 1 else ():
            original = self._originals[place]
            self._originals[place] = torch.empty(0)
            self._saved[place] = functools.partial(_copy, private_copy(original), original.requires_grad)

    def forward_done(self) -> None:
        """Call after forward: changes from here on are others'."""
        self._originals.clear()

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
                    "can't be recomputed. Change a copy, or move the in-place operation out of the region."
                ) from error

        def restore(value: Any) -> Any:
            return tensors[value.index] if type(value) is _Place else value

        return map_leaves(restore, self._arguments)


def _copy(kept: Tensor, requires_grad: bool) -> Tensor:
    """A copy of `kept` that may be changed in place: no leaf, where it requires a gradient."""
    with torch.enable_grad():
        return kept.detach().requires_grad_(requires_grad).clone()
