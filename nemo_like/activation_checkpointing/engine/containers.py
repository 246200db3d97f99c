"""Containers among a call's arguments: kept as the call found them, whatever the layer writes into them afterwards."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

COMMON_LEAVES = frozenset({type(None), bool, int, float, str, Tensor, nn.Parameter})
"""The types of most arguments; none is a container."""
_BUILT = (dict, UserDict, SimpleNamespace)
"""Whose instances are made anew, attributes and all."""


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` on everything in it that is no container; every container is a new one.

    Containers are tuples, lists, dicts, sets and queues, named tuples, all kinds of dicts (the output classes of model
    libraries), namespaces and dataclasses; nested in any way. They are built without calling code of their classes.

    >>> map_leaves(lambda leaf: leaf + 1, {"a": (1, [2])})
    {'a': (2, [3])}
    """
    return _mapped(function, value, {})


def _mapped(function: Callable[[Any], Any], value: Any, made: dict[int, Any]) -> Any:
    """`made`: id of a container → the new one, so that one which occurs twice, or in itself, is made once."""
    kind: Any = type(value)
    if kind is tuple:
        return tuple(_each(function, value, made))
    if not _is_kind_of_container(kind):
        return function(value)
    if id(value) in made:
        return made[id(value)]
    if kind is list:
        made[id(value)] = items = []
        items += _each(function, value, made)
        return items
    if kind is dict:
        pairs: dict[Any, Any] = {}
        made[id(value)] = pairs
        pairs.update(zip(value, _each(function, value.values(), made)))
        return pairs
    if hasattr(kind, "__dataclass_fields__") or issubclass(kind, _BUILT):
        return _built(function, value, made)
    if issubclass(kind, tuple):
        return tuple.__new__(kind, _each(function, value, made))
    if kind is set:
        made[id(value)] = new = set(_each(function, value, made))
        return new
    made[id(value)] = queue = deque[Any](maxlen=value.maxlen)
    queue.extend(_each(function, value, made))
    return queue


def _each(function: Callable[[Any], Any], values: Iterable[Any], made: dict[int, Any]) -> list[Any]:
    return [function(value) if type(value) in COMMON_LEAVES else _mapped(function, value, made) for value in values]


def is_container(value: Any) -> bool:
    """Whether `map_leaves` looks into `value`."""
    kind: Any = type(value)
    return _is_kind_of_container(kind)


@functools.cache  # this is asked of every argument of every region
def _is_kind_of_container(kind: Any) -> bool:
    if issubclass(kind, Tensor | nn.Module | type):
        return False
    plain = kind in (tuple, list, dict, set, deque) or issubclass(kind, _BUILT)
    return plain or hasattr(kind, "__dataclass_fields__") or (issubclass(kind, tuple) and hasattr(kind, "_make"))


def _built(function: Callable[[Any], Any], value: Any, made: dict[int, Any]) -> Any:
    """The same for an object with attributes."""
    kind: Any = type(value)
    made[id(value)] = new = kind.__new__(kind)
    if isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        for key, item in base.items(value):
            base.__setitem__(new, key, _mapped(function, item, made))
    if isinstance(value, defaultdict):
        new.default_factory = value.default_factory
    for name, item in getattr(value, "__dict__", {}).items():
        new.__dict__[name] = _mapped(function, item, made)
    for name in slots_of(kind):
        if hasattr(value, name):
            object.__setattr__(new, name, _mapped(function, getattr(value, name), made))
    return new


def slots_of(kind: type) -> Iterator[str]:
    """The names of the slots of a class and its bases."""
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else (s for s in slots if s not in ("__dict__", "__weakref__"))
