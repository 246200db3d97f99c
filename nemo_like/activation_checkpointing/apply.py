"""`apply_specs`: the only place that puts checkpointing into a model.

Everything is checked before the first wrapper is made: an error leaves the model untouched.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Protocol, runtime_checkable

from torch import nn

from nemo_like._util.module_tree import bare, bare_children, bare_modules, check_model, join
from nemo_like.activation_checkpointing import kv_sharing
from nemo_like.activation_checkpointing.sequential import Chunk, Segment, SegmentMember
from nemo_like.activation_checkpointing.spec import CheckpointSpec
from nemo_like.activation_checkpointing.wrapper import (
    SELECTIVE_AC_WRAPPER_FLAG,
    CheckpointWrapper,
    check_wrappable,
    watch_for_others,
)
from nemo_like.torch_compat import CheckpointWrapper as TorchCheckpointWrapper
from nemo_like.torch_compat import disable_dynamo_lru_cache


@runtime_checkable
class Placement(Protocol):
    """A transfer that can also take every tensor that a module saves for backward, by enclosing the module."""

    def enclose(self, module: nn.Module) -> nn.Module:
        """`module` inside a wrapper that adds no name; `module` itself is not changed."""


def apply_specs(
    model: nn.Module, specs: Iterable[CheckpointSpec], *, compile: bool = False, without_cache: bool = True
) -> dict[str, nn.Module]:
    """Wrap the modules that `specs` name, in place.

    A module that is in several places (a looped block) gets one wrapper in all of them.

    Args:
        model: the original model; changed in place.
        specs: the regions, in any order; none of them changes nothing.
        compile: the layers will be compiled afterwards (`nemo_like.compile.compile_layers`).
        without_cache: where something is recomputed, call the model without a key/value cache while gradients are on (a
            recomputation would write it twice), unless layers hand states on through it. False: the caller sees to that.

    Returns:
        The module that the model now has under each name in `specs`.

    Raises:
        ValueError: a name that is not in the model, or two regions with one module; the older form of checkpointing
            together with `compile`.
        TypeError: a module is already checkpointed. The model is unchanged in all these cases.
    """
    check_model(model)
    specs = list(specs)
    tree = _Tree(model)
    _check(tree, specs, compile)
    wrappers: dict[str, CheckpointWrapper] = {}
    for spec in specs:  # all are made before the first is registered: an error leaves the model as it was
        if spec.policy is None:
            continue
        segment = _segment_of(spec)
        how: dict[str, Any] = dict(
            policy=spec.policy, preserve_rng_state=spec.preserve_rng_state, transfer=spec.transfer
        )
        for position, name in enumerate(spec.members):
            module = tree.find(name)
            if segment is None:
                wrappers[name] = CheckpointWrapper(module, spec.use_reentrant, name=name, **how)
            else:
                wrappers[name] = SegmentMember(module, segment, position, name=name, **how)
            if spec.keeps_something and len(spec.members) == 1:
                vars(wrappers[name])[SELECTIVE_AC_WRAPPER_FLAG] = True
    for name, wrapper in wrappers.items():
        tree.put(name, wrapper)
    for spec in specs:
        for name in spec.members:
            if spec.policy is None and isinstance(spec.transfer, Placement):
                tree.put(name, spec.transfer.enclose(tree.find(name)))
    if compile and any(spec.keeps_something for spec in specs):
        disable_dynamo_lru_cache()
    if without_cache and wrappers and not kv_sharing.needs_cache(model):
        kv_sharing.call_without_cache(model, wrappers.values())
    if wrappers:
        watch_for_others(model)
    return {name: tree.find(name) for spec in specs for name in spec.members}


def check_specs(model: nn.Module, specs: Iterable[CheckpointSpec], *, compile: bool = False) -> None:
    """Raise the errors that `apply_specs` would raise. Changes nothing."""
    _check(_Tree(model), list(specs), compile)


class _Tree:
    """The places where each module of a model is registered, by its name in the original model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: dict[str, nn.Module] = {}
        self._slots: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for parent_name, parent in bare_modules(model):
            for key, child in bare_children(parent):
                self._modules[join(parent_name, key)] = child
                self._slots.setdefault(bare(child), []).append((bare(parent), key))

    def find(self, name: str) -> nn.Module:
        """The outermost wrapper, or the module itself, that is registered under `name`.

        Raises:
            ValueError: there is none.
        """
        module = self._modules.get(name)
        if module is None:
            near = get_close_matches(name, self._modules, n=1)
            raise ValueError(
                f"A region names {name!r}, which is not a module below this {type(self._model).__name__}."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
        return module

    def put(self, name: str, wrapper: nn.Module) -> None:
        """Register `wrapper`, which contains the module of that name, wherever that module is."""
        inner = bare(wrapper)
        for parent, key in self._slots[inner]:
            # The registered child itself, not `setattr`: a property of the same name may alias it.
            parent._modules[key] = wrapper
        for other, module in self._modules.items():
            if bare(module) is inner:
                self._modules[other] = wrapper


def _check(tree: _Tree, specs: Sequence[CheckpointSpec], compile: bool) -> None:
    """Raise where a region names a module that is absent, in another region, or can't be wrapped."""
    taken: dict[int, str] = {}
    seen: set[str] = set()
    for spec in specs:
        if spec.policy is None:
            tree.find(spec.members[0])
            if not isinstance(spec.transfer, Placement):
                raise TypeError(
                    f"The region of {spec.members[0]} has policy=None and {type(spec.transfer).__name__} as transfer, which "
                    "moves the tensors that a policy keeps, not those that a module saves. Give it an Offloader, or a "
                    "policy."
                )
            continue
        if spec.use_reentrant and compile:
            raise ValueError(
                f"use_reentrant is True for {spec.members[0]} and compile is on: torch cannot compile it. Drop one."
            )
        for name in spec.members:
            module = tree.find(name)
            other = taken.setdefault(id(bare(module)), name)
            if other != name or name in seen:
                raise ValueError(f"{name} is in two regions (there it is {other}): it would be recomputed twice.")
            seen.add(name)
            check_wrappable(module, spec.policy, spec.use_reentrant, name)


def _segment_of(spec: CheckpointSpec) -> Segment | None:
    """Return the object in which the members of the region record their calls; None for a region of one call."""
    if spec.calls is not None:
        return Chunk(spec.calls)
    return Segment(len(spec.members)) if len(spec.members) > 1 else None


def refuse_checkpointed(model: nn.Module, *, replays: bool = True) -> None:
    """Raise ValueError where something in `model` is checkpointed already, by us, PyTorch's wrapper or the model.

    With ``replays=False`` nothing will be checkpointed, and the model's own checkpointing may be on.
    """
    check_model(model)
    for name, module in model.named_modules():
        if isinstance(module, TorchCheckpointWrapper):
            raise ValueError(
                f"{name or 'The model'} is checkpointed already: a second wrapper would recompute it twice. "
                "Apply checkpointing once, to a freshly built model."
            )
        if replays and getattr(module, "gradient_checkpointing", False) is True:
            methods = ("gradient_checkpointing_disable", "disable_gradient_checkpointing")
            method = next((method for method in methods if hasattr(model, method)), methods[0])
            raise ValueError(
                f"{name or 'The model'} has its own gradient checkpointing on, and would be recomputed twice. "
                f"Call model.{method}() first (in a Trainer: gradient_checkpointing=False)."
            )
        if replays and getattr(module, "grad_checkpointing", False) is True:  # timm's word
            raise ValueError(
                f"{name or 'The model'} has its own gradient checkpointing on (grad_checkpointing=True), and would be "
                "recomputed twice. Call model.set_grad_checkpointing(False) first."
            )
