"""Effects of a change of the job: bytes and seconds of the fastest plan that then fits; and how far a device goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from nemo_like.job import Job
from nemo_like.planning.advise import changes
from nemo_like.planning.planner import query_of
from nemo_like.planning.predictions.outside_allocator import default_limit
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import PlanReport, WhatIf, fastest_within, row_of

MOST_GPUS = 1 << 14
_MOST_PROBES = 12


@dataclass(frozen=True)
class Step:
    """A model, a job and its input, which a step is planned for."""

    model: nn.Module
    job: Job
    given: Callable[[int, int], tuple[Any, str]]
    """Function that makes the input of one micro-batch, of so many sequences of so many tokens, and describes it."""
    batch: int = 1
    """Sequences of a micro-batch."""
    seq_len: int = 0
    """Tokens of a sequence; 0: the input has a length of its own."""

    @cached_property
    def input(self) -> tuple[Any, str]:
        """Input of one micro-batch, and its description."""
        return self.given(self.batch, self.seq_len)

    def query(self, job: Job | None = None, batch: int | None = None, seq_len: int | None = None) -> PlanQuery:
        """Trace the model for a job, a batch and a length; None: the step's own.

        Raises:
            ValueError: as `nemo_like.plan_for`.
        """
        job = self.job if job is None else job
        same = batch is None and seq_len is None
        sample, _ = self.input if same else self.given(batch or self.batch, seq_len or self.seq_len)
        return query_of(self.model, sample, job)


def what_if(step: Step, query: PlanQuery, report: PlanReport) -> Iterator[WhatIf]:
    """Yield the effects of single changes of a job: sequence, devices, loss, optimizer, offloading, in this order.

    A change that cannot be planned is left out.

    Args:
        step, query: the step and its query that `report` was made from.
    """
    for words, make in _changed(step, query):
        try:
            other = make()
        except (ValueError, NotImplementedError):
            continue  # a rule of the job, the model's positions, a part that is not planned
        if other is None:
            continue
        limit = default_limit(other.job, other.device) if report.is_default_limit else report.limit
        row = fastest_within(other, limit) or row_of("full", other, other.uniform("full"), limit)
        tokens = None if report.tokens is None else report.tokens * (2 if words == _TWICE else 1)
        same = words not in (_TWICE, _HALF) and "=" in words and other.job != query.job
        speed = replace(report, job=other.job, tokens=tokens).tokens_per_second(row)
        yield WhatIf(words, row, speed, other.job if same and other.job.as_call() != query.job.as_call() else None)


_TWICE, _HALF = "twice the sequence", "half the GPUs"


def _changed(step: Step, query: PlanQuery) -> Iterator[tuple[str, Callable[[], PlanQuery | None]]]:
    job = query.job
    if step.seq_len:
        yield _TWICE, lambda: step.query(job, seq_len=2 * step.seq_len)
    if job.ranks > 1 and job.ranks % 2 == 0:
        yield _HALF, lambda: query.under(job.change(world_size=job.ranks // 2))
    for change in changes(job):
        if change.job.ac == job.ac:  # the report shows which ac= is best
            yield change.words, partial(query.changed, change.job)


def least_need(query: PlanQuery, limit: int) -> int:
    """Return the bytes that full checkpointing needs where `limit` may be taken; no plan saves less."""
    return row_of("full", query, query.uniform("full"), limit).need.bytes


def largest(needs: Callable[[int], int], start: int, limit: int, most: int, step: int = 1) -> int:
    """Return the largest multiple of `step` up to `most` that needs at most `limit` bytes; 0: not even one.

    The need grows almost evenly, so two values show where the limit is crossed. The answer and the next multiple are both
    computed.

    Args:
        needs: returns bytes by size, growing.
        start: the first size to try.
    """
    fits, fails, known = 0, most // step + 1, dict[int, int]()
    guess = min(max(1, start // step), fails - 1)
    for _ in range(_MOST_PROBES):
        if fails - fits <= 1:
            break
        known[guess] = needs(guess * step)
        if known[guess] <= limit:
            fits = guess
        else:
            fails = guess
        low, high = min(known), max(known)
        slope = (known[high] - known[low]) / (high - low) if high > low else 0.0
        at = fits or low
        if slope > 0:
            guess = int(at + (limit - known[at]) / slope)
        else:
            guess = 2 * guess if fits == guess else guess // 2
        guess = min(max(guess, fits + 1), fails - 1)
    return fits * step


def fewest(needs: Callable[[int], int], counts: Sequence[int], limit: int) -> int | None:
    """Return the smallest of `counts` that needs at most `limit` bytes each; None: none does.

    Args:
        needs: returns bytes of one device by the number of devices, falling.
        counts: in order; doubling steps find the first that fits, bisection the smallest.
    """
    low, high = 0, 0
    while needs(counts[high]) > limit:
        if high == len(counts) - 1:
            return None
        low, high = high + 1, min(2 * high + 1, len(counts) - 1)
    while low < high:
        middle = (low + high) // 2
        if needs(counts[middle]) <= limit:
            high = middle
        else:
            low = middle + 1
    return counts[low]


def gpu_unit(tp: int, cp: int, ep: int, pp: int, dp_replicate: int) -> int:
    """Return the smallest number of devices that these axes take; all others are multiples of it.

    >>> gpu_unit(2, 1, 8, 1, 2)
    16
    """
    return tp * cp * (ep // math.gcd(ep, tp * cp)) * pp * dp_replicate


def gpu_counts(job: Job, per_host: int) -> list[int]:
    """Return the numbers of devices that a job could run on: what its axes allow, and whole hosts above one."""
    unit = gpu_unit(job.tp.size, job.cp.size, job.ep.size, job.pp.size, job.dp_replicate)
    counts = range(unit, MOST_GPUS + 1, unit)
    return [count for count in counts if count <= per_host or count % per_host == 0]
