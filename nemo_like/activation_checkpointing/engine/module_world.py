"""What of a module steers its forward and is no argument: taken at forward, put back for replay, or its change named.

Put back: training flags, hooks, sub-modules that were exchanged, plain attributes and small plain containers (LoRA's
active adapter and scale, a counter), those of a configuration too, parameters and buffers that were exchanged
(`torch.func.functional_call`, an inner step), `requires_grad`. A parameter or buffer that was changed in place can't
be put back, so that raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine.deep_state import is_plain
from nemo_like.activation_checkpointing.engine.errors import RegionError
from nemo_like.activation_checkpointing.engine.kept import storages
from nemo_like.activation_checkpointing.engine.module_parts import (
    HOOKS,
    PLAIN_TENSORS,
    Snapshot,
    Taken,
    requires_grad_of,
    walk_of,
)

_version: Callable[[Tensor], int] = attrgetter("_version")
_ABSENT = object()
_PLAIN_OR_NONE = (*PLAIN_TENSORS, type(None))


class ModuleWorld:
    """The modules of a region as its forward finds them; of little cost where they are as in the forward before."""

    __slots__ = (
        "_counted",
        "_deep",
        "_flags",
        "_snapshot",
        "_versions",
        "generators",
        "halves",
        "outside",
        "stamp",
    )

    def __init__(self, module: nn.Module) -> None:
        walk, self._snapshot = walk_of(module)
        self._deep = walk.take_deep()
        self.stamp = walk.stamp
        self.outside = walk.outside[module.training]
        self.halves = walk.halves[module.training]
        self._flags = list(map(requires_grad_of, self._snapshot.parameters))
        self._versions: list[int] = []
        self.generators = walk.generators()
        """Of random numbers, among the attributes and the globals that methods name."""

    def forward_done(self) -> None:
        """Call after forward: changes from here on are others'."""
        self._versions = list(map(_version, self._snapshot.counted))

    def check(self, region: str, put_back: Callable[[dict[str, Any], str], bool]) -> None:
        """Raise RegionError for what was changed in place since forward, except where `put_back` says that it is."""
        counted = self._snapshot.counted
        if list(map(_version, counted)) == self._versions:
            return
        for tensor, version in zip(counted, self._versions):
            if tensor._version == version:
                continue
            for owner, name, holder in self._places(tensor):
                if put_back(owner, name):
                    continue
                what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise RegionError(
                    f"Region {region!r}: the {what} {name!r} of a {holder} was changed in place between forward and "
                    f"backward (version {version}, now {tensor._version}), so replay would compute with other values. "
                    "Change it after backward, or run forward again after the change."
                )

    @property
    def counted(self) -> list[Tensor]:
        """The parameters and buffers that `check` looks at."""
        return self._snapshot.counted

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` has the memory of one of `counted`."""
        memory = storages(tensor)
        return any(storages(other) & memory for other in self.counted)

    def _places(self, tensor: Tensor) -> Iterator[tuple[dict[str, Any], str, str]]:
        for state in self._snapshot.taken:
            for key, tensors in (("_parameters", state.parameters), ("_buffers", state.buffers)):
                for name, other in tensors.items():
                    if other is tensor:
                        yield state.part.own[key], name, state.part.name

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Put the modules into the state that forward found, until `stack` ends."""
        snapshot = self._snapshot
        if snapshot.is_untouched() or snapshot.is_current():
            stack.callback(_revert_all, snapshot, snapshot.copies_of_others())
        else:
            for state in snapshot.taken:
                _restore(state, stack)
        if self._deep is not None:
            self._deep.restore(stack)
        if list(map(requires_grad_of, snapshot.parameters)) != self._flags:
            for parameter, flag in zip(snapshot.parameters, self._flags):
                if parameter.requires_grad != flag:
                    stack.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(flag)


def _revert_all(snapshot: Snapshot, others: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """`_revert` for all parts, after a replay that began with the very same ones."""
    for own, before in others:
        _revert(own, before)
    if not snapshot.has_same_attributes():
        for own, before in snapshot.then():
            _revert(own, before)


def _restore(state: Taken, stack: contextlib.ExitStack) -> None:
    part = state.part
    own = part.own
    stack.callback(_revert, own, own.copy())
    if part.modules is not None:
        if own["_modules"] != part.modules:
            _exchange(own["_modules"], part.modules, stack)
        _restore_tensors(own["_parameters"], state.parameters, stack)
        _restore_tensors(own["_buffers"], state.buffers, stack)
        for position, hook in enumerate(HOOKS):
            hooks = state.hooks[position] if state.hooks is not None else {}
            if own[hook] != hooks:
                _exchange(own[hook], hooks, stack)
    if len(own) != len(part.names) or list(own) != part.names:
        for name in own.keys() - set(part.names):
            stack.callback(own.__setitem__, name, own.pop(name))  # whatever the replay makes under this name
    elif all(map(is_, part.get_watched(own), state.values)):
        return
    for name, value in zip(part.watched, state.values):
        now = own.get(name, _ABSENT)
        if now is not value and not (type(now) is type(value) and _is_plain(value) and now == value):
            own[name] = value


def _is_plain(value: Any) -> bool:
    kind: Any = type(value)
    return is_plain(kind)


def _revert(own: dict[str, Any], before: dict[str, Any]) -> None:
    """Take back what the replay and its preparation wrote into a module."""
    if len(own) == len(before) and all(map(is_, own.values(), before.values())):
        return
    for name in own.keys() - before.keys():
        del own[name]
    for name, value in before.items():
        if own.get(name, _ABSENT) is not value:
            own[name] = value


def _restore_tensors(target: dict[str, Any], wanted: dict[str, Any], stack: contextlib.ExitStack) -> None:
    for name, tensor in wanted.items():
        now = target.get(name)
        # Sharded to gathered is what FSDP does by itself, before this and in it.
        if now is not tensor and type(now) in _PLAIN_OR_NONE and type(tensor) in _PLAIN_OR_NONE:
            stack.callback(target.__setitem__, name, now)
            target[name] = tensor
    for name in target.keys() - wanted.keys():
        stack.callback(target.__setitem__, name, target.pop(name))


def _exchange(container: dict[Any, Any], contents: dict[Any, Any], stack: contextlib.ExitStack) -> None:
    stack.callback(_fill, container, container.copy())
    _fill(container, contents)


def _fill(container: dict[Any, Any], contents: dict[Any, Any]) -> None:
    container.clear()
    container.update(contents)


def module_of(function: Any) -> nn.Module | None:
    """The module that `function` is, or is a method of."""
    if isinstance(function, nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
