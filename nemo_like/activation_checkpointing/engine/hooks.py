"""Callers' forward hooks on modules inside a region: one that only looks is called in forward, and not in recomputation.

A hook is part of the computation, and is called again, where it returns a value, draws random numbers, writes into its
arguments or its module, or has autograd save something. So are the others on the same module, since one may keep
something for another. Recomputation calls them even if they were removed since, as PEFT removes those that it puts on for
one call. Hooks of torch and of this package stay as they are. Where a hook writes elsewhere, and the layer
reads that, verification of the first step finds other numbers.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.rng import rng_state
from nemo_like._util.tensors import tensors_in
from nemo_like.torch_compat import GLOBAL_HOOKS

_recomputing = threading.local()


def is_recomputing() -> bool:
    """Return whether the calling code runs in the recomputation of a checkpointed layer, in backward.

    Use it in a layer that counts or collects by itself, because backward runs the layer a second time. It is always
    False in compiled code.

    >>> calls = []
    >>> class Counted(torch.nn.Linear):
    ...     def forward(self, x):
    ...         if not is_recomputing():
    ...             calls.append(1)
    ...         return super().forward(x)
    """
    return getattr(_recomputing, "depth", 0) > 0


@contextlib.contextmanager
def recomputation(runs: bool = True) -> Iterator[None]:
    """Within it `is_recomputing` is true, unless `runs` is False."""
    before = getattr(_recomputing, "depth", 0)
    _recomputing.depth = before + runs
    try:
        yield
    finally:
        _recomputing.depth = before


_TABLES = tuple(GLOBAL_HOOKS)
_FLAGS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


class _Instead(functools.partial[Any]):
    """In the place of a hook, which is its last argument."""


def _origin(hook: Any) -> Any:
    while isinstance(hook, _Instead):  # of a region around this one
        hook = hook.args[-1]
    return hook


class HookCalls:
    """Calls of hooks on some modules in one forward, and those of them that recomputation leaves out."""

    def __init__(self, owners: list[dict[str, Any]]) -> None:
        self._owners = owners
        # Each hook with its number, the table that has it, and the tables that have a flag of it.
        self._hooks = [
            ([fields[name], *(fields[flag] for flag in flags if key in fields.get(flag, ()))], key, hook)
            for fields in owners
            for name, flags in _FLAGS.items()
            for key, hook in fields[name].items()
            if not _is_known(hook)
        ]
        # By the hook's id, as not all can be hashed: for each call in forward, how many tensors autograd saved in it and
        # dropped; None: it is called again. `_hooks` keeps the hooks alive.
        self._calls: dict[int, list[int | None]] = {}
        self._kept: list[tuple[int, Any]] = []  # The outputs that the policy saved, with the hook's id.

    @contextlib.contextmanager
    def _in_place(self, around: Callable[..., Any]) -> Iterator[None]:
        """Within it `around(hook, ...)` is called in the place of each of the callers' hooks."""
        put = [
            (fields[name], key, hook, _Instead(around, hook))
            for fields in self._owners
            for name in _TABLES
            for key, hook in fields[name].items()
            if not _is_known(hook)
        ]
        for table, key, _, instead in put:
            table[key] = instead
        try:
            yield
        finally:
            for table, key, hook, instead in put:
                if table.get(key) is instead:  # it was not removed meanwhile
                    table[key] = hook

    @contextlib.contextmanager
    def in_forward(self, region: Any) -> Iterator[None]:
        """Within it the hooks' calls are noted; at its end it is decided which of them recomputation leaves out."""
        with self._in_place(functools.partial(self._note, region)):
            yield
        again: set[int] = set()
        for fields in self._owners:
            hooks = [id(_origin(hook)) for name in _TABLES for hook in fields[name].values()]
            again.update(hooks if any(None in self._calls.get(hook, ()) for hook in hooks) else ())
        again |= {hook for hook, calls in self._calls.items() if None in calls}
        for hook in again & self._calls.keys():
            self._calls[hook] = [None] * len(self._calls[hook])
        left_out = {id(entry) for hook, entry in self._kept if hook not in again}
        self._kept.clear()
        if left_out:
            region.kept[:] = [entry for entry in region.kept if id(entry) not in left_out]

    @contextlib.contextmanager
    def in_recomputation(self, region: Any) -> Iterator[None]:
        """Within it forward's hooks are there, and those that only looked are not called."""
        waiting = {hook: iter(calls) for hook, calls in self._calls.items()}

        def leave_out(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            packs = next(waiting.get(id(_origin(hook)), iter(())), 0)
            return hook(*args, **kwargs) if packs is None else region.pass_over(packs)

        removed = [(tables, key, hook) for tables, key, hook in self._hooks if key not in tables[0]]
        for tables, key, hook in removed:
            tables[0][key] = hook
            for flags in tables[1:]:
                flags[key] = True
        try:
            with self._in_place(leave_out):
                yield
        finally:
            for tables, key, _ in removed:
                for table in tables:
                    table.pop(key, None)

    def _note(self, region: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        packs, kept, before, drawn = len(region.handles), len(region.kept), _state(args), rng_state()
        result = hook(*args, **kwargs)
        looks = result is None and before == _state(args)
        looks = looks and all(map(_is_same, drawn, rng_state()))
        saves = any(handle() is not None for handle in region.handles[packs:])
        origin = id(_origin(hook))
        self._calls.setdefault(origin, []).append(len(region.handles) - packs if looks and not saves else None)
        self._kept += [(origin, entry) for entry in region.kept[kept:]]
        return result


def hook_calls(modules: list[dict[str, Any]]) -> HookCalls | None:
    """Return an object that notes calls of callers' hooks on modules with these attributes; None: no such hooks."""
    owners = [fields for fields in (*modules, GLOBAL_HOOKS) if fields["_forward_hooks"] or fields["_forward_pre_hooks"]]
    hooks = (hook for fields in owners for name in _TABLES for hook in fields[name].values())
    return None if all(map(_is_known, hooks)) else HookCalls(owners)


def _is_known(hook: Any) -> bool:
    hook = _origin(hook)
    while isinstance(hook, functools.partial):
        hook = hook.func
    package = getattr(hook, "__module__", None) or type(hook).__module__
    return package.partition(".")[0] in ("torch", "nemo_like")


def _is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def _state(args: tuple[Any, ...]) -> list[Any]:
    """Return the state that a hook which is called with `args` may change, as things to compare."""
    module: nn.Module = args[0]
    tensors = (*tensors_in(args[1:]), *module.parameters(), *module.buffers())
    versions = [(id(tensor), tensor._version) for tensor in tensors if not tensor.is_inference()]
    return [versions, [(name, id(value)) for name, value in vars(module).items()]]
