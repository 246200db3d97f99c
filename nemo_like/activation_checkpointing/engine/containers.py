"""Lists, dicts, sets and objects with attributes: their contents at one moment, for a recomputation to start from.

`map_leaves` copies the containers among a call's arguments. `Contents` is of the containers that a module's attributes lead
to: they are filled again with their former contents. Tensors and other objects, as arrays and queues, are not copied:
one that was changed in place raises.
"""

import contextlib
import functools
import io
import pickle
import random
from array import array
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable
from operator import is_
from types import SimpleNamespace
from typing import Any
from weakref import ref

from torch import Tensor, nn

from nemo_like._util.plain import PLAIN, is_plain, is_plain_value, slots_in, slots_of
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.torch_compat import version_of

_SMALL = 1024  # Entries up to which a container is copied before every forward.
_SMALL_ARRAY = 1 << 16  # Bytes up to which an array is read before every forward.


# --- containers among a call's arguments ---------------------------------------------------------------------------

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


# --- containers that attributes lead to ----------------------------------------------------------------------------

Attribute = tuple[dict[str, Any], str, str]  # The dict that has it, its name, and the class of its owner.
_FILLED: tuple[Any, ...] = (OrderedDict, dict, list, set)
_READ = (deque, bytearray, array, random.Random)
# Packages whose objects are not looked into, where they are not containers.
_OTHER_CODE = ("torch", "nemo_like", "numpy", "builtins")
_UNKNOWN = object()  # In the place of an object whose contents are not known.


class Contents:
    """Contents of the containers that some attributes lead to, nested in any way, and signs of the other objects.

    A container that is in two others stays one, and so does a tensor.
    """

    __slots__ = ("_attributes", "_filled", "_signed")

    def __init__(self, attributes: Iterable[Attribute]) -> None:
        # Containers with their contents; None: these could hold the graph of an earlier step.
        self._filled: list[tuple[Any, Any]] = []
        # Objects that are not filled again, each with the attribute that leads to it, and its sign.
        self._signed: list[tuple[Attribute, Any, Any]] = []
        known: dict[int, tuple[Any, Any]] = {}  # and no longer than now: its values may hold a graph
        self._attributes = [(place, self._keep(place[0][place[1]], place, known)) for place in attributes]

    def check(self, region: str, put_back: Callable[[dict[str, Any], str], bool]) -> None:
        """Raise RegionError for a tensor or another object that was changed in place and cannot be filled again, except
        for attributes that are `put_back`."""
        for (attributes, name, owner), value, sign in self._signed:
            if _sign_of(value) != sign and not put_back(attributes, name):
                way_out = (
                    "Put a new tensor in its place, or keep it in a buffer."
                    if isinstance(value, Tensor)
                    else "Keep its contents in a buffer, a plain attribute, a list or a dict."
                )
                raise RegionError(
                    f"Region {region!r}: the attribute {name!r} of a {owner} is or has a {type(value).__name__} that was "
                    "changed in place since forward began, so recomputation would compute with other values. " + way_out
                )

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Set the attributes as they were, and until `stack` ends fill the containers with their former contents."""
        stack.callback(_fill_all, [(container, _contents_of(container)) for container, _ in self._filled])
        _fill_all(self._filled)
        for (attributes, name, _), kept in self._attributes:
            if kept is not _UNKNOWN:
                attributes[name] = kept

    def _keep(self, value: Any, place: Attribute, known: dict[int, tuple[Any, Any]]) -> Any:
        """Return the value to remember of `value`; `_UNKNOWN` where that could hold the graph of an earlier step."""
        kind: Any = type(value)
        if is_plain(kind) or issubclass(kind, nn.Module):
            return value
        if id(value) in known:
            return known[id(value)][1]
        kept = value
        known[id(value)] = value, value  # which may be in itself
        if issubclass(kind, Tensor):
            kept = value if value.grad_fn is None else value.detach().requires_grad_()  # of the same version
            self._signed.append((place, kept, _sign_of(kept)))
        elif issubclass(kind, tuple):
            items = [self._keep(item, place, known) for item in value]
            kept = value if all(map(is_, items, value)) else tuple.__new__(kind, items)
            kept = _UNKNOWN if any(item is _UNKNOWN for item in items) else kept
        elif has_state(value):
            self._look_into(value, place, known)
        else:
            kept = _UNKNOWN
        known[id(value)] = value, kept
        return kept

    def _look_into(self, value: Any, place: Attribute, known: dict[int, tuple[Any, Any]]) -> None:
        kind: Any = type(value)
        if kind.__dictoffset__:
            self._keep(vars(value), place, known)
        if _is_read(kind) or any(slots_of(kind)):
            self._signed.append((place, value, _sign_of(value)))
        if isinstance(value, _FILLED) and len(value) <= _SMALL:
            contents = _contents_of(value)
            items = list(contents.values() if isinstance(contents, dict) else contents)
            if not PLAIN.issuperset(map(type, items)):  # as few containers of a layer have
                kept = [self._keep(item, place, known) for item in items]
                if not all(map(is_, kept, items)):
                    contents = dict(zip(contents, kept)) if isinstance(contents, dict) else kept
                    if isinstance(value, set) or any(item is _UNKNOWN for item in kept):
                        contents = None  # the items of a set are found by their values
            self._filled.append((value, contents))


def has_state(value: object) -> bool:
    """Return whether `Contents` looks into `value`, which is neither a tensor nor a module."""
    kind: Any = type(value)
    if _is_kind_with_state(kind) or is_plain(kind):
        return not is_plain(kind)
    # An object with attributes of its own, all of which are tensors, plain values or containers.
    if kind.__module__.partition(".")[0] in _OTHER_CODE or callable(value):
        return False
    items: list[Any] = [*getattr(value, "__dict__", {}).values(), *slots_in(value)]
    known = all(
        is_plain_value(item) or isinstance(item, Tensor) or _is_kind_with_state(item.__class__) for item in items
    )
    return known and bool(kind.__dictoffset__ or any(slots_of(kind)))


@functools.cache
def _is_kind_with_state(kind: Any) -> bool:
    if issubclass(kind, type | nn.Module | Tensor):
        return False
    containers = (*_FILLED, tuple, SimpleNamespace, UserDict, UserList)
    return issubclass(kind, containers) or hasattr(kind, "__dataclass_fields__") or _is_read(kind)


@functools.cache
def _is_read(kind: Any) -> bool:
    """Return whether objects of this class have a state that only pickling tells: queues, arrays, generators."""
    of_numpy = [base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "numpy"]
    return issubclass(kind, _READ) or "ndarray" in of_numpy or "Generator" in of_numpy


class _Signing(pickle.Pickler):
    """Writes tensors as reference and version, which tell of an exchange or a change in place; modules by identity."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.seen: list[Any] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.seen.append(ref(value))  # of which a tensor has one, and which lives as long as the sign
            return id(self.seen[-1]), _sign_of(value)
        return id(value) if isinstance(value, nn.Module) or (not is_plain_value(value) and callable(value)) else None


def _sign_of(value: Any) -> Any:
    """A sign that equals the one taken before, unless a tensor or another object was changed in place."""
    if isinstance(value, Tensor):
        return version_of(value)
    if getattr(value, "nbytes", 0) > _SMALL_ARRAY or (isinstance(value, deque) and len(value) > _SMALL):
        return None
    file = io.BytesIO()
    pickler = _Signing(file)
    try:
        pickler.dump(value)
    except (TypeError, AttributeError, pickle.PicklingError):
        return None  # as of a lock: its state is not known
    return file.getvalue(), pickler.seen


@functools.cache
def _base_of(kind: Any) -> Any:
    """Return the class of Python's own whose methods read and fill the containers of class `kind`: a Counter's own add."""
    return next(base for base in _FILLED if issubclass(kind, base))


def _contents_of(value: Any) -> Any:
    base = _base_of(value.__class__)
    return dict(OrderedDict.items(value)) if base is OrderedDict else base.copy(value)


def _fill_all(every: list[tuple[Any, Any]]) -> None:
    for container, contents in every:
        if contents is not None:
            _fill(container, contents)


def _fill(value: Any, contents: Any) -> None:
    base = _base_of(value.__class__)
    if base is list:
        base.__setitem__(value, slice(None), contents)
    elif base is set:
        base.clear(value)
        base.update(value, contents)
    elif list(base.keys(value)) != list(contents) or not all(map(is_, base.values(value), contents.values())):
        base.clear(value)
        for key, item in contents.items():
            base.__setitem__(value, key, item)
