"""The computation on the logits of one chunk: a loss per token in float32, and its gradient, over the logits.

A chunk is worked on in blocks of rows, so that temporaries are a small part of the chunk itself. The output of one
operator is then in the cache when the next one reads it.
"""

import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_like._util.code import names_in
from nemo_like._util.module_tree import base_model
from nemo_like._util.tensors import on_accelerator
from nemo_like.torch_compat import is_fake

# Fewest blocks per chunk, where the logits are worked on as they are, and where each block is copied to float32 first:
# its temporaries, at most two and four float32 copies of a block, are then 1/20 of a float32 chunk and 1/16 of a
# bfloat16 one.
_BLOCKS, _BLOCKS_COPIED = 40, 128
# Elements of a block that is worked on in place, with no temporary of its size, on the CPU: half a MiB of float32.
_CACHED_ELEMENTS = 1 << 17
# Elements of the smallest block on an accelerator, half of a chunk of 256 MiB in 16 bits: each takes some twenty
# kernels, which smaller ones launch longer than they compute. A float32 copy of a block takes 256 MiB.
_LAUNCH_ELEMENTS = 1 << 26


class SparseGradient(NamedTuple):
    """Entries of a gradient that are to be added to it, one per token. Summed together with the label's, which is as
    large as all others together, the others would lose bits: in every sum over tokens or the vocabulary, and in bfloat16
    itself."""

    column: Tensor  # (tokens,) int64
    value: Tensor  # (tokens,) float32 or float64


def blocks(logits: Tensor, copies: bool = True) -> Iterator[slice]:
    """The rows of a chunk of logits, (tokens, V), in blocks. copies: temporaries of a block's size are made of each."""
    count, width = logits.shape
    size = max(1, -(-count // (_BLOCKS if in_place(logits) else _BLOCKS_COPIED)))
    if on_accelerator(logits):
        size = max(size, _LAUNCH_ELEMENTS // max(1, width))
    elif not copies:
        size = max(1, _CACHED_ELEMENTS // max(1, width))
    yield from pieces(count, size, logits)


# Times that the operators of a piece run in a real step: on fake tensors the last piece is all that follow, too.
REPEATS: ContextVar[float] = ContextVar("REPEATS", default=1.0)


def pieces(count: int, size: int, like: Tensor) -> Iterator[slice]:
    """0 ... `count` in steps of `size`. On fake tensors two of them, since each takes the memory of the one before; then
    the second one has the seconds of all that follow (`REPEATS`)."""
    shown, before = min(count, 2 * size) if is_fake(like) else count, REPEATS.get()
    try:
        for start in range(0, shown, size):
            stop = min(start + size, count)
            REPEATS.set(before * ((count if stop == shown else stop) - start) / (stop - start))
            yield slice(start, stop)
    finally:
        REPEATS.set(before)


def new_losses(logits: Tensor, *kinds: int) -> Tensor:
    """Memory for `kinds` numbers per row of `logits`, in the dtype that losses are computed in: (*kinds, rows)."""
    return logits.new_empty(*kinds, len(logits), dtype=logits.dtype if in_place(logits) else torch.float32)


def in_place(logits: Tensor) -> bool:
    """Return whether logits are computed with as they are; lower precision is copied to float32, a block at a time."""
    return logits.dtype in (torch.float32, torch.float64)


def kernel(function: Callable[..., Any], backend: str | None, logits: Tensor) -> Callable[..., Any]:
    """`function` of one block, compiled for every number of rows at once where a compiler is asked for."""
    return function if backend is None or is_fake(logits) else _compiled(function, backend=backend, dynamic=True)


_compiled = functools.cache(torch.compile)  # each function once for a back end


@dataclass(frozen=True)
class Shape:
    """The function of raw logits before the softmax: ``factor * cap * tanh(logits * scale / cap)``."""

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


# The meaning of labels to the losses of PyTorch and transformers.

IGNORED = -100  # The label that counts for nothing, as `F.cross_entropy` has it.


def predicts_next_token(model: nn.Module) -> bool:
    """Return whether `model` computes transformers' loss of causal models, which shifts ``labels``, unless it is given
    ``shift_labels``. GPT-2 does, too, whose ``loss_type`` is None; BART has that function, and its forward calls another."""
    inner = base_model(model)
    if getattr(getattr(inner, "loss_function", None), "__name__", None) != "ForCausalLMLoss":
        return False
    forwards = [vars(kind)["forward"] for kind in type(inner).__mro__ if "forward" in vars(kind)]
    return any("loss_function" in names_in(forward) for forward in forwards)


# Cross entropy with label smoothing and z-loss of the logits of one chunk, and its gradient.


@dataclass(frozen=True)
class Terms:
    """``(1 - smoothing) * (lse - logit of the label) + smoothing * (lse - mean logit) + z_loss * lse ** 2``."""

    smoothing: float
    z_loss: float
    shape: Shape

    def losses(self, lse: Tensor, target: Tensor, mean: Tensor) -> Tensor:
        """From the logarithm of the sum of exponentials, the label's logit and the mean logit; all (rows,)."""
        losses = lse - target
        if self.smoothing:
            losses = (1 - self.smoothing) * losses + self.smoothing * (lse - mean)
        return losses + self.z_loss * lse.square() if self.z_loss else losses

    def in_softmax(self, weights: Tensor, lse: Tensor) -> Tensor:
        """Return the factor of the softmax in the gradient; (rows,)."""
        return weights * (1 + 2 * self.z_loss * lse) if self.z_loss else weights


# Which part of the vocabulary a rank's logits are: all of it, or the shard of a tensor-parallel head.


@dataclass(frozen=True)
class Vocabulary:
    """Columns `start` to `start + width` of `size`, the other columns being with the ranks of `group`."""

    size: int
    width: int
    start: int = 0
    group: Any = None  # The process group whose ranks hold the other columns; None: there are none.

    def local(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Labels as columns of this shard, and which of them lie in it. Both (tokens,)."""
        if self.group is None:
            return labels, torch.ones_like(labels, dtype=torch.bool)
        local = labels - self.start
        return local, (local >= 0) & (local < self.width)

    def combine(self, lse: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """From those of each shard to those of the whole vocabulary, in two reductions.

        Args:
            lse: (tokens,), logarithms of sums of exponentials.
            sums: (j, tokens).
        """
        largest = lse.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        all_sums = torch.cat([(lse - largest).exp()[None], sums])
        dist.all_reduce(all_sums, dist.ReduceOp.SUM, self.group)
        return all_sums[0].log() + largest, all_sums[1:]


class CrossEntropyRows:
    """`Terms` of each token, zero where the label is `ignore_index`.

    Args:
        labels: (tokens,) int64.
        backend: the compiler of the computation on a block; None: none.
    """

    def __init__(
        self,
        labels: Tensor,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
        shape: Shape,
        backend: str | None = None,
    ) -> None:
        self.labels = labels
        self.counts = labels != ignore_index
        self._terms = Terms(smoothing, z_loss, shape)
        self._backend = backend

    def check(self, vocabulary: int) -> None:
        """Raise ValueError for a label that is not a token. On the CPU; on an accelerator, where looking would stop the
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

    def step(
        self, logits: Tensor, rows: slice, vocabulary: Vocabulary, weights: Tensor | None, apart: bool
    ) -> tuple[Tensor, SparseGradient | None]:
        """Losses of the tokens `rows`, (tokens,), float32 or, for such logits, float64.

        logits: (tokens, this shard's part of the vocabulary). With `weights`, (tokens,), they become the gradient of
        ``(weights * losses).sum()``; without, they are not read again. apart: one entry per token may be left out of
        the gradient, and returned.
        """
        labels, counts = self.labels[rows], self.counts[rows]
        local, here = vocabulary.local(labels)
        here = here & counts
        index = torch.where(here, local, 0)[:, None]
        weights = None if weights is None else weights.masked_fill(~counts, 0)
        if vocabulary.group is not None:
            return self._cut(logits, vocabulary, index, here, counts, weights), None
        results = new_losses(logits, 2)  # losses, entries at the label
        run = kernel(_whole_rows, self._backend, logits)
        # False saves a pass over the logits. A compiler fuses it anyway, and would make two graphs.
        some = self._backend is not None or _some_do_not_count(counts)
        for block in blocks(logits, copies=not in_place(logits) or self._terms.shape.cap is not None):
            mine = None if weights is None else weights[block]
            results[:, block] = run(logits[block], index[block], counts[block], mine, some, apart, self._terms)
        return results[0], SparseGradient(index[:, 0], results[1]) if apart and weights is not None else None

    def _cut(
        self,
        logits: Tensor,  # (tokens, V here)
        vocabulary: Vocabulary,
        index: Tensor,  # (tokens, 1)
        here: Tensor,  # (tokens,)
        counts: Tensor,  # (tokens,)
        weights: Tensor | None,  # (tokens,)
    ) -> Tensor:
        """Two walks over the blocks, because the other shards' sums come between them, once for all blocks."""
        terms, parts = self._terms, new_losses(logits, 3)  # lse, the label's logit, sum of the logits
        run = kernel(_cut_sums, self._backend, logits)
        for block in blocks(logits):
            parts[:, block] = run(logits[block], index[block], here[block], terms)
        lse, (target, sums) = vocabulary.combine(parts[0], parts[1:])
        if weights is not None:
            run = kernel(_cut_gradient_, self._backend, logits)
            at_label = torch.where(here, weights, 0)
            for block in blocks(logits):
                run(
                    logits[block],
                    index[block],
                    counts[block],
                    lse[block],
                    weights[block],
                    at_label[block],
                    vocabulary.size,
                    terms,
                )
        return terms.losses(lse, target, sums / vocabulary.size).masked_fill(~counts, 0)


def _some_do_not_count(counts: Tensor) -> bool:
    """An accelerator is not asked, which would stop the host: True."""
    return counts.device.type != "cpu" or is_fake(counts) or not bool(counts.all())


def _whole_rows(
    raw: Tensor,  # (rows, V)
    index: Tensor,  # (rows, 1)
    counts: Tensor,  # (rows,)
    weights: Tensor | None,  # (rows,)
    some_do_not_count: bool,
    apart: bool,
    terms: Terms,
) -> Tensor:
    """(2, rows): losses of one block; with `weights`, `raw` becomes the gradient, whose entries at the label
    come second and with `apart` are left out of it. Each logit is exponentiated once."""
    values = terms.shape.apply(raw)
    target = values.gather(1, index)[:, 0]
    mean = values.mean(1) if terms.smoothing else target
    largest = values.amax(1, keepdim=True)
    shaped = values.clone() if terms.shape.cap is not None and weights is not None else None
    total = values.sub_(largest).exp_().sum(1)
    lse = total.log() + largest[:, 0]
    losses = terms.losses(lse, target, mean).masked_fill(~counts, 0)
    if weights is None:
        return torch.stack([losses, losses])
    at_label = (weights * (terms.smoothing - 1)).to(values.dtype)[:, None]
    values.mul_((terms.in_softmax(weights, lse) / total)[:, None])
    if terms.smoothing:
        values.sub_(weights[:, None] * (terms.smoothing / values.shape[1]))
    if not apart:
        values.scatter_add_(1, index, at_label)
    if some_do_not_count:
        # Weight 0 means a gradient of 0, also where the logits are not finite.
        values.masked_fill_(~counts[:, None], 0)
    terms.shape.chain_(values, shaped)
    if values is not raw:
        raw.copy_(values)
    if apart:
        terms.shape.chain_(at_label, target[:, None])
    return torch.stack([losses, at_label[:, 0].masked_fill(~counts, 0)])


def _cut_sums(
    raw: Tensor,  # (rows, V here)
    index: Tensor,  # (rows, 1)
    here: Tensor,  # (rows,)
    terms: Terms,
) -> Tensor:
    """(3, rows): lse, the label's logit, sum of the logits of this shard. Logits that are worked on in place get shaped."""
    if not raw.shape[1]:
        nothing = raw.new_zeros(len(raw), dtype=raw.dtype if in_place(raw) else torch.float32)
        return torch.stack([nothing.log(), nothing, nothing])
    values = terms.shape.apply(raw)
    target = values.gather(1, index)[:, 0].masked_fill(~here, 0)
    return torch.stack([values.logsumexp(1), target, values.sum(1) if terms.smoothing else target])


def _cut_gradient_(
    raw: Tensor,  # (rows, V here)
    index: Tensor,  # (rows, 1)
    counts: Tensor,  # (rows,)
    lse: Tensor,  # (rows,)
    weights: Tensor,  # (rows,)
    at_label: Tensor,  # (rows,)
    size: int,
    terms: Terms,
) -> None:
    """`raw`, as `_cut_sums` left it, becomes the gradient. at_label: the weights of rows whose label is in this shard."""
    if not raw.shape[1]:
        return
    values = raw if in_place(raw) else terms.shape.apply(raw)
    shaped = values.clone() if terms.shape.cap is not None else None
    values.sub_(lse[:, None]).exp_().mul_(terms.in_softmax(weights, lse)[:, None])
    if terms.smoothing:
        values.sub_(weights[:, None] * (terms.smoothing / size))
    values.scatter_add_(1, index, at_label[:, None].to(values.dtype) * (terms.smoothing - 1))
    values.masked_fill_(~counts[:, None], 0)
    terms.shape.chain_(values, shaped)
    if values is not raw:
        raw.copy_(values)
