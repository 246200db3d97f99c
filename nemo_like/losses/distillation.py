"""`chunked_kl`: how far a student's next-token distribution is from a teacher's, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.losses.cross_entropy import check_hidden, check_num_items, chosen, reduced, shape_of, whole
from nemo_like.losses.heads import Head, unwrap_logits
from nemo_like.losses.rows import Apart, Shape, Vocabulary, blocks, in_place, kernel, new_losses
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
        teacher: the teacher's logits, (..., V); with `teacher_head`, its hidden states, (..., its width). Together with
            a head that is cut by vocabulary, the teacher's logits may be whole or cut over the same ranks.
        teacher_head: from the teacher's hidden states to logits, called on the same chunks (whose logits are the second
            chunk that then exists). The student's soft cap and scale are not applied to it.
        mask: (...) bool: the tokens that count; default: all.
        temperature: divides both sides' logits.
        reduction: ``"mean"`` over the tokens that count, or ``"sum"``.
        num_items: with ``"mean"``, what the sum is divided by instead of the number of tokens that count.

    Returns:
        A number, float32 or, for such a head, float64.

    Raises:
        ValueError, TypeError: any bad argument; a teacher of other tokens or another vocabulary, or whose logits are cut
            in another way than the student's.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {', '.join(REDUCTIONS)}.")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items divides the loss of reduction='mean', and reduction is {reduction!r}; drop one.")
    check_num_items(num_items)
    options = chosen(options, chunk_tokens)
    for tensor in (hidden, teacher):
        check_hidden(tensor)
    hidden = whole(hidden)
    teacher = teacher.detach() if teacher_head is None else whole(teacher).detach()
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
    rows = KLRows(teacher.flatten(0, -2), teacher_head, counts, shape, 1 / temperature, options.compile)
    if num_items is None:
        num_items = counts.sum() if reduction == "mean" else 1
    return reduced(hidden, head, rows, counts, num_items, options, parameters)


@dataclass
class KLRows:
    """``sum(p * (log p - log q))`` over the vocabulary; p is the teacher's softmax, q the student's."""

    teacher: Tensor
    """(tokens, V), or with `head` (tokens, the teacher's width). A DTensor where it is cut by vocabulary."""
    head: Head | None
    counts: Tensor
    shape: Shape
    factor: float
    backend: str | None = None
    """The compiler of what is done with a block; None: none."""

    def check(self, vocabulary: int) -> None:
        with torch.no_grad():
            width = self.teacher.shape[-1] if self.head is None else self.head(self.teacher[:1]).shape[-1]
        if width != vocabulary:
            raise ValueError(
                f"The teacher has {width} logits per token, and the head makes {vocabulary}: give equal ones."
            )

    def step(
        self, logits: Tensor, rows: slice, vocabulary: Vocabulary, weights: Tensor | None, apart: bool
    ) -> tuple[Tensor, Apart | None]:
        teacher, counts = self._teacher(rows, vocabulary), self.counts[rows]
        weights = None if weights is None else weights.masked_fill(~counts, 0)
        if vocabulary.group is not None:
            return self._cut(logits, teacher, vocabulary, counts, weights), None
        losses = new_losses(logits)
        run = kernel(_whole_rows, self.backend, logits)
        for block in blocks(logits):
            mine = None if weights is None else weights[block]
            losses[block] = run(logits[block], teacher[block], counts[block], mine, self.factor, self.shape)
        return losses, None

    def _cut(
        self, logits: Tensor, teacher: Tensor, vocabulary: Vocabulary, counts: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Two walks over the blocks, because the other shards' sums come between them, once for all blocks."""
        parts = new_losses(
            logits, 3
        )  # the teacher's lse, the student's, and the mean of the teacher's less the student's
        run = kernel(_cut_sums, self.backend, logits)
        for block in blocks(logits):
            parts[:, block] = run(logits[block], teacher[block], self.factor, self.shape)
        (of_teacher, of_student), _, (mean,) = vocabulary.combine(parts[:2], parts[:0], parts[2:])
        if weights is not None:
            run = kernel(_cut_gradient_, self.backend, logits)
            for block in blocks(logits):
                run(
                    logits[block],
                    teacher[block],
                    counts[block],
                    of_teacher[block],
                    of_student[block],
                    weights[block],
                    self.factor,
                    self.shape,
                )
        return (mean - of_teacher + of_student).masked_fill(~counts, 0)

    def _teacher(self, rows: slice, vocabulary: Vocabulary) -> Tensor:
        """The teacher's logits of one chunk, in the columns that this rank has of the student's."""
        output = self.teacher[rows]
        if self.head is not None:
            with torch.no_grad():
                output = self.head(output)
        local, its = unwrap_logits(output, len(output))
        if its.group is None:
            return local[:, vocabulary.start : vocabulary.start + vocabulary.width]
        if (its.start, its.width) != (vocabulary.start, vocabulary.width):
            raise ValueError(
                f"The teacher's logits are cut by vocabulary, this rank having columns {its.start} to "
                f"{its.start + its.width}, and of the student's {vocabulary.start} to "
                f"{vocabulary.start + vocabulary.width}: cut both over the same ranks, or leave the teacher's whole."
            )
        return local


def _log_p(logits: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The teacher's log-probabilities over these columns, in a tensor of their own, and their lse, (rows, 1)."""
    values = logits.to(dtype, copy=True).mul_(factor)
    lse = values.logsumexp(1, keepdim=True)
    return values.sub_(lse), lse


def _whole_rows(
    raw: Tensor, teacher: Tensor, counts: Tensor, weights: Tensor | None, factor: float, shape: Shape
) -> Tensor:
    """Losses of one block, (rows,); with `weights`, `raw`, (rows, V), becomes the gradient."""
    student = shape.apply(raw)
    lse = student.logsumexp(1)
    log_p, _ = _log_p(teacher, factor, student.dtype)
    p = log_p.exp()
    # Where p is 0, its logarithm may be -inf: such a token adds nothing.
    losses = torch.where(p > 0, log_p.sub_(student).mul_(p), 0).sum(1) + lse
    if weights is not None:
        _gradient_(raw, student, p, counts, lse, weights, shape)
    return losses.masked_fill(~counts, 0)


def _cut_sums(raw: Tensor, teacher: Tensor, factor: float, shape: Shape) -> Tensor:
    """(3, rows): the teacher's lse, the student's, and the mean under the teacher's softmax of its logits less the
    student's; all over this shard. Logits that are worked on in place get shaped."""
    if not raw.shape[1]:
        nothing = raw.new_zeros(len(raw), dtype=raw.dtype if in_place(raw) else torch.float32)
        return torch.stack([nothing.log(), nothing.log(), nothing])
    student = shape.apply(raw)
    log_p, lse = _log_p(teacher, factor, student.dtype)
    p = log_p.exp()
    mean = torch.where(p > 0, log_p.sub_(student).mul_(p), 0).sum(1) + lse[:, 0]
    # A shard of which the teacher excludes every token has no mean, and no weight either.
    return torch.stack([lse[:, 0], student.logsumexp(1), torch.where(lse[:, 0] == -torch.inf, 0, mean)])


def _cut_gradient_(
    raw: Tensor,
    teacher: Tensor,
    counts: Tensor,
    of_teacher: Tensor,
    of_student: Tensor,
    weights: Tensor,
    factor: float,
    shape: Shape,
) -> None:
    """`raw`, as `_cut_sums` left it, becomes the gradient; the two lse are those of the whole vocabulary."""
    student = raw if in_place(raw) else shape.apply(raw)
    p = teacher.to(student.dtype, copy=True).mul_(factor).sub_(of_teacher[:, None]).exp_()
    _gradient_(raw, student, p, counts, of_student, weights, shape)


def _gradient_(
    raw: Tensor, student: Tensor, p: Tensor, counts: Tensor, lse: Tensor, weights: Tensor, shape: Shape
) -> None:
    shaped = student.clone() if shape.cap is not None else None
    gradient = student.sub_(lse[:, None]).exp_().sub_(p)
    gradient.mul_(weights[:, None]).masked_fill_(~counts[:, None], 0)
    shape.chain_(gradient, shaped)
    if gradient is not raw:
        raw.copy_(gradient)
