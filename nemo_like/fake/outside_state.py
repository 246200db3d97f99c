"""State outside of a model that a run of it on copies or fake tensors must not change: context variables, remembered tables.

Attributes of classes, closures and globals that a forward changes are not looked for: they stay as it left them.
"""

import contextlib
import contextvars
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from types import CellType, FunctionType
from typing import Any, Self

from torch import nn

from nemo_like._util.log import warn_once
from nemo_like._util.tensors import tensors_in


@contextlib.contextmanager
def context_variables_put_back() -> Iterator[None]:
    """Within it, a forward may set context variables; they have their values again after it.

    One that was not set before and has no default cannot be put back, which a warning names.
    """
    before = contextvars.copy_context()
    try:
        yield
    finally:
        for variable, now in contextvars.copy_context().items():
            if variable in before:
                if before[variable] is not now:
                    variable.set(before[variable])
            else:
                _to_default(variable)


def _to_default(variable: contextvars.ContextVar[Any]) -> None:
    try:
        variable.set(contextvars.Context().run(variable.get))
    except LookupError:
        warn_once(
            f"The context variable {variable.name!r} was not set; a model's forward set it while it was planned or "
            "profiled, and it has no default to put back. Give it a default, or set it before."
        )


# Functions of a model's code that remember their results: `functools.lru_cache` around a table of positions.
#
# Their tables stay for the life of the process. A run on fake tensors must neither read tensors that a real step left
# there nor leave fake ones for the next, and has to count those that stay.


_NO_MODELS = ("builtins", "abc", "typing", "torch", "nemo_like")  # Packages whose classes are of no model.


class RememberedTables:
    """Each of these functions with a memory of its own, empty at first, wherever this context is entered.

    Results remembered inside stay with this object; those from before are the functions' again outside.

    Args:
        model: whose classes, and the Python modules of these, are looked through; None: nothing is.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._memories: dict[int, OrderedDict[Hashable, Any]] = {}
        self._places = [] if model is None else list(_places(model))
        self._before: list[Any] = []
        self._entered = 0

    def __enter__(self) -> Self:
        self._entered += 1
        if self._entered == 1:
            self._before = [vars(owner)[name] if name else owner.cell_contents for owner, name in self._places]
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
    every = {cls for module in model.modules() for cls in type(module).__mro__}
    classes = {cls for cls in every if cls.__module__.partition(".")[0] not in _NO_MODELS}
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


def _remembers(value: object) -> bool:
    return isinstance(value, Callable) and hasattr(value, "cache_parameters") and hasattr(value, "__wrapped__")  # type: ignore[arg-type]


def _table_content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _put(owner: Any, name: str, value: Any) -> None:
    if name:
        setattr(owner, name, value)
    else:
        owner.cell_contents = value
