"""Where each GiB and each millisecond of one configuration comes from: rows that add up to its peak and its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_like.planning.program.readers import StepPoint


@dataclass(frozen=True)
class Row:
    """One line of an account."""

    part: str
    """A key of `Candidate.peak.parts` or `Candidate.seconds.parts`."""
    what: str
    """Of the part; empty: all of it."""
    amount: float
    """Bytes (whole numbers), or seconds."""
    hidden: float = 0.0
    """Seconds beside `amount` that computing hides."""


@dataclass(frozen=True)
class RankPeak:
    """One rank of a pipeline."""

    stages: tuple[int, ...]
    total: int
    """Its peak, bytes."""
    at: str


@dataclass(frozen=True)
class Account:
    """All of it for one configuration."""

    bytes: tuple[Row, ...]
    """They add up to the peak, bytes."""
    seconds: tuple[Row, ...]
    """They add up to the step, seconds."""
    ranks: tuple[RankPeak, ...] = ()
    """Of a pipeline: the peak of each of its ranks."""
    lines: Mapping[str, Callable[[], list[StepPoint]]] = field(default_factory=dict, compare=False, repr=False)
    """The stretches of a step in order, by rank of the pipeline; made when asked for."""

    def __getstate__(self) -> dict[str, Any]:
        """What planned the step stays with the process that did."""
        return {**self.__dict__, "lines": {}}

    def as_json(self) -> dict[str, Any]:
        """In JSON values; bytes and seconds."""
        return {
            "bytes": [{"part": row.part, "what": row.what, "bytes": row.amount} for row in self.bytes],
            "seconds": [
                {"part": row.part, "what": row.what, "seconds": row.amount, "hidden": row.hidden}
                for row in self.seconds
            ],
            "ranks": [{"stages": list(rank.stages), "peak_bytes": rank.total, "at": rank.at} for rank in self.ranks],
        }


def rows_of(totals: Mapping[str, float], finer: Mapping[str, Iterable[Row]], least: float) -> tuple[Row, ...]:
    """The parts of `totals`, each by its rows in `finer`, where it has any; the largest part first.

    What the rows of a part leave over by more than `least` is a row of its own.
    """
    found: list[Row] = []
    for part, total in sorted(totals.items(), key=lambda item: -item[1]):
        own = sorted((row for row in finer.get(part, ()) if row.amount or row.hidden), key=lambda row: -row.amount)
        left = total - sum(row.amount for row in own)
        if abs(left) > least:
            own.append(Row(part, "other" if own else "", left))
        found += own
    return tuple(found)
