"""A batch cut into micro-batches, and what counts in each of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_like.losses.batch_means import LossCall, LossCalls
from nemo_like.losses.model_loss import LABELS


def size_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and tokens of `batch`.

    Raises:
        ValueError: no tensor of shape (rows, tokens, ...).
    """
    first = next((value for value in batch.values() if isinstance(value, Tensor) and value.dim() >= 2), None)
    if first is None:
        raise ValueError(
            f"A pipeline's batch has no tensor of shape (rows, tokens); it has {', '.join(batch) or 'nothing'}. Give by "
            "keyword what the model is called with: pipeline.step(input_ids=..., labels=...)."
        )
    return first.shape[0], first.shape[1]


def cut_batch(
    batch: Mapping[str, Any], count: int, fill: Mapping[str, int] | None = None
) -> tuple[list[dict[str, Any]], int, int]:
    """`count` micro-batches of equal size, their rows and their tokens.

    Rows that are missing for that are copies of the last one, with the numbers of `fill` in the tensors that it names.

    Raises:
        ValueError: no tensor of shape (rows, tokens, ...), or rows that are missing where there is no `fill`.
    """
    rows, tokens = size_of(batch)
    missing = -rows % count
    if missing and fill is None:
        raise ValueError(
            f"The batch has {rows} rows and the pipeline {count} micro-batches: give a multiple of {count} rows. Rows that "
            "count for nothing are added where the loss is a cross entropy of labels (its ignore_index), and here it is not."
        )
    size = (rows + missing) // count
    parts: list[dict[str, Any]] = [{**batch} for _ in range(count)]
    for name, value in _by_row(batch).items():
        if missing and fill is not None:
            added = value[-1:].expand(missing, *value.shape[1:])
            value = torch.cat([value, torch.full_like(added, fill[name]) if name in fill else added])
        for part, chunk in zip(parts, value.split(size)):
            part[name] = chunk
    return parts, size, tokens


def repeated(microbatch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """A batch of `count` times the same micro-batch."""
    return {**microbatch} | {name: torch.cat([value] * count) for name, value in _by_row(microbatch).items()}


def first_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The first `rows` rows of `batch`."""
    return {**batch} | {name: value[:rows] for name, value in _by_row(batch).items()}


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two micro-batches of one batch as one of twice the rows."""
    return {**first} | {name: torch.cat([value, second[name]]) for name, value in _by_row(first).items()}


def _by_row(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of `batch` that have an entry for each row."""
    rows, _ = size_of(batch)
    return {
        name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() and len(value) == rows
    }


_WINDOWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "all": lambda tensor: tensor,
    "next": lambda tensor: tensor[..., 1:],
    "but the last": lambda tensor: tensor[..., :-1],
}
"""Functions that cut out the entries along the last dimension that a loss may read. Of labels of the next token, the
first one belongs to no prediction."""


@dataclass(frozen=True)
class Counted:
    """The entries of one of a batch's tensors that count in a mean."""

    name: str
    window: str
    """A key of `_WINDOWS`."""
    ignored: int | None = None
    """The number that is not a class, as no negative one is."""
    sums: bool = False
    """The entries are those of a mask, and added up."""

    def of(self, microbatch: Mapping[str, Any], weight: Tensor | None = None) -> Tensor:
        """Return how much counts in `microbatch`, 0-dim float64; `weight`: of each class."""
        entries = _WINDOWS[self.window](microbatch[self.name])
        if self.sums:
            return entries.double().sum()
        counts = _is_class(entries, self.ignored)
        return (counts.sum() if weight is None else weight[entries[counts]].sum()).double()


def targets_of(call: LossCall, batch: Mapping[str, Any]) -> list[Counted]:
    """The entries of `batch` that the targets of `call` may be; those that are called as targets are, where there are some.

    Targets are told by the numbers that count among them, in their order if any are, else in any order: a model may shift,
    pad, select and transpose.
    """
    wanted = call.target[call.target != call.ignore_index]
    ordered, others = [], []
    for name, window, entries in _entries(batch):
        if entries.dtype == torch.bool or entries.is_floating_point() or entries.is_complex():
            continue
        numbers = entries[_is_class(entries, call.ignore_index)].to(wanted.device)
        if numbers.shape != wanted.shape:
            continue
        counted_labels = Counted(name, window, call.ignore_index)
        if torch.equal(numbers, wanted):
            ordered.append(counted_labels)
        elif torch.equal(numbers.sort().values, wanted.sort().values):
            others.append(counted_labels)
    every = ordered or others
    return [one for one in every if one.name in LABELS] or every


def marks(batch: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Numbers of `batch` by the name of their tensor that may mean "does not count": the least, and what rows repeat at
    their ends."""
    marked = set()
    for name, value in _by_row(batch).items():
        if value.dtype == torch.bool or value.is_floating_point() or value.is_complex() or not value.numel():
            continue
        numbers = [value.min()[None]]
        if value.dim() == 2 and value.shape[1] > 1:
            numbers += [value[:, 0][value[:, 0] == value[:, 1]], value[:, -1][value[:, -1] == value[:, -2]]]
        marked |= {(name, number) for number in torch.cat(numbers).unique().tolist() if number >= 0}
    return marked


def masks_and_classes(batch: Mapping[str, Any], marked: Collection[tuple[str, int]] = ()) -> list[Counted]:
    """Return what may count in a mean that no function of torch takes. That is entries of masks, and those of classes
    that exist, also without the numbers that are `marked`."""
    masks = []
    for name, window, entries in _entries(batch):
        if entries.is_complex() or not entries.numel():
            continue
        number = entries.dtype != torch.bool and not entries.is_floating_point()
        if bool((entries >= 0).all()) and (not number or bool((entries <= 1).all())):
            masks.append(Counted(name, window, sums=True))
        if number:
            masks.append(Counted(name, window))
            masks += [Counted(name, window, mark) for other, mark in sorted(marked) if other == name]
    return masks


def _entries(batch: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    for name, value in _by_row(batch).items():
        for window, entries in _WINDOWS.items():
            if value.dim() > 1 or window == "all":
                yield name, window, entries(value)


def _is_class(entries: Tensor, ignored: int | None) -> Tensor:
    return entries >= 0 if ignored is None else (entries >= 0) & (entries != ignored)


def counts_of_all(
    counted: Sequence[Counted],
    microbatches: Sequence[Mapping[str, Any]],
    weights: Sequence[Tensor | None] | None = None,
) -> list[list[float]]:
    """For each of `counted`, what it counts in each micro-batch; the device is waited for once."""
    weights = [None] * len(counted) if weights is None else weights
    counts = [[one.of(part, weight) for part in microbatches] for one, weight in zip(counted, weights)]
    device = next((count.device for row in counts for count in row if count.device.type != "cpu"), torch.device("cpu"))
    if not counts:
        return []
    return torch.stack([torch.stack([count.to(device) for count in row]) for row in counts]).tolist()


# What the loss of each micro-batch counts, so that all together are the loss of the whole batch.
#
# Cross entropies of torch that are means are divided by what counts in all micro-batches (`LossCalls`), as far as their
# targets are found in the batch; whether as much counts there as was looked up is compared in every step. All else is
# multiplied with a share: one (a sum), one over the number of micro-batches (a mean over rows or elements, of which all have
# equally many), or what counts in a micro-batch over what counts in all. Which of them it is, `learn_shares` finds out.

SUM, MEAN = "sum", "mean"
Share = str | Counted
"""`SUM`, `MEAN`, or what counts."""
_SAME = 1e-9


@dataclass
class LossShares:
    """The way in which the loss of a batch is made of those of its micro-batches."""

    means: Sequence[Sequence[Counted]]
    """For each cross entropy that is a mean, what may count in it, the first of which is taken; where there is nothing, it
    was not found in the batch, and each micro-batch has as much of it."""
    shares: Sequence[Share]
    """Candidates for the shares, the first of which is taken."""
    fill: Mapping[str, int] | None = None
    """Numbers that count for nothing, for rows that are missing; None: there are none."""
    class_weights: Sequence[Tensor | None] = ()
    """For each of `means`, on ranks with the last stage."""
    told: bool = False
    """The loss is made of cross entropies alone: means, which are compared in every step, or sums."""

    @property
    def certain(self) -> bool:
        """Return whether no later batch can tell more."""
        return len(self.shares) == 1 and isinstance(self.shares[0], str) and all(len(one) < 2 for one in self.means)

    def differ(self, microbatches: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether these micro-batches tell apart what the first batch did not."""
        every = [counts_of_all(alternatives, microbatches) for alternatives in self.means]
        return any(
            abs(one - other) > _SAME
            for alternatives in (*every, self.of(microbatches))
            for numbers in alternatives
            for one, other in zip(numbers, alternatives[0])
        )

    def of(self, microbatches: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        """For each of `shares`, those of all micro-batches."""
        counted = [share for share in self.shares if isinstance(share, Counted)]
        counts = dict(zip(counted, counts_of_all(counted, microbatches)))
        numbers = []
        for share in self.shares:
            if isinstance(share, Counted):
                total = sum(counts[share]) or 1
                numbers.append([count / total for count in counts[share]])
            else:
                numbers.append([1.0 if share == SUM else 1 / len(microbatches)] * len(microbatches))
        return numbers


class BatchShares:
    """The shares of one batch's micro-batches, on a rank with the last stage."""

    def __init__(self, known: LossShares, microbatches: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> None:
        """shares: one of `known.of`."""
        self.shares = shares
        weighted = [(mean[0], weight) for mean, weight in zip(known.means, known.class_weights) if mean]
        counts = iter(counts_of_all([mean for mean, _ in weighted], microbatches, [weight for _, weight in weighted]))
        self._counts = [next(counts) if mean else None for mean in known.means]
        self._first: dict[int, Tensor] = {}
        self._off: list[Tensor] = []

    def calls(self, number: int) -> LossCalls:
        """The context in which the loss of micro-batch `number` is computed."""
        return LossCalls(partial(self._divisor, number))

    def _divisor(self, number: int, mean: int, own: Tensor) -> Tensor | float:
        if mean >= len(self._counts):
            raise ValueError(
                f"The loss of micro-batch {number} has more mean cross entropies than the {len(self._counts)} of the first "
                "batch: what counts in the whole batch is not known of the others."
            )
        counts, share = self._counts[mean], self.shares[number]
        expected = self._first.setdefault(mean, own) if counts is None else counts[number]
        self._off.append((own - expected).double().abs() / own.double().clamp(min=1e-6))
        total = own * len(self.shares) if counts is None else sum(counts) or 1
        return total * share

    def off(self, device: torch.device) -> Tensor:
        """By which part what counted in a cross entropy was off what was looked up in the batch; 0-dim float32."""
        if not self._off:
            return torch.zeros((), device=device)
        return torch.stack([off.to(device) for off in self._off]).max().float()
