"""The state of a module that its forward reads and that is not an argument: restored for the recomputation, or refused.

Restored: plain attributes and those of configurations (training flags, the active adapter, a counter), `requires_grad`,
parameters and buffers that were exchanged (`torch.func.functional_call`). Everything else that a module holds (lists,
dicts, tensors in them, sub-modules) has a sign, made of identity, length and the version of tensors: no model was seen to
change it (`docs/evidence/restored-state.md`), and if it changes, `RegionError` names it. Nothing is copied for that.

A walk over a layer's modules in Python costs more than a small layer's forward. So the modules are remembered, for as long
as their children are the same.
"""

import contextlib
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.forwards import Forward
from nemo_like._util.plain import is_plain_value
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
# Attributes of `nn.Module` itself, and lists in which nn.LSTM has its parameters once more.
_REGISTERS = {name for name, value in vars(nn.Module()).items() if not is_plain_value(value)}
_REGISTERS |= {"_flat_weights", "_flat_weight_refs"}


class ModuleState:
    """The modules of a region as its forward finds them."""

    __slots__ = ("_flags", "_held", "_names", "_signs", "_tables", "_values", "_versions", "_watched", "walk")

    def __init__(self, module: nn.Module) -> None:
        self.walk = walk = walk_of(module)
        self._tables = list(map(dict.copy, walk.tables))
        self._names = [fields.keys() - _REGISTERS for fields in walk.owns]
        self._values: list[Own] = []  # Values that are put back; others would live for longer, and their graphs.
        self._watched: list[tuple[int, str]] = []  # Owner and name of the attributes that have a sign, and of tensors.
        # Containers of plain values: one that is exchanged is put back, and one that is changed in place has a sign.
        self._held: dict[tuple[int, str], Any] = {}
        for number, (fields, names) in enumerate(zip(walk.owns, self._names)):
            self._values.append({name: fields[name] for name in names if is_plain_value(fields[name])})
            for name in names - self._values[number].keys():
                if isinstance(value := fields[name], nn.Module | Forward):  # `Forward`: this package's, of the region
                    continue
                self._watched.append((number, name))
                if _is_of_plain(value):
                    self._held[number, name] = value
        tensors = {id(t): t for t in chain.from_iterable(map(dict.values, self._tables)) if t is not None}.values()
        self._flags = [(t, t.requires_grad) for t in tensors if isinstance(t, nn.Parameter) and t.is_leaf]
        # PEFT's adapter of a parameter (fused experts) writes a frozen one's own values into it at each forward.
        adapted = {str(fields.get("parameter_name")) for fields in walk.owns if "lora_A" in fields.get("_modules", ())}
        held = [table.get(name) for table in self._tables for name in adapted]
        written = {id(t) for t in held if t is not None and not t.requires_grad}
        counted = (t for t in tensors if type(t) in PLAIN_TENSORS and not t.is_inference() and id(t) not in written)
        self._versions = [(t, t._version) for t in counted]
        self._signs: list[Any] = []

    def _value(self, key: tuple[int, str]) -> Any:
        return self._held[key] if key in self._held else self.walk.owns[key[0]].get(key[1])

    def _look(self) -> list[Any]:
        """Return the signs; tensors are buffers to `BufferSnapshot`."""
        values = map(self._value, self._watched)
        return [None if isinstance(value, Tensor) else _sign(value) for value in values]

    def buffers(self) -> list[tuple[dict[str, Any], str]]:
        """Return the tables and names of buffers, and of tensors that are plain attributes (a router's load)."""
        registered = [(table, name) for table in self.walk.tables[1::2] for name in table]
        attributes = [(self.walk.owns[key[0]], key[1]) for key in self._watched if type(self._value(key)) is Tensor]
        return registered + attributes

    def containers(self) -> list[Any]:
        """Return the lists, dicts, sets and queues among the attributes."""
        return [value for value in map(self._value, self._watched) if isinstance(value, list | dict | set | deque)]

    def forward_done(self) -> None:
        """Call after forward: changes from here on are others'."""
        self._versions = [(t, t._version) for t, _ in self._versions]
        self._signs = self._look()

    def check(self, region: str, restored: Callable[[Own, str], bool]) -> None:
        """Raise RegionError for state that was changed since forward, and is not restored, by this or by `restored`."""
        for tensor, version in self._versions:
            for number, table in enumerate(self.walk.tables) if tensor._version != version else ():
                name = next((name for name, other in table.items() if other is tensor), None)
                if name is not None and not restored(table, name):
                    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    raise RegionError(
                        f"Region {region!r}: the {kind} {name!r} of a {self.walk.kinds[number // 2]} was changed in place "
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
        for key, before, now in zip(self._watched, self._signs, self._look()):
            if now != before:
                raise RegionError(
                    f"Region {region!r}: the attribute {key[1]!r} of a {self.walk.kinds[key[0]]}, a "
                    f"{type(self._value(key)).__name__}, was changed {when}, and recomputation would compute with other "
                    "values, or change it twice. Keep its contents in a buffer or a plain attribute, which are restored, or "
                    "change it under `if not nemo_like.is_recomputing()`."
                )

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Put the modules into the state that forward found, until `stack` ends."""
        owns = self.walk.owns
        stack.callback(_put_back, owns, list(map(dict.copy, owns)))
        for fields, names, values in zip(owns, self._names, self._values):
            for name in fields.keys() - names - _REGISTERS:
                del fields[name]
            fields.update(values)
        for (number, name), value in self._held.items():
            owns[number][name] = value
        for table, then in zip(self.walk.tables, self._tables):
            for name in table.keys() | then.keys():
                now, wanted = table.get(name), then.get(name)
                # Sharded to gathered is FSDP's own change, made before this and in it.
                if now is not wanted and type(now) in _PLAIN_OR_NONE and type(wanted) in _PLAIN_OR_NONE:
                    stack.callback(_set, table, name, now, name in table)
                    _set(table, name, wanted, name in then)
        for parameter, flag in self._flags:
            if parameter.requires_grad != flag:
                stack.callback(parameter.requires_grad_, parameter.requires_grad)
                parameter.requires_grad_(flag)


def _put_back(owns: list[Own], before: list[Own]) -> None:
    """Undo writes of the recomputation and its preparation to attributes."""
    for fields, then in zip(owns, before):
        if len(fields) != len(then) or not all(map(is_, fields.values(), then.values())):
            refill(fields, then)


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
        self.children = [fields["_modules"].copy() for fields in self.owns]
        self.tables = [fields[table] for fields in self.owns for table in ("_parameters", "_buffers")]
        self.owns += map(vars, configs)

    def is_current(self) -> bool:
        """Return whether the modules and configurations are these still."""
        same = all(fields.get(name) is value for fields, name, value in self._configs)
        return same and [fields["_modules"] for fields in self.owns[: self.count]] == self.children


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
