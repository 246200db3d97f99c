"""FSDP2 over a model's layers: what is gathered together, when it is freed again, what is fetched ahead."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from nemo_like._util.log import say_once
from nemo_like._util.module_tree import every_module
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.engine.module_parts import walk_of
from nemo_like.distributed import launch
from nemo_like.distributed.agreement import compare_layers
from nemo_like.distributed.mesh import data_parallel_mesh, validate_mesh
from nemo_like.distributed.units import Unit, UnitPlan, plan_units, shard_dim
from nemo_like.distributed.weights.replaced import refuse_to_train
from nemo_like.distributed.weights.slots import CPU_OFFLOAD_MARK
from nemo_like.options import FSDP2
from nemo_like.options.parallel import undivided_shards
from nemo_like.torch_compat import (
    after_each_forward,
    explain_sharded_weights,
    gather_before_backward_of,
    sharded_versions,
)


def shard_layers(
    model: nn.Module,
    layers: Sequence[Any],
    mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    options: FSDP2 | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    apart: Iterable[nn.Parameter] = (),
    tail: str | Sequence[nn.Module] | None = "auto",
    reduce_unused: bool | None = None,
) -> UnitPlan:
    """Shard `model` in place: one FSDP unit per layer, one for the tail, one for everything else (the root).

    Args:
        model: anything; may be on the meta device (then call `nemo_like.distributed.materialize` afterwards). Parts that
            the caller has sharded before (experts on a mesh of their own, a frozen tower) stay units of their own, as
            they are; layers inside them are theirs.
        layers: its repeated blocks in the order in which they run: modules, or objects with ``.module`` and
            ``.group`` (`nemo_like.layers.Layer`). A block inside a checkpoint wrapper is sharded with its wrapper: the
            gather and the cast to the compute dtype are outside of what is recomputed, so that recomputation sees what
            forward saw and gathers nothing again. A block that is listed twice is one unit.
        mesh: axes as in `nemo_like.distributed.mesh`; FSDP shards over ``dp_shard`` (with ``cp`` folded in) and
            replicates over ``dp_replicate``.
        mp_policy: torch's policy. Its `output_dtype` is used on the root only: on a layer it would make every
            following layer, and the head of a Hugging Face model, see another dtype than its weights.
        options: resharding, prefetch, CPU offload and frozen towers; None: the defaults of `FSDP2`. A tower that *trains*
            is always sharded per layer: give ranks without an input an empty one.
        ignored_params: left whole on every rank; their gradients are *not* reduced.
        apart: left alone as they are, for the caller to shard afterwards (experts that are split over ranks).
        tail: ``"auto"``: final norm and output head, found by structure, when no parameter of theirs is shared (a
            tied head belongs to the root, with the embedding); modules, to name them; None: they belong to the root.
        reduce_unused: give parameters of the root that a rank did not use a zero gradient, so that every rank reduces
            the same buffer (a trainable projector of a tower that some ranks skip). None: where such a tower is.

    Returns:
        The units, for whoever wants to look.

    Raises:
        TypeError, ValueError: anything wrong with the arguments, naming it. The model is untouched then.
    """
    options = FSDP2() if options is None else options
    ignored = set(ignored_params)
    plan = check_sharding(model, layers, mesh, options=options, ignored_params=ignored, apart=apart, tail=tail)
    dp_mesh = data_parallel_mesh(mesh)
    if reduce_unused is None:
        reduce_unused = bool(plan.towers)

    policy = mp_policy or MixedPrecisionPolicy()
    inner_policy = dataclasses.replace(policy, output_dtype=None)
    last_layer = plan.layers[-1] if plan.layers else None
    placement = _placement(dp_mesh, options.reshard_after_forward)
    held: list[nn.Module] = []
    for unit in plan.units:
        mine = set(unit.params)
        reshard = _reshard(unit, last_layer, options.reshard_after_forward)
        if not reshard:
            held.append(unit.modules[0])
        shard_unit(
            unit.modules,
            dp_mesh,
            options,
            policy=policy if unit.kind == "root" else inner_policy,
            reshard=reshard,
            placement=placement,
            ignored_params={p for module in unit.modules for p in module.parameters() if p not in mine},
        )
    _move(plan.replicated, launch.local_device(mesh.device_type))
    _chain_prefetch(model, plan, options.forward_prefetch, options.backward_prefetch)
    if options.cpu_offload:
        setattr(model, CPU_OFFLOAD_MARK, True)
    if reduce_unused:
        _reduce_unused(model)
    compare_layers(model, plan.units, dp_mesh)
    gather_for_what_is_kept([unit.modules[0] for unit in plan.layers])
    refuse_to_train(model, [p for p in plan.replicated if p not in ignored])
    for module in _around_layers(model, plan):
        module.register_forward_hook(explain_sharded_weights, always_call=True)
    _gather_what_was_written(model, held)
    if any(parameter.is_meta for parameter in model.parameters()):
        ask_for_weights(model)
    return plan


def ask_for_weights(model: nn.Module) -> None:
    """Have the first forward of `model` report that parameters are on the meta device, where some still are."""
    model.register_forward_pre_hook(_MaterializeFirst(), prepend=True)


def shard_unit(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    options: FSDP2,
    *,
    policy: MixedPrecisionPolicy,
    reshard: bool | int,
    placement: Callable[[nn.Parameter], Shard | None] | None,
    ignored_params: set[nn.Parameter],
) -> None:
    """Make `modules` one unit of FSDP2 on the ranks of `mesh`: the one call of `fully_shard`.

    Args:
        modules: what is gathered together.
        mesh: the axes to shard over and to replicate over.
        options: CPU offload.
        policy: dtypes of this unit.
        reshard: torch's ``reshard_after_forward``.
        placement: torch's ``shard_placement_fn``; None: dim 0 for all.
        ignored_params: parameters of `modules` that stay out of the unit.
    """
    # Pinned memory is for copies to a GPU; without one torch raises on it.
    host = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if options.cpu_offload else OffloadPolicy()
    fully_shard(
        modules[0] if len(modules) == 1 else list(modules),
        mesh=mesh,
        reshard_after_forward=reshard,
        mp_policy=policy,
        shard_placement_fn=placement,
        offload_policy=host,
        ignored_params=ignored_params or None,
    )


def _placement(dp_mesh: DeviceMesh, reshard: bool | int | None) -> Callable[[nn.Parameter], Shard | None] | None:
    """FSDP2's ``shard_placement_fn``; None where it would be dim 0 for all."""
    ranks = dp_mesh.size(dp_mesh.ndim - 1)
    if ranks == 1 or not isinstance(reshard, bool | None):
        return None  # after forward, torch cuts for fewer ranks on dim 0 alone

    def of(param: nn.Parameter) -> Shard | None:
        dim = shard_dim(param, ranks)
        return Shard(dim) if dim else None

    return of


def check_sharding(
    model: nn.Module,
    layers: Sequence[Any],
    mesh: DeviceMesh,
    *,
    options: FSDP2 | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    apart: Iterable[nn.Parameter] = (),
    tail: str | Sequence[nn.Module] | None = "auto",
) -> UnitPlan:
    """Return the plan of what `shard_layers` would do with the same arguments, or raise its error. Changes nothing."""
    validate_mesh(mesh)
    options = FSDP2() if options is None else options
    dp_mesh = data_parallel_mesh(mesh)
    check_reshard(options.reshard_after_forward, dp_mesh.size(dp_mesh.ndim - 1))
    return plan_units(
        model, layers, tail=tail, frozen_sharding=options.frozen_sharding, ignored_params=ignored_params, apart=apart
    )


def check_reshard(value: bool | int | None, shard_size: int) -> None:
    """Raise ValueError where `value`, a number of ranks, does not divide `shard_size` of them."""
    if (problem := undivided_shards(value, shard_size)) is not None:
        raise ValueError(problem)


def _reshard(unit: Unit, last_layer: Unit | None, asked: bool | int | None) -> bool | int:
    if unit.kind == "dtype":
        return False  # a few norms: kept gathered, so that a recomputation which passes them gathers nothing
    if isinstance(asked, bool):
        return asked
    if unit.kind != "layer" or unit is last_layer:
        return False
    return True if asked is None else asked


def _chain_prefetch(model: nn.Module, plan: UnitPlan, forward: int, backward: int) -> None:
    """Each unit fetches its neighbours of the same stack; never another stack's, which may not run in this step."""
    stacks: dict[str, list[nn.Module]] = {}
    for unit in plan.layers:
        stacks.setdefault(unit.stack, []).append(unit.modules[0])
    chains = list(stacks.values())
    if len(chains) == 1:
        if plan.tail is not None:
            chains[0].append(plan.tail.modules[0])
        if forward:
            _as_fsdp(model).set_modules_to_forward_prefetch([_as_fsdp(m) for m in chains[0][:forward]])
    for chain in chains:
        sharded = [_as_fsdp(module) for module in chain]
        for index, module in enumerate(sharded):
            if forward:
                module.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + forward])
            if backward:
                module.set_modules_to_backward_prefetch(sharded[max(0, index - backward) : index][::-1])


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _reduce_unused(model: nn.Module) -> None:
    _as_fsdp(model).set_reduce_scatter_unused_params(True, recurse=False)
    say_once(
        "A tower may be skipped by some ranks: the root's unused parameters get zero gradients instead of none.",
        level=logging.INFO,
    )


def _move(params: Iterable[nn.Parameter], device: torch.device) -> None:
    for param in params:
        if param.device != device and param.device.type != "meta":
            param.data = param.data.to(device)


def _gather_what_was_written(model: nn.Module, held: Sequence[nn.Module]) -> None:
    """Have each forward of `model` read the weights that are stored, also in units that stay gathered after forward.

    FSDP2 frees these in backward alone. Without one, the next forward computes with what was gathered before the
    optimizer's step (pytorch#144289). So they are freed after a forward without gradients, and where a shard was written.
    """
    versions: list[list[int]] = []
    depth = 0  # a hook of the model may call it inside of a call, as context parallelism does in its first one

    def free() -> None:
        for unit in held:
            _as_fsdp(unit).reshard()

    def before(_module: nn.Module, _args: object) -> None:
        nonlocal versions, depth
        now = [sharded_versions(unit) for unit in held]
        if now != versions and not depth:
            free()
        versions, depth = now, depth + 1

    def after(_module: nn.Module, _args: object, _output: object) -> None:
        nonlocal depth
        depth -= 1
        if not torch.is_grad_enabled() and not depth:
            free()

    if held:
        model.register_forward_pre_hook(before, prepend=True)
        model.register_forward_hook(after, always_call=True)


def _around_layers(model: nn.Module, plan: UnitPlan) -> list[nn.Module]:
    """The model, and each module outside of its layers that has weights of its own."""
    inside = {module for unit in plan.layers for top in unit.modules for module in every_module(top)}
    holders = [module for module in every_module(model) if module not in inside and module._parameters]
    return list(dict.fromkeys([model, *holders]))


class _MaterializeFirst:
    """A forward pre-hook of a model on the meta device, in front of FSDP2's.

    FSDP2's own check comes when it has set up half of its state, and every later forward fails on the other half.
    """

    def __call__(self, module: nn.Module, _args: object) -> None:
        meta = [name for name, parameter in module.named_parameters() if parameter.is_meta]
        if meta:
            raise RuntimeError(
                f"{len(meta)} parameter(s) of this {type(module).__name__} are on the meta device, {meta[0]} for one: call "
                "nemo_like.distributed.materialize(model) before the first forward."
            )
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is self:  # done for good
                del module._forward_pre_hooks[number]


# Tensors that a layer keeps on itself, or puts into a list of its file, such as an auxiliary loss: FSDP2 gathers for them.
#
# FSDP2 gathers a unit's weights again when a gradient reaches what the unit returned. A gradient that reaches only what a
# layer kept would find them sharded, in the layer's recomputation or in the operators' own backward.

_CALLS = 4
"""Forwards of a unit after which all attributes are looked at; later ones look where something was found."""
_NOT_KEPT = frozenset(vars(nn.Module())) - {"_buffers"}


class _Kept:
    """Tensors that the modules of one unit keep."""

    def __init__(self, unit: nn.Module, hooked: dict[int, weakref.ref[Tensor]]) -> None:
        self._unit, self._hooked = unit, hooked
        self._calls, self._places = 0, list[tuple[dict[str, Any], str]]()
        self._walk = walk_of(unit)[0]

    def __call__(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._calls < _CALLS:
            self._calls += 1
            self._places = list(self._found())
        attributes = [attributes.get(name) for attributes, name in self._places]
        kept = tensors_in([*attributes, *self._walk.shared_containers()])
        new = {id(t): t for t in kept if t.grad_fn is not None and not self._is_hooked(t)}
        gather_before_backward_of(self._unit, list(new.values()))
        for key, tensor in new.items():
            self._hooked[key] = weakref.ref(tensor, lambda _, key=key: self._hooked.pop(key, None))  # type: ignore[misc]

    def _found(self) -> Iterator[tuple[dict[str, Any], str]]:
        for module in every_module(self._unit):
            for name, value in vars(module).items():
                if name not in _NOT_KEPT and any(tensor.grad_fn is not None for tensor in tensors_in(value)):
                    yield vars(module), name

    def _is_hooked(self, tensor: Tensor) -> bool:
        known = self._hooked.get(id(tensor))
        return known is not None and known() is tensor


def gather_for_what_is_kept(units: list[nn.Module]) -> None:
    """Have each of `units` gathered in backward also for the gradients of tensors that its modules keep in forward."""
    hooked: dict[int, weakref.ref[Tensor]] = {}
    for unit in units:
        after_each_forward(unit, _Kept(unit, hooked))
