"""Which operators are worth keeping: the save-op set, its families, and the look-up of operators by name.

The set follows the list in `contracts.md`, section 2. Every operator that only some builds of torch, or only some
installed packages, have is looked up by name and left out where it is absent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from nemo_like.log import say_once
from nemo_like.options import did_you_mean
from nemo_like.torch_compat import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    async_tensor_parallel,
    higher_order_op,
    partitioner_compute_intensive_ops,
)

Op = Any
"""An `OpOverload` or a higher-order operator: what a dispatch mode is called with."""

_SDPA = (
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._scaled_dot_product_attention_math_for_mps.default",
    "aten._flash_attention_forward.default",
    "aten._efficient_attention_forward.default",
    "aten._cudnn_attention_forward.default",
)
_VARLEN = (
    "torch_attn._varlen_attn.default",
    "flash_attn._flash_attn_forward.default",
    "flash_attn._flash_attn_varlen_forward.default",
    "flash_attn_3._flash_attn_forward.default",
    "flash_attn_3.fwd.default",
)
_SCALED_MATMULS = (
    "aten._scaled_mm.default",
    "aten._scaled_mm_v2.default",
    "aten._scaled_grouped_mm.default",
    "aten._scaled_grouped_mm_v2.default",
)
_PLAIN_MATMULS = ("aten.mm.default", "aten.linear.default", "aten._grouped_mm.default")
_ROUTING = ("aten.topk.default",)
_SCALES = ("aten.max.default",)
# Tensor parallelism's own sum of a row-wise linear is among them; its all-gather (sequence parallelism) is not: keeping
# the gathered sequence on every rank would undo what cutting it saves.
_COLLECTIVES = (
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
)
_REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
_EXPERT_PARALLEL = (
    "deepep.dispatch.default",
    "deepep.combine.default",
    "hybridep.dispatch.default",
    "hybridep.combine.default",
    "deep_ep.dispatch.default",
    "deep_ep.combine.default",
    "hybrid_ep.dispatch.default",
    "hybrid_ep.combine.default",
)
_COMPUTE_INTENSIVE_FALLBACK = (
    "aten.mm.default",
    "aten.convolution.default",
    "aten.convolution_backward.default",
    "aten.bmm.default",
    "aten.addmm.default",
    "aten._scaled_mm.default",
    "aten.upsample_bilinear2d.default",
)
_HIGHER_ORDER = ("flex_attention", "inductor_compiled_code")

_READS_DEVICE = "aten._local_scalar_dense.default"
_COPIES = ("aten._to_copy.default", "aten.to.dtype_layout", "aten.to.device")


def find_op(name: str) -> Op | None:
    """The operator called `name` (``"aten.mm.default"``, with or without ``torch.ops.``), or None.

    >>> find_op("torch.ops.aten.mm.default")
    <OpOverload(op='aten.mm', overload='default')>
    >>> find_op("deepep.dispatch.default") is None
    True
    """
    parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
    if len(parts) == 2:
        parts.append("default")
    if len(parts) != 3:
        return None
    namespace, packet, overload = parts
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError):  # RuntimeError: torch's word for an unknown operator in some namespaces
        return None


def resolve_op(name: str | Op) -> frozenset[Op]:
    """One user-given operator as overloads: a name, an overload, or a packet, which stands for all its overloads.

    Raises:
        ValueError: no operator has this name; the message lists close ones.
        TypeError: neither a name nor an operator.
    """
    if isinstance(name, OpOverloadPacket):
        return frozenset(getattr(name, overload) for overload in name.overloads())
    if isinstance(name, OpOverload | HigherOrderOperator):
        return frozenset((name,))
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no operator: give a name such as 'torch.ops.aten.mm.default', or the operator.")
    higher_order = higher_order_op(name.removeprefix("torch.ops.higher_order."))
    if higher_order is not None:
        return frozenset((higher_order,))
    parts = name.strip().removeprefix("torch.ops.").replace("::", ".").split(".")
    if len(parts) == 2:  # a packet: "aten.mm"
        packet = getattr(getattr(torch.ops, parts[0]), parts[1], None) if _is_name(parts) else None
        if isinstance(packet, OpOverloadPacket):
            return resolve_op(packet)
    found = find_op(name.strip()) if len(parts) == 3 and _is_name(parts) else None
    if found is None:
        known = [f"{parts[0]}.{op}" for op in dir(getattr(torch.ops, parts[0]))] if _is_name(parts[:1]) else []
        known += list(_COMPUTE_INTENSIVE_FALLBACK + _SDPA + _ROUTING)
        raise ValueError(
            f"{name!r} is no operator of this torch ({torch.__version__}) and the packages imported so far; write it "
            f"like 'torch.ops.aten.mm.default'.{did_you_mean('.'.join(parts), known)}"
        )
    return frozenset((found,))


def resolve_ops(names: Iterable[str | Op]) -> frozenset[Op]:
    """The overloads that `names` stand for; raises as `resolve_op` does."""
    found: frozenset[Op] = frozenset()
    for name in names:
        found |= resolve_op(name)
    return found


def _is_name(parts: list[str]) -> bool:
    return all(part.isidentifier() for part in parts)


def _named(names: Iterable[str]) -> frozenset[Op]:
    return frozenset(op for op in map(find_op, names) if op is not None)


@functools.cache
def compute_intensive_ops() -> frozenset[Op]:
    """PyTorch's own list of expensive operators, as overloads.

    Where torch has no such list, one of our own.
    """
    listed = partitioner_compute_intensive_ops()
    if listed is None:
        return _named(_COMPUTE_INTENSIVE_FALLBACK)
    found: set[Op] = set()
    for op in listed:
        if isinstance(op, OpOverloadPacket):
            # Only functional overloads: an out= overload writes into a tensor that the caller owns.
            found |= {o for o in resolve_op(op) if not o._schema.is_mutable}
        else:
            found.add(op)
    return frozenset(found)


@functools.cache
def plain_matmuls() -> frozenset[Op]:
    """The matmuls that alternate between kept and recomputed: `mm`, `linear` (a leaf in some graphs), grouped."""
    return _named(_PLAIN_MATMULS)


def always_saved_ops() -> frozenset[Op]:
    """Operators that are never replayed: their second result may differ, or every rank would have to join in.

    `topk` can break ties in another order the second time, and then an expert gets other tokens (known failure 2).
    """
    return _named(_ROUTING + _COLLECTIVES + _EXPERT_PARALLEL + (_READS_DEVICE,))


def default_save_ops() -> frozenset[Op]:
    """The whole save-op set of ``ac="selective"``, before alternation.

    Looked up anew at each call, because a package imported later (DeepEP, flash attention) brings new operators.
    """
    higher_order = frozenset(op for op in map(higher_order_op, _HIGHER_ORDER) if op is not None)
    ops = compute_intensive_ops() | plain_matmuls() | always_saved_ops() | higher_order
    ops |= _named(_SDPA + _VARLEN + _SCALED_MATMULS + _SCALES)
    if async_tensor_parallel():
        # A kept reduce-scatter can't be fused into its matmul (torchtitan#965).
        ops -= _named((_REDUCE_SCATTER,))
        say_once("Async tensor parallel is on: reduce-scatter is left out of the save-op set, so that it can fuse.")
    return ops


def is_random(op: Op) -> bool:
    """Whether `op` draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


@functools.cache
def _dropout_position(op: Op) -> int | None:
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def draws(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether this call of a random operator may draw: attention without dropout, though tagged, does not."""
    position = _dropout_position(op)
    if position is None:
        return True
    return bool(args[position] if position < len(args) else (kwargs or {}).get("dropout_p", 0.0))


def is_mutable(op: Op) -> bool:
    """Whether `op` changes one of its arguments (in-place and ``out=`` forms)."""
    schema = getattr(op, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def returns_alias(op: Op) -> bool:
    """Whether an output of `op` is a view or alias of an input: replaying it is free, keeping it twice is not."""
    schema = getattr(op, "_schema", None)
    return schema is not None and any(ret.alias_info is not None for ret in schema.returns)


_METADATA = frozenset(
    op
    for op in map(
        find_op,
        (
            "aten.detach.default",
            "aten.alias.default",
            "aten.lift_fresh.default",
            "prim.device.default",
            "aten.size.default",
            "aten.sym_size.default",
            "aten.sym_size.int",
            "aten.stride.default",
            "aten.sym_stride.default",
            "aten.sym_stride.int",
            "aten.sym_numel.default",
            "aten.sym_storage_offset.default",
            "aten.storage_offset.default",
            "aten.numel.default",
            "aten.dim.default",
            "aten.is_contiguous.default",
            "aten.is_contiguous.memory_format",
            "aten.is_strides_like_format.default",
            "aten.is_non_overlapping_and_dense.default",
            "prim.layout.default",
        ),
    )
    if op is not None
)


_UNDECLARED_ALIASES = _named(
    ("aten._unsafe_view.default", "aten._reshape_alias.default", "_c10d_functional.wait_tensor.default")
)
"""They return their input's storage, which their schemas don't say: keeping the input keeps the output."""


@functools.cache
def can_be_tracked(op: Op) -> bool:
    """Whether a decision on `op` has a meaning: not for views, metadata calls, profiler ranges and in-place forms."""
    if op in _METADATA or op in _UNDECLARED_ALIASES or is_mutable(op) or returns_alias(op):
        return False
    return getattr(op, "namespace", "") not in ("profiler", "fsdp", "c10d", "prim", "record_function")


def is_device_to_host_copy(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether this call copies from an accelerator to the host: always kept, for replaying it would wait again."""
    device = kwargs.get("device") if kwargs else None
    if device is None or not args or not isinstance(args[0], torch.Tensor):
        return False
    return torch.device(device).type == "cpu" and args[0].device.type != "cpu"


COPY_OPS: frozenset[Op] = _named(_COPIES)
"""Operators of which a call may be a device-to-host copy."""
