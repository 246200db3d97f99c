"""Lists, dicts and sets that the code of modules names: attributes of their classes, and global variables."""

import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from nemo_like._util.code import names_in

_SharedNames = tuple[tuple[Mapping[str, Any], str], ...]
_CHANGEABLE = frozenset({list, dict, set, deque, defaultdict, Counter, OrderedDict})
_WITHOUT = ("torch", "nemo_like")  # Packages whose modules change nothing outside of themselves in forward.
_known: weakref.WeakKeyDictionary[type, _SharedNames] = weakref.WeakKeyDictionary()


def _containers_named_by(kind: type) -> _SharedNames:
    """Return the plain containers that are attributes of a class of modules, or globals that its methods refer to.

    Each is a mapping and a name in it. Functions of the same file that the methods refer to count as their part.
    """
    if kind not in _known:
        # Base by base: FSDP2's subclass is torch's, and the class below it is not.
        every = kind.__mro__[: kind.__mro__.index(nn.Module)]
        bases = [base for base in every if base.__module__.partition(".")[0] not in _WITHOUT]
        containers: list[tuple[Mapping[str, Any], str]] = [
            (vars(base), name) for base in bases for name, value in vars(base).items() if type(value) in _CHANGEABLE
        ]
        waiting = [value for base in bases for value in vars(base).values() if isinstance(value, types.FunctionType)]
        seen = set(waiting)
        while waiting:
            function = waiting.pop()
            for name in names_in(function.__code__):
                value = function.__globals__.get(name)
                if type(value) in _CHANGEABLE and not name.startswith("__"):
                    containers.append((function.__globals__, name))
                elif isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
                    waiting += {value} - seen
                    seen.add(value)
        _known[kind] = tuple({(id(known), name): (known, name) for known, name in containers}.values())
    return _known[kind]


def named_containers(kinds: Iterable[type[nn.Module]]) -> list[Any]:
    """Return the lists, dictionaries and sets outside of modules of these classes that their methods can change."""
    return [known[name] for kind in set(kinds) for known, name in _containers_named_by(kind) if name in known]
