"""Wrappers that add no name of their own to a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

_INNER = "_checkpoint_wrapped_module"
_set_type: Callable[[object, type], None] = object.__dict__["__class__"].__set__


class Nameless(nn.Module):
    """Mixed into PyTorch's activation wrappers, which clean the names in state dicts but not those in the module tree.

    Put it in front of the wrapper class. Then every walk over the whole model meets the bare model's names, each once:
    by `named_children` or `named_modules`, and by asking each module for the parameters and buffers of its own, which
    the wrapper shares with the module inside. So does a walk by `modules` or `apply`, which looks for classes: the wrapper
    answers for the class inside (`nemo_like._util.module_tree.every_module` has both). `children` gives the module inside.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        # The very dicts: what is put into one of the two modules is in the other.
        for registered in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[registered] = module.__dict__[registered]
        kind: Any = type(self)
        _set_type(self, _with_operators(kind, tuple(name for name in _OPERATORS if hasattr(type(module), name))))
        self.register_load_state_dict_post_hook(_clean_names)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As `nn.Module.named_modules`, where the wrapper stands for itself and the module inside.

        A module inside that is a unit of FSDP2 comes, too: torch looks for its units in this walk.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        inner: Any = self._modules[_INNER]
        if inner in memo:
            return
        walk = inner.named_modules(memo, prefix, remove_duplicate)
        first = next(walk)
        if issubclass(type(inner), FSDPModule) and remove_duplicate:
            yield first
        yield from walk

    def apply(self, fn: Callable[[nn.Module], None]) -> Nameless:
        """As `nn.Module.apply`, where the wrapper stands for itself and the module inside."""
        for _, child in self.named_children():
            child.apply(fn)
        fn(self)
        return self

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The children of the module inside, by their names."""
        return self._modules[_INNER].named_children()  # type: ignore[union-attr]

    def children(self) -> Iterator[nn.Module]:
        """The module inside."""
        yield self._modules[_INNER]  # type: ignore[misc]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Nameless:
        # Not on the wrapper's own account as well: the parameters are those of the module inside.
        self._modules[_INNER]._apply(fn, recurse)  # type: ignore[union-attr]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The module inside saves its own."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """The module inside loads its own; the hooks of the wrapper give it its names."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *args)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the module inside has (a flag, a child, a weight) there, from where it is read, too.

        On the wrapper it would change nothing: ``model.layers[0].mlp = adapted`` must be what runs from then on. A new
        child goes there, too: walks over the model meet the children of the module inside.
        """
        mine = name in self.__dict__ or name in self.__dict__.get("_modules", ()) or hasattr(type(self), name)
        inner = None if mine else self.__dict__.get("_modules", {}).get(_INNER)
        if inner is not None and (isinstance(value, nn.Module) or hasattr(inner, name)):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete what the wrapper does not have from the module inside."""
        mine = name in self.__dict__ or name in self._modules
        (super().__delattr__ if mine else self._modules[_INNER].__delattr__)(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Give the module inside another child."""
        self._modules[_INNER].add_module(name, module)  # type: ignore[union-attr]

    @property
    def __class__(self) -> type:
        """The class of the module inside, so that ``isinstance`` finds it: walks by `named_children` meet the wrapper alone.

        Trainers leave norms out of weight decay by ``isinstance(child, nn.LayerNorm)``, transformers records hidden
        states at the modules of a layer's class, accelerate shards modules of a class.
        """
        inner = self.__dict__.get("_modules", {}).get(_INNER)
        return type(self) if inner is None else inner.__class__

    @__class__.setter
    def __class__(self, value: type) -> None:
        # FSDP2 makes a class of what ``__class__`` says and itself; the wrapper's own forward must stay in it.
        said = self.__class__
        if said is not type(self) and not issubclass(value, type(self)):
            value = _class_around(type(self), said, value)
        _set_type(self, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As for any object; said in another way, because pickle compares ``__class__`` with the real class."""
        reduced = super().__reduce_ex__(protocol)
        kind, operators = vars(type(self)).get("_made_of", (type(self), ()))
        return _blank, (kind, operators), *reduced[2:]


_OPERATORS = (
    *("__len__", "__bool__", "__iter__", "__reversed__", "__contains__", "__setitem__", "__delitem__"),
    *("__add__", "__iadd__", "__mul__", "__imul__"),
)


@functools.cache
def _with_operators(wrapper: type, operators: tuple[str, ...]) -> type:
    """`wrapper` with these methods, handed on to the module inside: ``len(layer.mlp)``, ``layer.mlp[0] = adapted``.

    Python looks for them at the class, where `__getattr__` answers nothing. Not all wrappers have them: what has a
    `__len__` and `__iter__` is taken for a collection.
    """
    methods = {name: _handed_on(name) for name in operators if not hasattr(wrapper, name)}
    if not methods:
        return wrapper
    return type(
        wrapper.__name__, (wrapper,), {"__module__": wrapper.__module__, "_made_of": (wrapper, operators), **methods}
    )


def _handed_on(name: str) -> Callable[..., Any]:
    def method(self: nn.Module, *args: Any) -> Any:
        inner = self._modules[_INNER]
        result = getattr(inner, name)(*args)
        return self if result is inner else result  # ``layer.mlp += [more]`` keeps the wrapper in its place

    return method


_made: dict[tuple[type, type, type], type] = {}
"""What `_class_around` has made."""


def _class_around(wrapper: type, said: type, wanted: type) -> type:
    """`wanted`, which FSDP2 made of the class `said`, made of `wrapper` instead.

    One class for all layers, as FSDP2 has it: Dynamo, which looks at classes, would compile each layer anew, and stop
    after eight.
    """
    key = (wrapper, said, wanted)
    if key not in _made:
        bases = tuple(wrapper if base is said else base for base in wanted.__bases__)
        # Only what FSDP2 adds. transformers puts a forward of its own into every subclass of its layers: that one would
        # run the layer past the wrapper.
        added = {name: item for name, item in vars(wanted).items() if not hasattr(said, name)}
        _made[key] = type(wanted.__name__, bases, added)
    return _made[key]


def _blank(kind: Any, operators: tuple[str, ...]) -> Nameless:
    made: Any = _with_operators(kind, operators)
    return made.__new__(made)


def _clean_names(module: nn.Module, keys: Any) -> None:
    """What is missing or unexpected in a loaded state dict, in the names that the caller knows."""
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [name.replace(f"{_INNER}.", "") for name in names]
