"""What is computed from the logits of one chunk: a loss per token in float32, and its gradient, over the logits.

A chunk is worked on in blocks of rows, so that temporaries are a small part of the chunk itself, and that what one operator
has written is in the cache when the next one reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nemo_like.losses.vocabulary import Vocabulary
from nemo_like.torch_compat import is_fake

_BLOCKS, _BLOCKS_COPIED = 40, 128
"""Fewest blocks per chunk, where the logits are worked on as they are, and where each block is copied to float32 first: its
temporaries, at most two and four float32 copies of a block, are then 1/20 of a float32 chunk and 1/16 of a bfloat16 one."""
_CACHED_ELEMENTS = 1 << 17
"""Elements of a block that is worked on in place, with no temporary of its size, on the CPU: half a MiB of float32."""
_LAUNCH_ELEMENTS = 1 << 22
"""Elements of the smallest block on an accelerator: smaller ones take longer to launch than to compute."""


class RowLoss(Protocol):
    """A loss that is a sum over tokens of a function of one row of logits."""

    def check(self, vocabulary: int) -> None:
        """Raise ValueError where the loss does not fit a head with so many outputs."""

    def step(
        self, logits: Tensor, rows: slice, vocabulary: Vocabulary, weights: Tensor | None, apart: bool
    ) -> tuple[Tensor, Apart | None]:
        """Losses of the tokens `rows`, (tokens,), float32 or, for such logits, float64.

        logits: (tokens, this shard's part of the vocabulary). With `weights`, (tokens,), they become the gradient of
        ``(weights * losses).sum()``; without, nobody reads them again. apart: one entry per token may be left out of
        the gradient, and returned.
        """


class Apart(NamedTuple):
    """Entries of a gradient that are to be added to it, one per token. Beside the label's, which is as large as all others
    together, the others would lose bits in every sum over tokens or tokens of the vocabulary, and in bfloat16 itself."""

    column: Tensor
    """(tokens,) int64"""
    value: Tensor
    """(tokens,) float32 or float64"""


def blocks(logits: Tensor, copies: bool = True) -> Iterator[slice]:
    """The rows of a chunk of logits, (tokens, V), in blocks. copies: temporaries of a block's size are made of each."""
    count, width = logits.shape
    size = max(1, -(-count // (_BLOCKS if in_place(logits) else _BLOCKS_COPIED)))
    if logits.device.type != "cpu":
        size = max(size, _LAUNCH_ELEMENTS // max(1, width))
    elif not copies:
        size = max(1, _CACHED_ELEMENTS // max(1, width))
    yield from pieces(count, size, logits)


def pieces(count: int, size: int, like: Tensor) -> Iterator[slice]:
    """0 ... `count` in steps of `size`. On fake tensors two of them, since each takes the memory of the one before."""
    for start in range(0, min(count, 2 * size) if is_fake(like) else count, size):
        yield slice(start, min(start + size, count))


def new_losses(logits: Tensor, *kinds: int) -> Tensor:
    """Room for `kinds` numbers per row of `logits`, in the dtype that losses are computed in: (*kinds, rows)."""
    return logits.new_empty(*kinds, len(logits), dtype=logits.dtype if in_place(logits) else torch.float32)


def in_place(logits: Tensor) -> bool:
    """Whether logits are computed with as they are; lower precision is copied to float32, a block at a time."""
    return logits.dtype in (torch.float32, torch.float64)


def kernel(function: Callable[..., Any], backend: str | None, logits: Tensor) -> Callable[..., Any]:
    """`function` of one block, compiled for every number of rows at once where a compiler is asked for."""
    return function if backend is None or is_fake(logits) else _compiled(function, backend)


@functools.cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, dynamic=True)


@dataclass(frozen=True)
class Shape:
    """What is done to raw logits before the softmax: ``factor * cap * tanh(logits * scale / cap)``."""

    scale: float | None = None
    cap: float | None = None
    factor: float | None = None

    def apply(self, raw: Tensor) -> Tensor:
        """Shaped logits in float32 (float64 stays); in place where `raw` has that dtype."""
        values = raw if in_place(raw) else raw.float()
        if self.scale is not None:
            values.mul_(self.scale)
        if self.cap is not None:
            values.div_(self.cap).tanh_().mul_(self.cap)
        if self.factor is not None:
            values.mul_(self.factor)
        return values

    def chain_(self, gradient: Tensor, shaped: Tensor | None) -> None:
        """From the gradient of shaped logits to that of raw ones."""
        if self.cap is not None and shaped is not None:
            gradient.mul_(shaped.div(self.cap * (self.factor or 1)).square_().neg_().add_(1))
        if self.factor is not None:
            gradient.mul_(self.factor)
        if self.scale is not None:
            gradient.mul_(self.scale)
