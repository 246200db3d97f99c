"""Looks at the operators of a forward for the generators of random numbers that they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nemo_like.activation_checkpointing.engine.dispatch import ForwardMode, _Mode
from nemo_like.activation_checkpointing.engine.generators import Generators, are_given, key_of, learn
from nemo_like.op_lookup import Op


class _Watch(_Mode):
    def __init__(self, generators: Generators, key: Any) -> None:
        super().__init__()
        self.generators, self.key, self.given = generators, key, False

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("generator") is not None:
            self.given = self.generators.note(kwargs["generator"]) or self.given
        return func(*args, **kwargs) if kwargs else func(*args)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            learn(self.key, self.given)


class _PassBy(_Mode):
    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def as_watched(*watching: AbstractContextManager[Any] | None) -> Callable[[], AbstractContextManager[Any]]:
    """What makes, for a replay, the like of what was `watching` its forward.

    Some operators (the CTC loss, what asks `areAnyTensorSubclassLike` in C++) run other kernels under any dispatch mode.
    """
    return nullcontext if watching.count(None) == len(watching) else _PassBy


def watch_generators(
    generators: Generators | None, mode: ForwardMode | None, function: Any, arguments: Iterable[Any], own: Iterable[Any]
) -> AbstractContextManager[Any] | None:
    """The context for a forward of `function`: within it `generators` notes those that operators are given. None: no need.

    Those among its `arguments` and its modules' `own` are noted at once. `mode`, where the region has one, looks at
    every operator anyway, and is made to note them.
    """
    if mode is not None:
        mode.generators = generators
    if generators is None:
        return None
    generators.note_all((*arguments, *own))
    generators.note_named(function)
    key = key_of(function)
    return _Watch(generators, key) if mode is None and are_given(key) else None
