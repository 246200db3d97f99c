"""FLOP rules of operators, by the shapes of their arguments; a multiply-add is two.

Rules of our own stand only where PyTorch's registry (`torch.utils.flop_counter`) has none or reads the shapes of a
layout wrongly; for all else the registry's is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from nemo_like.op_lookup import argument

FlopRule = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]
"""``(op, args, kwargs, output)`` → FLOPs."""

_OFFSETS_Q = ("cum_seq_q", "cu_seqlens_q", "cu_seq_q")
_OFFSETS_K = ("cum_seq_k", "cu_seqlens_k", "cu_seq_k")
_LONGEST_Q = ("max_q", "max_seqlen_q")
_LONGEST_K = ("max_k", "max_seqlen_k")


def rule_of_torch(op: Any) -> FlopRule | None:
    """PyTorch's own formula for `op`, as a rule; None where it has none."""
    formula = flop_registry.get(getattr(op, "overloadpacket", op))
    if formula is None:
        return None
    return lambda op, args, kwargs, out: int(formula(*args, **kwargs, out_val=out))


def matrix_product(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """``(M, K) x (K, N)``."""
    return 2 * math.prod(args[0].shape) * args[1].shape[-1]


def grouped_mm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """``(rows, K) x (groups, K, N)``, each row with its own group's matrix, and the other forms.

    They are ``(groups, M, K) x (groups, K, N)``, ``(M, K) x (K, N)`` with `K` cut into groups, and
    ``(groups, M, K) x (K, N)`` with `N` cut into groups.
    """
    first, second = args[0].shape, args[1].shape
    if len(first) == 3 and len(second) == 2:
        return 2 * first[1] * first[2] * second[1]
    return 2 * math.prod(first) * second[-1]


def linear(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """``(..., K)`` times the transpose of ``(N, K)``; the bias is not counted, as in PyTorch's `addmm`."""
    return 2 * math.prod(args[0].shape) * args[1].shape[0]


def attention_heads_first(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Query, key, value ``(B, H, S, D)``, or ``(T, H, D)`` with offsets: ``2 B H S_q S_k (D_qk + D_v)``.

    `H` is the query's: a key head that several query heads share is multiplied with each.
    """
    return _attention(op, args, kwargs, heads=1, tokens=2)


def attention_tokens_first(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """As `attention_heads_first`, for kernels that take ``(B, S, H, D)``."""
    return _attention(op, args, kwargs, heads=2, tokens=1)


def _attention(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], heads: int, tokens: int) -> int:
    query, key, value = args[:3]
    widths = query.shape[-1] + value.shape[-1]
    offsets_q = argument(op, args, kwargs, *_OFFSETS_Q)
    if offsets_q is None:
        return 2 * query.shape[0] * query.shape[heads] * query.shape[tokens] * key.shape[tokens] * widths
    offsets_k = argument(op, args, kwargs, *_OFFSETS_K)
    lengths_q = _lengths(offsets_q, argument(op, args, kwargs, *_LONGEST_Q))
    lengths_k = lengths_q if offsets_k is None else _lengths(offsets_k, argument(op, args, kwargs, *_LONGEST_K))
    pairs = sum(q * k for q, k in zip(lengths_q, lengths_k, strict=True))
    return 2 * query.shape[-2] * pairs * widths


def _lengths(offsets: torch.Tensor, longest: Any) -> list[int]:
    """Lengths of the sequences that `offsets` (0, ..., total) cuts; where a trace has no numbers, the longest for all."""
    if type(offsets) is torch.Tensor and offsets.device.type != "meta":
        return [int(length) for length in offsets.diff().tolist()]
    return [int(longest)] * (offsets.shape[0] - 1)
