"""Callers' forward hooks: one that only looks on is called in forward, and not a second time in recomputation.

A hook is part of the computation, and is called again, where it returns a value or writes: into a tensor that it is given,
into its module or those below, into a context variable, or into autograd's graph. So are the others on the same module,
since one may keep something for another. Where a hook writes elsewhere, and the layer reads that, recomputation reads
the value written last: verification compares the numbers. Hooks of torch and of this package are always called again,
and so are hooks inside a module that is compiled by itself.
"""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_like._util.plain import inside, is_plain_value
from nemo_like._util.rng import rng_state, set_rng_state
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.engine.module_state import NOT_STATE, ModuleState, modules_in
from nemo_like.activation_checkpointing.engine.random_state import HostRandom, Learned, is_same_state
from nemo_like.torch_compat import GLOBAL_HOOKS, unseen

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
    """A caller's hook, and the callable in its place while a region runs."""

    __slots__ = ("calls", "hook", "kept", "key", "owner", "position", "run", "table")

    def __init__(self, owner: dict[str, Any], table: str, key: int, hook: Callable[..., Any]) -> None:
        self.owner, self.table, self.key, self.hook = owner, table, key, hook
        # For each call in forward, how many tensors autograd saved in it and dropped, and the states of random
        # numbers after it, where it drew some; None: it must be called again.
        self.calls: list[tuple[int, Any] | None] = []
        self.kept: list[Any] = []  # The outputs that the region's policy saved in these calls.
        self.position = 0
        self.run: Callable[[_Hook, tuple[Any, ...]], Any] | None = None

    def __call__(self, *args: Any) -> Any:
        return self.hook(*args) if self.run is None or torch.compiler.is_compiling() else self.run(self, args)


class HookCalls:
    """The calls of callers' hooks in one forward."""

    __slots__ = ("_hooks", "_learned", "_module")

    def __init__(self, hooks: list[_Hook], state: ModuleState, learned: Learned) -> None:
        self._hooks, self._module, self._learned = hooks, state, learned

    @contextlib.contextmanager
    def in_place(self, run: Callable[[_Hook, tuple[Any, ...]], Any]) -> Iterator[None]:
        """Within it `run` is called in the place of the hooks that are there still."""
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
        again = {id(hook.owner) for hook in self._hooks if None in hook.calls}
        every, self._hooks = self._hooks, [hook for hook in self._hooks if hook.calls and id(hook.owner) not in again]
        left_out = {id(entry) for hook in self._hooks for entry in hook.kept}
        if left_out:
            region.kept[:] = [entry for entry in region.kept if id(entry) not in left_out]
        for hook in every:
            hook.kept.clear()

    def in_recomputation(self, region: Any) -> contextlib.AbstractContextManager[None]:
        """Within it the hooks that only looked on are not called."""
        return self.in_place(functools.partial(_leave_out, region))

    def _note(self, region: Any, hook: _Hook, args: tuple[Any, ...]) -> Any:
        packs, kept = len(region.handles), len(region.kept)
        host, drawn = HostRandom(self._learned), rng_state()
        generators = [(generator, generator.get_state()) for generator in self._module.generators]
        before = _state(args)
        result = hook.hook(*args)
        now = _state(args)
        writes = len(before) != len(now) or not all(
            then is value or (is_plain_value(then) and then == value) for then, value in zip(before, now)
        )
        with unseen():
            writes = writes or not all(torch.equal(generator.get_state(), state) for generator, state in generators)
            drew = host.was_drawn_from() or not all(map(is_same_state, drawn, rng_state()))
        saves = any(handle() is not None for handle in region.handles[packs:])
        after = (rng_state(), HostRandom(self._learned)) if drew else None
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


def hook_calls(state: ModuleState, learned: Learned) -> HookCalls | None:
    """Return an object that notes calls of callers' hooks in a forward of `state`'s module; None: no such hooks."""
    owners = [*state.registered.hooked, GLOBAL_HOOKS] if any(GLOBAL_HOOKS.values()) else state.registered.hooked
    hooks = [
        _Hook(owner, table, key, hook)
        for owner in owners
        for table in GLOBAL_HOOKS
        for key, hook in owner[table].items()
        if not _is_known(hook)
    ]
    return HookCalls(hooks, state, learned) if hooks else None


def _is_known(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    package = getattr(hook, "__module__", None) or type(hook).__module__
    return package.partition(".")[0] in ("torch", "nemo_like") and not isinstance(hook, _Hook)


def _state(args: tuple[Any, ...]) -> list[Any]:
    """Return the state that a hook which is called with `args` may write, as things to compare."""
    attributes = [value for m in modules_in(args[0]) for name, value in vars(m).items() if name not in NOT_STATE]
    state: list[Any] = [*tensors_in(args[1:]), *attributes]
    for value in {id(value): value for value in attributes if not is_plain_value(value)}.values():
        state += inside(value, depth=3)
    for variable, value in contextvars.copy_context().items():
        state += (variable, value)
    return state + [item._version for item in state if isinstance(item, Tensor) and not item.is_inference()]
