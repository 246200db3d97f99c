"""A batch cut into microbatches, and what each of them counts in the mean loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_like.losses.targets import IGNORED

_LABELS = ("labels", "shift_labels")


def cut_batch(batch: Mapping[str, Any], count: int) -> tuple[list[dict[str, Any]], int, int]:
    """`count` microbatches of equal size, their rows and their tokens.

    Rows that are missing for that are copies of the last one with labels that count for nothing.

    Raises:
        ValueError: no tensor of shape (rows, tokens, ...), or rows that are missing where there are no ``labels``.
    """
    first = next((value for value in batch.values() if isinstance(value, Tensor) and value.dim() >= 2), None)
    if first is None:
        raise ValueError(
            f"A pipeline's batch has no tensor of shape (rows, tokens); it has {', '.join(batch) or 'nothing'}. Give by "
            "keyword what the model is called with: pipeline.step(input_ids=..., labels=...)."
        )
    rows, tokens = first.shape[:2]
    missing = -rows % count
    labels = batch.get("labels")
    if missing and not (isinstance(labels, Tensor) and len(labels) == rows):
        raise ValueError(
            f"The batch has {rows} rows and the pipeline {count} microbatches: give a multiple of {count} rows, or labels=, "
            f"so that rows can be added which count for nothing ({IGNORED})."
        )
    size = (rows + missing) // count
    made: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() and len(value) == rows:
            if missing:
                added = value[-1:].expand(missing, *value.shape[1:])
                value = torch.cat([value, torch.full_like(added, IGNORED) if name in _LABELS else added])
            for part, chunk in zip(made, value.split(size)):
                part[name] = chunk
        else:
            for part in made:
                part[name] = value
    return made, size, tokens


def counted_tokens(labels: Tensor, shifted: bool) -> int:
    """How many labels of (rows, tokens) count; `shifted`: the first of each row is no token's target.

    No class has a negative number, so whatever a model's loss ignores (-100, -1) is negative.
    """
    return int((labels[:, 1:] if shifted else labels).ge(0).sum())


def _targets(microbatches: Sequence[dict[str, Any]]) -> str | None:
    """What a batch without ``labels`` calls them, if some count for nothing: whole numbers of which some are negative."""
    found = {
        name
        for part in microbatches
        for name, value in part.items()
        if isinstance(value, Tensor) and value.dim() >= 2 and not value.is_floating_point() and bool((value < 0).any())
    }
    if len(found) > 1:
        raise ValueError(
            f"The batch has no labels=, and negative numbers in {', '.join(sorted(found))}: which of them says what counts "
            "in the mean loss is not known. Call the targets labels=."
        )
    return found.pop() if found else None


def loss_weights(microbatches: Sequence[dict[str, Any]], takes_items: bool) -> list[float]:
    """What the loss of each microbatch is multiplied with, so that they add up to the mean over the batch.

    Where the model takes the number of all tokens that count (``num_items_in_batch``, transformers), it is given it, and
    divides by it itself.

    Raises:
        ValueError: a microbatch in which nothing counts, in a model that does not; no telling what the targets are.
    """
    if not all(isinstance(part.get("labels"), Tensor) for part in microbatches):
        name = _targets(microbatches)
        if name is None:
            return [1 / len(microbatches)] * len(microbatches)
        return _shares([counted_tokens(part[name], shifted=False) for part in microbatches])
    names = [
        "shift_labels" if takes_items and isinstance(p.get("shift_labels"), Tensor) else "labels" for p in microbatches
    ]
    counts = [counted_tokens(p[n], takes_items and n == "labels") for p, n in zip(microbatches, names, strict=True)]
    if takes_items:
        for part in microbatches:
            part["num_items_in_batch"] = max(sum(counts), 1)
        return [1.0] * len(counts)
    return _shares(counts)


def _shares(counts: Sequence[int]) -> list[float]:
    if not all(counts):
        raise ValueError(
            f"Microbatch {counts.index(0)} has no label that counts, so its mean loss is no number. Give a batch in which "
            "every microbatch has some, or fewer microbatches."
        )
    return [count / sum(counts) for count in counts]
