"""What is computed from the logits of one chunk: a loss per token in float32, and then its gradient, over the logits.

A chunk is worked on in blocks of rows, so that the float32 temporaries are a small part of the chunk itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nemo_like.losses.vocabulary import Vocabulary
from nemo_like.torch_compat import is_fake

_BLOCKS, _BLOCKS_COPIED = 40, 128
"""Blocks per chunk, where the logits are worked on as they are, and where each block is copied to float32 first: its
temporaries, at most two and four float32 copies of a block, are then 1/20 of a float32 chunk and 1/16 of a bfloat16 one."""
_LAUNCH_ELEMENTS = 1 << 22
"""Elements of the smallest block on an accelerator: smaller ones take longer to launch than to compute."""


class RowLoss(Protocol):
    """A loss that is a sum over tokens of a function of one row of logits."""

    def check(self, vocabulary: int) -> None:
        """Raise ValueError where the loss does not fit a head with so many outputs."""

    def losses(self, logits: Tensor, rows: slice, vocabulary: Vocabulary) -> Tensor:
        """Float32 losses of the tokens `rows`, whose logits, (tokens, vocabulary), are given. Changes the logits
        only in a way that `gradient_` knows of."""

    def gradient_(self, logits: Tensor, rows: slice, vocabulary: Vocabulary, weights: Tensor) -> None:
        """Replace `logits`, as `losses` left them, by the gradient of ``(weights * losses).sum()``."""


def blocks(logits: Tensor) -> Iterator[slice]:
    """The rows of a chunk of logits, (tokens, V), in blocks."""
    count, width = logits.shape
    size = max(1, -(-count // (_BLOCKS if in_place(logits) else _BLOCKS_COPIED)))
    if logits.device.type != "cpu":
        size = max(size, _LAUNCH_ELEMENTS // max(1, width))
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


class CrossEntropyRows:
    """Cross entropy with label smoothing and z-loss.

    ``(1 - smoothing) * (lse - logit of the label) + smoothing * (lse - mean logit) + z_loss * lse ** 2``, zero where the
    label is `ignore_index`; lse is the logarithm of the sum of the exponentials.
    """

    def __init__(self, labels: Tensor, ignore_index: int, smoothing: float, z_loss: float, shape: Shape) -> None:
        """labels: (tokens,) int64."""
        self.labels = labels
        self.counts = labels != ignore_index
        self._smoothing = smoothing
        self._z_loss = z_loss
        self._shape = shape
        self._lse: Tensor | None = None

    def check(self, vocabulary: int) -> None:
        """Raise ValueError for a label that is no token. On the CPU; on an accelerator, where looking would stop the
        host until the device has caught up, `gather` stops the program instead."""
        if self.labels.device.type != "cpu" or is_fake(self.labels):
            return
        wrong = self.counts & ((self.labels < 0) | (self.labels >= vocabulary))
        if wrong.any():
            first = self.labels[wrong][0].item()
            raise ValueError(
                f"labels has {first}, and the head makes {vocabulary} logits per token: labels must be in "
                f"0 ... {vocabulary - 1}, or ignore_index where a token does not count."
            )

    def losses(self, logits: Tensor, rows: slice, vocabulary: Vocabulary) -> Tensor:
        labels, counts = self.labels[rows], self.counts[rows]
        local, here = vocabulary.local(labels)
        here = here & counts
        parts = new_losses(logits, 3)  # lse, the label's logit, sum of the logits
        for block in blocks(logits):
            values = self._shape.apply(logits[block])
            index = torch.where(here[block], local[block], 0)[:, None]
            target = values.gather(1, index)[:, 0].masked_fill_(~here[block], 0)
            sums = values.sum(1) if self._smoothing else target
            torch.stack([values.logsumexp(1), target, sums], out=parts[:, block])
        lse, target, sums = vocabulary.combine(parts)
        self._lse = lse
        losses = lse - target
        if self._smoothing:
            losses = (1 - self._smoothing) * losses + self._smoothing * (lse - sums / vocabulary.size)
        if self._z_loss:
            losses = losses + self._z_loss * lse.square()
        return losses.masked_fill(~counts, 0)

    def gradient_(self, logits: Tensor, rows: slice, vocabulary: Vocabulary, weights: Tensor) -> None:
        assert self._lse is not None
        labels, counts = self.labels[rows], self.counts[rows]
        weights = weights.masked_fill(~counts, 0)
        local, here = vocabulary.local(labels)
        here = here & counts
        in_softmax = weights * (1 + 2 * self._z_loss * self._lse)
        for block in blocks(logits):
            raw = logits[block]
            values = raw if in_place(raw) else self._shape.apply(raw)  # `losses` shaped it in place
            shaped = values.clone() if self._shape.cap is not None else None
            gradient = values.sub_(self._lse[block, None]).exp_().mul_(in_softmax[block, None])
            if self._smoothing:
                gradient.sub_(weights[block, None] * (self._smoothing / vocabulary.size))
            index = torch.where(here[block], local[block], 0)[:, None]
            at_label = torch.where(here[block], weights[block] * (1 - self._smoothing), 0)[:, None]
            gradient.scatter_add_(1, index, -at_label.to(gradient.dtype))
            # Weight 0 is no gradient at all, also where the logits are not finite.
            gradient.masked_fill_(~counts[block, None], 0)
            self._shape.chain_(gradient, shaped)
            if gradient is not raw:
                raw.copy_(gradient)
