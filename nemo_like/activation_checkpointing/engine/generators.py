"""Generators of random numbers that a region has to itself: their states, put back for its replay.

They are found among the attributes of the region's modules, among its arguments, and among the globals that the modules'
methods name. A `torch.Generator` that comes from elsewhere is seen when an operator is given it. Where the policy keeps
something, every operator is seen. Looking on costs time where it does not, so there it is done in the first forward of a
module or function, and in later ones if that one found a generator.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from types import CodeType
from typing import Any

import torch

from nemo_like.torch_compat import generator_address

Key = tuple[Any, bool]
"""A module and whether it trains; or the code of a function."""

_given: weakref.WeakKeyDictionary[Any, dict[bool, bool]] = weakref.WeakKeyDictionary()
"""Whether the operators of the first forward were given a generator from elsewhere."""
_names: weakref.WeakKeyDictionary[CodeType, tuple[str, ...]] = weakref.WeakKeyDictionary()
_kinds: dict[type, tuple[str, str] | None] = {}
_others: set[type] = set()
"""The types that were seen to be no generator's."""
_UNSEEN = ("", "unseen")


def is_generator(value: Any) -> bool:
    """Whether `value` is a generator of torch, of Python or of NumPy, with a state to put back."""
    kind = type(value)
    if kind not in _kinds:
        _kinds[kind] = _getter_and_setter(kind)
        if _kinds[kind] is None:
            _others.add(kind)
    return _kinds[kind] is not None


def _getter_and_setter(kind: type) -> tuple[str, str] | None:
    if issubclass(kind, torch.Generator):
        return "get_state", "set_state"
    if issubclass(kind, random.Random):
        return None if issubclass(kind, random.SystemRandom) else ("getstate", "setstate")
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and issubclass(kind, numpy_random.RandomState):
        return "get_state", "set_state"
    if numpy_random is not None and issubclass(kind, numpy_random.Generator):
        return "", ""
    return None


def state_of(generator: Any) -> Any:
    """The state of a generator, for `put_state`."""
    names = _kinds[type(generator)]
    if names is not None and names[0]:
        return getattr(generator, names[0])()
    return generator.bit_generator.state


def put_state(generator: Any, state: Any) -> None:
    """Put a generator into the state that `state_of` returned."""
    names = _kinds[type(generator)]
    if names is not None and names[1]:
        getattr(generator, names[1])(state)
    else:
        generator.bit_generator.state = state


class Generators:
    """The generators that one region was seen to have, each with its state of the moment when it was first seen."""

    __slots__ = ("_states",)

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, Any]] = {}

    def note(self, generator: Any) -> bool:
        """Keep the state of `generator`, unless it is none or was seen before; returns whether it is kept now."""
        kind = _kinds.get(type(generator), _UNSEEN)
        if kind is None or (kind is _UNSEEN and not is_generator(generator)):
            return False
        key = generator_address(generator) if isinstance(generator, torch.Generator) else id(generator)
        if key in self._states:
            return False
        self._states[key] = generator, state_of(generator)
        return True

    def note_all(self, values: Sequence[Any]) -> None:
        """`note` each of them."""
        if not _others.issuperset(map(type, values)):
            for value in values:
                self.note(value)

    def note_named(self, function: Any) -> None:
        """`note` the generators that `function` refers to by name: global ones, and those around its definition."""
        if isinstance(function, torch.nn.Module):
            return  # its methods' globals are among what its `ModuleWorld` finds
        for name in names_of_globals(function):
            self.note(function.__globals__.get(name))
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a cell that is empty still
                self.note(cell.cell_contents)

    def forget_unused(self) -> bool:
        """Call at the end of forward: drops what was not drawn from. Returns whether any is left."""
        if self._states:
            noted = self._states.items()
            self._states = {key: (g, state) for key, (g, state) in noted if not same_state(state_of(g), state)}
        return bool(self._states)

    def restore(self, stack: ExitStack) -> None:
        """Put the states back until `stack` ends."""
        # Backwards, so that where one generator was seen as two objects the earlier state wins.
        for generator, state in reversed(self._states.values()):
            stack.callback(put_state, generator, state_of(generator))
            put_state(generator, state)


def same_state(a: Any, b: Any) -> bool:
    """Whether two states of one generator are equal; there are tensors or arrays in them."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and any(hasattr(item, "tobytes") for item in a):
        return all(map(same_state, a, b))
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else bool(a == b)


def names_of_globals(function: Any) -> tuple[str, ...]:
    """The names of the global generators that the code of `function` refers to, as far as they exist when first asked."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    names = _names.get(code)
    if names is None:
        known = function.__globals__
        names = _names[code] = tuple(name for name in all_names(code) if is_generator(known.get(name)))
    return names


def all_names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in `code`, functions inside of it included."""
    inner = (all_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def are_given(key: Key) -> bool:
    """Whether operators of a forward of `key` may be given generators from elsewhere: True until `learn` is told."""
    return key[0] is None or _given.get(key[0], {}).get(key[1], True)


def learn(key: Key, given: bool) -> None:
    """Call after the first forward of `key`, with whether operators were given a generator from elsewhere."""
    if key[0] is not None:
        _given.setdefault(key[0], {}).setdefault(key[1], given)


def key_of(function: Any) -> Key:
    """What stands for `function` from one forward to the next, and whether its module trains."""
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return owner, owner.training
    return getattr(function, "__code__", None), True
