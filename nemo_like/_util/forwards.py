"""Objects in `module.forward`: all that this package runs around a module's forward has one small base.

1. A module has a chain of them, the outermost in ``module.forward``, in the order of `Place` and not of the calls that put
   them there. The chain ends with the callable that was there before, or with the forward of the module's class.
2. The class is looked up at each call, because `fully_shard` exchanges it.
3. An object refers to its module weakly. Otherwise ``del model`` would free no weight before Python's collector runs.
4. A copy of a module, or an unpickled one, has copies of the objects, which refer to the copy.
5. Hooks of the module run outside of all of them, once in forward, and not in a recomputation.
6. A forward that others set on the module later is put at the end of the chain (`put_back`), where it runs as in a
   module without one.
"""

import enum
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, MethodType
from typing import Any, ClassVar, TypeVar

from torch import nn

Step = TypeVar("Step", bound="Forward")


class Place(enum.IntEnum):
    """Places in the chain, from outside to inside."""

    AUTOCAST = 0
    OFFLOADING = 1
    COMPILED_WITH_REGION = 2
    REGION = 3
    COMPILED = 4
    CALL = 5
    """The forward itself: of a pipeline's stage, of experts that ranks split."""


class Forward:
    """One object around, or in place of, the forward of `module`; see the rules above."""

    place: ClassVar[Place] = Place.CALL
    word: str = ""
    """Shown in parentheses when the chain is printed."""
    does: str = ""
    """Behind `word` in the log."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.inner: Callable[..., Any] | None = None

    @property
    def module(self) -> nn.Module:
        """The module whose forward this is."""
        module = self._module()
        assert module is not None  # which is being called, or copied
        return module

    @property
    def is_alive(self) -> bool:
        """Return whether the module is there still; another one may be in its place."""
        return self._module() is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; subclasses do something around `call`, or in its place."""
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the next object of the chain, or at its end the forward of the module's class."""
        inner = self.inner
        if inner is not None:
            return inner(*args, **kwargs)
        module: Any = self._module()
        return type(module).forward(module, *args, **kwargs)

    @property
    def next(self) -> Callable[..., Any]:
        """The next callable of the chain; the module's own forward is bound to it."""
        return MethodType(type(self.module).forward, self.module) if self.inner is None else self.inner

    def put(self: Step) -> Step:
        """Put this object at its place in the chain of its module; outside of others that have the same place."""
        module, outer = self.module, None
        inner = vars(module).get("forward")
        while isinstance(inner, Forward) and inner.place < self.place:
            outer, inner = inner, inner.inner
        self.inner = inner
        if outer is None:
            module.forward = self
        else:
            outer.inner = self
        return self

    @contextmanager
    def in_place(self: Step) -> Iterator[Step]:
        """Put this object in the chain, and take it out again when the context ends."""
        try:
            yield self.put()
        finally:
            chain = _chain(vars(self.module)["forward"])
            if (outer := next((step for step in chain if step.inner is self), None)) is not None:
                outer.inner = self.inner
            elif self.inner is not None:
                self.module.forward = self.inner
            else:
                del self.module.forward

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.next)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _module=weakref.ref(state["_module"]))

    def __repr__(self) -> str:
        words = [step.word for step in _chain(self) if step.word]
        return f"{type(self.module).__name__} ({', '.join(words)})"


def step_of(module: nn.Module, kind: type[Step]) -> Step | None:
    """Return the object of this kind in the chain of `module`, or None."""
    return next((step for step in _chain(vars(module).get("forward")) if isinstance(step, kind)), None)


def put_back(known: Forward) -> Forward:
    """Put a forward that others have set on the module since at the end of the chain, unless that one calls the chain.

    Returns the outermost object; `known` is the one that was, or another of the chain.
    """
    forward = vars(known.module).get("forward")
    if isinstance(forward, Forward) and any(step is known for step in _chain(forward)):
        return forward
    if not _reaches([forward, *vars(known.module).values()], known, depth=4):
        *_, last = _chain(known)
        last.inner = forward
        known.module.forward = known
    return known


def _reaches(values: Iterable[Any], target: Forward, depth: int) -> bool:
    """Return whether one of `values` is a chain with `target`, or a function or partial function that holds one."""
    for value in values if depth else ():
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell != CellType()]
        parts = [getattr(value, name, None) for name in ("__wrapped__", "__func__", "__self__", "func")]
        parts += getattr(value, "args", ()) if isinstance(value, partial) else ()
        inside = [part for part in (*cells, *parts) if callable(part)]
        if any(step is target for step in _chain(value)) or _reaches(inside, target, depth - 1):
            return True
    return False


def is_compiled(module: nn.Module) -> bool:
    """Return whether the forward of `module` is one compiled graph."""
    return any(
        step.place in (Place.COMPILED_WITH_REGION, Place.COMPILED) for step in _chain(vars(module).get("forward"))
    )


def sentences(model: nn.Module) -> list[str]:
    """Return the objects around forwards of `model`, with counts: ``"full checkpointing on 32 LlamaDecoderLayer"``."""
    counts = Counter(
        (f"{step.word} {step.does}".strip(), type(module).__name__)
        for module in model.modules()
        for step in _chain(vars(module).get("forward"))
        if step.word
    )
    return [f"{text} on {count} {kind}" for (text, kind), count in counts.items()]


def _chain(forward: object) -> Iterator[Forward]:
    while isinstance(forward, Forward):
        yield forward
        forward = forward.inner
