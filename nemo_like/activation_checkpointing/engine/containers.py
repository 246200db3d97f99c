"""Containers among a call's arguments: kept as the call found them, whatever the layer writes into them afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` on everything in it that is no container; every container is a new one.

    Containers are tuples, lists and dicts, named tuples, ordered dicts and their subclasses (the output classes of model
    libraries), and dataclasses; nested in any way. They are built without calling code of their classes.

    >>> map_leaves(lambda leaf: leaf + 1, {"a": (1, [2])})
    {'a': (2, [3])}
    """
    return _mapped(function, value, ())


def _mapped(function: Callable[[Any], Any], value: Any, around: tuple[Any, ...]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        items = [_mapped(function, item, (*around, value)) for item in value]
        return items if kind is list else tuple(items)
    if kind is dict:
        return {key: _mapped(function, item, (*around, value)) for key, item in value.items()}
    if hasattr(kind, "__dataclass_fields__") or issubclass(kind, OrderedDict):
        return function(value) if isinstance(value, nn.Module) else _built(function, value, around)
    if issubclass(kind, tuple) and hasattr(kind, "_make"):
        return tuple.__new__(kind, [_mapped(function, item, (*around, value)) for item in value])
    return function(value)


def _built(function: Callable[[Any], Any], value: Any, around: tuple[Any, ...]) -> Any:
    """The same for an object with attributes; one that holds itself holds the original in its copy."""
    if any(value is outer for outer in around):
        return value
    around = (*around, value)
    kind: Any = type(value)
    new = kind.__new__(kind)
    if isinstance(value, OrderedDict):
        for key, item in OrderedDict.items(value):
            OrderedDict.__setitem__(new, key, _mapped(function, item, around))
    for name, item in getattr(value, "__dict__", {}).items():
        new.__dict__[name] = _mapped(function, item, around)
    for name in _slots(kind):
        if hasattr(value, name):
            object.__setattr__(new, name, _mapped(function, getattr(value, name), around))
    return new


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else (s for s in slots if s not in ("__dict__", "__weakref__"))
