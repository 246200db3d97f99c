"""A batch cut into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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


def cut_batch(batch: Mapping[str, Any], count: int, fill: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """`count` micro-batches of equal size.

    Rows that are missing for that are copies of the last one, with the numbers of `fill` in the tensors that it names.

    Raises:
        ValueError: no tensor of shape (rows, tokens, ...), or rows that are missing where there is no `fill`.
    """
    rows, _ = size_of(batch)
    missing = -rows % count
    if missing and fill is None:
        raise ValueError(
            f"The batch has {rows} rows and the pipeline {count} micro-batches: give a multiple of {count} rows. Rows that "
            "count for nothing are added where loss_mean='tokens' and labels are classes, and here they are not."
        )
    size = (rows + missing) // count
    parts: list[dict[str, Any]] = [{**batch} for _ in range(count)]
    for name, value in by_row(batch).items():
        if missing and fill is not None:
            added = value[-1:].expand(missing, *value.shape[1:])
            value = torch.cat([value, torch.full_like(added, fill[name]) if name in fill else added])
        for part, chunk in zip(parts, value.split(size)):
            part[name] = chunk
    return parts


def repeated(microbatch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """A batch of `count` times the same micro-batch."""
    return {**microbatch} | {name: torch.cat([value] * count) for name, value in by_row(microbatch).items()}


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two micro-batches of one batch as one of twice the rows."""
    return {**first} | {name: torch.cat([value, second[name]]) for name, value in by_row(first).items()}


def by_row(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of `batch` that have an entry for each row."""
    rows, _ = size_of(batch)
    return {
        name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() and len(value) == rows
    }
