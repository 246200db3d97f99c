"""What there is to look at in the modules of a region, found once and looked up before every forward.

A walk over a layer's modules and their attributes in Python costs more than a small layer's forward. So what a module
consists of is remembered, and good for as long as it has the same attributes of the same types and the same children;
both are compared without a loop in Python.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine.containers import map_leaves
from nemo_like.activation_checkpointing.engine.generators import is_generator, names_of_globals

HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_hooks_of: Callable[[dict[str, Any]], tuple[dict[int, Any], ...]] = itemgetter(*HOOKS)
_REGISTERS = frozenset(vars(nn.Module()))
"""nn.Module's own attributes; of the containers among them, hooks, parameters, buffers and modules are looked at."""
_PLAIN = frozenset({
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, type, frozenset,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial,
})  # fmt: skip
_CONTAINERS = frozenset({list, dict, set, OrderedDict, defaultdict, deque})
_SMALL = 64
"""Entries up to which a container among a module's attributes is copied before every forward."""
SMALL_TENSOR = 1 << 16
"""Bytes up to which a tensor that is part of a module's state is copied before every forward."""
_CONFIG = frozenset({"config", "cfg", "args", "hparams"})
"""The last word of the names of attributes that hold a configuration: its values are looked at as the module's own."""
PLAIN_TENSORS = (Tensor, nn.Parameter)
_EMPTY: tuple[Any, ...] = ()


class Taken(NamedTuple):
    """One module, or configuration, as it was."""

    part: Part
    values: tuple[Any, ...]
    """Of the plain attributes, in the order of `part.plain`."""
    containers: list[tuple[str, Any, Any]] | tuple[()]
    """(name, container, a copy of it or its `Contents`); for a tuple, (name, tuple, None)"""
    parameters: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    hooks: list[dict[int, Any]] | None
    """In the order of `HOOKS`; None: there are none."""


class Part:
    """What is to be looked at in one module, or in one configuration that modules share."""

    __slots__ = ("buffers", "containers", "generators", "get", "kinds", "modules", "name", "names", "own", "plain", "tuples")

    def __init__(self, own: dict[str, Any], name: str, is_module: bool) -> None:
        self.own = own  # and not the module, which is a key of the table in which this is held
        self.name = name
        self.names = list(own)
        self.kinds = list(map(type, own.values()))
        self.modules: dict[str, nn.Module | None] | None = own["_modules"].copy() if is_module else None
        self.buffers = list(own["_buffers"]) if is_module else []
        named = list(zip(self.names, self.kinds))
        self.plain = [name for name, kind in named if kind in _PLAIN or issubclass(kind, enum.Enum)]
        self.get = itemgetter(*self.plain) if len(self.plain) > 1 else self._get_few
        free = [(name, kind) for name, kind in named if name not in _REGISTERS]
        self.tuples = [name for name, kind in free if kind is tuple]
        self.containers = [name for name, kind in free if kind in _CONTAINERS]
        self.generators = [name for name, _ in free if is_generator(own[name])]

    def _get_few(self, own: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(own[name] for name in self.plain)

    def is_current(self) -> bool:
        """Whether attributes and buffers were neither added nor taken away, and no attribute has another type."""
        own = self.own
        same = list(map(type, own.values())) == self.kinds and list(own) == self.names
        return same and (self.modules is None or list(own["_buffers"]) == self.buffers)

    def take(self) -> Taken:
        """The module as it is now."""
        own = self.own
        containers = [c for name in self.containers if (c := _taken_container(name, own[name])) is not None]
        for name in self.tuples:
            if all(type(item) in _PLAIN for item in own[name]):
                containers.append((name, own[name], None))
        if self.modules is None:
            return Taken(self, self.get(own), containers, {}, {}, None)
        hooks = _hooks_of(own)
        return Taken(
            self, self.get(own), containers, own["_parameters"].copy(), own["_buffers"].copy(),
            [hook.copy() for hook in hooks] if any(hooks) else None,
        )  # fmt: skip


def _taken_container(name: str, container: Any) -> tuple[str, Any, Any] | None:
    if len(container) > _SMALL:
        return None
    values = container.values() if isinstance(container, dict) else container
    if all(type(value) in _PLAIN for value in values):
        return name, container, container.copy()
    return name, container, Contents(container)


class Contents:
    """What a container with tensors in it (a list of losses, a router's loads) held."""

    __slots__ = ("_kept",)

    def __init__(self, container: Any) -> None:
        leaves: list[Any] = []
        map_leaves(leaves.append, container)
        # Other objects may hold the graph of an earlier step, which must not live for as long as this one.
        simple = all(type(leaf) in _PLAIN or isinstance(leaf, Tensor | nn.Module) for leaf in leaves)
        self._kept = map_leaves(_without_graph, container) if simple else None

    def for_replay(self, container: Any) -> Any:
        """Contents for `container` that a replay may change; where they can't be kept, those that it has now."""
        return container.copy() if self._kept is None else map_leaves(_small_copy, self._kept)


def _without_graph(leaf: Any) -> Any:
    return _small_copy(leaf.detach()).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _small_copy(leaf: Any) -> Any:
    """A small tensor's copy, since state is changed in place; a large one, hardly ever changed, itself."""
    if not isinstance(leaf, Tensor) or leaf.is_inference() or leaf.nbytes > SMALL_TENSOR:
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


class Walk:
    """The parts of one layer's module and of all that is in it."""

    def __init__(self, root: nn.Module) -> None:
        self.parts: list[Part] = []
        self._tensors: list[Tensor | None] = []
        self.parameters: list[Tensor] = []
        self.counted: list[Tensor] = []
        self.stamp = object()
        """Another one whenever an attribute has come, gone, or changed its type."""
        self.global_generators: list[tuple[dict[str, Any], str]] = []
        configs: dict[int, Part] = {}
        for module in _modules(root):
            self.global_generators += _named_by(type(module))
            own = module.__dict__
            self.parts.append(Part(own, type(module).__name__, is_module=True))
            for name, value in own.items():
                if id(value) not in configs and _is_configuration(name, value):
                    configs[id(value)] = Part(value.__dict__, type(value).__name__, is_module=False)
        self.parts += configs.values()

    def take(self) -> list[Taken] | None:
        """All of it as it is now; None where modules came or went, so that another walk is needed."""
        parts = self.parts
        for index, part in enumerate(parts):
            if part.modules is not None and part.own["_modules"] != part.modules:
                return None
            if not part.is_current():
                parts[index] = Part(part.own, part.name, part.modules is not None)
                self.stamp = object()
        taken = [part.take() for part in parts]
        self._find_tensors(taken)
        return taken

    def _find_tensors(self, taken: list[Taken]) -> None:
        """Which tensors have a flag to put back and a version to compare; as before where they are the same ones."""
        tensors: list[Tensor | None] = [*chain.from_iterable(
            chain(state.parameters.values(), state.buffers.values()) for state in taken
        )]  # fmt: skip
        if len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors)):
            return
        present = {id(t): t for state in taken for t in state.parameters.values() if t is not None}
        self.parameters = [tensor for tensor in present.values() if tensor.is_leaf]
        self.counted = [t for t in tensors if t is not None and type(t) in PLAIN_TENSORS and not t.is_inference()]
        # What a functional call puts in for a while has a graph, which must not live until the next forward.
        self._tensors = tensors if all(t is None or t.is_leaf for t in tensors) else []


requires_grad_of: Callable[[Tensor], bool] = attrgetter("requires_grad")
_walks: weakref.WeakKeyDictionary[nn.Module, Walk] = weakref.WeakKeyDictionary()


def walk_of(root: nn.Module) -> tuple[Walk, list[Taken]]:
    """The walk over `root`, which is remembered, and what it finds now."""
    walk = _walks.get(root)
    taken = walk.take() if walk is not None else None
    if walk is None or taken is None:
        walk = _walks[root] = Walk(root)
        taken = walk.take()
        assert taken is not None
    return walk, taken


def _modules(root: nn.Module) -> Iterator[nn.Module]:
    """`root` and all modules in it, each once; scripted ones have nothing that Python code could change."""
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [root]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in seen or not isinstance(module.__dict__.get("_parameters"), dict):
            continue
        seen.add(id(module))
        yield module
        waiting += reversed(module._modules.values())


_GlobalNames = tuple[tuple[dict[str, Any], str], ...]
_named: weakref.WeakKeyDictionary[type, _GlobalNames] = weakref.WeakKeyDictionary()


def _named_by(kind: type) -> _GlobalNames:
    """The global generators of random numbers that the methods of a class of modules refer to, as (globals, name)."""
    if kind not in _named:
        bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
        methods = [value for base in bases for value in vars(base).values() if isinstance(value, types.FunctionType)]
        _named[kind] = tuple((method.__globals__, name) for method in methods for name in names_of_globals(method))
    return _named[kind]


def _is_configuration(name: str, value: Any) -> bool:
    """A dataclass or a namespace, or what is called a configuration: an object with plain attributes of its own."""
    if hasattr(type(value), "__dataclass_fields__") or isinstance(value, types.SimpleNamespace):
        return hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor)
    others = nn.Module | Tensor | type | types.ModuleType | types.FunctionType | dict
    return name.rpartition("_")[2] in _CONFIG and hasattr(value, "__dict__") and not isinstance(value, others)
