"""Context variables: a replay runs in the context that forward ran in, and what it sets or collects there is dropped.

What a variable holds is kept as a region's arguments are: tensors saved by autograd, containers as they were. So a
list in which forward collects something (as transformers collects hidden states) gets nothing a second time.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from torch import Tensor

from nemo_like.activation_checkpointing.engine.containers import is_container, map_leaves
from nemo_like.activation_checkpointing.engine.deep_state import is_plain
from nemo_like.activation_checkpointing.engine.inputs import SavedInputs

_BUILT_IN = (list, dict, set)


class ContextVariables:
    """The context at the moment of creation."""

    __slots__ = ("_context", "_empty", "_held", "_saved")

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._held: tuple[contextvars.ContextVar[Any], ...] = ()
        self._empty: list[tuple[contextvars.ContextVar[Any], type]] = []
        """Variables with an empty container, and its type: torch's compiler leaves some in every context."""
        held = {}
        for variable, value in self._context.items():
            if is_container(value):
                if not value and type(value) in _BUILT_IN:
                    self._empty.append((variable, type(value)))
                elif type(value) is not tuple or not all(map(is_plain, map(type, value))):  # which nobody can change
                    held[variable] = value
            elif isinstance(value, Tensor):
                held[variable] = value
        if held:
            self._held = tuple(held)
            self._saved = SavedInputs(map_leaves(_without_graph, tuple(held.values())), {})
            self._context.run(_set, self._held, [None] * len(held))  # else they would be held twice

    def run(self, region: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function` in a copy of the context; raises RegionError if a tensor in it was changed in place."""
        context = self._context.copy()
        for variable, kind in self._empty:
            context.run(variable.set, kind())
        if self._held:
            context.run(_set, self._held, self._saved.get(region)[0])
        return context.run(function, *args, **kwargs)


def _without_graph(leaf: Any) -> Any:
    # A region that held the graph of a tensor which an earlier call of it put there would never be freed.
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _set(variables: tuple[contextvars.ContextVar[Any], ...], values: list[Any]) -> None:
    for variable, value in zip(variables, values):
        variable.set(value)
