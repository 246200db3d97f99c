"""Cross entropy with label smoothing and z-loss of the logits of one chunk, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.losses.rows import Apart, Shape, blocks, in_place, kernel, new_losses
from nemo_like.losses.vocabulary import Vocabulary
from nemo_like.torch_compat import is_fake


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
        """What the softmax is multiplied by in the gradient; (rows,)."""
        return weights * (1 + 2 * self.z_loss * lse) if self.z_loss else weights


class CrossEntropyRows:
    """`Terms` of each token, zero where the label is `ignore_index`."""

    def __init__(
        self,
        labels: Tensor,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
        shape: Shape,
        backend: str | None = None,
    ) -> None:
        """labels: (tokens,) int64. backend: the compiler of what is done with a block; None: none."""
        self.labels = labels
        self.counts = labels != ignore_index
        self._terms = Terms(smoothing, z_loss, shape)
        self._backend = backend

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

    def step(
        self, logits: Tensor, rows: slice, vocabulary: Vocabulary, weights: Tensor | None, apart: bool
    ) -> tuple[Tensor, Apart | None]:
        labels, counts = self.labels[rows], self.counts[rows]
        local, here = vocabulary.local(labels)
        here = here & counts
        index = torch.where(here, local, 0)[:, None]
        weights = None if weights is None else weights.masked_fill(~counts, 0)
        if vocabulary.group is not None:
            return self._cut(logits, vocabulary, index, here, counts, weights), None
        found = new_losses(logits, 2)  # losses, entries at the label
        run = kernel(_whole_rows, self._backend, logits)
        # False saves a pass over the logits. A compiler fuses it anyway, and would make two graphs.
        some = self._backend is not None or _some_do_not_count(counts)
        for block in blocks(logits, copies=not in_place(logits) or self._terms.shape.cap is not None):
            mine = None if weights is None else weights[block]
            found[:, block] = run(logits[block], index[block], counts[block], mine, some, apart, self._terms)
        return found[0], Apart(index[:, 0], found[1]) if apart and weights is not None else None

    def _cut(
        self,
        logits: Tensor,
        vocabulary: Vocabulary,
        index: Tensor,
        here: Tensor,
        counts: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """Two walks over the blocks, because the other shards' sums come between them, once for all blocks."""
        terms, parts = self._terms, new_losses(logits, 3)  # lse, the label's logit, sum of the logits
        run = kernel(_cut_sums, self._backend, logits)
        for block in blocks(logits):
            parts[:, block] = run(logits[block], index[block], here[block], terms)
        (lse,), (target, sums), _ = vocabulary.combine(parts[:1], parts[1:])
        if weights is not None:
            run = kernel(_cut_gradient_, self._backend, logits)
            at_label = torch.where(here, weights, 0)
            for block in blocks(logits):
                run(logits[block], index[block], counts[block], lse[block], weights[block], at_label[block],
                    vocabulary.size, terms)  # fmt: skip
        return terms.losses(lse, target, sums / vocabulary.size).masked_fill(~counts, 0)


def _some_do_not_count(counts: Tensor) -> bool:
    """An accelerator is not asked, which would stop the host: True."""
    return counts.device.type != "cpu" or is_fake(counts) or not bool(counts.all())


def _whole_rows(
    raw: Tensor,
    index: Tensor,
    counts: Tensor,
    weights: Tensor | None,
    some_do_not_count: bool,
    apart: bool,
    terms: Terms,
) -> Tensor:
    """(2, rows): losses of one block; with `weights`, `raw`, (rows, V), becomes the gradient, whose entries at the label
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
        # Weight 0 is no gradient at all, also where the logits are not finite.
        values.masked_fill_(~counts[:, None], 0)
    terms.shape.chain_(values, shaped)
    if values is not raw:
        raw.copy_(values)
    if apart:
        terms.shape.chain_(at_label, target[:, None])
    return torch.stack([losses, at_label[:, 0].masked_fill(~counts, 0)])


def _cut_sums(raw: Tensor, index: Tensor, here: Tensor, terms: Terms) -> Tensor:
    """(3, rows): lse, the label's logit, sum of the logits of this shard. Logits that are worked on in place get shaped."""
    if not raw.shape[1]:
        nothing = raw.new_zeros(len(raw), dtype=raw.dtype if in_place(raw) else torch.float32)
        return torch.stack([nothing.log(), nothing, nothing])
    values = terms.shape.apply(raw)
    target = values.gather(1, index)[:, 0].masked_fill(~here, 0)
    return torch.stack([values.logsumexp(1), target, values.sum(1) if terms.smoothing else target])


def _cut_gradient_(
    raw: Tensor, index: Tensor, counts: Tensor, lse: Tensor, weights: Tensor, at_label: Tensor, size: int, terms: Terms
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
