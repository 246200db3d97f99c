"""A call on parts of sequences compared with the same call on whole ones, on the same weights.

Plain models are compared once, on the first tokens of their first batch: nothing in their structure says where positions
come from, or that no other function than torch's attention looks along the sequence. ``NEMO_LIKE_VERIFY=1`` compares
the whole first batch of any model (which takes the memory of whole sequences), ``0`` none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.distributed.context_parallel import layout
from nemo_like.distributed.context_parallel.block_masks import first_tokens as first_of_mask
from nemo_like.distributed.context_parallel.block_masks import is_block_mask
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
    inputs = first_tokens(given, length, tokens, parts.ranks)
    with torch.no_grad(), torch.random.fork_rng(), evaluating(model):
        parts.verifying = "whole"
        try:
            whole = answers(model(**inputs))
            parts.verifying = "parts"
            cut = answers(model(**inputs))
        finally:
            parts.verifying = None
    refuse_others(model, parts, max(excess(parts, found, expected) for found, expected in zip(cut, whole)))


def excess(parts: Parts, found: Tensor, expected: Tensor) -> float:
    """How far what parts gave is off what whole sequences gave, as a multiple of what is allowed for its dtype.

    found: (B, S / ranks, ...) of this rank, joined first; or anything of the shape of `expected`.
    """
    if found.ndim > 1 and found.shape != expected.shape:
        found = parts.gather(found, 1)[:, : expected.shape[1]]
    error = ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()
    return error / _TOLERANCE.get(expected.dtype, _LOWER) if error == error else float("inf")


def refuse_others(model: nn.Module, parts: Parts, worst: float) -> None:
    """Raise ValueError where `excess` came to more than one."""
    if worst > 1:
        raise ValueError(
            f"cp={parts.ranks} gives this {type(model).__name__} other outputs than whole sequences do (off by {worst:.0f} "
            "times what rounding is allowed): something in it looks along the sequence, or counts positions, without the "
            "function that cp replaces. Use cp=1, or take positions as an argument position_ids."
        )


def first_tokens(given: Mapping[str, Any], length: int, tokens: int, ranks: int) -> dict[str, Any]:
    """`given` with the first tokens of its sequences of `length`: `tokens` for each of `ranks`; 0: all.

    Where the whole sequences are padded, one less, so that these are, too.
    """
    few = tokens * ranks - (layout.padded_length(length, ranks) != length) if tokens else length
    return {name: _first(value, length, min(length, few)) for name, value in given.items()}


def _first(value: Any, length: int, few: int) -> Any:
    if few < length and is_block_mask(value) and value.shape[-1] == length:
        return first_of_mask(value, few)
    if not isinstance(value, Tensor) or few == length:
        return value
    for dim in range(value.ndim - 1, 0, -1):
        if value.shape[dim] == length:
            value = value.narrow(dim, 0, few).contiguous()  # as whole sequences are: models view them
    return value


def answers(output: Any) -> list[Tensor]:
    """The loss, if there is one, and the first tensor of the sequence."""
    if isinstance(output, Tensor):
        return [output]
    values = list(output.values()) if isinstance(output, dict) else list(output)
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    scalars, others = [t for t in tensors if t.ndim == 0], [t for t in tensors if t.ndim > 1]
    return scalars[:1] + others[:1]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
