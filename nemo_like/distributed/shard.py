"""FSDP2 over a model's layers: the units that are gathered together, freed again, and fetched ahead."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from nemo_like._util.table import grouped
from nemo_like.distributed import launch
from nemo_like.distributed.consistency_checks import mesh_groups
from nemo_like.distributed.layer_order import compare_layers
from nemo_like.distributed.mesh import data_parallel_mesh, validate_mesh
from nemo_like.distributed.unit_calls import (
    ModelCalls,
    fsdp_managed,
    gather_for_what_is_kept,
    guard_units,
    refuse_new_parameters,
)
from nemo_like.distributed.units import Unit, UnitPlan, plan_units, shard_dim
from nemo_like.distributed.weights.replaced import refuse_to_train
from nemo_like.distributed.weights.tensor_locations import CPU_OFFLOAD_MARK
from nemo_like.options.parallel import FSDP2, ranks_between, undivided_shards, unit_reshards
from nemo_like.torch_compat import cast_as_weight, explain_sharded_weights


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
    keep_gathered: bool = False,
) -> UnitPlan:
    """Shard `model` in place: one FSDP unit per layer, one for the tail, one for everything else (the root).

    Args:
        model: anything; may be on the meta device (then call `nemo_like.distributed.materialize` afterwards). Parts that
            the caller has sharded before (experts on a mesh of their own, a frozen encoder) stay units of their own, as
            they are; layers inside them are theirs.
        layers: its repeated blocks in the order in which they run: modules, or objects with ``.module`` and
            ``.group`` (`nemo_like.layers.Layer`). A block inside a checkpoint wrapper is sharded with its wrapper: the
            gather and the cast to the compute dtype are outside of the recomputed code, so that recomputation sees
            the tensors that forward saw and gathers nothing again. A block that is listed twice is one unit.
        mesh: axes as in `nemo_like.distributed.mesh`; FSDP shards over ``dp_shard`` (with ``cp`` folded in) and
            replicates over ``dp_replicate``.
        mp_policy: torch's policy. Its `output_dtype` is used on the root only: on a layer it would make every
            following layer, and the head of a Hugging Face model, see another dtype than its weights.
        options: resharding, prefetch, CPU offload and frozen encoders; None: the defaults of `FSDP2`. One that *trains*
            is always sharded per layer: give ranks without an input an empty one.
        ignored_params: left whole on every rank; their gradients are *not* reduced.
        apart: left alone as they are, for the caller to shard afterwards (experts that are split over ranks).
        tail: ``"auto"``: final norm and output head, found by structure, when no parameter of theirs is shared (a
            tied head belongs to the root, with the embedding); modules, to name them; None: they belong to the root.
        keep_gathered: units that stay gathered after forward stay so over several forwards without a backward in between
            (a pipeline's micro-batches); else a forward gathers them again, as the weights may have been written.

    Returns:
        The units, for whoever wants to look.

    Raises:
        TypeError, ValueError: anything wrong with the arguments, naming it. The model is untouched then.
    """
    options = FSDP2() if options is None else options
    ignored = set(ignored_params)
    plan = check_sharding(model, layers, mesh, options=options, ignored_params=ignored, apart=apart, tail=tail)
    dp_mesh = data_parallel_mesh(mesh)

    policy = mp_policy or MixedPrecisionPolicy()
    inner_policy = dataclasses.replace(policy, output_dtype=None)
    last_layer = plan.layers[-1] if plan.layers else None
    placement = _placement(dp_mesh, options)
    held: list[nn.Module] = []
    for unit in plan.units:
        mine = set(unit.params)
        unit_policy = policy if unit.kind == "root" else inner_policy
        if any(param.is_complex() for param in mine):  # a cast would drop the imaginary part (Fourier operators)
            unit_policy = dataclasses.replace(unit_policy, param_dtype=None, reduce_dtype=None)
        reshard = unit_reshards(options, unit.kind, is_last=unit is last_layer)
        if not reshard:
            held.append(unit.modules[0])
        shard_unit(
            unit.modules,
            dp_mesh,
            options,
            policy=unit_policy,
            reshard=reshard,
            placement=placement,
            ignored_params={p for module in unit.modules for p in module.parameters() if p not in mine},
        )
    device = launch.local_device(mesh.device_type)
    for param in plan.replicated:
        if param.device != device and not param.is_meta:
            param.data = param.data.to(device)
    if plan.embedding is not None:
        _as_fsdp(plan.embedding.modules[0]).set_unshard_in_backward(False)  # no gradient takes its weight
    chain_prefetch(model, plan, options)
    if options.cpu_offload:
        setattr(model, CPU_OFFLOAD_MARK, True)
    compare_layers(model, plan.units, dp_mesh, scheduled=keep_gathered)
    for theirs in plan.theirs:
        _as_fsdp(theirs).set_reduce_scatter_unused_params(True)
    guard_units(model, [(unit.modules[0], unit.name) for unit in plan.units], mesh_groups(dp_mesh))
    gather_for_what_is_kept([unit.modules[0] for unit in plan.layers])
    refuse_new_parameters(model, lambda: fsdp_managed(model))
    refuse_to_train(model, [p for p in plan.replicated if p not in ignored])
    inside = {module for unit in plan.layers for top in unit.modules for module in top.modules()}
    holders = [module for module in model.modules() if module not in inside and module._parameters]
    for module in dict.fromkeys([model, *holders]):  # the model, and owners of weights outside of its layers
        module.register_forward_hook(explain_sharded_weights, always_call=True)
        if policy.param_dtype is not None and policy.cast_forward_inputs and type(module) in _OF_ONE_DTYPE:
            module.register_forward_pre_hook(cast_as_weight)
    calls = ModelCalls(model, held, keep=keep_gathered)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "generate"):
        calls.around("generate")  # calls the encoder by itself, whose embedding may be the root's
    if any(parameter.is_meta for parameter in model.parameters()):
        ask_for_weights(model)
    return plan


def ask_for_weights(model: nn.Module) -> None:
    """Have the first forward of `model` report that parameters are on the meta device, where some still are.

    FSDP2's own check comes when it has set up half of its state, and every later forward fails on the other half.
    """

    def check(module: nn.Module, _args: object) -> None:
        meta = [name for name, parameter in module.named_parameters() if parameter.is_meta]
        if meta:
            raise RuntimeError(
                f"{len(meta)} parameter(s) of this {type(module).__name__} are on the meta device, {meta[0]} for one: call "
                "nemo_like.distributed.materialize(model) before the first forward."
            )
        handle.remove()

    handle = model.register_forward_pre_hook(check, prepend=True)


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
        modules: those that are gathered together.
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
    # Or ranks that use different parameters of one unit would pack gradients of different lists into one sum.
    _as_fsdp(modules[0]).set_reduce_scatter_unused_params(True, recurse=False)


# Modules that raise where their input has another dtype than their weight.
_OF_ONE_DTYPE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm)


def _placement(dp_mesh: DeviceMesh, options: FSDP2) -> Callable[[nn.Parameter], Shard | None] | None:
    """FSDP2's ``shard_placement_fn``; None where it would be dim 0 for all."""
    ranks = dp_mesh.size(dp_mesh.ndim - 1)
    if ranks == 1 or ranks_between(options):
        return None  # after forward, torch cuts for fewer ranks on dim 0 alone

    def placement_for(param: nn.Parameter) -> Shard | None:
        dim = shard_dim(param, ranks)
        return Shard(dim) if dim else None

    return placement_for


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
    """Return the plan that `shard_layers` would make with the same arguments, or raise its error. Changes nothing."""
    validate_mesh(mesh)
    options = FSDP2() if options is None else options
    dp_mesh = data_parallel_mesh(mesh)
    check_reshard(options, dp_mesh.size(dp_mesh.ndim - 1))
    return plan_units(
        model,
        layers,
        tail=tail,
        frozen_sharding=options.frozen_sharding,
        ends=options.ends,
        ignored_params=ignored_params,
        apart=apart,
    )


def check_reshard(options: FSDP2, ranks: int) -> None:
    """Raise ValueError where a number of ranks to reshard over does not divide `ranks`."""
    if (problem := undivided_shards(options, ranks)) is not None:
        raise ValueError(problem)


def chain_prefetch(model: nn.Module, plan: UnitPlan, options: FSDP2 | None, inside: Sequence[nn.Module] = ()) -> None:
    """Have each unit fetch its neighbours of the same stack; never another stack's, which may not run in this step.

    inside: units inside of layers (experts), which are fetched behind their layer. Without a list FSDP2 would begin to
    gather them when their forward begins, behind the exchange of rows that the host waits for.
    """
    options = FSDP2() if options is None else options
    forward, backward = options.forward_prefetch, options.backward_prefetch

    def fetched(unit: Unit) -> list[FSDPModule]:
        below = set(unit.modules[0].modules())
        return [_as_fsdp(module) for module in (unit.modules[0], *(each for each in inside if each in below))]

    chains = list(grouped((unit.stack, fetched(unit)) for unit in plan.layers).values())
    if len(chains) == 1:
        ends = [[] if unit is None else [fetched(unit)] for unit in (plan.embedding, plan.tail)]
        chains = [[*ends[0], *chains[0], *ends[1]]]
        if forward:
            _as_fsdp(model).set_modules_to_forward_prefetch([m for unit in chains[0][:forward] for m in unit])
    for chain in chains:
        for index, (module, *_) in enumerate(chain):
            ahead, behind = chain[index + 1 : index + 1 + forward], chain[max(0, index - backward) : index][::-1]
            if forward:
                module.set_modules_to_forward_prefetch([m for unit in ahead for m in unit])
            if backward:
                module.set_modules_to_backward_prefetch([m for unit in behind for m in unit])


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
