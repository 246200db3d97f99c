"""What one op does, in numbers: FLOPs, bytes moved, and whether replay may leave it out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from nemo_like.torch_compat import OpOverload

_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": 4, "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6, "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_fused_attention_overrideable": 5,
}  # fmt: skip
"""Fused attention ops, and the position of ``is_causal`` among their arguments."""

_RANDOM = ("rand", "normal", "bernoulli", "dropout", "multinomial", "uniform", "exponential")
_FREE = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift_fresh"})


def packet_name(op: OpOverload) -> str:
    """``"mm"`` of ``aten.mm.default``: the op without its namespace and overload."""
    return op._overloadpacket.__name__


def is_attention(op: OpOverload) -> bool:
    """Whether `op` is one of the fused attention kernels."""
    return packet_name(op) in _ATTENTION


def is_random(op: OpOverload) -> bool:
    """Whether `op` draws random numbers (a fused attention draws only with dropout, which its caller must look at)."""
    if torch.Tag.nondeterministic_seeded in op.tags and not is_attention(op):
        return True
    return any(word in packet_name(op) for word in _RANDOM) and not packet_name(op).endswith("backward")


def flops(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations, a multiply-add being two.

    Matrix products and convolutions from PyTorch's own registry (`torch.utils.flop_counter`); attention
    ``4 B H S_q S_k D``, halved where causal, because the fused kernels skip the masked half; grouped products
    ``2 rows K N``. Everything else counts 0: its time is the bytes it moves.
    """
    name = packet_name(op)
    if name in _ATTENTION:
        query, key = args[0], args[1]  # (B, H, S, D)
        position = _ATTENTION[name]
        causal = kwargs.get("is_causal", args[position] if len(args) > position else False)
        full = 4 * math.prod(query.shape) * key.shape[-2]
        return full // 2 if causal else full
    if "grouped_mm" in name:
        rows = args[0]  # (rows, K) x (groups, K, N)
        return 2 * math.prod(rows.shape) * args[1].shape[-1]
    counter = flop_registry.get(op._overloadpacket)
    return int(counter(*args, **kwargs, out_val=out)) if counter is not None else 0


def moved_bytes(op: OpOverload, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Bytes read and written by a kernel that touches each input and output once; 0 for an allocation."""
    if packet_name(op) in _FREE:
        return 0
    return sum(_touched(t) for t in inputs) + sum(_touched(t) for t in outputs)


def _touched(tensor: torch.Tensor) -> int:
    """Elements at distinct addresses: an expanded dim is read once."""
    distinct = math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride != 0)
    return distinct * tensor.element_size() if tensor.numel() else 0
