"""`chunked_kl`: how far a student's next-token distribution is from a teacher's, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.losses.cross_entropy import check_hidden, chosen, reduced, shape_of, whole
from nemo_like.losses.heads import Head, unwrap_logits
from nemo_like.losses.rows import Shape, blocks, in_place, new_losses
from nemo_like.losses.vocabulary import Vocabulary
from nemo_like.options import ChunkedLoss

REDUCTIONS = ("mean", "sum")


def chunked_kl(
    hidden: Tensor,
    head: Head,
    teacher: Tensor,
    *,
    teacher_head: Head | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    reduction: str = "mean",
    num_items: int | float | Tensor | None = None,
    chunk_tokens: int | None = None,
    logit_softcap: float | None = None,
    logit_scale: float | None = None,
    options: ChunkedLoss | None = None,
    parameters: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """``KL(teacher || student)`` of the two softmaxes over the vocabulary, for distillation.

    The gradients are made in forward, as by `chunked_cross_entropy`; none goes to the teacher. The result is not
    multiplied by ``temperature ** 2``.

    >>> head, teacher_head = torch.nn.Linear(8, 100), torch.nn.Linear(16, 100)
    >>> chunked_kl(torch.randn(5, 8), head, torch.randn(5, 16), teacher_head=teacher_head).shape
    torch.Size([])

    Args:
        hidden, head, chunk_tokens, logit_softcap, logit_scale, options, parameters: the student's; as for
            `chunked_cross_entropy`.
        teacher: the teacher's logits, (..., V); with `teacher_head`, its hidden states, (..., its width).
        teacher_head: from the teacher's hidden states to logits, called on the same chunks (whose logits are the second
            chunk that then exists). The student's soft cap and scale are not applied to it.
        mask: (...) bool: the tokens that count; default: all.
        temperature: divides both sides' logits.
        reduction: ``"mean"`` over the tokens that count, or ``"sum"``.
        num_items: with ``"mean"``, what the sum is divided by instead of the number of tokens that count.

    Returns:
        A number, float32 or, for such a head, float64.

    Raises:
        ValueError, TypeError: any bad argument; a teacher of other tokens or another vocabulary; logits that are cut by
            vocabulary over ranks.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {', '.join(REDUCTIONS)}.")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items divides the loss of reduction='mean', and reduction is {reduction!r}; drop one.")
    options = chosen(options, chunk_tokens)
    for tensor in (hidden, teacher):
        check_hidden(tensor)
    hidden, teacher = whole(hidden), whole(teacher).detach()
    if teacher.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"teacher has shape {tuple(teacher.shape)} and hidden {tuple(hidden.shape)}; both must have the same tokens: "
            f"({', '.join(map(str, hidden.shape[:-1]))}, ...)."
        )
    if mask is None:
        mask = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
    if mask.shape != hidden.shape[:-1] or mask.dtype != torch.bool:
        raise ValueError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be bool of shape {tuple(hidden.shape[:-1])}."
        )
    shape = shape_of(logit_scale, logit_softcap, temperature)
    counts = mask.reshape(-1)
    rows = KLRows(teacher.flatten(0, -2), teacher_head, counts, shape, 1 / temperature)
    if num_items is None:
        num_items = counts.sum() if reduction == "mean" else 1
    return reduced(hidden, head, rows, counts, num_items, options, parameters)


@dataclass
class KLRows:
    """``sum(p * (log p - log q))`` over the vocabulary; p is the teacher's softmax, q the student's."""

    teacher: Tensor
    """(tokens, V), or with `head` (tokens, the teacher's width)."""
    head: Head | None
    counts: Tensor
    shape: Shape
    factor: float

    def __post_init__(self) -> None:
        self._chunk: tuple[slice, Tensor] | None = None
        self._lse: list[Tensor] = []

    def check(self, vocabulary: int) -> None:
        with torch.no_grad():
            width = self.teacher.shape[-1] if self.head is None else self.head(self.teacher[:1]).shape[-1]
        if width != vocabulary:
            raise ValueError(f"The teacher has {width} logits per token, and the head makes {vocabulary}: give equal ones.")

    def losses(self, logits: Tensor, rows: slice, vocabulary: Vocabulary) -> Tensor:
        if vocabulary.group is not None:
            raise ValueError("chunked_kl needs whole logits, and the head's are cut by vocabulary over ranks.")
        teacher = self._teacher(rows)
        losses = new_losses(logits)
        self._lse = []
        for block in blocks(logits):
            student = self.shape.apply(logits[block])
            lse = student.logsumexp(1)
            self._lse.append(lse)
            log_p = self._log_p(teacher[block], student.dtype)
            p = log_p.exp()
            # Where p is 0, its logarithm may be -inf: such a token adds nothing.
            losses[block] = torch.where(p > 0, log_p.sub_(student).mul_(p), 0).sum(1) + lse
        return losses.masked_fill(~self.counts[rows], 0)

    def gradient_(self, logits: Tensor, rows: slice, vocabulary: Vocabulary, weights: Tensor) -> None:
        teacher = self._teacher(rows)
        for block, lse in zip(blocks(logits), self._lse, strict=True):
            raw = logits[block]
            values = raw if in_place(raw) else self.shape.apply(raw)
            shaped = values.clone() if self.shape.cap is not None else None
            gradient = values.sub_(lse[:, None]).exp_().sub_(self._log_p(teacher[block], values.dtype).exp_())
            gradient.mul_(weights[block, None]).masked_fill_(~self.counts[rows][block, None], 0)
            self.shape.chain_(gradient, shaped)
            if gradient is not raw:
                raw.copy_(gradient)
        self._chunk = None

    def _teacher(self, rows: slice) -> Tensor:
        """The teacher's logits of one chunk, kept from its losses to its gradient."""
        if self.head is None:
            return self.teacher[rows]
        if self._chunk is None or self._chunk[0] != rows:
            self._chunk = None
            with torch.no_grad():
                output = self.head(self.teacher[rows])
            self._chunk = rows, unwrap_logits(output, len(output))[0]
        return self._chunk[1]

    def _log_p(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """The teacher's log-probabilities in a tensor of their own."""
        values = logits.to(dtype, copy=True).mul_(self.factor)
        return values.sub_(values.logsumexp(1, keepdim=True))
