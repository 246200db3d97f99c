"""State outside of a model that its code changes in forward: context variables, attributes of classes, closures, globals."""

from __future__ import annotations

import contextvars
import copy
import functools
import itertools
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.log import warn_once
from nemo_like._util.tensors import tensors_in
from nemo_like.fake.model_copy import SMALL

_LIBRARIES = ("builtins", "abc", "typing", "torch", "transformers", "peft", "nemo_like")
"""Whose classes are none of the model's own."""
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, set, deque, bytearray, *_MAPPINGS)
_COUNTERS = (random.Random, itertools.count, itertools.cycle)
_MOST = 1024
"""Entries up to which a container is copied."""
_ABSENT = object()


class OutsideState:
    """Within it, code of `model` changes its own state outside of the model; what callers have there is theirs again after.

    That is: context variables, attributes of the classes of `model` that are of no library, and what methods of these name
    in closures and globals. Containers, tensors and counters are copies within it. A context variable that was not set
    before and has no default cannot be put back, which a warning names.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        parts = () if model is None else model.modules()
        memories = {
            cls for part in parts for cls in type(part).__mro__ if cls.__module__.partition(".")[0] not in _LIBRARIES
        }
        self._classes = sorted(memories, key=str)
        functions = [
            value for cls in self._classes for value in map(_function, vars(cls).values()) if value is not None
        ]
        self._cells = list({id(cell): cell for function in functions for cell in function.__closure__ or ()}.values())
        self._globals = {
            (id(function.__globals__), name): function.__globals__
            for function in functions
            for name in function.__code__.co_names
        }
        self._before: list[list[Callable[[], None]]] = []

    def __enter__(self) -> OutsideState:
        memo: dict[int, Any] = {}
        put_back: list[Callable[[], None]] = []
        self._before.append(put_back)
        before = contextvars.copy_context()
        put_back.append(partial(_put_back_variables, before))
        for variable, value in before.items():
            if (copied := _apart(value, memo)) is not value:
                variable.set(copied)
        for cls in self._classes:
            attributes = dict(vars(cls))
            put_back.append(partial(_put_back_class, cls, attributes))
            for name, value in attributes.items():
                if (copied := _apart(value, memo)) is not value:
                    setattr(cls, name, copied)
        for cell in self._cells:
            value = _content(cell)
            put_back.append(partial(_put_back_cell, cell, value))
            if (copied := _apart(value, memo)) is not value:
                cell.cell_contents = copied
        for (_, name), table in self._globals.items():
            value = table.get(name, _ABSENT)
            put_back.append(partial(_put_back_item, table, name, value))
            if (copied := _apart(value, memo)) is not value:
                table[name] = copied
        return self

    def __exit__(self, *error: object) -> None:
        for function in self._before.pop():
            function()


def _function(value: object) -> FunctionType | None:
    value = getattr(value, "__func__", value)  # static methods and those of the class
    value = value.fget if isinstance(value, property) else value
    return value if isinstance(value, FunctionType) else None


def _apart(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of what can be changed in place: containers, tensors and counters; anything else itself."""
    kind = type(value)
    if id(value) in memo:
        return memo[id(value)]
    if kind in (Tensor, torch.Generator):
        copied = _own_copy(value)
    elif kind in _COUNTERS:
        copied = copy.copy(value)
    elif kind in _CONTAINERS and len(value) <= _MOST:
        copied = memo[id(value)] = copy.copy(value)
        if kind in _MAPPINGS:
            copied.update({key: _apart(item, memo) for key, item in value.items()})
        elif kind in (list, deque):
            copied.clear()
            copied.extend(_apart(item, memo) for item in value)
    else:
        return value
    memo[id(value)] = copied
    return copied


def _own_copy(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return value.detach().clone().requires_grad_(value.requires_grad) if value.numel() <= SMALL else value


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _ABSENT


def _put_back_variables(before: contextvars.Context) -> None:
    for variable, now in contextvars.copy_context().items():
        if variable in before:
            if before[variable] is not now:
                variable.set(before[variable])
            continue
        try:
            variable.set(contextvars.Context().run(variable.get))  # the default
        except LookupError:
            warn_once(
                f"The context variable {variable.name!r} was not set; a model's forward set it while it was planned or "
                "profiled, and it has no default to put back. Give it a default, or set it before."
            )


def _put_back_class(cls: type, attributes: dict[str, Any]) -> None:
    for name, now in list(vars(cls).items()):
        if name not in attributes:
            delattr(cls, name)
        elif attributes[name] is not now:
            setattr(cls, name, attributes[name])
    for name in attributes.keys() - vars(cls).keys():
        setattr(cls, name, attributes[name])


def _put_back_cell(cell: CellType, value: object) -> None:
    if value is not _ABSENT:
        cell.cell_contents = value
    elif _content(cell) is not _ABSENT:
        del cell.cell_contents


def _put_back_item(table: dict[str, Any], name: str, value: object) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


# Functions of a model's code that remember what they returned: `functools.lru_cache` around a table of positions.
#
# Their tables stay for the life of the process. A run on fake tensors must neither read what a real step left there nor
# leave
# fake tensors for the next one, and has to count what stays.


class RememberedTables:
    """Each of these functions with a memory of its own, empty at first, wherever this context is entered.

    What they remember inside stays with this object; what they remembered before is theirs again outside.

    Args:
        model: whose classes, and the Python modules of these, are looked through; None: nothing is.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._memories: dict[int, OrderedDict[Hashable, Any]] = {}
        self._places = [] if model is None else list(_places(model))
        self._before: list[Any] = []
        self._entered = 0

    def __enter__(self) -> RememberedTables:
        self._entered += 1
        if self._entered == 1:
            self._before = [_get(*place) for place in self._places]
            for place, value in zip(self._places, self._before):
                _put(*place, self._instead(value))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered -= 1
        if not self._entered:
            for place, value in zip(self._places, self._before):
                _put(*place, value)

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensors that are remembered inside."""
        storages = [t.untyped_storage() for t in tensors_in([[*memory.values()] for memory in self._memories.values()])]
        return sum({id(storage): storage.nbytes() for storage in storages}.values())

    def _instead(self, value: Any) -> Any:
        if isinstance(value, staticmethod | classmethod):
            return type(value)(self._instead(value.__func__))
        memory, most = self._memories.setdefault(id(value), OrderedDict()), value.cache_parameters()["maxsize"]

        @functools.wraps(value.__wrapped__)
        def remembering(*args: object, **kwargs: object) -> Any:
            key = (args, tuple(sorted(kwargs.items())))
            if key not in memory:
                memory[key] = value.__wrapped__(*args, **kwargs)
            memory.move_to_end(key)
            result = memory[key]
            while most is not None and len(memory) > most:
                memory.popitem(last=False)
            return result

        return remembering


def _places(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield where such functions are: (a class or a Python module, a name), or (a cell of a function that wraps one,
    "")."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if _of_a_model(cls)}
    modules = {cls.__module__ for cls in classes} & sys.modules.keys()
    owners: list[Any] = [*sorted(classes, key=str), *(sys.modules[name] for name in sorted(modules))]
    seen: set[int] = set()
    for owner in owners:
        home = owner.__module__ if isinstance(owner, type) else owner.__name__
        for name, value in list(vars(owner).items()):
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if getattr(function, "__module__", None) != home or id(function) in seen:
                continue  # imported: of no model
            seen.add(id(function))
            if _remembers(function):
                yield owner, name
            elif isinstance(function, FunctionType):
                yield from ((cell, "") for cell in function.__closure__ or () if _remembers(_table_content(cell)))


def _of_a_model(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in ("builtins", "abc", "typing", "torch", "nemo_like")


def _remembers(value: object) -> bool:
    return isinstance(value, Callable) and hasattr(value, "cache_parameters") and hasattr(value, "__wrapped__")  # type: ignore[arg-type]


def _table_content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _get(owner: Any, name: str) -> Any:
    return vars(owner)[name] if name else owner.cell_contents


def _put(owner: Any, name: str, value: Any) -> None:
    if name:
        setattr(owner, name, value)
    else:
        owner.cell_contents = value
