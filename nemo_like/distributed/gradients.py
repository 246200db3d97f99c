"""Gradient clipping that gives the same norm for a sharded model as for the whole one."""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from nemo_like._util.module_tree import check_model
from nemo_like._util.table import grouped
from nemo_like._util.words import check_bool
from nemo_like.distributed.launch import current_device
from nemo_like.distributed.weights.tensor_locations import show_shards
from nemo_like.torch_compat import foreach_mul

# A mesh and the dimensions of it over which a gradient is cut up; ``(None, ())``: every rank has all of it.
_Axes = tuple[DeviceMesh | None, tuple[int, ...]]


class Stages(ABC):
    """Stages of one model, of which each rank of `group` holds others: their gradients have one norm."""

    group: dist.ProcessGroup

    def __init__(self) -> None:
        _PIPELINES.add(self)

    @abstractmethod
    def parameters(self) -> Iterable[nn.Parameter]:
        """Return this rank's."""

    @abstractmethod
    def counted_elsewhere(self) -> Iterable[nn.Parameter]:
        """Return this rank's that another rank of `group` has and counts as well."""


# Looked up by a parameter: a stage's module or its list of parameters is all that a loop may pass.
_PIPELINES: weakref.WeakSet[Stages] = weakref.WeakSet()


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Stages | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm over the *whole* model is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, and right where that one is not: parameters sharded over different meshes
    (FSDP with FSDP x TP, HSDP) and plain tensors may be mixed. Each rank adds up its own gradients, and one number per
    kind of sharding is reduced over the ranks that hold different parts. Sums are taken in float32 at least.

    A collective: every rank of the mesh calls it. It does not wait for the device: the norm stays a tensor there.

    Args:
        parameters: a model (also right after a forward that left FSDP units gathered), or its parameters; those
            without a gradient count as zero. A `Pipeline`, its module or its parameters count the other stages, too.
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
    if isinstance(parameters, nn.Module | Stages):
        parameters = parameters.parameters()
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    param_ids = set(map(id, params))
    stages = next((s for s in list(_PIPELINES) if any(id(param) in param_ids for param in s.parameters())), None)
    twice = set() if stages is None else param_ids & set(map(id, stages.counted_elsewhere()))
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}; it must be >= 0.")
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; it must be > 0, or inf.")
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
        dist.all_reduce(total, op, group=stages.group)
    if not math.isinf(norm_type):
        total = total ** (1.0 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"The norm of the gradients is {total.item()}; they were not scaled.")
    if not math.isinf(max_norm):
        # The clamp keeps small gradients as they are; 1e-6 is torch's guard against a zero norm.
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grads in (*groups.values(), *_groups([param for param in params if id(param) in twice]).values()):
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
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            whole = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
            grad = param.grad = grad.redistribute(placements=whole)
        reference = param if grad is None else grad
        cut: _Axes = (None, ())
        if isinstance(reference, DTensor):
            mesh, placements = reference.device_mesh, enumerate(reference.placements)
            axes = tuple(axis for axis, placement in placements if not placement.is_replicate() and mesh.size(axis) > 1)
            cut = (mesh, axes) if axes else cut
        group = groups.setdefault(cut, [])
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            if local.numel():  # a rank may hold an empty shard, which has no largest value
                group.append(local)
    return groups


def _device(params: Sequence[Tensor]) -> torch.device:
    """Return where the norm is reduced: on the mesh's kind of device, which the shards of an offloaded model are not
    on."""
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
    for (device, _), same in grouped(((grad.device, grad.dtype), grad) for grad in grads).items():
        factor = scale.to(device)
        if foreach is False:
            for grad in same:
                grad.mul_(factor)
        else:
            foreach_mul(same, factor)


# Gradient accumulation without communication, right also where micro-batches use different parameters.


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Set whether the following backward passes reduce gradients over the ranks: off for all micro-batches but the
    last.

    Works on a model sharded with FSDP2 (all ranks keep whole gradients meanwhile) and under `DistributedDataParallel`.
    On a single device there is nothing to do. Call it before the forward of the micro-batch, on every rank.
    """
    check_model(model)
    check_bool("enabled", enabled)
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = enabled
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)


# A sample that runs everything and counts for nothing: for ranks whose batch has no image (or sound).
#
# An encoder that trains is sharded like the rest of the model: a rank that skips it leaves the others waiting for its share.
# Models refuse an empty image, and an image without its place among the tokens. So a rank without an image takes a blank
# one with its tokens behind those of its first row, where a causal model's other tokens don't see it, and with labels that
# no loss counts: the encoder gets gradients of zero, and all ranks run the same collectives.

_TOKENS = "input_ids"


def with_unused_sample(batch: Mapping[str, Any], sample: Mapping[str, Any], *, pad_token_id: int = 0) -> dict[str, Any]:
    """`batch`, with `sample` behind its first row, out of the loss. Neither is changed.

    For causal language models with encoders; the loss and all gradients are those of `batch` alone.

    >>> batch = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([[1, 2], [3, 4]])}
    >>> more = with_unused_sample(batch, {"input_ids": torch.tensor([[9]]), "pixel_values": torch.zeros(1, 3, 8, 8)})
    >>> more["input_ids"].tolist(), more["labels"].tolist(), more["pixel_values"].shape
    ([[1, 2, 9], [3, 4, 0]], [[1, 2, -100], [3, 4, -100]], torch.Size([1, 3, 8, 8]))

    Args:
        batch: this rank's arguments of the model: ``input_ids`` (B, T), ``labels`` (B, T), perhaps
            ``attention_mask`` and ``position_ids`` of that shape, and no image. Token types that only the sample has are
            0 for the batch.
        sample: one row made by the model's processor from a blank image: ``input_ids`` (1, S), and the inputs of the
            image (``pixel_values``, ``image_grid_thw``, ...). Tensors go to the device of the batch.
        pad_token_id: fills the other rows.

    Raises:
        ValueError: no ``input_ids`` of these shapes; the batch has an image already; a tensor (B, T, ...) of another
            name, whose values for the sample are not known.
    """
    tokens, extra = batch.get(_TOKENS), sample.get(_TOKENS)
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or not isinstance(extra, Tensor) or extra.shape[:1] != (1,):
        shapes = [tuple(v.shape) if isinstance(v, Tensor) else v for v in (tokens, extra)]
        raise ValueError(
            f"input_ids are {shapes[0]} in the batch and {shapes[1]} in the sample: not (B, T) and (1, S)."
        )
    rows, length, more = *tokens.shape, extra.shape[1]
    names = {_TOKENS, "labels", "attention_mask", "position_ids"}
    of_tokens = {
        name for name, v in sample.items() if name.endswith(("_ids", "_mask")) and _of_shape(v)[:2] == (1, more)
    }
    media = {name: value for name, value in sample.items() if name not in names | of_tokens}
    already = [name for name in media if batch.get(name) is not None]
    if already:
        raise ValueError(f"The batch has {', '.join(already)} itself: it needs no unused sample.")
    out: dict[str, Any] = dict(batch)
    for name, value in batch.items():
        if name in names and isinstance(value, Tensor):
            fill, row = {_TOKENS: pad_token_id, "labels": -100}.get(name, 0), _own(name, extra, more)
        elif name not in names and _of_shape(value)[:2] == (rows, length):
            if not isinstance(sample.get(name), Tensor):
                raise ValueError(
                    f"The batch has {name}, {tuple(value.shape)}, and the sample has not: nothing to append."
                )
            fill, row = 0, sample[name][0]
        else:
            continue
        tail = value.new_full((rows, more, *value.shape[2:]), fill)
        if name != "labels":
            tail[0] = row.to(tail)
        out[name] = torch.cat([value, tail], dim=1)
    for name, value in sample.items():
        if name.endswith("token_type_ids") and isinstance(value, Tensor) and batch.get(name) is None:
            out[name] = value.new_zeros((rows, length + more), device=tokens.device)  # text, in all models
            out[name][0, length:] = value[0]
    return out | {n: v.to(tokens.device) if isinstance(v, Tensor) else v for n, v in media.items()}


def _own(name: str, extra: Tensor, more: int) -> Tensor:
    """Return the values of the sample's own tokens there; with explicit positions they are a document of their own."""
    if name == _TOKENS:
        return extra[0]
    return torch.ones(more) if name == "attention_mask" else torch.arange(more)


def _of_shape(value: object) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()
