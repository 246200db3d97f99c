"""State that a module changes while it runs: recomputation must start from what forward started from, and change nothing.

Delayed FP8 scaling appends to an amax history, batch norm moves its running statistics: with a plain recomputation such
buffers are updated twice, and the second pass may compute with other scales than the first (TransformerEngine#1190).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.module_tree import every_module
from nemo_like.activation_checkpointing.engine.deep_state import is_plain_value
from nemo_like.activation_checkpointing.engine.handles import RegionError, storages
from nemo_like.activation_checkpointing.engine.module_parts import (
    HOOKS,
    PLAIN_TENSORS,
    Snapshot,
    Taken,
    requires_grad_of,
    walk_of,
)
from nemo_like.torch_compat import is_fake, sparse_parts

_SMALL = 1 << 16
"""Bytes up to which a buffer is copied before every forward. State that forward changes is small, as a rule (amax
histories, running statistics); what is large (masks, position tables) hardly ever changes."""

_known: weakref.WeakKeyDictionary[nn.Module, dict[bool, tuple[object, tuple[_Known, ...]]]] = (
    weakref.WeakKeyDictionary()
)
"""By module and training mode: the stamp of the module's attributes, and its buffers at that time."""


class _Known:
    """One buffer of a module, and whether a forward has been seen to change it."""

    __slots__ = ("changes", "name", "owner")

    def __init__(self, owner: dict[str, Tensor | None], name: str) -> None:
        self.owner, self.name, self.changes = owner, name, False


def _buffers_of(module: nn.Module) -> tuple[_Known, ...]:
    """The buffers, and the tensors that are plain attributes (a router's load)."""
    return tuple(
        _Known(owner, name)
        for child in every_module(module)
        for owner in (child._buffers, child.__dict__)
        for name, value in owner.items()
        if owner is child._buffers or type(value) is Tensor
    )


def _version(buffer: Tensor) -> int:
    """Return the number of times that `buffer` was changed in place; made in inference mode (a cached table), it cannot
    be."""
    return 0 if buffer.is_inference() else buffer._version


def copied_in_forward(module: nn.Module) -> int:
    """Bytes that a region of `module` copies before every forward, and drops after it where they did not change."""
    buffers = (known.owner.get(known.name) for known in _buffers_of(module))
    return sum(size for b in buffers if isinstance(b, Tensor) and (size := _bytes(b)) <= _SMALL)


class BufferSnapshot:
    """The buffers that `module` changes in its forward, as they were before it.

    The first forward of a module (once for training, once for evaluation mode) copies all its buffers and compares.
    Later ones copy the small buffers and those that were seen to change, and drop the copies of what did not change by
    identity and version. Modules without buffers, as most transformer layers are, cost nothing.
    """

    __slots__ = ("_before", "_copies", "_first", "_mode", "_module", "_same", "_stamp")

    def __init__(self, module: nn.Module, stamp: object = None) -> None:
        """`stamp` is another object than before when attributes of the modules have come, gone or changed their type."""
        self._module, self._mode, self._stamp = module, module.training, stamp
        known_at, known_buffers = _known.get(module, {}).get(self._mode, (None, None))
        if known_at is not stamp:
            known_buffers = None
        self._first = _buffers_of(module) if known_buffers is None else None
        self._before: list[tuple[_Known, Tensor, int, Tensor | None]] = []
        copies: dict[int, Tensor] = {}  # of a buffer that has two names, one
        for known in known_buffers or self._first or ():
            buffer = known.owner.get(known.name)
            if isinstance(buffer, Tensor):
                if id(buffer) not in copies and (self._first or known.changes or _bytes(buffer) <= _SMALL):
                    copies[id(buffer)] = buffer.detach().clone().requires_grad_(buffer.requires_grad)
                self._before.append((known, buffer, _version(buffer), copies.get(id(buffer))))
        self._copies: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self._same: list[tuple[dict[str, Any], str, Tensor, weakref.ref[Tensor], int]] = []
        """Plain attributes that forward left alone, for a later call may exchange them: a table that grows with a sequence,
        a style that the model computes and sets. Each without its graph, which must not live for longer; with the tensor
        itself and its version. `ModuleWorld` has the buffers."""

    def forward_done(self) -> bool:
        """Call after forward. Returns whether there is state to put back for recomputation.

        Raises RegionError for a large buffer that changes for the first time after forwards that left it alone.
        Recomputation has no copy of it to start from.
        """
        if self._first is not None:
            _known.setdefault(self._module, {})[self._mode] = self._stamp, self._first
        for known, buffer, version, copy in self._before:
            now = known.owner.get(known.name)
            changed = known.changes or now is not buffer or _version(buffer) != version
            # Writes through `.data` count no version, the values tell; once only, because the host waits for the device.
            changed = changed or (self._first is not None and copy is not None and _differs(now, copy))
            if not changed:
                if "_parameters" in known.owner:
                    kept = buffer if buffer.grad_fn is None else buffer.detach().requires_grad_()
                    self._same.append((known.owner, known.name, kept, weakref.ref(buffer), version))
                continue
            known.changes = True
            if copy is None and _version(buffer) != version:
                raise RegionError(
                    f"Buffer {known.name!r}, of {_bytes(buffer)} bytes, was changed in place inside a checkpointed region, "
                    "and earlier forwards had left it alone, so no copy was made to recompute from. Run this step again "
                    "(the buffer is copied from now on), or change the buffer outside of the layer."
                )
            kept = buffer.detach().requires_grad_(buffer.requires_grad) if copy is None else copy
            self._copies.append((known.owner, known.name, kept))
        self._before = []
        return bool(self._copies or self._same)

    @property
    def changes(self) -> bool:
        """Return whether the recomputation gets copies, whose versions start anew."""
        return bool(self._copies)

    def puts_back(self, owner: dict[str, Tensor | None], name: str) -> bool:
        """Return whether the recomputation gets a copy of this buffer as it was before forward."""
        return any(known is owner and at == name for known, at, _ in self._copies)

    def restore(self, stack: contextlib.ExitStack, region: str) -> None:
        """Give the module copies of its earlier buffers to change; when `stack` ends, the present ones are back.

        Raises RegionError for a plain attribute that was changed in place since forward.
        """
        clones = {id(copy): copy.clone() for _, _, copy in self._copies}
        for owner, name, copy in self._copies:
            stack.callback(owner.__setitem__, name, owner.get(name))
            owner[name] = clones[id(copy)]
        for owner, name, tensor, original, version in self._same:
            if _version(tensor) != version:
                raise RegionError(
                    f"Region {region!r}: the tensor in the attribute {name!r} was changed in place between forward and "
                    f"backward (version {version}, now {_version(tensor)}), so recomputation would compute with other "
                    "values. Set a new tensor instead, or change this one after backward."
                )
            now = owner.get(name)
            if now is not original():
                stack.callback(owner.__setitem__, name, now)
                owner[name] = tensor


def _parts(tensor: Tensor) -> list[Tensor]:
    return [tensor] if tensor.layout is torch.strided else sparse_parts(tensor)


def _bytes(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else sum(part.nbytes for part in sparse_parts(tensor))


def _differs(now: Tensor | None, before: Tensor) -> bool:
    if now is None or now.shape != before.shape or now.layout != before.layout:
        return True
    if is_fake(now):
        return False
    ours, theirs = _parts(now), _parts(before)
    return len(ours) != len(theirs) or not all(map(torch.equal, ours, theirs))


# What of a module steers its forward and is not an argument: taken at forward, put back for recomputation, or its
# change named.
#
# Put back: training flags, hooks, sub-modules that were exchanged, plain attributes and small plain containers (LoRA's
# active adapter and scale, a counter), those of a configuration too, parameters and buffers that were exchanged
# (`torch.func.functional_call`, an inner step), `requires_grad`. A parameter or buffer that was changed in place can't
# be put back, so that raises.

_parts_version: Callable[[Tensor], int] = attrgetter("_version")
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
        "walk",
    )

    def __init__(self, module: nn.Module) -> None:
        walk, self._snapshot = walk_of(module)
        self.walk = walk
        self._deep = walk.take_deep()
        self.stamp = walk.stamp
        self.outside = walk.outside[module.training]
        self.halves = walk.halves[module.training]
        self._flags = list(map(requires_grad_of, self._snapshot.parameters))
        self._versions: list[int] = []
        self.generators = walk.generators()
        """Generators of random numbers, among the attributes and the globals that methods name."""

    def forward_done(self) -> None:
        """Call after forward: changes from here on are others'."""
        self._versions = list(map(_parts_version, self._snapshot.counted))

    def check(self, region: str, put_back: Callable[[dict[str, Any], str], bool]) -> None:
        """Raise RegionError for what was changed in place since forward, except where `put_back` is true for it."""
        versions = list(map(_parts_version, self._snapshot.counted))
        for tensor, version in zip(self._snapshot.counted, self._versions) if versions != self._versions else ():
            if tensor._version == version:
                continue
            for owner, name, holder in self._places(tensor):
                if put_back(owner, name):
                    continue
                what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise RegionError(
                    f"Region {region!r}: the {what} {name!r} of a {holder} was changed in place between forward and "
                    f"backward (version {version}, now {tensor._version}), so recomputation would compute with other "
                    "values. Change it after backward, or run forward again after the change."
                )
        if self._deep is not None:
            self._deep.check(region)

    @property
    def hooked(self) -> list[dict[str, Any]]:
        """The attributes of the modules that have hooks."""
        return self._snapshot.hooked

    @property
    def counted(self) -> list[Tensor]:
        """The parameters and buffers that `check` looks at."""
        return self._snapshot.counted

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` has the memory of one of `counted`."""
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
    """`_revert` for all parts, after a recomputation that began with the very same ones."""
    for attributes, before in others:
        _revert(attributes, before)
    if not snapshot.has_same_attributes():
        for attributes, before in snapshot.then():
            _revert(attributes, before)


def _restore(state: Taken, stack: contextlib.ExitStack) -> None:
    part = state.part
    attributes = part.own
    stack.callback(_revert, attributes, attributes.copy())
    if part.modules is not None:
        if attributes["_modules"] != part.modules:
            _exchange(attributes["_modules"], part.modules, stack)
        _restore_tensors(attributes["_parameters"], state.parameters, stack)
        _restore_tensors(attributes["_buffers"], state.buffers, stack)
        for position, hook in enumerate(HOOKS):
            hooks = state.hooks[position] if state.hooks is not None else {}
            if attributes[hook] != hooks:
                _exchange(attributes[hook], hooks, stack)
    if len(attributes) != len(part.names) or list(attributes) != part.names:
        for name in attributes.keys() - set(part.names):
            stack.callback(
                attributes.__setitem__, name, attributes.pop(name)
            )  # whatever the recomputation makes under this name
    elif all(map(is_, part.get_watched(attributes), state.values)):
        return
    for name, value in zip(part.watched, state.values):
        now = attributes.get(name, _ABSENT)
        if now is not value and not (type(now) is type(value) and is_plain_value(value) and now == value):
            attributes[name] = value


def _revert(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    """Take back what the recomputation and its preparation wrote into a module."""
    if len(attributes) == len(before) and all(map(is_, attributes.values(), before.values())):
        return
    for name in attributes.keys() - before.keys():
        del attributes[name]
    for name, value in before.items():
        if attributes.get(name, _ABSENT) is not value:
            attributes[name] = value


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


def module_of(function: object) -> nn.Module | None:
    """The module that `function` is, or is a method of."""
    if isinstance(function, nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
