"""The state that objects hold: everything that values lead to, each object once.

`DeepState` is a region's. Lists, dicts and sets, nested in any way, are filled again with what they had, and so are the
attributes of namespaces and dataclasses. Tensors, arrays, queues and slots are not copied: one that was changed in place
raises. A container that is in two others stays one, and so does a tensor.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import numbers
import types
from array import array
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from itertools import chain
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine.handles import RegionError

PLAIN = frozenset(
    {
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
        torch.dtype,
        torch.device,
        torch.Size,
        range,
        type,
        frozenset,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
        functools.partial,
    }
)
_SMALL = 1024
"""Entries up to which a container is copied before every forward."""
_SMALL_ARRAY = 1 << 16
"""Bytes up to which an array that is part of a module's state is copied before every forward."""

Attribute = tuple[dict[str, Any], str, str]
"""The dict that has it, its name, and the class of its owner."""


class _Way(NamedTuple):
    """Read a container as a new one that holds the contents, and fill them in again."""

    read: Callable[[Any], Any]
    fill: Callable[[Any, Any], None]


class DeepState:
    """The containers that some attributes lead to, and the tensors and other objects in them, as they are now."""

    __slots__ = ("_attributes", "_containers", "_fixed")

    def __init__(self, attributes: Iterable[Attribute]) -> None:
        self._containers: list[tuple[Any, _Way, Any]] = []
        """With their contents; None: these could hold the graph of an earlier step."""
        self._fixed: list[tuple[Attribute, Any, Any]] = []
        """Objects that are not filled again, each with the attribute that leads to it, and its mark."""
        known: dict[int, tuple[Any, Any]] = {}  # and no longer than now: what is in it may hold a graph
        self._attributes = [(place, self._keep(place[0][place[1]], place, known)) for place in attributes]

    def check(self, region: str) -> None:
        """Raise RegionError for a tensor or another object that was changed in place and cannot be filled again."""
        for (_, name, owner), value, mark in self._fixed:
            if _mark(value) != mark:
                way_out = "Keep what it holds in a buffer, a plain attribute, a list or a dict."
                if isinstance(value, Tensor):
                    way_out = "Put a new tensor in its place, or keep it in a buffer."
                raise RegionError(
                    f"Region {region!r}: the attribute {name!r} of a {owner} is or has a {type(value).__name__} that was "
                    "changed in place since forward began, so recomputation would compute with other values. " + way_out
                )

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Set the attributes as they were, and until `stack` ends fill the containers with what they contained."""
        stack.callback(_fill_all, [(container, way, way.read(container)) for container, way, _ in self._containers])
        _fill_all(self._containers)
        for (attributes, name, _), kept in self._attributes:
            if kept is not _UNKNOWN:
                attributes[name] = kept

    def _keep(self, value: Any, place: Attribute, known: dict[int, tuple[Any, Any]]) -> Any:
        """Return what to remember of `value`; `_UNKNOWN` where that could hold the graph of an earlier step."""
        kind: Any = type(value)
        if is_plain(kind) or issubclass(kind, nn.Module):
            return value
        if id(value) in known:
            return known[id(value)][1]
        if issubclass(kind, Tensor):
            kept = value if value.grad_fn is None else value.detach().requires_grad_()  # of the same version
            self._fixed.append((place, kept, _mark(kept)))
        elif kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_make")):
            items = [self._keep(item, place, known) for item in value]
            kept = value if all(map(is_, items, value)) else tuple.__new__(kind, items)
            if any(item is _UNKNOWN for item in items):
                kept = _UNKNOWN
        elif has_state(kind) or is_record(value):
            known[id(value)] = value, value  # which may be in itself
            self._look_into(value, place, known)
            return value
        else:
            return _UNKNOWN
        known[id(value)] = value, kept
        return kept

    def _look_into(self, value: Any, place: Attribute, known: dict[int, tuple[Any, Any]]) -> None:
        kind: Any = type(value)
        if kind.__dictoffset__:
            self._keep(vars(value), place, known)
        if not _is_small(value):
            return
        if way := _way_of(kind):
            contents = way.read(value)
            items = contents.values() if isinstance(contents, dict) else contents
            if not PLAIN.issuperset(map(type, items)):
                kept = [self._keep(item, place, known) for item in items]
                same = all(map(is_, kept, items))  # the items of a set are found by what they are
                if any(item is _UNKNOWN for item in kept) or (isinstance(contents, set) and not same):
                    contents = None
                elif not same:
                    contents = dict(zip(contents, kept)) if isinstance(contents, dict) else kept
            self._containers.append((value, way, contents))
        if _is_compared(kind):
            for item in _items(value):
                self._keep(item, place, known)
            self._fixed.append((place, value, _mark(value)))


_UNKNOWN = object()
"""In the place of an object whose contents are not known."""


@functools.cache
def is_plain(kind: Any) -> bool:
    """Return whether values of this type can be compared, and put back, as they are."""
    return kind in PLAIN or issubclass(kind, enum.Enum | numbers.Number | Decimal)  # NumPy's scalars among them


def is_plain_value(value: object) -> bool:
    """Return whether `value` can be compared, and put back, as it is."""
    kind: Any = type(value)
    return is_plain(kind)


@functools.cache
def has_state(kind: Any) -> bool:
    """Return whether `DeepState` looks into values of this type, which is neither a tensor nor a module."""
    if issubclass(kind, type | nn.Module | Tensor):
        return False
    if issubclass(kind, tuple):
        return not is_plain(kind)
    return issubclass(kind, _OBJECTS) or hasattr(kind, "__dataclass_fields__") or _is_array(kind)


def is_record(value: object) -> bool:
    """Return whether `value` is an object with attributes of its own, and all of them are tensors, plain values or
    containers."""
    kind: Any = type(value)
    looked_into = kind.__module__.partition(".")[0] not in _CODE and not is_plain(kind) and not callable(value)
    if not looked_into or not (kind.__dictoffset__ or any(slots_of(kind))):
        return False
    items = [*getattr(value, "__dict__", {}).values(), *_slots(value)]
    kinds: list[Any] = list(map(type, items))
    return all(is_plain(kind) or issubclass(kind, Tensor) or has_state(kind) for kind in kinds)


_CODE = ("torch", "nemo_like", "numpy", "builtins")
"""Packages whose objects are not looked into, where they are not containers."""


def inside(value: Any, depth: int) -> Iterator[Any]:
    """Yield `value`, and everything that containers and objects with attributes in it have, so many levels deep."""
    yield value
    if depth == 0 or is_plain_value(value) or isinstance(value, nn.Module | Tensor | type | types.ModuleType):
        return
    items: Iterable[Any] = [*getattr(value, "__dict__", {}).values(), *_slots(value)]
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list | tuple | set | deque):
        items = value
    for item in items:
        yield from inside(item, depth - 1)


@functools.cache
def _is_array(kind: Any) -> bool:
    """Return whether it is a class of arrays, Python's or NumPy's; nothing is imported to find out."""
    numpy = any(base.__name__ == "ndarray" and base.__module__ == "numpy" for base in kind.__mro__)
    return numpy or issubclass(kind, bytearray | array)


@functools.cache
def _is_compared(kind: Any) -> bool:
    """Return whether values of this type have contents that are not filled again."""
    return _is_array(kind) or issubclass(kind, deque) or any(slots_of(kind))


def _is_small(value: Any) -> bool:
    if _is_array(value.__class__):
        return (getattr(value, "nbytes", 0) or len(value)) <= _SMALL_ARRAY
    return not hasattr(value, "__len__") or len(value) <= _SMALL


def _items(value: Any) -> list[Any]:
    """The items of a queue, and what is in the slots of any object."""
    return [*(value if isinstance(value, deque) else ()), *_slots(value)]


def _slots(value: object) -> list[Any]:
    return [getattr(value, name, _UNKNOWN) for name in slots_of(type(value))]


def _mark(value: Any) -> Any:
    """Something that is equal to what it was before, unless a tensor or another object was changed in place."""
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    if _is_array(value.__class__):
        return getattr(value, "shape", None), value.tobytes() if hasattr(value, "tobytes") else bytes(value)
    return list(map(_identity, _items(value)))


def _identity(item: Any) -> Any:
    """The item, if it is plain; else something that tells it from all others, and holds no graph."""
    if is_plain(item.__class__):
        return (item,)
    holder = ref(item) if isinstance(item, Tensor) else item  # a tensor has one such reference
    return id(holder), holder  # where the numbers differ, the rest is not compared


# --- how containers are read and filled ---------------------------------------------------------------------------


def _fill_all(every: list[tuple[Any, _Way, Any]]) -> None:
    for container, way, contents in every:
        if contents is not None:
            way.fill(container, contents)


def _fill_dict(value: Any, contents: Any) -> None:
    now = chain(dict.keys(value), dict.values(value))
    if len(value) != len(contents) or not all(map(is_, now, chain(contents, contents.values()))):
        dict.clear(value)
        dict.update(value, contents)  # a Counter's own adds


def _fill_ordered(value: Any, contents: Any) -> None:
    OrderedDict.clear(value)
    for key, item in contents.items():
        OrderedDict.__setitem__(value, key, item)


def _fill_set(value: Any, contents: Any) -> None:
    set.clear(value)
    set.update(value, contents)


def _fill_list(value: Any, contents: Any) -> None:
    value[:] = contents


_CONTAINERS: dict[type, _Way] = {
    OrderedDict: _Way(lambda value: dict(OrderedDict.items(value)), _fill_ordered),
    dict: _Way(dict.copy, _fill_dict),
    list: _Way(list.copy, _fill_list),
    set: _Way(set.copy, _fill_set),
}
_OBJECTS = (*_CONTAINERS, deque, bytearray, array, SimpleNamespace, UserDict, UserList)


@functools.cache
def _way_of(kind: Any) -> _Way | None:
    """Return the way to read and fill containers of this type; None for other objects."""
    return next((_CONTAINERS[base] for base in kind.__mro__ if base in _CONTAINERS), None)


# Containers among a call's arguments: saved as the call found them, whatever the layer writes into them afterwards.

COMMON_LEAVES = frozenset({type(None), bool, int, float, str, Tensor, nn.Parameter})
"""The types of most arguments; none is a container."""
_BUILT = (dict, UserDict, SimpleNamespace)
"""Whose instances are made anew, attributes and all."""


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` on everything in it that is not a container; every container is a new one.

    Containers are tuples, lists, dicts, sets and queues, named tuples, all kinds of dicts (the output classes of model
    libraries), namespaces and dataclasses; nested in any way. They are built without calling code of their classes.

    >>> map_leaves(lambda leaf: leaf + 1, {"a": (1, [2])})
    {'a': (2, [3])}
    """
    return _map_value(function, value, {})


def _map_value(function: Callable[[Any], Any], value: Any, seen: dict[int, Any]) -> Any:
    """`made`: id of a container → the new one, so that one which occurs twice, or in itself, is made once."""
    kind: Any = type(value)
    if kind is tuple:
        return tuple(_each(function, value, seen))
    if not _is_kind_of_container(kind):
        return function(value)
    if id(value) in seen:
        return seen[id(value)]
    if kind is list:
        seen[id(value)] = items = []
        items += _each(function, value, seen)
        return items
    if kind is dict:
        pairs: dict[Any, Any] = {}
        seen[id(value)] = pairs
        pairs.update(zip(value, _each(function, value.values(), seen)))
        return pairs
    if hasattr(kind, "__dataclass_fields__") or issubclass(kind, _BUILT):
        return _built(function, value, seen)
    if issubclass(kind, tuple):
        return tuple.__new__(kind, _each(function, value, seen))
    if kind is set:
        seen[id(value)] = new = set(_each(function, value, seen))
        return new
    seen[id(value)] = queue = deque[Any](maxlen=value.maxlen)
    queue.extend(_each(function, value, seen))
    return queue


def _each(function: Callable[[Any], Any], values: Iterable[Any], seen: dict[int, Any]) -> list[Any]:
    return [function(value) if type(value) in COMMON_LEAVES else _map_value(function, value, seen) for value in values]


def is_container(value: Any) -> bool:
    """Return whether `map_leaves` looks into `value`."""
    kind: Any = type(value)
    return _is_kind_of_container(kind)


@functools.cache  # this is asked of every argument of every region
def _is_kind_of_container(kind: Any) -> bool:
    if issubclass(kind, Tensor | nn.Module | type):
        return False
    plain = kind in (tuple, list, dict, set, deque) or issubclass(kind, _BUILT)
    return plain or hasattr(kind, "__dataclass_fields__") or (issubclass(kind, tuple) and hasattr(kind, "_make"))


def _built(function: Callable[[Any], Any], value: object, seen: dict[int, Any]) -> Any:
    """The same for an object with attributes."""
    kind: Any = type(value)
    seen[id(value)] = new = kind.__new__(kind)
    if isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        for key, item in base.items(value):
            base.__setitem__(new, key, _map_value(function, item, seen))
    if isinstance(value, defaultdict):
        new.default_factory = value.default_factory
    for name, item in getattr(value, "__dict__", {}).items():
        new.__dict__[name] = _map_value(function, item, seen)
    for name in slots_of(kind):
        if hasattr(value, name):
            object.__setattr__(new, name, _map_value(function, getattr(value, name), seen))
    return new


def slots_of(kind: type) -> Iterator[str]:
    """The names of the slots of a class and its bases."""
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (
            (slots,) if isinstance(slots, str) else (slot for slot in slots if slot not in ("__dict__", "__weakref__"))
        )
