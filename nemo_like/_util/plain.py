"""Plain values, and the contents of other objects."""

import enum
import functools
import numbers
import types
from collections import deque
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, type, frozenset, functools.partial)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.Size)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
PLAIN = frozenset({*_PLAIN, *_PLAIN_OF_TORCH, *_FUNCTIONS})


@functools.cache
def is_plain(kind: Any) -> bool:
    """Return whether values of this type can be compared, and put back, as they are."""
    return kind in PLAIN or issubclass(kind, enum.Enum | numbers.Number | Decimal)  # NumPy's scalars among them


def is_plain_value(value: object) -> bool:
    """Return whether `value` can be compared, and put back, as it is."""
    kind: Any = type(value)
    return is_plain(kind)


def slots_of(kind: type) -> Iterator[str]:
    """The names of the slots of a class and its bases."""
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        slots = (slots,) if isinstance(slots, str) else slots
        yield from (slot for slot in slots if slot not in ("__dict__", "__weakref__"))


def slots_in(value: object) -> list[Any]:
    return [getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)]


def inside(value: Any, depth: int) -> Iterator[Any]:
    """Yield `value`, and everything that containers and objects with attributes in it have, so many levels deep."""
    yield value
    if depth == 0 or is_plain_value(value) or isinstance(value, nn.Module | Tensor | types.ModuleType):
        return
    items: Iterable[Any] = [*getattr(value, "__dict__", {}).values(), *slots_in(value)]
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list | tuple | set | deque):
        items = value
    for item in items:
        yield from inside(item, depth - 1)
