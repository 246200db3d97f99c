"""A call on parts of sequences compared with the same call on whole ones, on the same weights.

Plain models are compared once, on the first tokens of their first batch: nothing in their structure says where positions
come from, or that no other function than torch's attention looks along the sequence. ``NEMO_LIKE_VERIFY=1`` compares
the whole first batch of any model (which takes the memory of whole sequences), ``0`` none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.distributed.context_parallel.parts import Parts

VARIABLE = "NEMO_LIKE_VERIFY"
_TOKENS_PER_RANK = 16
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Relative to the norm of what is compared; other dtypes round more."""
_LOWER = 3e-2


def wanted(plain: bool) -> int | None:
    """How many times the ranks' number of tokens to compare; 0: all; None: nothing is compared."""
    value = os.environ.get(VARIABLE)
    if value == "1":
        return 0
    return _TOKENS_PER_RANK if plain and value != "0" else None


def verify_cut(model: nn.Module, parts: Parts, given: dict[str, Any], length: int, tokens: int) -> None:
    """Raise ValueError, on every rank, where `model` answers otherwise on parts than on whole sequences.

    given: arguments of the call by name; length: tokens of its sequences; tokens: as `wanted` gives.
    """
    few = min(length, tokens * parts.ranks) if tokens else length
    inputs = {name: _first(value, length, few) for name, value in given.items()}
    with torch.no_grad(), torch.random.fork_rng(), _evaluating(model):
        parts.verifying = "whole"
        try:
            whole = _answers(model(**inputs))
            parts.verifying = "parts"
            cut = _answers(model(**inputs))
        finally:
            parts.verifying = None
    for expected, found in zip(whole, cut):
        joined = found
        if found.ndim > 1 and found.shape != expected.shape:
            joined = parts.gather(found, 1)[:, : expected.shape[1]]
        error = ((joined.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()
        allowed = _TOLERANCE.get(expected.dtype, _LOWER)
        if not error <= allowed:
            raise ValueError(
                f"cp={parts.ranks} gives this {type(model).__name__} other outputs than whole sequences do (off by "
                f"{error:.1e} of their norm, {allowed:.0e} is allowed): something in it looks along the sequence, or counts "
                "positions, without the function that cp replaces. Use cp=1, or take positions as an argument position_ids."
            )


def _first(value: Any, length: int, few: int) -> Any:
    if not isinstance(value, Tensor) or few == length:
        return value
    for dim in range(value.ndim - 1, 0, -1):
        if value.shape[dim] == length:
            value = value.narrow(dim, 0, few)
    return value


def _answers(output: Any) -> list[Tensor]:
    """The loss, if there is one, and the first tensor of the sequence."""
    if isinstance(output, Tensor):
        return [output]
    values = list(output.values()) if isinstance(output, dict) else list(output)
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    scalars, others = [t for t in tensors if t.ndim == 0], [t for t in tensors if t.ndim > 1]
    return scalars[:1] + others[:1]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
