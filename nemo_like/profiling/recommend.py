"""The cheapest layers to replay for a peak in bytes. Pure functions over numbers; no tensors here."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """A stretch of the training step and the most bytes alive in it when nothing is checkpointed.

    `calls_before` says how many layer calls lie before it whose kept bytes are still alive: what replaying those
    layers frees comes off this peak.
    """

    calls_before: int
    peak: int


@dataclass(frozen=True)
class LayerCall:
    """One call of one layer, and what replaying it would do."""

    layer: int
    freed: int
    """Bytes that are not kept from forward to backward; negative where its inputs are larger than what it keeps."""
    cost: float
    """Time that the replay takes, any unit."""
    replay_peak: int = 0
    """The most bytes alive during the replay itself, before what earlier layers free comes off."""


def predict_peak(moments: Sequence[Moment], calls: Sequence[LayerCall], chosen: Collection[int]) -> int:
    """The peak of the step in bytes when the layers `chosen` are replayed."""
    freed = [0]
    peak = 0
    for call in calls:
        if call.layer in chosen:
            peak = max(peak, call.replay_peak - freed[-1])
        freed.append(freed[-1] + (call.freed if call.layer in chosen else 0))
    return max([peak, *(moment.peak - freed[moment.calls_before] for moment in moments)])


def cheapest_layers(moments: Sequence[Moment], calls: Sequence[LayerCall], budget: int) -> list[int] | None:
    """The layers of least total cost whose replay keeps the peak within `budget` bytes; None where none suffices.

    Exact: dynamic programming over the calls in forward order, keeping for each choice of layers that come again the
    Pareto points (bytes freed so far, cost so far). Every moment demands a number of bytes freed by the calls before
    it, so a point that misses a demand is dropped when its moment passes. Ties go to fewer, then earlier layers.
    """
    demand = [-sys.maxsize] * (len(calls) + 1)
    for moment in moments:
        demand[moment.calls_before] = max(demand[moment.calls_before], moment.peak - budget)
    last_call = {call.layer: index for index, call in enumerate(calls)}
    decided: dict[frozenset[int], list[_Point]] = {frozenset(): [_Point(0, 0.0, ())]}
    for index in range(len(calls) + 1):
        decided = {
            key: kept
            for key, points in decided.items()
            if (kept := [point for point in points if point.freed >= demand[index]])
        }
        if index < len(calls):
            first = all(earlier.layer != calls[index].layer for earlier in calls[:index])
            last = last_call[calls[index].layer] == index
            decided = _decide(decided, calls[index], calls[index].replay_peak - budget, first=first, last=last)
    points = [point for points in decided.values() for point in points]
    return list(min(points, key=_Point.rank).layers) if points else None


@dataclass(frozen=True)
class _Point:
    freed: int
    cost: float
    layers: tuple[int, ...]

    def rank(self) -> tuple[float, int, tuple[int, ...]]:
        return (self.cost, len(self.layers), self.layers)


def _decide(
    decided: dict[frozenset[int], list[_Point]], call: LayerCall, demand: int, *, first: bool, last: bool
) -> dict[frozenset[int], list[_Point]]:
    """Every point with `call` replayed (where it meets the replay's `demand`) and not.

    The key holds the replayed layers that are called again later.
    """
    grown: dict[frozenset[int], list[_Point]] = {}
    for key, points in decided.items():
        for replayed in (False, True) if first else (call.layer in key,):
            open_layers = key | {call.layer} if replayed and not last else key - {call.layer}
            bucket = grown.setdefault(open_layers, [])
            for point in points:
                if not replayed:
                    bucket.append(point)
                    continue
                if point.freed < demand:
                    continue
                layers = (*point.layers, call.layer) if first else point.layers
                bucket.append(_Point(point.freed + call.freed, point.cost + call.cost, layers))
    return {key: _pareto(points) for key, points in grown.items()}


def _pareto(points: list[_Point]) -> list[_Point]:
    """The points that no other beats in both bytes and cost."""
    kept: list[_Point] = []
    for point in sorted(points, key=lambda p: (-p.freed, *p.rank())):
        if not kept or point.rank() < kept[-1].rank():
            kept.append(point)
    return kept
