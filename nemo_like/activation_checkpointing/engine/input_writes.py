"""A forward that changes its own inputs in place, as Mixtral's router does with ``router_jitter_noise``.

Replay needs such an input as it was. It is copied just before the operator that writes into it, so that a forward which
changes nothing pays nothing, but for a look at every operator in the first call of each module.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

from nemo_like.activation_checkpointing import ops
from nemo_like.activation_checkpointing.engine.dispatch import ForwardMode, _Mode
from nemo_like.activation_checkpointing.engine.generators import Key, key_of
from nemo_like.activation_checkpointing.engine.inputs import SavedInputs
from nemo_like.op_lookup import Op

_writes: weakref.WeakKeyDictionary[Any, dict[bool, bool]] = weakref.WeakKeyDictionary()
"""Module or code → whether it trains → whether its forward writes into its inputs; absent: not seen yet."""


class _WatchWrites(_Mode):
    def __init__(self, inputs: SavedInputs, key: Key) -> None:
        super().__init__()
        self.inputs, self.key = inputs, key

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ops.facts(func).mutating:
            self.inputs.before_change(func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self.key[0] is not None:
            _writes.setdefault(self.key[0], {})[self.key[1]] = self.inputs.changed


def watch_writes(inputs: SavedInputs, mode: ForwardMode | None, function: Any) -> AbstractContextManager[Any] | None:
    """The context for a forward of `function`: within it `inputs` keep what is about to be changed. None: no need.

    `mode`, where the region has one, looks at every operator anyway, and is made to tell them.
    """
    if mode is not None:
        mode.inputs = inputs
        return None
    key = key_of(function)
    if key[0] is None or _writes.get(key[0], {}).get(key[1], True):
        return _WatchWrites(inputs, key)
    return None
