"""Containers among a call's arguments: copied, so that a recomputation starts from their contents at the call."""

import functools
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from nemo_like._util.plain import slots_of

# The types of most arguments; none is a container.
COMMON_LEAVES = frozenset({type(None), bool, int, float, str, Tensor, nn.Parameter})
_COPIED = (tuple, list, dict, set, deque)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` on everything in it that is not a container; every container is a new one.

    Containers are tuples, lists, dicts, sets and queues, named tuples, all kinds of dicts (the output classes of model
    libraries), namespaces and dataclasses; nested in any way. They are built without calling code of their classes.

    >>> map_leaves(lambda leaf: leaf + 1, {"a": (1, [2])})
    {'a': (2, [3])}
    """
    return _mapped(function, value, {})


@functools.cache  # this is asked of every argument of every region
def is_kind_of_container(kind: Any) -> bool:
    """Return whether `map_leaves` looks into values of this type."""
    if issubclass(kind, Tensor | nn.Module | type):
        return False
    copied = kind in _COPIED or issubclass(kind, dict | UserDict | SimpleNamespace)
    return copied or hasattr(kind, "__dataclass_fields__") or (issubclass(kind, tuple) and hasattr(kind, "_make"))


def _mapped(function: Callable[[Any], Any], value: Any, seen: dict[int, Any]) -> Any:
    """`seen`: id of a container → the new one, so that one which occurs twice, or in itself, is made once."""
    kind: Any = type(value)
    if kind in COMMON_LEAVES or not is_kind_of_container(kind):
        return function(value)
    if id(value) in seen:
        return seen[id(value)]
    if issubclass(kind, tuple):
        return tuple.__new__(kind, [_mapped(function, item, seen) for item in value])
    seen[id(value)] = new = kind.__new__(kind)
    if isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        for key, item in base.items(value):
            base.__setitem__(new, key, _mapped(function, item, seen))
        if isinstance(value, defaultdict):
            new.default_factory = value.default_factory
    elif kind in _COPIED:
        maxlen = {"maxlen": value.maxlen} if kind is deque else {}
        new.__init__([_mapped(function, item, seen) for item in value], **maxlen)
    for name, item in getattr(value, "__dict__", {}).items():
        new.__dict__[name] = _mapped(function, item, seen)
    for name in slots_of(kind):
        if hasattr(value, name):
            object.__setattr__(new, name, _mapped(function, getattr(value, name), seen))
    return new


def refill(container: Any, contents: Any) -> None:
    """Give a list, dict, set or queue these contents."""
    container.clear()
    (container.update if isinstance(container, dict | set) else container.extend)(contents)
