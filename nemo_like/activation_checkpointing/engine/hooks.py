"""Callers' forward hooks: one that only looks on is called in forward, and not a second time in recomputation.

A hook is part of the computation, and is called again, where it returns a value or writes: into a tensor that it is given,
into its module or those below, into a context variable, or into autograd's graph. So is one that can write what the layer's
code, or another hook that is called again, reads: an object or a global that both name. Hooks of torch and of this package
are always called again, and so are hooks inside a module that is compiled by itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import dis
import functools
import gc
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.engine.ambient import rng_state, set_rng_state
from nemo_like.activation_checkpointing.engine.deep_state import inside, is_plain_value
from nemo_like.activation_checkpointing.engine.module_parts import NOT_STATE, modules_in
from nemo_like.activation_checkpointing.engine.module_state import ModuleWorld
from nemo_like.activation_checkpointing.engine.random_state import Generators, HostRandom, same_state
from nemo_like.torch_compat import GLOBAL_HOOKS, unseen

_PACKAGES = ("torch", "nemo_like")
_TABLES = ("_forward_pre_hooks", "_forward_hooks")
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


class _Hook:
    """A caller's hook, and what is in its place while a region runs."""

    __slots__ = ("calls", "hook", "kept", "key", "owner", "position", "run", "table")

    def __init__(self, owner: dict[str, Any], table: str, key: int, hook: Callable[..., Any]) -> None:
        self.owner, self.table, self.key, self.hook = owner, table, key, hook
        self.calls: list[tuple[int, Any] | None] = []
        """For each call in forward, how many tensors autograd saved in it and dropped, and the states of random numbers
        after it, where it drew some; None: it must be called again."""
        self.kept: list[Any] = []
        """The outputs that the region's policy saved in these calls."""
        self.position = 0
        self.run: Callable[[_Hook, tuple[Any, ...]], Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.run is None or torch.compiler.is_compiling():
            return self.hook(*args)
        return self.run(self, args)


class HookCalls:
    """The calls of callers' hooks in one forward."""

    __slots__ = ("_hooks", "_world")

    def __init__(self, hooks: list[_Hook], world: ModuleWorld) -> None:
        self._hooks, self._world = hooks, world

    @contextlib.contextmanager
    def in_place(self, run: Callable[[_Hook, tuple[Any, ...]], Any]) -> Iterator[None]:
        """Within it `run` is what is called in the place of the hooks that are there still."""
        for hook in self._hooks:
            hook.position, hook.run = 0, run
            if hook.owner[hook.table].get(hook.key) is hook.hook:
                hook.owner[hook.table][hook.key] = hook
        try:
            yield
        finally:
            for hook in self._hooks:
                hook.run = None
                if hook.owner[hook.table].get(hook.key) is hook:
                    hook.owner[hook.table][hook.key] = hook.hook

    @contextlib.contextmanager
    def in_forward(self, region: Any) -> Iterator[None]:
        """Within it the hooks' calls are noted; at its end it is decided which of them recomputation leaves out."""
        with self.in_place(functools.partial(self._note, region)):
            yield
        again = {hook: None in hook.calls for hook in self._hooks}
        read = set[object]().union(*map(_read_by, self._world.walk.kinds))
        read |= _reach(self._world.walk.forwards(), reads=True)
        read |= _reach([hook.hook for hook in self._hooks if again[hook]], reads=True)
        waiting = [hook for hook in self._hooks if not again[hook]]
        while read and (more := [hook for hook in waiting if read & _reach([hook.hook], reads=False)]):
            read |= _reach([hook.hook for hook in more], reads=True)
            waiting = [hook for hook in waiting if hook not in more]
        self._hooks = [hook for hook in waiting if hook.calls]
        left_out = {id(entry) for hook in self._hooks for entry in hook.kept}
        if left_out:
            region.kept[:] = [entry for entry in region.kept if id(entry) not in left_out]
        for hook in again:
            hook.kept.clear()

    def in_recomputation(self, region: Any) -> contextlib.AbstractContextManager[None]:
        """Within it the hooks that only looked on are not called."""
        return self.in_place(functools.partial(_leave_out, region))

    def _note(self, region: Any, hook: _Hook, args: tuple[Any, ...]) -> Any:
        packs, kept = len(region.handles), len(region.kept)
        generators, host = Generators(), HostRandom()
        generators.note_all(self._world.generators)
        before, drawn = _state(args), rng_state()
        result = hook.hook(*args)
        now = _state(args)
        writes = len(before) != len(now) or not all(map(_is_same, before, now))
        with unseen():
            drew = host.forget_unused() or not all(map(same_state, drawn, rng_state()))
            writes = writes or generators.forget_unused()
        saves = any(handle() is not None for handle in region.handles[packs:])
        after = (rng_state(), HostRandom()) if drew else None
        hook.calls.append(None if result is not None or writes or saves else (len(region.handles) - packs, after))
        hook.kept += region.kept[kept:]
        return result


def _leave_out(region: Any, hook: _Hook, args: tuple[Any, ...]) -> Any:
    position = hook.position
    hook.position += 1
    noted = hook.calls[position] if position < len(hook.calls) else None
    if noted is None:  # recomputation took another way
        return hook.hook(*args)
    packs, after = noted
    region.pass_over(packs)
    if after is not None:
        set_rng_state(after[0])
        after[1].put()
    return None


def hook_calls(world: ModuleWorld) -> HookCalls | None:
    """Return what notes the calls of callers' hooks in a forward of `world`'s module; None: it has none."""
    owners = [*world.hooked, GLOBAL_HOOKS] if any(GLOBAL_HOOKS.values()) else world.hooked
    hooks = [
        _Hook(owner, table, key, hook)
        for owner in owners
        for table in _TABLES
        for key, hook in owner[table].items()
        if not _is_known(hook)
    ]
    return HookCalls(hooks, world) if hooks else None


def _is_known(hook: Any) -> bool:
    """Return whether `hook` is torch's or this package's, which are called again."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    package = getattr(hook, "__module__", None) or type(hook).__module__
    return package.partition(".")[0] in _PACKAGES and not isinstance(hook, _Hook)


def _state(args: tuple[Any, ...]) -> list[Any]:
    """Return the state that a hook which is called with `args` may write, as things to compare."""
    modules = modules_in(args[0])
    attributes = [value for m in modules for name, value in vars(m).items() if name not in NOT_STATE]
    state: list[Any] = [*tensors_in(args[1:]), *attributes]
    for value in {id(value): value for value in attributes if not is_plain_value(value)}.values():
        state += inside(value, depth=3)
    for variable, value in contextvars.copy_context().items():
        state += (variable, value)
    return state + [item._version for item in state if isinstance(item, Tensor) and not item.is_inference()]


def _is_same(before: object, now: object) -> bool:
    return before is now or (is_plain_value(before) and before == now)


# The state that a hook may write, and that other code may read: objects by their id, cells, and globals by their name.

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, logging.Logger)
_by_class: weakref.WeakKeyDictionary[type, set[object]] = weakref.WeakKeyDictionary()


def _read_by(kind: type) -> set[object]:
    """Return what the methods of a class of modules may read."""
    if kind not in _by_class:
        bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in _PACKAGES]
        _by_class[kind] = _reach(
            (value for base in bases for value in vars(base).values() if _is_function(value)), True
        )
    return _by_class[kind]


def _reach(functions: Iterable[Any], reads: bool) -> set[object]:
    """Return what `functions` may read, or else what they may write."""
    reached: set[object] = set()
    seen: set[int] = set()
    waiting = [(function, True) for function in functions]
    while waiting:
        value, follow = waiting.pop()
        if id(value) in seen or isinstance(value, type | types.ModuleType | logging.Logger):
            continue
        seen.add(id(value))
        inner: list[Any] = []
        if isinstance(value, types.FunctionType):
            known, (names, stores) = value.__globals__, _names(value.__code__)
            used = {name: known[name] for name in names & known.keys() if not isinstance(known[name], _CODE)}
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or ()))
            reached |= {(id(known), n) for n, v in used.items() if reads or n in stores or not is_plain_value(v)}
            reached |= {id(cell) for name, cell in cells.items() if reads or name in stores}
            helpers = [known[n] for n in names & known.keys() if getattr(known[n], "__globals__", None) is known]
            contents = gc.get_referents(*cells.values())
            defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            inner = [*used.values(), *helpers, *contents, *defaults]
        elif isinstance(value, functools.partial):
            inner = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, _Hook):
            inner = [value.hook]
        elif isinstance(value, types.MethodType | tuple):
            inner = gc.get_referents(value)
        elif not is_plain_value(value):
            reached.add(id(value))
            if follow and not isinstance(value, nn.Module | Tensor):
                call = getattr(type(value), "__call__", None)  # noqa: B004 - its code is looked into
                inner = [call] if _is_function(call) else []
                waiting += [(item, False) for item in getattr(value, "__dict__", {}).values()]
        waiting += [(item, follow) for item in inner]
    return reached


def _is_function(value: object) -> bool:
    return isinstance(value, types.FunctionType)


@functools.lru_cache(4096)
def _names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the globals that `code` and the functions in it name, and the globals and outer variables that they set."""
    steps = [(step.opname, str(step.argval)) for part in _parts(code) for step in dis.get_instructions(part)]
    names = {name for operation, name in steps if operation in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    return names, {name for operation, name in steps if operation in ("STORE_GLOBAL", "STORE_DEREF")}


def _parts(code: types.CodeType) -> list[types.CodeType]:
    inside = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [code, *(part for inner in inside for part in _parts(inner))]
