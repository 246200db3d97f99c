"""FSDP2 over a model's layers: what is gathered together, when it is freed again, what is fetched ahead."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from nemo_like.distributed import launch
from nemo_like.distributed.mesh import data_parallel_mesh, validate_mesh
from nemo_like.distributed.slots import CPU_OFFLOAD_MARK
from nemo_like.distributed.units import FROZEN_SHARDING, Unit, UnitPlan, plan_units
from nemo_like.log import say_once, warn_once


def shard_layers(
    model: nn.Module,
    layers: Sequence[Any],
    mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    forward_prefetch: int = 1,
    backward_prefetch: int = 1,
    ignored_params: Iterable[nn.Parameter] = (),
    tail: str | Sequence[nn.Module] | None = "auto",
    frozen_sharding: str = "root",
    reduce_unused: bool | None = None,
) -> UnitPlan:
    """Shard `model` in place: one FSDP unit per layer, one for the tail, one for everything else (the root).

    Args:
        model: anything; may be on the meta device (then call `nemo_like.distributed.materialize` afterwards).
        layers: its repeated blocks in the order in which they run: modules, or objects with ``.module`` and
            ``.group`` (`nemo_like.layers.Layer`). A block inside a checkpoint wrapper is sharded with its wrapper: the
            gather and the cast to the compute dtype stand outside of what is replayed, so that replay sees what
            forward saw and gathers nothing again. A block that is listed twice is one unit.
        mesh: axes as in `nemo_like.distributed.mesh`; FSDP shards over ``dp_shard`` (with ``cp`` folded in) and
            replicates over ``dp_replicate``.
        mp_policy: torch's policy. Its `output_dtype` is used on the root only: on a layer it would make every
            following layer, and the head of a Hugging Face model, see another dtype than its weights.
        offload_policy: torch's (`CPUOffloadPolicy` keeps shards, gradients and optimizer state in host memory).
        reshard_after_forward: free the gathered parameters after forward and gather them again in backward.
            None: layers do, except the last one, which backward needs at once; tail and root do not.
            True / False: all / none. A number: layers stay sharded over that many ranks (a divisor of the shard axis).
        forward_prefetch: how many following units each unit fetches ahead in forward; 0: FSDP's implicit prefetch.
        backward_prefetch: the same for backward.
        ignored_params: left whole on every rank; their gradients are *not* reduced.
        tail: ``"auto"``: final norm and output head, found by structure, when no parameter of theirs is shared (a
            tied head belongs to the root, with the embedding); modules, to name them; None: they belong to the root.
        frozen_sharding: frozen layers of a tower (vision, audio, or unnamed beside layers that train) that a rank
            without such an input skips. ``"root"``: gathered with the root on every rank, so that nobody waits.
            ``"replicate"``: whole on every rank. ``"per_layer"``: like any layer, least memory; it **hangs** as soon
            as one rank runs the tower and another does not, because a gather waits for all ranks. A tower that
            *trains* is always sharded per layer: give ranks without an input an empty one.
        reduce_unused: give parameters of the root that a rank did not use a zero gradient, so that every rank reduces
            the same buffer (a trainable projector of a tower that some ranks skip). None: where such a tower is.

    Returns:
        The units, for whoever wants to look.

    Raises:
        TypeError, ValueError: anything wrong with the arguments, naming it. The model is untouched then.
    """
    plan = check_sharding(
        model,
        layers,
        mesh,
        reshard_after_forward=reshard_after_forward,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
        ignored_params=ignored_params,
        tail=tail,
        frozen_sharding=frozen_sharding,
    )
    dp_mesh = data_parallel_mesh(mesh)
    if reduce_unused is None:
        reduce_unused = bool(plan.towers)

    policy = mp_policy or MixedPrecisionPolicy()
    inner_policy = dataclasses.replace(policy, output_dtype=None)
    last_layer = plan.layers[-1] if plan.layers else None
    for unit in plan.units:
        mine = set(unit.params)
        others = {p for module in unit.modules for p in module.parameters() if p not in mine}
        fully_shard(
            unit.modules[0] if len(unit.modules) == 1 else list(unit.modules),
            mesh=dp_mesh,
            reshard_after_forward=_reshard(unit, last_layer, reshard_after_forward),
            mp_policy=policy if unit.kind == "root" else inner_policy,
            offload_policy=offload_policy or OffloadPolicy(),
            ignored_params=others if others else None,
        )
    _move(plan.replicated, launch.local_device(mesh.device_type))
    _chain_prefetch(model, plan, forward_prefetch, backward_prefetch)
    if isinstance(offload_policy, CPUOffloadPolicy):
        setattr(model, CPU_OFFLOAD_MARK, True)
    if reduce_unused:
        _reduce_unused(model)
    return plan


def check_sharding(
    model: nn.Module,
    layers: Sequence[Any],
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool | int | None = None,
    forward_prefetch: int = 1,
    backward_prefetch: int = 1,
    ignored_params: Iterable[nn.Parameter] = (),
    tail: str | Sequence[nn.Module] | None = "auto",
    frozen_sharding: str = "root",
) -> UnitPlan:
    """What `shard_layers` would do with the same arguments, or its error. Changes nothing."""
    validate_mesh(mesh)
    dp_mesh = data_parallel_mesh(mesh)
    check_options(
        reshard_after_forward=reshard_after_forward,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
        frozen_sharding=frozen_sharding,
    )
    _check_reshard(reshard_after_forward, dp_mesh.size(dp_mesh.ndim - 1))
    return plan_units(model, layers, tail=tail, frozen_sharding=frozen_sharding, ignored_params=ignored_params)


def check_options(
    *,
    reshard_after_forward: bool | int | None = None,
    forward_prefetch: int = 1,
    backward_prefetch: int = 1,
    frozen_sharding: str = "root",
) -> None:
    """Raise TypeError or ValueError for an option that is wrong on any mesh."""
    _check_depth("forward_prefetch", forward_prefetch)
    _check_depth("backward_prefetch", backward_prefetch)
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
        raise TypeError(
            f"reshard_after_forward is {reshard_after_forward!r}; it must be None, a bool or a number of ranks."
        )
    if not isinstance(reshard_after_forward, bool) and reshard_after_forward is not None and reshard_after_forward < 1:
        raise ValueError(
            f"reshard_after_forward is {reshard_after_forward}; it must be None, a bool or a number of ranks >= 2."
        )
    if frozen_sharding not in FROZEN_SHARDING:
        raise ValueError(f"frozen_sharding is {frozen_sharding!r}; it must be one of {', '.join(FROZEN_SHARDING)}.")


def _check_depth(name: str, depth: int) -> None:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ValueError(f"{name} is {depth!r}; it must be a whole number of units >= 0.")


def _check_reshard(value: bool | int | None, shard_size: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if not 1 < value < shard_size or shard_size % value:
        divisors = ", ".join(str(n) for n in range(2, shard_size) if shard_size % n == 0)
        raise ValueError(
            f"reshard_after_forward is {value}; as a number of ranks it must divide the shard axis of {shard_size} ranks "
            f"({divisors or 'no number between does'}). True: sharded over all of them after forward; False: not."
        )


def _reshard(unit: Unit, last_layer: Unit | None, asked: bool | int | None) -> bool | int:
    if unit.kind == "dtype":
        return False  # a few norms: held, so that a replay which passes them gathers nothing
    if isinstance(asked, bool):
        return asked
    if unit.kind != "layer" or unit is last_layer:
        return False
    return True if asked is None else asked


def _chain_prefetch(model: nn.Module, plan: UnitPlan, forward: int, backward: int) -> None:
    """Each unit fetches its neighbours of the same stack; never another stack's, which may not run in this step."""
    stacks: dict[str, list[nn.Module]] = {}
    for unit in plan.layers:
        stacks.setdefault(unit.name.rpartition(".")[0], []).append(unit.modules[0])
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
    setter = getattr(model, "set_reduce_scatter_unused_params", None)  # torch 2.13 and later
    if setter is None:
        warn_once(
            f"torch {torch.__version__} cannot give unused parameters a zero gradient (2.13 can): if a rank skips "
            "a tower whose projector trains, the job hangs in backward. Give such ranks an empty input."
        )
        return
    setter(True, recurse=False)
    say_once(
        "A tower may be skipped by some ranks: the root's unused parameters get zero gradients instead of none.",
        level=logging.INFO,
    )


def _move(params: Iterable[nn.Parameter], device: torch.device) -> None:
    for param in params:
        if param.device != device and param.device.type != "meta":
            param.data = param.data.to(device)
