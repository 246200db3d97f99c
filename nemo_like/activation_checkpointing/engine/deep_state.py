"""The state that objects hold: everything that values lead to, each object once, filled again in place.

`DeepState` is a region's. It looks into containers (lists, dicts, sets, queues, byte arrays, namespaces, dataclasses and
their subclasses, nested in any way). Its `restore` puts copies in the place of tensors and arrays, because a backward may
still read those. A container that is in two others stays one, and so does a tensor.
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

import torch
from torch import Tensor, nn

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
_MOST = PLAIN | {list, dict, set}
_SMALL = 1024
"""Entries up to which a container is copied before every forward."""
SMALL_TENSOR = 1 << 16
"""Bytes up to which a tensor that is part of a module's state is copied before every forward, and so for arrays."""


class _Way(NamedTuple):
    """Read one side of an object as a new object that holds the contents, and fill them in again."""

    read: Callable[[Any], Any]
    fill: Callable[[Any, Any], None]


class _Entry(NamedTuple):
    container: Any
    way: _Way
    contents: Any
    """With tensors and arrays as they were; None: they can't be saved."""
    plain: bool
    """The contents have nothing in them that a recomputation could change in place."""


class DeepState:
    """The containers that some attributes lead to, the tensors and the arrays, as they are now."""

    __slots__ = ("_attributes", "_entries")

    def __init__(self, attributes: Iterable[tuple[dict[str, Any], str]]) -> None:
        """`attributes`: each by the dict that has it, and its name."""
        self._entries: list[_Entry] = []
        known: dict[int, tuple[Any, Any]] = {}  # and no longer than now: what is in it may hold a graph
        self._attributes = [
            (attributes_of, name, self._keep(attributes_of[name], known)) for attributes_of, name in attributes
        ]

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Set the attributes as they were, and until `stack` ends fill the containers with what they contained."""
        present = [way.read(container) for container, way, *_ in self._entries]
        stack.callback(self._fill, present)
        copies: dict[int, Any] = {}
        for (container, way, contents, plain), now in zip(self._entries, present):
            if not plain and contents is not None:
                way.fill(container, _mapped(lambda item: _again(item, copies), contents))
            elif contents is not None and contents != now:
                way.fill(container, contents)
        for attributes, name, kept in self._attributes:
            if kept is not _UNKNOWN:
                attributes[name] = _again(kept, copies)

    def _fill(self, every: list[Any]) -> None:
        for (container, way, *_), contents in zip(self._entries, every):
            way.fill(container, contents)

    def _keep(self, value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
        """Return what to remember of `value`; `_UNKNOWN` where that could hold the graph of an earlier step."""
        kind: Any = type(value)
        if is_plain(kind) or issubclass(kind, nn.Module):
            return value
        if id(value) in known:
            return known[id(value)][1]
        if issubclass(kind, Tensor) or is_array(kind):
            kept = _without_graph(value)
        elif issubclass(kind, tuple) and (kind is tuple or hasattr(kind, "_make")):
            items = [self._keep(item, known) for item in value]
            kept = _UNKNOWN if any(item is _UNKNOWN for item in items) else _tuple_of(value, items)
        elif ways := _ways_of(kind):
            known[id(value)] = value, value
            self._entries += [self._entry(value, way, known) for way in ways if _is_small(value)]
            return value
        else:
            return _UNKNOWN
        known[id(value)] = value, kept
        return kept

    def _entry(self, container: Any, way: _Way, known: dict[int, tuple[Any, Any]]) -> _Entry:
        contents = way.read(container)
        items = _items(contents)
        if PLAIN.issuperset(map(type, items)):
            return _Entry(container, way, contents, True)
        kept = [self._keep(item, known) for item in items]
        if any(item is _UNKNOWN for item in kept):
            return _Entry(container, way, None, False)
        if isinstance(contents, set):  # its items are found by what they are
            return _Entry(container, way, contents if all(map(is_, kept, items)) else None, True)
        following = iter(kept)
        return _Entry(container, way, _mapped(lambda _: next(following), contents), False)


class _Unknown:
    """In the place of an object whose contents are not known."""


_UNKNOWN = _Unknown()


@functools.cache
def is_plain(kind: Any) -> bool:
    """Return whether values of this type can be compared, and put back, as they are."""
    return kind in PLAIN or issubclass(kind, enum.Enum | numbers.Number | Decimal)  # NumPy's scalars among them


@functools.cache
def is_array(kind: Any) -> bool:
    """Return whether it is NumPy's class of arrays; nothing is imported to find out."""
    return any(base.__name__ == "ndarray" and base.__module__ == "numpy" for base in kind.__mro__)


@functools.cache
def has_state(kind: Any) -> bool:
    """Return whether `DeepState` looks into values of this type, which is neither a tensor nor a module."""
    return bool(_ways_of(kind)) or is_array(kind) or (issubclass(kind, tuple) and not is_plain(kind))


def _is_small(container: Any) -> bool:
    if isinstance(container, bytearray | array):
        return len(container) <= SMALL_TENSOR
    return not hasattr(container, "__len__") or len(container) <= _SMALL


def _items(contents: object) -> Iterable[Any]:
    if isinstance(contents, dict):
        return contents.values()
    return contents if isinstance(contents, list | set) else ()


def _mapped(function: Callable[[Any], Any], contents: Any) -> Any:
    if isinstance(contents, dict):
        return dict(zip(contents, map(function, contents.values())))
    return list(map(function, contents))


def _tuple_of(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple as `value`, with `items` in it; the same one where they are the same."""
    if all(new is old for new, old in zip(items, value)):
        return value
    rebuilt: tuple[Any, ...] = tuple.__new__(type(value), items)
    return rebuilt


def _without_graph(value: object) -> Any:
    kept = _copy(value)
    return kept.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else kept


def _again(kept: object, copies: dict[int, Any]) -> Any:
    """`kept` for one recompute, which may change it."""
    kind: Any = type(kept)
    if kind in _MOST:
        return kept
    if isinstance(kept, tuple):
        return _tuple_of(kept, [_again(item, copies) for item in kept])
    if not (issubclass(kind, Tensor) or is_array(kind)):
        return kept
    if id(kept) not in copies:
        copies[id(kept)] = _copy(kept)
    return copies[id(kept)]


def _copy(value: Any) -> Any:
    """A copy of a small tensor or array, since state is changed in place; a large one, hardly ever changed, itself."""
    if not isinstance(value, Tensor):
        return value.copy() if value.nbytes <= SMALL_TENSOR else value
    if value.is_inference() or (value.layout is torch.strided and value.nbytes > SMALL_TENSOR):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


# --- how objects are read and filled ------------------------------------------------------------------------------


def _fill_dict(value: Any, contents: Any) -> None:
    dict.clear(value)
    dict.update(value, contents)  # a Counter's own adds


def _fill_ordered(value: Any, contents: Any) -> None:
    OrderedDict.clear(value)
    for key, item in contents.items():
        OrderedDict.__setitem__(value, key, item)


def _fill_set(value: Any, contents: Any) -> None:
    set.clear(value)
    set.update(value, contents)


def _fill_queue(value: Any, contents: Any) -> None:
    deque.clear(value)
    deque.extend(value, contents)


def _fill_sequence(value: Any, contents: object) -> None:
    value[:] = contents


def _fill_attributes(value: object, contents: Any) -> None:
    attributes = vars(value)
    if len(attributes) != len(contents) or not all(
        map(is_, chain(attributes, attributes.values()), chain(contents, contents.values()))
    ):
        attributes.clear()
        attributes.update(contents)


def _read_slots(value: object) -> dict[str, Any]:
    return {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}


def _fill_slots(value: object, contents: Any) -> None:
    for name in slots_of(type(value)):
        if name in contents:
            object.__setattr__(value, name, contents[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


_CONTAINERS: dict[type, _Way] = {
    OrderedDict: _Way(lambda value: dict(OrderedDict.items(value)), _fill_ordered),
    dict: _Way(dict.copy, _fill_dict),
    list: _Way(list.copy, _fill_sequence),
    set: _Way(set.copy, _fill_set),
    deque: _Way(list, _fill_queue),
    bytearray: _Way(bytes, _fill_sequence),
    array: _Way(lambda value: value[:], _fill_sequence),
}
_OBJECTS = (types.SimpleNamespace, UserDict, UserList)
_ATTRIBUTES = _Way(lambda value: vars(value).copy(), _fill_attributes)
_SLOTS = _Way(_read_slots, _fill_slots)


@functools.cache
def _ways_of(kind: Any) -> list[_Way]:
    """Return the ways to read values of a type of containers; none for other types."""
    if issubclass(kind, type | nn.Module | Tensor | tuple):
        return []
    base = next((base for base in kind.__mro__ if base in _CONTAINERS), None)
    if base is None and not issubclass(kind, _OBJECTS) and not hasattr(kind, "__dataclass_fields__"):
        return []
    return [*([_CONTAINERS[base]] if base is not None else ()), *_own_ways(kind)]


def _own_ways(kind: type) -> list[_Way]:
    """Return the ways to read the attributes that values of this type have of their own."""
    return [*([_ATTRIBUTES] if kind.__dictoffset__ else ()), *([_SLOTS] if any(slots_of(kind)) else ())]


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
