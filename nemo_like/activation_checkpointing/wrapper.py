"""The module wrapper: a module's call as one region. `nemo_like.activation_checkpointing.apply` puts it in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from nemo_like._util.module_tree import check_model, every_module
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.engine.hooks import recomputation
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy
from nemo_like.activation_checkpointing.transfer import Transfer
from nemo_like.torch_compat import CheckpointWrapper as TorchCheckpointWrapper
from nemo_like.torch_compat import wrapped_module
from nemo_like.transformers_compat import given_cache, parameter_names

# Wrappers that add no name of their own to a model.

_INNER = "_checkpoint_wrapped_module"
_set_type: Callable[[object, type], None] = object.__dict__["__class__"].__set__


class Nameless(nn.Module):
    """Mixed into PyTorch's activation wrappers, which clean the names in state dicts but not those in the module tree.

    Put it in front of the wrapper class. Then every walk over the whole model meets the original model's names, each once:
    by `named_children` or `named_modules`, and by asking each module for the parameters and buffers of its own, which
    the wrapper shares with the module inside. So does a walk by `modules` or `apply`, which looks for classes: the wrapper
    answers for the class inside (`nemo_like._util.module_tree.every_module` has both). `children` gives the module inside.
    """

    def __init__(self, module: nn.Module, *args: object, **kwargs: object) -> None:
        super().__init__(module, *args, **kwargs)
        # The very dicts: an entry put into one of the two modules is in the other.
        for registered in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[registered] = module.__dict__[registered]
        self._name_type(type(self))
        self.register_load_state_dict_post_hook(_clean_names)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As `nn.Module.named_modules`, where the wrapper counts as itself and the module inside.

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
        """As `nn.Module.apply`, where the wrapper counts as itself and the module inside."""
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

    def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> None:
        """The module inside saves its own."""

    def _load_from_state_dict(self, state_dict: object, prefix: str, *args: object) -> None:
        """The module inside loads its own; the hooks of the wrapper give it its names."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *args)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes other than the wrapper's own (a flag, a child, a weight, a new one) in the module inside.

        On the wrapper it would change nothing, because the module inside reads its own attributes:
        after ``model.layers[0].mlp = adapted``, `adapted` must run.
        """
        mine = name in self.__dict__ or name in self.__dict__.get("_modules", ()) or hasattr(type(self), name)
        inner = None if mine else self.__dict__.get("_modules", {}).get(_INNER)
        if inner is not None and self.__dict__["_parameters"] is inner.__dict__["_parameters"]:  # else it is being made
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute that the wrapper does not have from the module inside."""
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
        inner = self.__dict__.get("_modules", {}).get(_INNER)
        if inner is None or issubclass(value, type(self)):
            _set_type(self, value)
        elif issubclass(value, FSDPModule) and inner.__class__ in value.__bases__:
            # FSDP2 makes a class of ``__class__`` and itself; the wrapper's own forward must stay in it.
            _set_type(self, _class_around(type(self), inner.__class__, value))
        else:  # another forward, of a kernel library for example: the wrapper runs that of the module inside
            inner.__class__ = value
            if "_made_of" in vars(type(self)):
                self._name_type(vars(type(self))["_made_of"][0])

    def _name_type(self, wrapper: Any) -> None:
        inner: Any = type(self._modules[_INNER])
        _set_type(self, _wrapper_of(wrapper, inner))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As for any object; written in another way, because pickle compares ``__class__`` with the real class."""
        reduced = super().__reduce_ex__(protocol)
        return _blank, vars(type(self)).get("_made_of", (type(self), None)), *reduced[2:]


_OPERATORS = (
    *("__len__", "__bool__", "__iter__", "__reversed__", "__contains__", "__setitem__", "__delitem__"),
    *("__add__", "__iadd__", "__mul__", "__imul__"),
)


@functools.cache
def _wrapper_of(wrapper: Any, inner: Any) -> Any:
    """Return `wrapper` for modules of the class `inner`: under that name, which others look for, and with its operators.

    The operators (``len(layer.mlp)``, ``layer.mlp[0] = adapted``) are passed on to the module inside. Python looks for
    them at the class, where `__getattr__` answers nothing. Not all wrappers have them: a class with `__len__` and
    `__iter__` is taken for a collection. There is one class for each `inner`: Dynamo looks at classes.
    """
    methods = {name: _handed_on(name) for name in _OPERATORS if hasattr(inner, name) and not hasattr(wrapper, name)}
    about = {"__module__": wrapper.__module__, "__qualname__": inner.__qualname__, "__doc__": wrapper.__doc__}
    return type(inner.__name__, (wrapper,), {**about, "_made_of": (wrapper, inner), **methods})


def _handed_on(name: str) -> Callable[..., Any]:
    def method(self: nn.Module, *args: object) -> Any:
        inner = self._modules[_INNER]
        result = getattr(inner, name)(*args)
        return self if result is inner else result  # ``layer.mlp += [more]`` keeps the wrapper in its place

    return method


_made: dict[tuple[type, type, type], type] = {}  # Classes that `_class_around` has made.


def _class_around(wrapper: type, reported: type, wanted: type) -> type:
    """`wanted`, which FSDP2 made of the class `reported`, made of `wrapper` instead.

    One class for all layers, as FSDP2 has it: Dynamo, which looks at classes, would compile each layer again, and stop
    after eight.
    """
    key = (wrapper, reported, wanted)
    if key not in _made:
        bases = tuple(wrapper if base is reported else base for base in wanted.__bases__)
        # Only the attributes that FSDP2 adds. transformers puts a forward of its own into every subclass of its layers:
        # that one would run the layer past the wrapper.
        added = {name: item for name, item in vars(wanted).items() if not hasattr(reported, name)}
        _made[key] = type(wanted.__name__, bases, added)
    return _made[key]


def _blank(kind: Any, inner: type | None) -> Nameless:
    return object.__new__(kind if inner is None else _wrapper_of(kind, inner))


def _clean_names(module: nn.Module, keys: Any) -> None:
    """Put missing and unexpected keys of a loaded state dict into the names that the caller knows."""
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [name.replace(f"{_INNER}.", "") for name in names]


SELECTIVE_AC_WRAPPER_FLAG = "_nemo_like_selective_ac"
"""Set on whole-layer selective wrappers: compile the wrapper itself, so that the partitioner reads the recompute tags."""


class CheckpointWrapper(Nameless, TorchCheckpointWrapper):
    """A module whose activations are recomputed in backward. Subclass of PyTorch's wrapper, so tools recognise it.

    Parameter, buffer, module and state-dict names are those of the bare module: the wrapper adds no name of its own.
    Attributes of the bare module are read and set through it.

    >>> wrapped = CheckpointWrapper(nn.Linear(2, 3))
    >>> [name for name, _ in nn.Sequential(wrapped).named_parameters()], wrapped.out_features
    (['0.weight', '0.bias'], 3)
    """

    # On the class, so that they are the wrapper's own where the module inside has attributes of the same names.
    policy: Policy = FullPolicy()
    region_name: str = ""
    use_reentrant: bool = False
    preserve_rng_state: bool = True
    early_stop: bool | None = None
    transfer: Transfer | None = None
    _arguments: tuple[str, ...] = ()

    def __init__(
        self,
        module: nn.Module,
        use_reentrant: bool = False,
        preserve_rng_state: bool = True,
        *,
        policy: Policy | None = None,
        name: str = "",
        early_stop: bool | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        """Wrap `module`.

        Args:
            module: the module to recompute as one region.
            use_reentrant: the older autograd-function form (eager, nothing saved).
            preserve_rng_state: recompute with the forward's random numbers.
            policy: chooses the outputs saved inside the region; None saves nothing.
            name: the module's name, for error messages; default: its class name.
            early_stop: end the recomputation at the last tensor that backward needs; None: as `set_early_stop` has set it.
            transfer: how outputs with the decision HOST move; None: synchronous copies.

        Raises:
            TypeError: `module` is not a module, or already such a wrapper.
            ValueError: `use_reentrant` together with a policy that keeps something.
        """
        policy = FullPolicy() if policy is None else policy
        check_wrappable(module, policy, use_reentrant, name)
        super().__init__(module)
        self.policy = policy
        self.region_name = name or type(module).__name__
        self.use_reentrant = use_reentrant
        self.preserve_rng_state = preserve_rng_state
        self.early_stop = early_stop
        self.transfer = transfer
        self._arguments = parameter_names(module.forward)

    def __setattr__(self, name: str, value: object) -> None:
        """As `Nameless`; the module's own checkpointing stays off."""
        if value is True and name in FLAGS:
            raise second_replay(self.region_name, name)
        super().__setattr__(name, value)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The wrapped module's forward, as one region where gradients flow through it."""
        if not torch.is_grad_enabled() or self._saves_nothing(args, kwargs):
            return self._checkpoint_wrapped_module(*args, **kwargs)
        self._refuse_cache(args, kwargs)
        if self.use_reentrant:
            return self._forward_reentrant(args, kwargs)
        return run_region(
            self._checkpoint_wrapped_module,
            args,
            kwargs,
            policy=self.policy,
            name=self.region_name,
            preserve_rng_state=self.preserve_rng_state,
            transfer=self.transfer,
            early_stop=self.early_stop,
        )

    def _saves_nothing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether no gradient flows through this call: nothing in the module trains, and no input needs a
        gradient.

        Asked at each call, and not once: only then is it known whether something before a frozen layer trains.
        """
        if torch.compiler.is_compiling():
            return False
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())):
            return False
        inside = chain(tensors_in((args, kwargs)), self._checkpoint_wrapped_module.parameters())
        return not any(tensor.requires_grad for tensor in inside)

    def _refuse_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = given_cache(self._arguments, args, kwargs)
        if cache is not None:
            raise RuntimeError(
                f"{self.region_name} was called with {cache}= while gradients are on: its recomputation would write "
                "that cache a second time. Call the model with use_cache=False in training, or under torch.no_grad(); a "
                "model that makes a cache at every call, and cannot be told not to, cannot recompute its attention."
            )

    def _forward_reentrant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            raise RuntimeError("use_reentrant=True cannot be compiled; use use_reentrant=False.")
        # Autograd sees the tensors among the function's own arguments only: those by keyword are passed on as such.
        names = [key for key, value in kwargs.items() if isinstance(value, torch.Tensor)]
        others = {key: value for key, value in kwargs.items() if key not in names}
        positional, count = (*args, *(kwargs[name] for name in names)), len(args)
        inside = tensors_in(([value for value in args if not isinstance(value, torch.Tensor)], others))
        if any(tensor.requires_grad for tensor in inside):
            raise TypeError(
                f"{self.region_name} was called with a tensor that requires a gradient inside a list, dict or other "
                "container; use_reentrant=True loses such gradients. Use use_reentrant=False."
            )
        takes_gradients = any(isinstance(value, torch.Tensor) and value.requires_grad for value in positional)
        if not takes_gradients and any(p.requires_grad for p in self._checkpoint_wrapped_module.parameters()):
            raise RuntimeError(
                f"{self.region_name} has weights to train and no input that requires a gradient, as behind a frozen "
                "embedding: use_reentrant=True would leave them without gradients. Use use_reentrant=False."
            )

        def run(*inputs: object) -> Any:
            with recomputation(torch.is_grad_enabled()):  # gradients are off in forward
                return self._checkpoint_wrapped_module(
                    *inputs[:count], **dict(zip(names, inputs[count:], strict=True)), **others
                )

        return torch.utils.checkpoint.checkpoint(
            run, *positional, use_reentrant=True, preserve_rng_state=self.preserve_rng_state
        )


def check_wrappable(module: nn.Module, policy: Policy, use_reentrant: bool, name: str) -> None:
    """Raise the errors that `CheckpointWrapper` raises for such arguments."""
    check_model(module, name or "module")
    if isinstance(module, TorchCheckpointWrapper):
        raise TypeError(
            f"{name or 'The module'} is already checkpointed: wrapping it twice would recompute it twice. "
            "Apply checkpointing once, or pass unwrap_checkpoint_wrapper(module)."
        )
    if use_reentrant and not isinstance(policy, FullPolicy):
        raise ValueError(
            f"use_reentrant=True keeps nothing inside a region, so it cannot follow {type(policy).__name__}; "
            "use use_reentrant=False."
        )


def unwrap_checkpoint_wrapper(module: nn.Module) -> nn.Module:
    """The module inside a checkpoint wrapper (ours or PyTorch's), or `module` itself."""
    return wrapped_module(module) if isinstance(module, TorchCheckpointWrapper) else module


# No one else recomputes our regions: found at the call that would switch it on, or else at the next forward.
#
# Whoever checkpoints a model after us (a trainer's setting, accelerate's, the model's own) nests one recomputation in
# another: everything is computed twice more, and the outputs that our policy keeps have no effect.

# Names of models' own checkpointing: transformers, timm.
FLAGS = ("gradient_checkpointing", "grad_checkpointing")


def second_replay(where: str, flag: str) -> ValueError:
    """The error for a module that is checkpointed by us and has its own checkpointing switched on."""
    return ValueError(
        f"{where}.{flag} is True, and regions of nemo_like are in the model: it would be recomputed twice. Use one of the "
        "two: leave gradient checkpointing off (model.gradient_checkpointing_disable(), set_grad_checkpointing(False), "
        "in a Trainer gradient_checkpointing=False), or ac='none'."
    )


def watch_for_others(model: nn.Module) -> None:
    """Have `model`, and each module below it that holds a list of regions, look before its forwards."""
    for module in model.modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList | nn.Sequential)]
        inside = (inner for some in lists for inner in every_module(some))
        holds = module is model or any(isinstance(inner, TorchCheckpointWrapper) for inner in inside)
        if holds and not any(isinstance(hook, _OnlyOurs) for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(_OnlyOurs())


class _OnlyOurs:
    """A forward pre-hook (a class of the module's, so that a model with it can be copied and pickled)."""

    _flagged: list[tuple[nn.Module, str]] | None = None

    def __call__(self, module: nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if self._flagged is None:  # the first forward: by now, whoever prepares a model has done it
            _refuse_nested(module)
            self._flagged = [(inner, name) for inner in module.modules() for name in FLAGS if hasattr(inner, name)]
        for inner, name in self._flagged:
            if inner.training and getattr(inner, name) is True:
                raise second_replay(type(inner).__name__, name)


def _refuse_nested(model: nn.Module) -> None:
    for name, module in model.named_modules():
        wrappers = every_module(module) if isinstance(module, TorchCheckpointWrapper) else ()
        kinds = {issubclass(type(m), Nameless) for m in wrappers if issubclass(type(m), TorchCheckpointWrapper)}
        if len(kinds) == 2:  # ours, and another library's
            raise ValueError(
                f"PyTorch's checkpoint_wrapper was put around or into {name or 'the model'} after nemo_like had "
                "checkpointed it (accelerate does that for fsdp_activation_checkpointing: true, and for "
                "FullyShardedDataParallelPlugin(activation_checkpointing=True)): two wrappers nest, and ac= "
                "would have no effect. Switch that off, or use ac='none'."
            )
