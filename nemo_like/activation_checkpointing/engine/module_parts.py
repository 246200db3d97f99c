"""Parts of a region's modules to look at, found once and looked up before every forward.

A walk over a layer's modules and their attributes in Python costs more than a small layer's forward. So their parts are
remembered as a `Snapshot`. It is good for as long as all of it is the same, which is compared without a loop in Python.
The walk is repeated only where something differs.
"""

from __future__ import annotations

import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, call, eq, is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine.deep_state import DeepState, has_state, inside, is_plain, is_record
from nemo_like.activation_checkpointing.engine.halves import Halves
from nemo_like.activation_checkpointing.engine.random_state import all_names, is_generator, names_of_globals

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_hooks_of: Callable[[dict[str, Any]], tuple[dict[int, Any], ...]] = itemgetter(*HOOKS)
_REGISTERS = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
"""nn.Module's own attributes, and the lists in which nn.LSTM and its like have their parameters once more, as these are
gathered and freed; of the containers among them, those in `_TABLES` are looked at."""
NOT_STATE = _REGISTERS - {"_parameters", "_buffers", "_modules", "training"}
"""The attributes of `nn.Module` that its forward does not read, hooks among them."""
_TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)
_tables_of: Callable[[dict[str, Any]], tuple[dict[Any, Any], ...]] = itemgetter(*_TABLES)
_LEADING = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""The tables that are looked at even where they are empty. The others tell more of some hook; `nn.Module`'s own forward does
not look at them where there is none, and what only we look at has to be fetched from far away, region by region."""
_leading_of: Callable[[dict[str, Any]], tuple[dict[Any, Any], ...]] = itemgetter(*_LEADING)
_CONFIG = frozenset({"config", "cfg", "args", "hparams"})
"""The last word of the names of attributes that hold a configuration: its values are looked at as the module's own."""
PLAIN_TENSORS = (Tensor, nn.Parameter)


class Taken(NamedTuple):
    """One module, or configuration, as it was."""

    part: ModulePart
    values: tuple[Any, ...]
    """Values of the plain attributes and the configurations, in the order of `part.watched`."""
    parameters: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    hooks: list[dict[int, Any]] | None
    """In the order of `HOOKS`; None: there are none."""


class ModulePart:
    """The things to look at in one module, or in one configuration that modules share."""

    __slots__ = (
        "buffers",
        "deep",
        "generators",
        "get_looked_at",
        "get_watched",
        "kinds",
        "modules",
        "name",
        "names",
        "own",
        "watched",
    )

    def __init__(self, own: dict[str, Any], name: str, is_module: bool) -> None:
        self.own = own  # and not the module, which is a key of the table in which this is
        self.name = name
        self.names = list(own)
        self.kinds: list[Any] = list(map(type, own.values()))
        self.modules: dict[str, nn.Module | None] | None = own["_modules"].copy() if is_module else None
        self.buffers = list(own["_buffers"]) if is_module else []
        named = list(zip(self.names, self.kinds))
        self.watched = [name for name, kind in named if is_plain(kind) or _is_configuration(name, own[name])]
        """The attributes that a `Snapshot` may hold: others would live for longer, and their graphs."""
        self.get_watched = _getter(self.watched)
        self.get_looked_at = _getter([*self.watched, *_LEADING]) if is_module else self.get_watched
        free = [(name, kind) for name, kind in named if name not in _REGISTERS]
        # A module's own tensors are `BufferSnapshot`'s, and its configurations are parts themselves.
        self.deep = [
            name
            for name, kind in free
            if not (is_module and (name in self.watched or kind is Tensor))
            and (issubclass(kind, Tensor) or has_state(kind) or is_record(own[name]))
        ]
        """The attributes that `DeepState` looks into."""
        self.generators = [name for name, _ in free if name not in self.watched and any(_generators_in(own[name]))]

    def is_watched_whole(self) -> bool:
        """Return whether there are no attributes but those that are watched, and `nn.Module`'s own."""
        return _REGISTERS.union(self.watched).issuperset(self.names)

    def is_current(self) -> bool:
        """Return whether attributes and buffers were neither added nor taken away, and no attribute has another
        type."""
        attributes = self.own
        same = list(map(type, attributes.values())) == self.kinds and list(attributes) == self.names
        return same and (self.modules is None or list(attributes["_buffers"]) == self.buffers)

    def take(self) -> Taken:
        """The module as it is now, but for what its attributes lead to."""
        attributes = self.own
        if self.modules is None:
            return Taken(self, self.get_watched(attributes), {}, {}, None)
        hooks = _hooks_of(attributes)
        return Taken(
            self,
            self.get_watched(attributes),
            attributes["_parameters"].copy(),
            attributes["_buffers"].copy(),
            [hook.copy() for hook in hooks] if any(hooks) else None,
        )


def _getter(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    return itemgetter(*names) if len(names) > 1 else lambda attributes: tuple(attributes[name] for name in names)


class Snapshot:
    """All parts of a region's modules at one moment: good for every forward that finds the same.

    Objects are compared as Python compares lists: the same one is equal, and only others are asked. So a number that was
    exchanged for an equal one counts as the same.
    """

    __slots__ = (
        "_empty",
        "_entries",
        "_filled",
        "_filled_lengths",
        "_getters",
        "_keys",
        "_lengths",
        "_modules",
        "_others",
        "_others_then",
        "_owns",
        "_tables",
        "_values",
        "counted",
        "hooked",
        "parameters",
        "taken",
    )

    def __init__(self, parts: list[ModulePart]) -> None:
        self._owns = [part.own for part in parts]
        self._lengths = list(map(len, self._owns))
        self._getters = [part.get_looked_at for part in parts]
        self._values = list(map(call, self._getters, self._owns))
        self._others = [part for part in parts if not part.is_watched_whole()]
        self._others_then = self._others_now()
        self._modules = [part.own for part in parts if part.modules is not None]
        self._tables = list(chain.from_iterable(map(_tables_of, self._modules)))
        self._filled = [table for table in self._tables if table]
        self._empty = [table for table in chain.from_iterable(map(_leading_of, self._modules)) if not table]
        self._filled_lengths = list(map(len, self._filled))
        self._keys = list(chain.from_iterable(self._filled))
        self._entries = list(chain.from_iterable(map(dict.values, self._filled)))
        self.taken = [part.take() for part in parts]
        present = {id(t): t for state in self.taken for t in state.parameters.values() if t is not None}
        self.parameters = [tensor for tensor in present.values() if tensor.is_leaf]
        """Parameters with a flag to put back."""
        self.hooked = list(_hooked(self._owns[0], set())) if any(state.hooks for state in self.taken) else []
        """The attributes of modules with hooks, but for those inside of one that is compiled by itself."""
        tensors = chain.from_iterable(chain(state.parameters.values(), state.buffers.values()) for state in self.taken)
        self.counted = [t for t in tensors if t is not None and type(t) in PLAIN_TENSORS and not t.is_inference()]
        """Tensors with a version to compare."""

    def _others_now(self) -> list[Any]:
        """The types of all attributes of the parts that have some which are not watched."""
        return [list(map(type, part.own.values())) for part in self._others]

    def has_same_attributes(self) -> bool:
        """Return whether the parts have the same attributes, as far as these are watched, and as many."""
        return self._has_same_values() and (not self._others or self._others_now() == self._others_then)

    def is_untouched(self) -> bool:
        """Return whether all is the same, and there is nothing but what is watched: the quick way to tell that it
        holds."""
        return not self._others and not any(self._empty) and self._has_same_values() and self._has_same_entries()

    def is_current(self) -> bool:
        """`has_same_attributes`, and the very same parameters, buffers, modules and hooks."""
        return not any(self._empty) and self.has_same_attributes() and self._has_same_entries()

    def _has_same_values(self) -> bool:
        # No long lists are made: writing them takes longer than reading what is in them.
        if list(map(len, self._owns)) != self._lengths:
            return False
        try:
            return all(map(eq, map(call, self._getters, self._owns), self._values))
        except KeyError:  # one was taken away, and another one put in
            return False
        except RuntimeError:  # a table was exchanged, and the tensors in both are compared
            return False

    def _has_same_entries(self) -> bool:
        if list(map(len, self._filled)) != self._filled_lengths or not all(map(eq, chain(*self._filled), self._keys)):
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self._entries))

    def has_same_tables(self) -> bool:
        """Return whether parameters, buffers, modules and hooks are still in the dicts that `is_current` looks into."""
        return all(map(is_, chain.from_iterable(map(_tables_of, self._modules)), self._tables))

    def copies_of_others(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The attributes of those parts that have some which are not watched, each with a copy of now."""
        return [(part.own, part.own.copy()) for part in self._others]

    def then(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The attributes of every part, each with a copy of then; in it, what is not watched is as it is now."""
        for part, values, *_ in self.taken:
            watched, attributes = dict(zip(part.watched, values)), part.own
            yield (
                attributes,
                {
                    name: watched.get(name, attributes.get(name))
                    for name in part.names
                    if name in watched or name in attributes
                },
            )

    def may_be_remembered(self) -> bool:
        """Return whether nothing in it must go before the next forward: no graph, as what a functional call puts in
        has."""
        return all(not isinstance(entry, Tensor) or entry.is_leaf for entry in self._entries)


def _hooked(attributes: dict[str, Any], seen: set[int]) -> Iterator[dict[str, Any]]:
    compiled = attributes.get("_compiled_call_impl") is not None or "_orig_mod" in attributes["_modules"]
    if id(attributes) in seen or compiled:
        return
    seen.add(id(attributes))
    if any(_hooks_of(attributes)):
        yield attributes
    for child in attributes["_modules"].values():
        if child is not None and isinstance(vars(child).get("_parameters"), dict):
            yield from _hooked(vars(child), seen)


class Walk:
    """The parts of one layer's module and of all that is in it."""

    def __init__(self, root: nn.Module) -> None:
        self._parts: list[ModulePart] = []
        self._snapshot: Snapshot | None = None
        self.stamp = object()
        """Another one whenever an attribute has come, gone, or changed its type."""
        self.outside = {True: Outside(), False: Outside()}
        """By whether the module trains."""
        self.halves = {True: Halves(), False: Halves()}
        """The same."""
        self._global_generators: list[tuple[dict[str, Any], str]] = []
        self._shared: dict[type, _SharedNames] = {}
        self._configs: list[tuple[dict[str, Any], str, Any]] = []
        configs: dict[int, ModulePart] = {}
        for module in modules_in(root):
            self._global_generators += _named_by(type(module))
            self._shared[type(module)] = _containers_of(type(module))
            attributes = module.__dict__
            self._parts.append(ModulePart(attributes, type(module).__name__, is_module=True))
            for name, value in attributes.items():
                if _is_configuration(name, value):
                    self._configs.append((attributes, name, value))
                    if id(value) not in configs:
                        configs[id(value)] = ModulePart(value.__dict__, type(value).__name__, is_module=False)
        self._parts += configs.values()
        self._sort()

    def _sort(self) -> None:
        """Sort out the parts that have something to be looked at in every forward."""
        self._deep = [(part.own, name, part.name) for part in self._parts for name in part.deep]
        named = [(part.own, name) for part in self._parts for name in part.generators]
        self._generators = [*named, *self._global_generators]

    def take(self) -> Snapshot | None:
        """All of it as it is now; None where modules or configurations came or went, so that another walk is needed."""
        known = self._snapshot
        if known is not None and (known.is_untouched() or (known.has_same_tables() and known.is_current())):
            return known
        if any(attributes.get(name) is not value for attributes, name, value in self._configs):
            return None
        for index, part in enumerate(self._parts):
            if part.modules is not None and part.own["_modules"] != part.modules:
                return None
            if not part.is_current():
                if any(_is_configuration(name, value) for name, value in part.own.items()):
                    return None  # it may be new
                self._parts[index] = ModulePart(part.own, part.name, part.modules is not None)
                self.stamp = object()
        self._sort()
        snapshot = Snapshot(self._parts)
        self._snapshot = snapshot if snapshot.may_be_remembered() else None
        return snapshot

    def take_deep(self) -> DeepState | None:
        """Return the state of objects that the attributes lead to and that are not plain values."""
        return DeepState(self._deep) if self._deep else None

    def shared_containers(self) -> list[Any]:
        """Lists, dictionaries and sets outside of the modules that their methods can change."""
        return [known[name] for names in self._shared.values() for known, name in names if name in known]

    @property
    def kinds(self) -> Iterable[type]:
        """The classes of the modules."""
        return self._shared

    def forwards(self) -> list[Any]:
        """Return the functions that modules run instead of their class's forward."""
        return [part.own["forward"] for part in self._parts if "forward" in part.own]

    def generators(self) -> list[Any]:
        """Return the generators of random numbers in the attributes and the globals that methods name."""
        return [item for known, name in self._generators if name in known for item in _generators_in(known[name])]


requires_grad_of: Callable[[Tensor], bool] = attrgetter("requires_grad")
_walks: weakref.WeakKeyDictionary[nn.Module, Walk] = weakref.WeakKeyDictionary()


def walk_of(root: nn.Module) -> tuple[Walk, Snapshot]:
    """The walk over `root`, which is remembered, and what it finds now."""
    walk = _walks.get(root)
    snapshot = walk.take() if walk is not None else None
    if walk is None or snapshot is None:
        walk = _walks[root] = Walk(root)
        snapshot = walk.take()
        assert snapshot is not None
    return walk, snapshot


def modules_in(root: nn.Module) -> Iterator[nn.Module]:
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


_SharedNames = tuple[tuple[Mapping[str, Any], str], ...]
_CHANGEABLE = frozenset({list, dict, set, deque, defaultdict, Counter, OrderedDict})
_WITHOUT = ("torch", "nemo_like")
"""Packages whose modules change nothing outside of themselves in forward."""
_containers: weakref.WeakKeyDictionary[type, _SharedNames] = weakref.WeakKeyDictionary()


def _containers_of(kind: type) -> _SharedNames:
    """Return the plain containers that are attributes of a class of modules, or globals that its methods refer to.

    Each is a mapping and a name in it. Functions of the same file that the methods refer to count as their part.
    """
    if kind not in _containers:
        bases = () if kind.__module__.partition(".")[0] in _WITHOUT else kind.__mro__[: kind.__mro__.index(nn.Module)]
        containers: list[tuple[Mapping[str, Any], str]] = [
            (vars(base), name) for base in bases for name, value in vars(base).items() if type(value) in _CHANGEABLE
        ]
        waiting = [value for base in bases for value in vars(base).values() if isinstance(value, types.FunctionType)]
        seen = set(waiting)
        while waiting:
            function = waiting.pop()
            for name in all_names(function.__code__):
                value = function.__globals__.get(name)
                if type(value) in _CHANGEABLE and not name.startswith("__"):
                    containers.append((function.__globals__, name))
                elif isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
                    waiting += {value} - seen
                    seen.add(value)
        _containers[kind] = tuple({(id(known), name): (known, name) for known, name in containers}.values())
    return _containers[kind]


def _generators_in(value: object) -> Iterator[Any]:
    return filter(is_generator, inside(value, depth=3))


def _is_configuration(name: str, value: object) -> bool:
    """A dataclass or a namespace, or what is called a configuration: an object with plain attributes of its own."""
    if hasattr(type(value), "__dataclass_fields__") or isinstance(value, types.SimpleNamespace):
        return hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor)
    others = nn.Module | Tensor | type | types.ModuleType | types.FunctionType | dict
    return name.rpartition("_")[2] in _CONFIG and hasattr(value, "__dict__") and not isinstance(value, others)


# Which of the tensors that autograd saves in a module's forward come from elsewhere: learned from its first recomputation.
#
# Of those a region keeps a weak reference to the memory, to notice a change in place before backward (see
# `Region.check_same_version`). For the many that the forward makes itself that would take time and tell nothing.


class Outside:
    """Facts learned of one module; `indices` is None while nothing is known."""

    __slots__ = ("_count", "_stamp", "indices")

    def __init__(self) -> None:
        self._stamp: object = None
        self._count = 0
        self.indices: frozenset[int] | None = None

    def check(self, stamp: object) -> frozenset[int] | None:
        """`indices`, for a forward that begins; forgotten where `stamp` is another one (a mask is cached from now on)."""
        if stamp is not self._stamp:
            self._stamp, self.indices = stamp, None
        return self.indices

    def forward_done(self, count: int, used: frozenset[int] | None) -> None:
        """After a forward that saved `count` tensors and knew of `used`: another number is another forward."""
        if used is not None and used is self.indices and count != self._count:
            self.indices = None

    def learn(self, count: int, known: set[int]) -> None:
        """Learn from a recomputation of a forward that saved `count` tensors. Those in `known` were made in it, or are
        watched by others: parameters and buffers by `ModuleWorld`, arguments by `SavedInputs`."""
        self._count = count
        self.indices = frozenset(range(count)) - known
