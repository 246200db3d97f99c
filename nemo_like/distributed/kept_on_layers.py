"""Tensors that a layer keeps on itself, or puts into a list of its file, such as an auxiliary loss: FSDP2 gathers for them.

FSDP2 gathers a unit's weights again when a gradient reaches what the unit returned. A gradient that reaches only what a
layer kept would find them sharded, in the layer's recomputation or in the operators' own backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.module_tree import every_module
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.engine.module_parts import walk_of
from nemo_like.torch_compat import after_each_forward, gather_before_backward_of

_CALLS = 4
"""Forwards of a unit after which all attributes are looked at; later ones look where something was found."""
_NOT_KEPT = frozenset(vars(nn.Module())) - {"_buffers"}


class _Kept:
    """What the modules of one unit keep."""

    def __init__(self, unit: nn.Module, hooked: dict[int, weakref.ref[Tensor]]) -> None:
        self._unit, self._hooked = unit, hooked
        self._calls, self._places = 0, list[tuple[dict[str, Any], str]]()
        self._walk = walk_of(unit)[0]

    def __call__(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._calls < _CALLS:
            self._calls += 1
            self._places = list(self._found())
        attributes = [own.get(name) for own, name in self._places]
        kept = tensors_in([*attributes, *self._walk.shared_containers()])
        new = {id(t): t for t in kept if t.grad_fn is not None and not self._is_hooked(t)}
        gather_before_backward_of(self._unit, list(new.values()))
        for key, tensor in new.items():
            self._hooked[key] = weakref.ref(tensor, lambda _, key=key: self._hooked.pop(key, None))  # type: ignore[misc]

    def _found(self) -> Iterator[tuple[dict[str, Any], str]]:
        for module in every_module(self._unit):
            for name, value in vars(module).items():
                if name not in _NOT_KEPT and any(tensor.grad_fn is not None for tensor in tensors_in(value)):
                    yield vars(module), name

    def _is_hooked(self, tensor: Tensor) -> bool:
        known = self._hooked.get(id(tensor))
        return known is not None and known() is tensor


def gather_for_what_is_kept(units: list[nn.Module]) -> None:
    """Have each of `units` gathered in backward also for the gradients of tensors that its modules keep in forward."""
    hooked: dict[int, weakref.ref[Tensor]] = {}
    for unit in units:
        after_each_forward(unit, _Kept(unit, hooked))
