"""The state that objects hold: everything that values lead to, each object once, filled again in place.

`DeepState` is a region's. It looks into containers (lists, dicts, sets, queues, byte arrays, namespaces, dataclasses and
their subclasses, nested in any way). Its `restore` puts copies in the place of tensors and arrays, because a backward may
still read those. A container that is in two others stays one, and so does a tensor.

`take` is for whoever runs a model once and wants everything back: it looks into modules and other objects, too, and its
`restore` writes the values of tensors back into them.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import numbers
import sys
import types
from array import array
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine.containers import slots_of
from nemo_like.activation_checkpointing.engine.generators import is_generator, put_state, state_of

PLAIN = frozenset({
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, type, frozenset,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial,
})  # fmt: skip
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
    """With tensors and arrays as they were; None: they can't be kept."""
    plain: bool
    """Whether the contents have nothing in them that a recompute could change in place."""


class DeepState:
    """The containers that some attributes lead to, the tensors and the arrays, as they are now."""

    __slots__ = ("_attributes", "_entries")

    def __init__(self, attributes: Iterable[tuple[dict[str, Any], str]]) -> None:
        """`attributes`: each by the dict that has it, and its name."""
        self._entries: list[_Entry] = []
        known: dict[int, tuple[Any, Any]] = {}  # and no longer than now: what is in it may hold a graph
        self._attributes = [(own, name, self._keep(own[name], known)) for own, name in attributes]

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Set the attributes as they were, and until `stack` ends fill the containers with what they held."""
        present = [way.read(container) for container, way, *_ in self._entries]
        stack.callback(self._fill, present)
        copies: dict[int, Any] = {}
        for (container, way, contents, plain), now in zip(self._entries, present):
            if not plain and contents is not None:
                way.fill(container, _mapped(lambda item: _again(item, copies), contents))
            elif contents is not None and contents != now:
                way.fill(container, contents)
        for own, name, kept in self._attributes:
            if kept is not _UNKNOWN:
                own[name] = _again(kept, copies)

    def _fill(self, every: list[Any]) -> None:
        for (container, way, *_), contents in zip(self._entries, every):
            way.fill(container, contents)

    def _keep(self, value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
        """What to remember of `value`; `_UNKNOWN` where that could hold the graph of an earlier step."""
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


class WholeState:
    """Everything that a model leads to, as `take` found it."""

    def __init__(self, model: nn.Module) -> None:
        self._found: list[tuple[Any, _Way, Any]] = []
        self._generators: list[tuple[Any, Any]] = []
        seen: dict[int, Any] = {}
        waiting: list[Any] = [model]
        while waiting:
            value = waiting.pop()
            kind: Any = type(value)
            if is_plain(kind) or id(value) in seen:
                continue
            seen[id(value)] = value
            if is_generator(value):
                self._generators.append((value, state_of(value)))
                continue
            if isinstance(value, tuple):
                waiting += value
            for way in _whole_ways_of(kind):
                contents = way.read(value)
                self._found.append((value, way, contents))
                waiting += _items(contents)

    def restore(self) -> None:
        """Put everything back in place, as often as wanted."""
        for value, way, contents in self._found:
            way.fill(value, contents)
        for generator, state in self._generators:
            put_state(generator, state)


def take(model: nn.Module) -> WholeState:
    """Remember everything that a run of `model` may change, for `restore` to put back.

    That is: attributes, tables of parameters, buffers, modules and hooks, training flags, all containers and objects that
    these lead to, the values of buffers, of other tensors and of arrays, random-number generators, and the gradients of
    parameters and their `requires_grad`. Not the values of parameters (a forward leaves them alone, and copies would take
    as much memory again), iterators, and what functions refer to.

    >>> layer = nn.BatchNorm1d(2)
    >>> before = take(layer)
    >>> _ = layer(torch.ones(3, 2))
    >>> before.restore()
    >>> int(layer.num_batches_tracked)
    0
    """
    return WholeState(model)


class _Unknown:
    """In the place of an object whose contents are not known."""


_UNKNOWN = _Unknown()


@functools.cache
def is_plain(kind: Any) -> bool:
    """Whether values of this type can be compared, and put back, as they are."""
    return kind in PLAIN or issubclass(kind, enum.Enum | numbers.Number | Decimal)  # NumPy's scalars among them


@functools.cache
def is_array(kind: Any) -> bool:
    """Whether it is NumPy's class of arrays; nothing is imported to find out."""
    return any(base.__name__ == "ndarray" and base.__module__ == "numpy" for base in kind.__mro__)


@functools.cache
def has_state(kind: Any) -> bool:
    """Whether `DeepState` looks into values of this type, which is neither a tensor nor a module."""
    return bool(_ways_of(kind)) or is_array(kind) or (issubclass(kind, tuple) and not is_plain(kind))


def _is_small(container: Any) -> bool:
    if isinstance(container, bytearray | array):
        return len(container) <= SMALL_TENSOR
    return not hasattr(container, "__len__") or len(container) <= _SMALL


def _items(contents: Any) -> Iterable[Any]:
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
    made: tuple[Any, ...] = tuple.__new__(type(value), items)
    return made


def _without_graph(value: Any) -> Any:
    kept = _copy(value)
    return kept.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else kept


def _again(kept: Any, copies: dict[int, Any]) -> Any:
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


def _fill_sequence(value: Any, contents: Any) -> None:
    value[:] = contents


def _fill_attributes(value: Any, contents: Any) -> None:
    own = vars(value)
    if len(own) != len(contents) or not all(map(is_, chain(own, own.values()), chain(contents, contents.values()))):
        own.clear()
        own.update(contents)


def _read_slots(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}


def _fill_slots(value: Any, contents: Any) -> None:
    for name in slots_of(type(value)):
        if name in contents:
            object.__setattr__(value, name, contents[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


def _read_tensor(value: Tensor) -> tuple[bool, Tensor | None, Tensor | None, Tensor | None]:
    """Whether it requires a gradient, that gradient, and copies of the gradient and, but for parameters, of the values."""
    grad = value.grad if value.is_leaf else None
    copied = not isinstance(value, nn.Parameter) and not value.is_inference()
    values = value.detach().clone() if copied else None
    return value.requires_grad, grad, None if grad is None else grad.clone(), values


def _fill_tensor(value: Tensor, contents: tuple[bool, Tensor | None, Tensor | None, Tensor | None]) -> None:
    requires_grad, grad, grad_values, values = contents
    if grad is not None and grad_values is not None:
        _write(grad, grad_values)
    if values is not None:
        _write(value, values)
    if value.is_leaf:
        value.grad = grad
        value.requires_grad_(requires_grad)


def _write(value: Tensor, values: Tensor) -> None:
    """In place, where they differ: others may have the same memory, or a graph that counts its versions."""
    with torch.no_grad():
        if value.shape != values.shape or value.dtype != values.dtype:
            value.data = values.clone()
        elif value.layout is not torch.strided or not torch.equal(value, values):
            value.copy_(values)


def _fill_array(value: Any, contents: Any) -> None:
    value[...] = contents


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
    """How to read values of a type of containers; none for other types."""
    if issubclass(kind, type | nn.Module | Tensor | tuple):
        return []
    base = next((base for base in kind.__mro__ if base in _CONTAINERS), None)
    if base is None and not issubclass(kind, _OBJECTS) and not hasattr(kind, "__dataclass_fields__"):
        return []
    return [*([_CONTAINERS[base]] if base is not None else ()), *_own_ways(kind)]


def _own_ways(kind: type) -> list[_Way]:
    """How to read the attributes that values of this type have of their own."""
    return [*([_ATTRIBUTES] if kind.__dictoffset__ else ()), *([_SLOTS] if any(slots_of(kind)) else ())]


@functools.cache
def _whole_ways_of(kind: Any) -> list[_Way]:
    """The same for modules, tensors, arrays, generators of random numbers, and objects of all but the standard library."""
    if issubclass(kind, Tensor):
        return [_Way(_read_tensor, _fill_tensor)]
    if is_array(kind):
        return [_Way(lambda value: value.copy(), _fill_array)]
    if issubclass(kind, type | types.ModuleType | tuple):
        return []
    home = kind.__module__.partition(".")[0]
    return _ways_of(kind) or ([] if home in sys.stdlib_module_names else _own_ways(kind))
