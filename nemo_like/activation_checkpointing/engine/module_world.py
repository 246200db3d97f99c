"""What of a module steers its forward and is no argument: taken at forward, put back for replay, or its change named.

Put back: training flags, hooks, plain attributes and small plain lists and dicts (LoRA's active adapter and scale, a
counter), parameters and buffers that were exchanged (`torch.func.functional_call`, an inner step), `requires_grad`.
A parameter or buffer that was changed in place can't be put back, so that raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine.errors import RegionError
from nemo_like.activation_checkpointing.engine.generators import is_generator
from nemo_like.torch_compat import version_of

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
_NONE = type(None)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, _NONE, torch.dtype, torch.device})
_PLAIN_TENSORS = (Tensor, nn.Parameter)
_SMALL = 64
"""Entries up to which a plain list or dict among a module's attributes is copied before every forward."""
_ABSENT = object()


class _State:
    """One module as it was before the forward; tensors of plain attributes are `BufferSnapshot`'s."""

    __slots__ = ("attributes", "buffers", "containers", "generators", "hooks", "module", "parameters")

    def __init__(self, module: nn.Module) -> None:
        own = module.__dict__
        self.module = module
        self.parameters = module._parameters.copy()
        self.buffers = module._buffers.copy()
        self.hooks = [(name, own[name].copy()) for name in _HOOKS]
        self.attributes: dict[str, Any] = {}
        self.containers: list[tuple[str, Any, Any]] = []
        self.generators: list[Any] = []
        for name, value in own.items():
            kind = type(value)
            if kind in _PLAIN or (kind is tuple and all(type(item) in _PLAIN for item in value)):
                self.attributes[name] = value
            elif (kind is dict or kind is list) and len(value) <= _SMALL and name not in _REGISTERED:
                values = value.values() if kind is dict else value
                if all(type(item) in _PLAIN for item in values):
                    self.containers.append((name, value, value.copy()))
            elif is_generator(value):
                self.generators.append(value)


_REGISTERED = frozenset({"_parameters", "_buffers", "_modules", *_HOOKS})


class ModuleWorld:
    """The modules of a region as its forward finds them. Costs some microseconds for each module."""

    __slots__ = ("_flags", "_states", "_versions", "generators")

    def __init__(self, module: nn.Module) -> None:
        self._states = [_State(child) for child in module.modules()]
        self.generators = [generator for state in self._states for generator in state.generators]
        parameters = {id(p): p for state in self._states for p in state.parameters.values() if p is not None}
        self._flags = [(p, p.requires_grad) for p in parameters.values() if p.is_leaf]
        self._versions: list[tuple[dict[str, Any], str, Tensor, int | None]] = []

    def forward_done(self) -> None:
        """Call after forward: changes from here on are others'."""
        self._versions = [
            (owner, name, tensor, version_of(tensor))
            for state in self._states
            for owner, tensors in ((state.module._parameters, state.parameters), (state.module._buffers, state.buffers))
            for name, tensor in tensors.items()
            if tensor is not None and type(tensor) in _PLAIN_TENSORS
        ]

    def check(self, region: str, put_back: Callable[[dict[str, Any], str], bool]) -> None:
        """Raise RegionError for what was changed in place since forward, except where `put_back` says that it is."""
        for owner, name, tensor, version in self._versions:
            now = version_of(tensor)
            if now != version and not put_back(owner, name):
                what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                holder = next(type(s.module).__name__ for s in self._states if any(owner is r for r in _registers(s.module)))
                raise RegionError(
                    f"Region {region!r}: the {what} {name!r} of a {holder} was changed in place between forward and "
                    f"backward (version {version}, now {now}), so replay would compute with other values. Change it "
                    "after backward, or run forward again after the change."
                )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within it the modules are as forward found them; after it as they were before."""
        with contextlib.ExitStack() as stack:
            for state in self._states:
                _restore(state, stack)
            for parameter, flag in self._flags:
                if parameter.requires_grad != flag:
                    stack.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(flag)
            yield


def _registers(module: nn.Module) -> tuple[Any, Any]:
    return module._parameters, module._buffers


def _restore(state: _State, stack: contextlib.ExitStack) -> None:
    own = state.module.__dict__
    for target, wanted in ((own["_parameters"], state.parameters), (own["_buffers"], state.buffers)):
        for name, tensor in wanted.items():
            now = target.get(name)
            # Sharded to gathered is what FSDP does by itself, before this and in it.
            if now is not tensor and (now is None or type(now) in _PLAIN_TENSORS) and type(tensor) in _PLAIN_TENSORS:
                stack.callback(target.__setitem__, name, now)
                target[name] = tensor
    for name, hooks in state.hooks:
        if own[name] != hooks:
            _exchange(own[name], hooks, stack)
    for name, container, contents in state.containers:
        if container != contents:
            _exchange(container, contents, stack)
        if own.get(name, _ABSENT) is not container:
            _set(own, name, container, stack)
    for name, value in state.attributes.items():
        now = own.get(name, _ABSENT)
        if now is not value and (type(now) is not type(value) or now != value):
            _set(own, name, value, stack)


def _set(own: dict[str, Any], name: str, value: Any, stack: contextlib.ExitStack) -> None:
    if name in own:
        stack.callback(own.__setitem__, name, own[name])
    own[name] = value


def _exchange(container: Any, contents: Any, stack: contextlib.ExitStack) -> None:
    present = container.copy()
    stack.callback(_fill, container, present)
    _fill(container, contents)


def _fill(container: Any, contents: Any) -> None:
    container.clear()
    container.update(contents) if hasattr(container, "update") else container.extend(contents)


def module_of(function: Any) -> nn.Module | None:
    """The module that `function` is, or is a method of."""
    if isinstance(function, nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
