"""`apply_specs`: the only place that puts checkpointing into a model.

Everything is checked before the first region is put in place: an error leaves the model untouched.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from nemo_like._util.module_tree import bare_modules, check_model, join, registered
from nemo_like.activation_checkpointing import kv_sharing
from nemo_like.activation_checkpointing.checkpointed import (
    SELECTIVE_AC_WRAPPER_FLAG,
    Checkpointed,
    check_region,
    is_checkpointed,
    watch_for_others,
)
from nemo_like.activation_checkpointing.names import FirstForward, named_policy, watch_modules
from nemo_like.activation_checkpointing.sequential import Chunk, Segment, SegmentMember
from nemo_like.activation_checkpointing.spec import CheckpointSpec
from nemo_like.options import did_you_mean
from nemo_like.torch_compat import CheckpointWrapper as TorchCheckpointWrapper
from nemo_like.torch_compat import disable_dynamo_lru_cache


@runtime_checkable
class Placement(Protocol):
    """A transfer that can also take every tensor that a module saves for backward."""

    def enclose(self, module: nn.Module) -> None:
        """Take the tensors that `module` saves from now on."""


def apply_specs(
    model: nn.Module, specs: Iterable[CheckpointSpec], *, compile: bool = False, without_cache: bool = True
) -> dict[str, nn.Module]:
    """Checkpoint the modules that `specs` name, in place: no module is exchanged, and no name or class changes.

    Args:
        model: the original model; changed in place.
        specs: the regions, in any order; none of them changes nothing.
        compile: the layers will be compiled afterwards (`nemo_like.compile.compile_layers`).
        without_cache: where something is recomputed, call the model without a key/value cache while gradients are on (a
            recomputation would write it twice), unless layers hand states on through it. False: the caller sees to that.

    Returns:
        The module under each name in `specs`.

    Raises:
        ValueError: a name that is not in the model, or two regions with one module; the older form of checkpointing
            together with `compile`.
        TypeError: a module is already checkpointed. The model is unchanged in all these cases.
    """
    check_model(model)
    specs = list(specs)
    chosen = _check(model, specs, compile)
    regions: list[Checkpointed] = []
    for spec in specs:  # all are made before the first is put in place: an error leaves the model as it was
        segment = _segment_of(spec)
        for position, name in enumerate(spec.members if spec.policy is not None else ()):
            how: dict[str, Any] = dict(
                name=name, preserve_rng_state=spec.preserve_rng_state, transfer=spec.transfer, policy=spec.policy
            )
            if segment is None:
                regions.append(Checkpointed(chosen[name], use_reentrant=spec.use_reentrant, **how))
            else:
                regions.append(SegmentMember(chosen[name], segment, position, **how))
            inner = getattr(spec.policy, "inner", spec.policy)  # of `KeepRouting`: eager code has those operators
            if spec.keeps_something and not getattr(inner, "keeps_nothing", False) and len(spec.members) == 1:
                vars(chosen[name])[SELECTIVE_AC_WRAPPER_FLAG] = True
    for region in regions:
        region.put()
    for spec in specs:
        if (policy := named_policy(spec.policy)) is not None and policy.learns:
            layer, member = spec.layer or spec.members[0], spec.members[0]
            watch_modules(registered(model, layer), policy.decision, member[len(layer) + 1 :])
        if spec.policy is None and isinstance(spec.transfer, Placement):
            spec.transfer.enclose(chosen[spec.members[0]])
    if compile and any(spec.keeps_something for spec in specs):
        disable_dynamo_lru_cache()
    if without_cache and regions and not kv_sharing.needs_cache(model):
        kv_sharing.call_without_cache(model, [region.module for region in regions])
    if regions:
        watch_for_others(model)
    return chosen


def check_met(model: nn.Module, specs: Iterable[CheckpointSpec], *, labels: bool = True) -> None:
    """Have the first forward of `model` look whether names of its policies were met (`names.FirstForward`)."""
    policies = [p for spec in specs if (p := named_policy(spec.policy)) is not None and p.learns]
    if policies:
        model.register_forward_hook(FirstForward(policies, labels))


def check_specs(model: nn.Module, specs: Iterable[CheckpointSpec], *, compile: bool = False) -> None:
    """Raise the errors that `apply_specs` would raise. Changes nothing."""
    _check(model, list(specs), compile)


def _check(model: nn.Module, specs: Sequence[CheckpointSpec], compile: bool) -> dict[str, nn.Module]:
    """Return the modules by their names in `specs`.

    Raises:
        ValueError, TypeError: as `apply_specs`.
    """
    modules = {
        join(at, name): child
        for at, parent in bare_modules(model)
        for name, child in parent._modules.items()
        if child is not None
    }
    taken: dict[int, str] = {}
    chosen: dict[str, nn.Module] = {}
    for name in (name for spec in specs for name in spec.members):
        if name not in modules:
            raise ValueError(
                f"A region names {name!r}, which is not a module below this {type(model).__name__}."
                + did_you_mean(name, list(modules))
            )
    for spec in specs:
        if spec.policy is None:
            chosen[spec.members[0]] = modules[spec.members[0]]
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
            if id(modules[name]) in taken:
                other = taken[id(modules[name])]
                raise ValueError(f"{name} is in two regions (there it is {other}): it would be recomputed twice.")
            taken[id(modules[name])] = name
            chosen[name] = modules[name]
            check_region(modules[name], spec.policy, spec.use_reentrant, name)
    return chosen


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
        if is_checkpointed(module) or isinstance(module, TorchCheckpointWrapper):
            raise ValueError(
                f"{name or 'The model'} is checkpointed already: it would be recomputed twice. "
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
