"""The state of a module that steers its forward and is not an argument: taken at forward, put back for recomputation.

Put back: training flags, hooks, sub-modules that were exchanged, plain attributes and those of configurations (LoRA's active
adapter, a counter), containers (LoRA's scales), parameters and buffers that were exchanged (`torch.func.functional_call`,
an inner step), `requires_grad`. A parameter or buffer that was changed in place can't be put back, so that raises.

A walk over a layer's modules in Python costs more than a small layer's forward. So the modules are remembered, and so
are their sorted attributes, for as long as those have the same names and types.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.plain import is_plain_value
from nemo_like.activation_checkpointing.engine.containers import Attribute, Contents, has_state
from nemo_like.activation_checkpointing.engine.handles import RegionError

Own = dict[str, Any]  # The attributes of one module, or of one configuration.

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_TENSORS = ("_parameters", "_buffers")
_TABLES = (*_TENSORS, "_modules", *HOOKS)
_tables_of: Callable[[Own], tuple[dict[Any, Any], ...]] = itemgetter(*_TABLES)
_hooks_of: Callable[[Own], tuple[dict[Any, Any], ...]] = itemgetter(*HOOKS)
_children_of: Callable[[Own], dict[str, nn.Module | None]] = itemgetter("_modules")
# nn.Module's own attributes, and the lists in which nn.LSTM and its like have their parameters once more, as these
# are gathered and freed; of the containers among them, those in `_TABLES` are looked at.
_REGISTERS = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
# The attributes of `nn.Module` that its forward does not read, hooks among them.
NOT_STATE = _REGISTERS - {*_TENSORS, "_modules", "training"}
# The last word of the names of attributes that hold a configuration: its values are looked at as the module's own.
_CONFIG = frozenset({"config", "cfg", "args", "hparams"})
PLAIN_TENSORS = (Tensor, nn.Parameter)
_PLAIN_OR_NONE = (*PLAIN_TENSORS, type(None))
_ABSENT = object()
_version: Callable[[Tensor], int] = attrgetter("_version")
_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")


class ModuleState:
    """The modules of a region as its forward finds them."""

    __slots__ = ("_contents", "_flags", "_values", "_versions", "attributes", "registered", "walk")

    def __init__(self, module: nn.Module) -> None:
        self.walk = walk = walk_of(module)
        self.attributes = attributes = walk.attributes
        self.registered = walk.registered()
        self._values = list(map(call, attributes.getters, walk.owns))
        self._contents = Contents(attributes.containers) if attributes.containers else None
        self._flags = list(map(_requires_grad, self.registered.parameters))
        self._versions: list[int] = []

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators of random numbers in attributes."""
        return [fields[name] for fields, name in self.attributes.generators]

    def forward_done(self) -> None:
        """Call after forward: changes from here on are others'."""
        self._versions = list(map(_version, self.registered.counted))

    def check(self, region: str, put_back: Callable[[Own, str], bool]) -> None:
        """Raise RegionError for state changed in place since forward, except where `put_back` is true for it."""
        counted = self.registered.counted
        versions = list(map(_version, counted))
        for tensor, version in zip(counted, self._versions) if versions != self._versions else ():
            if tensor._version == version:
                continue
            for name, holder in self.registered.places(tensor, put_back):
                what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise RegionError(
                    f"Region {region!r}: the {what} {name!r} of a {self.walk.class_of(holder)} was changed in place between "
                    f"forward and backward (version {version}, now {tensor._version}), so recomputation would compute with "
                    "other values. Change it after backward, or run forward again after the change."
                )
        if self._contents is not None:
            self._contents.check(region, put_back)

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Put the modules into the state that forward found, until `stack` ends."""
        owns = self.walk.owns
        stack.callback(_put_back, owns, list(map(dict.copy, owns)))
        if not self.registered.is_current():
            self.registered.restore(stack)
        if not self._has_same_attributes():
            self._restore_attributes()
        if self._contents is not None:
            self._contents.restore(stack)
        if list(map(_requires_grad, self.registered.parameters)) != self._flags:
            for parameter, flag in zip(self.registered.parameters, self._flags):
                if parameter.requires_grad != flag:
                    stack.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(flag)

    def _has_same_attributes(self) -> bool:
        if list(map(list, self.walk.owns)) != self.attributes.names:
            return False
        now = map(call, self.attributes.getters, self.walk.owns)
        return all(map(is_, chain.from_iterable(now), chain(*self._values)))

    def _restore_attributes(self) -> None:
        attributes = self.attributes
        for fields, names, plain, values in zip(self.walk.owns, attributes.names, attributes.plain, self._values):
            for name in fields.keys() - set(names):
                del fields[name]
            for name, value in zip(plain, values):
                now = fields.get(name, _ABSENT)
                if now is not value and not (type(now) is type(value) and is_plain_value(value) and now == value):
                    fields[name] = value


def _put_back(owns: list[Own], before: list[Own]) -> None:
    """Undo writes of the recomputation and its preparation to attributes."""
    for fields, then in zip(owns, before):
        if len(fields) != len(then) or not all(map(is_, fields.values(), then.values())):
            fill(fields, then)


def fill(table: dict[Any, Any], contents: dict[Any, Any]) -> None:
    table.clear()
    table.update(contents)


class Registered:
    """The parameters, buffers, sub-modules and hooks of some modules, as they are now."""

    def __init__(self, modules: list[Own]) -> None:
        self._modules = modules
        self._tables = self._filled()
        self._contents = {(id(fields), key): fields[key].copy() for fields in modules for key in _TABLES if fields[key]}
        self._keys, self._entries = list(chain(*self._tables)), self._values(self._tables)
        tensors = [[fields[key] for fields in modules] for key in _TENSORS]
        parameters, buffers = ([t for t in self._values(tables) if t is not None] for tables in tensors)
        # Parameters with a flag to put back.
        self.parameters = [t for t in {id(t): t for t in parameters}.values() if t.is_leaf]
        # PEFT's adapter of a parameter (fused experts) writes a frozen one's own values into it at each forward.
        adapted = {fields.get("parameter_name") for fields in modules if "lora_A" in fields["_modules"]} - {None}
        held = [fields["_parameters"].get(name) for fields in modules for name in adapted]
        written = {id(t) for t in held if t is not None and not t.requires_grad}
        # Parameters and buffers with a version to compare.
        both = (t for t in (*parameters, *buffers) if type(t) in PLAIN_TENSORS and not t.is_inference())
        self.counted = [t for t in both if id(t) not in written]
        self._has_hooks = any(map(any, map(_hooks_of, modules)))
        # Nothing in it must go before the next forward: no graph, as tensors put in by a functional call have.
        self.may_be_remembered = all(not isinstance(entry, Tensor) or entry.is_leaf for entry in self._entries)

    def _filled(self) -> list[dict[Any, Any]]:
        return [table for table in chain.from_iterable(map(_tables_of, self._modules)) if table]

    @staticmethod
    def _values(tables: list[dict[Any, Any]]) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, tables)))

    def is_current(self) -> bool:
        """Return whether the very same entries are in the same tables."""
        tables = self._filled()
        if len(tables) != len(self._tables) or not all(map(is_, tables, self._tables)):
            return False
        values, keys = self._values(tables), list(chain(*tables))
        return keys == self._keys and all(map(is_, values, self._entries))

    @property
    def hooked(self) -> list[Own]:
        """The attributes of modules with hooks, but for those inside of one that is compiled by itself."""
        return list(_hooked(self._modules[0], set())) if self._has_hooks else []

    def places(self, tensor: Tensor, put_back: Callable[[Own, str], bool]) -> Iterator[tuple[str, Own]]:
        """The names of a parameter or buffer, with the attributes of the module, but for places that are `put_back`."""
        for fields in self._modules:
            for table in (fields[key] for key in _TENSORS):
                yield from (
                    (name, fields) for name, other in table.items() if other is tensor and not put_back(table, name)
                )

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Put the entries back until `stack` ends."""
        for fields in self._modules:
            for key in _TABLES:
                table, wanted = fields[key], self._contents.get((id(fields), key), {})
                if key in _TENSORS:
                    _restore_tensors(table, wanted, stack)
                elif table != wanted:
                    stack.callback(fill, table, table.copy())
                    fill(table, wanted)


def _restore_tensors(table: dict[str, Any], wanted: dict[str, Any], stack: contextlib.ExitStack) -> None:
    for name, tensor in wanted.items():
        now = table.get(name)
        # Sharded to gathered is FSDP's own change, made before this and in it.
        if now is not tensor and type(now) in _PLAIN_OR_NONE and type(tensor) in _PLAIN_OR_NONE:
            stack.callback(table.__setitem__, name, now)
            table[name] = tensor
    for name in table.keys() - wanted.keys():
        stack.callback(table.__setitem__, name, table.pop(name))


def _hooked(fields: Own, seen: set[int]) -> Iterator[Own]:
    if id(fields) in seen or fields.get("_compiled_call_impl") is not None or "_orig_mod" in fields["_modules"]:
        return
    seen.add(id(fields))
    if any(_hooks_of(fields)):
        yield fields
    for child in fields["_modules"].values():
        if child is not None and isinstance(vars(child).get("_parameters"), dict):
            yield from _hooked(vars(child), seen)


class Attributes:
    """The attributes of modules and configurations, sorted by their treatment; valid while these stay."""

    def __init__(self, walk: Walk, present: tuple[list[str], list[type]]) -> None:
        self.present = present
        self.names = list(map(list, walk.owns))
        # The attributes whose values may be held: others would live for longer, and their graphs.
        self.plain = [
            [n for n, v in fields.items() if is_plain_value(v) or _is_configuration(n, v)] for fields in walk.owns
        ]
        self.getters = list(map(_getter, self.plain))
        self.containers: list[Attribute] = []  # The attributes that `Contents` looks into.
        self.generators: list[tuple[Own, str]] = []
        for number, (fields, plain) in enumerate(zip(walk.owns, self.plain)):
            is_module = number < walk.count
            free = [(name, value) for name, value in fields.items() if name not in _REGISTERS]
            self.generators += [(fields, name) for name, value in free if isinstance(value, torch.Generator)]
            for name, value in free:
                # A module's configurations are looked at as it is.
                if not (is_module and name in plain) and (isinstance(value, Tensor) or has_state(value)):
                    self.containers.append((fields, name, walk.class_of(fields)))


def _getter(names: list[str]) -> Callable[[Own], tuple[Any, ...]]:
    return itemgetter(*names) if len(names) > 1 else lambda fields: tuple(fields[name] for name in names)


class Walk:
    """The modules of one layer and their configurations."""

    def __init__(self, root: nn.Module) -> None:
        # Attributes of the modules, then of the configurations. Not the modules: one is a key of the table of walks.
        self.owns: list[Own] = []
        self._classes: dict[int, str] = {}
        for module in modules_in(root):
            self._add(vars(module), module)
        self._configs = list(_configurations(self.owns))
        self._modules = self.owns.copy()
        self.count = len(self._modules)  # Modules among `owns`.
        for config in {id(value): value for _, _, value in self._configs}.values():
            self._add(vars(config), config)
        self._children = list(map(dict.copy, map(_children_of, self._modules)))
        self.attributes = Attributes(self, self._present())  # The attributes as `look` saw them last.
        self._registered: Registered | None = None

    def _add(self, fields: Own, owner: object) -> None:
        self.owns.append(fields)
        self._classes[id(fields)] = type(owner).__name__

    def class_of(self, fields: Own) -> str:
        """Return the name of the class whose instance has these attributes."""
        return self._classes[id(fields)]

    def look(self) -> bool:
        """Look at the attributes of now; returns whether the modules and configurations are those of the walk still.

        `attributes` is another object where an attribute or a buffer has come or gone, or changed its type.
        """
        exchanged = any(fields.get(name) is not value for fields, name, value in self._configs)
        if exchanged or list(map(_children_of, self._modules)) != self._children:
            return False
        present = self._present()
        if self.attributes.present != present:
            if len(list(_configurations(self._modules))) != len(self._configs):
                return False
            self.attributes = Attributes(self, present)
        return True

    def _present(self) -> tuple[list[str], list[type]]:
        buffers = [fields["_buffers"] for fields in self._modules]
        return list(chain(*self.owns, *buffers)), list(map(type, chain.from_iterable(map(dict.values, self.owns))))

    def registered(self) -> Registered:
        """Return the parameters, buffers, sub-modules and hooks of now."""
        known = self._registered
        if known is None or not known.is_current():
            known = Registered(self._modules)
            self._registered = known if known.may_be_remembered else None
        return known


_walks: weakref.WeakKeyDictionary[nn.Module, Walk] = weakref.WeakKeyDictionary()


def walk_of(root: nn.Module) -> Walk:
    """Return the walk over `root`, which is remembered."""
    walk = _walks.get(root)
    if walk is None or not walk.look():
        walk = _walks[root] = Walk(root)
    return walk


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


def module_of(function: object) -> nn.Module | None:
    """The module that `function` is, or is a method of."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _configurations(owns: list[Own]) -> Iterator[tuple[Own, str, Any]]:
    return (
        (fields, name, value) for fields in owns for name, value in fields.items() if _is_configuration(name, value)
    )


def _is_configuration(name: str, value: object) -> bool:
    """A dataclass, a namespace, or an object named as a configuration that has attributes of its own."""
    if hasattr(type(value), "__dataclass_fields__") or isinstance(value, types.SimpleNamespace):
        return hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor)
    others = nn.Module | Tensor | type | types.ModuleType | types.FunctionType | dict
    return name.rpartition("_")[2] in _CONFIG and hasattr(value, "__dict__") and not isinstance(value, others)
