"""The state of a module that its forward reads and that is not an argument: restored for the recomputation, or refused.

Restored: plain attributes and those of configurations (training flags, the active adapter, a counter), `requires_grad`,
parameters and buffers that were exchanged (`torch.func.functional_call`). Everything else that a module holds (lists,
dicts, tensors in them, sub-modules) has a sign, made of identity, length and the version of tensors: no model was seen to
change it (`docs/evidence/restored-state.md`), and if it changes, `RegionError` names it. Nothing is copied for that.

A walk over a layer's modules in Python costs more than a small layer's forward. So the modules are remembered, for as long
as their children are the same.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.forwards import Forward
from nemo_like._util.plain import is_plain, is_plain_value
from nemo_like.activation_checkpointing.engine.containers import refill
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.torch_compat import version_of

Own = dict[str, Any]  # The attributes of one module, or of one configuration.

# The last word of the names of attributes that hold a configuration: its values are looked at as the module's own.
_CONFIG = frozenset({"config", "cfg", "args", "hparams"})
_CONTAINERS = (dict, list, tuple, set, deque)
_MOST = 64  # Entries of a container that are in its sign, besides their number.
PLAIN_TENSORS = (Tensor, nn.Parameter)
_PLAIN_OR_NONE = (*PLAIN_TENSORS, type(None))
_version: Callable[[Tensor], int] = attrgetter("_version")
_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
_children_of: Callable[[Own], dict[str, nn.Module | None]] = itemgetter("_modules")
_tables_of: Callable[[Own], tuple[dict[str, Any], ...]] = itemgetter("_parameters", "_buffers")


class _Kinds(dict[type, bool]):
    """By type, whether values of it may be held and restored: others would live for longer, and their graphs."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = is_plain(kind)
        return self[kind]


_kinds = _Kinds()
# Attributes of `nn.Module` itself that are not held, and lists in which nn.LSTM has its parameters once more.
_REGISTERS = {name for name, value in vars(nn.Module()).items() if not is_plain_value(value)}
_AGAIN = {"_flat_weights", "_flat_weight_refs"}


class ModuleState:
    """The modules of a region as its forward finds them."""

    __slots__ = ("_flags", "_held", "_names", "_signs", "_tensors", "_there", "_values", "_versions", "walk")

    def __init__(self, module: nn.Module) -> None:
        self.walk = walk = walk_of(module)
        self._tensors = walk.tensors()
        self._names = list(map(tuple, walk.owns))
        self._values = [{n: v for n, v in fields.items() if _kinds[type(v)]} for fields in walk.owns]
        self._flags = list(map(_requires_grad, self._tensors.parameters))
        # Containers of plain values: one that is exchanged is restored, and one that is changed in place has a sign.
        self._there = self._others()  # for as long as forward runs
        self._held = {key: value for key, value in self._there.items() if _is_of_plain(value)}
        self._signs = self._look(self._there)
        self._versions: list[int] = []

    def _look(self, others: dict[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
        """Return the signs of `others`, of which tensors are buffers to `BufferSnapshot`."""
        now = {key: self._held.get(key, value) for key, value in others.items()}
        return {key: _sign(value) for key, value in now.items() if not isinstance(value, Tensor | nn.Module)}

    def _others(self) -> dict[tuple[int, str], Any]:
        """Return the attributes that are not plain values, by the number of their owner and name."""
        return {
            (number, name): fields[name]
            for number, (fields, values) in enumerate(zip(self.walk.owns, self._values))
            if len(fields) - len(values) != len(_REGISTERS) or number >= self.walk.count
            for name in fields.keys() - values.keys() - _REGISTERS - _AGAIN
            if not isinstance(fields[name], Forward)  # this package's own, of the region itself for one
        }

    def buffers(self) -> list[tuple[dict[str, Any], str]]:
        """Return the tables and names of buffers, and of tensors that are plain attributes (a router's load)."""
        registered = [(table, name) for table in self.walk.tables[1::2] for name in table]
        attributes = [(self.walk.owns[n], name) for (n, name), value in self._others().items() if type(value) is Tensor]
        return registered + attributes

    def containers(self) -> list[Any]:
        """Return the lists, dicts, sets and queues among the attributes."""
        return [value for value in self._others().values() if isinstance(value, list | dict | set | deque)]

    def forward_done(self) -> None:
        """Call after forward: changes from here on are others'.

        Raises:
            RegionError: something that is not restored was changed, and earlier forwards had left it alone.
        """
        self._versions = list(map(_version, self._tensors.counted))
        now = self._others()
        before, self._signs = self._signs, self._look(now)
        there, self._there = self._there, {}
        if there:
            # In place: an attribute that forward sets again is that of forward again after the recomputation.
            changed = {
                key for key, sign in self._signs.items() if now[key] is there.get(key) and sign != before.get(key)
            }
            known = self.walk.changing
            self.walk.changing = changed if known is None else known
            if known is not None and not changed <= known:
                raise RegionError(self._sentence(min(changed - known), "inside a checkpointed region"))

    def changed_in_forward(self) -> str:
        """Return a sentence about attributes that are not restored and that forward itself changes, or nothing."""
        names = [f"{name!r} of a {self.walk.kinds[number]}" for number, name in sorted(self.walk.changing or ())]
        return f"Forward changes {', '.join(names)}, which recomputation finds changed.\n" if names else ""

    def check(self, region: str, restored: Callable[[Own, str], bool]) -> None:
        """Raise RegionError for state that was changed since forward, and is not restored, by this or by `restored`."""
        counted = self._tensors.counted
        versions = list(map(_version, counted))
        for tensor, version in zip(counted, self._versions) if versions != self._versions else ():
            for number, table in self._tensors.places(tensor) if tensor._version != version else ():
                name = next(name for name, other in table.items() if other is tensor)
                if not restored(table, name):
                    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    raise RegionError(
                        f"Region {region!r}: the {kind} {name!r} of a {self.walk.kinds[number]} was changed in place "
                        f"between forward and backward (version {version}, now {tensor._version}), so recomputation would "
                        "compute with other values. Change it after backward, or run forward again after the change."
                    )
        for number, children in enumerate(self.walk.children):
            for name, child in children.items():
                if self.walk.owns[number]["_modules"].get(name) is not child:
                    raise RegionError(
                        f"Region {region!r}: the sub-module {name!r} of a {self.walk.kinds[number]} was exchanged between "
                        "forward and backward, so recomputation would run another one. Exchange it after backward."
                    )
        self.check_signs(region, "between forward and backward")

    def check_signs(self, region: str, when: str) -> None:
        """Raise RegionError where something that is not restored was changed `when`."""
        now = self._look(self._others()) if self._signs else {}
        if key := next((key for key, sign in self._signs.items() if now.get(key) != sign), None):
            raise RegionError(f"Region {region!r}: {self._sentence(key, when)}")

    def _sentence(self, key: tuple[int, str], when: str) -> str:
        number, name = key
        kind = type(self.walk.owns[number].get(name)).__name__
        return (
            f"the attribute {name!r} of a {self.walk.kinds[number]}, a {kind}, was changed {when}, and recomputation would "
            "compute with other values, or change it twice. Keep its contents in a buffer or a plain attribute, which are "
            "restored, or change it under `if not nemo_like.is_recomputing()`."
        )

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Put the modules into the state that forward found, until `stack` ends."""
        stack.callback(_put_back, self.walk.owns, list(map(dict.copy, self.walk.owns)))
        self._tensors.restore(stack)
        for fields, names, values in zip(self.walk.owns, self._names, self._values):
            if len(fields) != len(names):
                for name in fields.keys() - set(names):
                    del fields[name]
            fields.update(values)
        for (number, name), value in self._held.items():
            self.walk.owns[number][name] = value
        for parameter, flag in zip(self._tensors.parameters, self._flags):
            if parameter.requires_grad != flag:
                stack.callback(parameter.requires_grad_, parameter.requires_grad)
                parameter.requires_grad_(flag)


def _put_back(owns: list[Own], before: list[Own]) -> None:
    """Undo writes of the recomputation and its preparation to attributes."""
    for fields, then in zip(owns, before):
        if len(fields) != len(then) or not all(map(is_, fields.values(), then.values())):
            refill(fields, then)


class _Tensors:
    """The parameters and buffers of some modules, as they are now."""

    def __init__(self, walk: Walk) -> None:
        self._tables, self._contents = walk.tables, list(map(dict.copy, walk.tables))
        tensors = {id(t): t for t in chain.from_iterable(map(dict.values, walk.tables)) if t is not None}.values()
        # Parameters with a flag to restore.
        self.parameters = [t for t in tensors if isinstance(t, nn.Parameter) and t.is_leaf]
        # PEFT's adapter of a parameter (fused experts) writes a frozen one's own values into it at each forward.
        adapted = {str(fields.get("parameter_name")) for fields in walk.owns if "lora_A" in fields.get("_modules", ())}
        held = [table.get(name) for table in walk.tables for name in adapted]
        written = {id(t) for t in held if t is not None and not t.requires_grad}
        # Those with a version to compare.
        self.counted = [
            t for t in tensors if type(t) in PLAIN_TENSORS and not t.is_inference() and id(t) not in written
        ]
        # Nothing in it must go before the next forward: no graph, as tensors put in by a functional call have.
        self.may_be_remembered = all(t.is_leaf for t in tensors)

    def is_current(self) -> bool:
        """Return whether the very same entries are in the tables."""
        now, then = (list(chain.from_iterable(map(dict.items, tables))) for tables in (self._tables, self._contents))
        return len(now) == len(then) and all(a[1] is b[1] and a[0] == b[0] for a, b in zip(now, then))

    def places(self, tensor: Tensor) -> Iterator[tuple[int, dict[str, Any]]]:
        """The numbers of modules that have the tensor, with the tables that it is in."""
        return (
            (number // 2, table)
            for number, table in enumerate(self._tables)
            if any(other is tensor for other in table.values())
        )

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Put the entries back until `stack` ends."""
        for table, then in zip(self._tables, self._contents) if not self.is_current() else ():
            for name in table.keys() | then.keys():
                now, wanted = table.get(name), then.get(name)
                # Sharded to gathered is FSDP's own change, made before this and in it.
                if now is not wanted and type(now) in _PLAIN_OR_NONE and type(wanted) in _PLAIN_OR_NONE:
                    stack.callback(_set, table, name, now, name in table)
                    _set(table, name, wanted, name in then)


def _set(table: dict[str, Any], name: str, value: Any, present: bool) -> None:
    table[name] = value
    if not present:
        del table[name]


class Walk:
    """The modules of one layer, and their configurations."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(modules_in(root))
        # Attributes of the modules, then of the configurations. Not the modules: one is a key of the table of walks.
        self.owns: list[Own] = list(map(vars, modules))
        self.count = len(modules)
        self._configs = [
            (fields, n, value) for fields in self.owns for n, value in fields.items() if _is_configuration(n, value)
        ]
        configs = list({id(value): value for _, _, value in self._configs}.values())
        self.kinds = [type(owner).__name__ for owner in (*modules, *configs)]
        self.children = list(map(dict.copy, map(_children_of, self.owns)))
        self.tables = list(chain.from_iterable(map(_tables_of, self.owns)))
        self.owns += map(vars, configs)
        self._tensors: _Tensors | None = None
        # Attributes that are not restored and whose signs the first forward has changed.
        self.changing: set[tuple[int, str]] | None = None

    def is_current(self) -> bool:
        """Return whether the modules and configurations are these still."""
        same = all(fields.get(name) is value for fields, name, value in self._configs)
        return same and list(map(_children_of, self.owns[: self.count])) == self.children

    def tensors(self) -> _Tensors:
        """Return the parameters and buffers of now."""
        known = self._tensors
        if known is None or not known.is_current():
            known = _Tensors(self)
            self._tensors = known if known.may_be_remembered else None
        return known


def _is_of_plain(value: Any) -> bool:
    if not isinstance(value, _CONTAINERS) or len(value) > _MOST:
        return False
    return all(map(is_plain_value, value.values() if isinstance(value, dict) else value))


def _sign(value: Any, depth: int = 2) -> Any:
    """Return identity, or of a container length and signs of its first entries; of a tensor the version, too."""
    if is_plain_value(value):
        return value
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if depth == 0 or not isinstance(value, _CONTAINERS):
        return id(value)
    items = chain(value, value.values()) if isinstance(value, dict) else value
    return type(value), len(value), [_sign(item, depth - 1) for item, _ in zip(items, range(_MOST))]


_walks: weakref.WeakKeyDictionary[nn.Module, Walk] = weakref.WeakKeyDictionary()


def walk_of(root: nn.Module) -> Walk:
    """Return the walk over `root`, which is remembered."""
    walk = _walks.get(root)
    if walk is None or not walk.is_current():
        walk = _walks[root] = Walk(root)
    return walk


def modules_in(root: nn.Module) -> Iterator[nn.Module]:
    """`root` and all modules in it, each once; scripted ones have nothing that Python code could change."""
    return (module for module in root.modules() if not isinstance(module, torch.jit.ScriptModule))


def module_of(function: object) -> nn.Module | None:
    """The module that `function` is, or is a method of."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _is_configuration(name: str, value: object) -> bool:
    """A dataclass, a namespace, or an object named as a configuration that has attributes of its own."""
    if hasattr(type(value), "__dataclass_fields__") or isinstance(value, types.SimpleNamespace):
        return hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor)
    others = nn.Module | Tensor | type | types.ModuleType | types.FunctionType | dict
    return name.rpartition("_")[2] in _CONFIG and hasattr(value, "__dict__") and not isinstance(value, others)
