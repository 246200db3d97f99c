"""Gradient clipping that gives the same norm for a sharded model as for the whole one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from nemo_like.distributed.launch import current_device
from nemo_like.distributed.slots import show_shards
from nemo_like.torch_compat import foreach_mul

_Axes = tuple[DeviceMesh | None, tuple[int, ...]]
"""A mesh and the dimensions of it over which a gradient is cut up; ``(None, ())``: every rank has all of it."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm over the *whole* model is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, and right where that one is not: parameters sharded over different meshes
    (FSDP beside FSDP x TP, HSDP) and plain tensors may be mixed. Each rank adds up what it holds, and one number per
    kind of sharding is reduced over the ranks that hold different parts. Sums are taken in float32 at least.

    A collective: every rank of the mesh calls it. It does not wait for the device: the norm stays a tensor there.

    Args:
        parameters: a model (also right after a forward that left FSDP units gathered), or its parameters; those
            without a gradient count as zero.
        max_norm: >= 0; ``math.inf`` measures and scales nothing.
        norm_type: > 0, or ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise where the norm is NaN or infinite (waits for the device), before anything is scaled.
        foreach: torch's fused kernels; None: where all gradients are float32 on one kind of device.

    Returns:
        The norm before scaling: a plain scalar tensor, the same on every rank.

    Raises:
        ValueError: `max_norm` or `norm_type` out of range.
        RuntimeError: `error_if_nonfinite` and the norm is not finite; on every rank.
    """
    if isinstance(parameters, nn.Module):
        show_shards(parameters)
        parameters = parameters.parameters()
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return clip_stages_(params, max_norm, norm_type, error_if_nonfinite, foreach)


@torch.no_grad()
def clip_stages_(
    params: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None, *,
    elsewhere: Collection[Tensor] = (), stages: dist.ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """`clip_grad_norm_` where each rank of `stages` holds other parameters of one model.

    elsewhere: those of `params` that another rank of `stages` holds, too, and counts.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}; it must be >= 0.")
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; it must be > 0, or inf.")
    twice = {id(param) for param in elsewhere}
    groups = _groups([param for param in params if id(param) not in twice])
    device = _device(params)
    total = torch.zeros((), device=device)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for (mesh, axes), grads in groups.items():
        power = _local_power(grads, norm_type, foreach).to(device)
        for axis in axes:
            assert mesh is not None
            dist.all_reduce(power, op, group=mesh.get_group(axis))
        total = torch.maximum(total, power) if math.isinf(norm_type) else total + power
    if stages is not None:
        dist.all_reduce(total, op, group=stages)
    if not math.isinf(norm_type):
        total = total ** (1.0 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"The norm of the gradients is {total.item()}; they were not scaled.")
    if not math.isinf(max_norm):
        # The clamp keeps small gradients as they are; 1e-6 is torch's guard against a zero norm.
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grads in (*groups.values(), *_groups(list(elsewhere)).values()):
            _scale(grads, scale, foreach)
    return total


def _groups(params: Sequence[Tensor]) -> dict[_Axes, list[Tensor]]:
    """This rank's parts of the gradients, by how they are cut up.

    The groups come from the parameters, not from the gradients, so that a rank without some gradient still takes part
    in each reduction.
    """
    groups: dict[_Axes, list[Tensor]] = {}
    for param in params:
        grad = param.grad
        reference = param if grad is None else grad
        if isinstance(reference, DTensor):
            if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
                whole = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
                grad = param.grad = reference = grad.redistribute(placements=whole)
            mesh = reference.device_mesh
            axes = tuple(
                axis
                for axis, placement in enumerate(reference.placements)
                if not placement.is_replicate() and mesh.size(axis) > 1
            )
            group = groups.setdefault((mesh, axes) if axes else (None, ()), [])
        else:
            group = groups.setdefault((None, ()), [])
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            if local.numel():  # a rank may hold an empty shard, which has no largest value
                group.append(local)
    return groups


def _device(params: Sequence[Tensor]) -> torch.device:
    """Where the norm is reduced: the mesh's kind of device, which the shards of an offloaded model are not on."""
    for param in params:
        if isinstance(param, DTensor):
            return current_device(param.device_mesh.device_type)
    return params[0].device if params else torch.device("cpu")


def _local_power(grads: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """``sum(|g| ** norm_type)`` over this rank's parts, or the largest ``|g|``."""
    if not grads:
        return torch.zeros(())
    if all(grad.dtype == torch.float32 for grad in grads):
        norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
    else:  # a 16-bit sum of squares loses small gradients
        norms = [
            torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32)) for g in grads
        ]
        norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, torch.float64) for n in norms]), norm_type)
        norm = norm.float()
    return norm if math.isinf(norm_type) else norm**norm_type


def _scale(grads: list[Tensor], scale: Tensor, foreach: bool | None) -> None:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), same in by_kind.items():
        factor = scale.to(device)
        if foreach is False:
            for grad in same:
                grad.mul_(factor)
        else:
            foreach_mul(same, factor)
