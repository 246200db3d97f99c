"""What decides whether a configuration fits: what CUDA's caching allocator reserves, where that is predicted.

Users run out of what is reserved, not of what tensors take. A step fits where the allocator, replayed with no more memory
than the limit, goes through without giving segments back in every step, for which the device would have to wait. Where
nothing reserves more than tensors take (the CPU), these decide. Of a pipeline, the rank that reserves most decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo_like.options import parse_bytes
from nemo_like.planning.allocator_model import DeviceMemoryError
from nemo_like.planning.block import Choice
from nemo_like.planning.planner import Planner
from nemo_like.planning.program.readers import Peak
from nemo_like.planning.reserved import Reserved, StepLogs, ranks_to_replay, replay
from nemo_like.planning.stages import Choices, PipelinePlanner

RESERVED, ALLOCATED = "reserved", "allocated"


@dataclass(frozen=True)
class Need:
    """Bytes that one rank must have."""

    bytes: int
    by: str
    """What they are: `RESERVED` or `ALLOCATED`."""
    reserved: int | None = None
    """What the caching allocator reserves at most; None: there is none."""
    inputs: int = 0
    """Of `bytes`, the step's input (token ids and labels), which peaks and what is reserved for them leave out."""


def verdict(planner: Planner | PipelinePlanner, choices: Any, peak: Peak, limit: int) -> Need:
    """Return what decides whether a step fits in `limit` bytes of each rank; `peak`: of `choices`, on the highest rank."""
    inputs = planner.input_bytes
    if planner.device.cuda is None:
        return Need(peak.total + inputs, ALLOCATED, inputs=inputs)
    reserved = (_on_ranks if isinstance(planner, PipelinePlanner) else _on_one)(planner, choices, limit - inputs)
    return Need(reserved + inputs, RESERVED, reserved, inputs)


def most_allocated(planner: Planner | PipelinePlanner, limit: int) -> int:
    """The highest peak that could fit in `limit` bytes."""
    return max(0, limit - planner.input_bytes)


Planned = tuple[Any, Peak]
"""The choices of a plan, and its peak."""


def plan_within(
    planner: Planner | PipelinePlanner, limit: int, make: Callable[[int], Planned | None]
) -> tuple[Any, Peak, Need, str] | None:
    """Return a plan of which what decides is within `limit`: its choices, its peak, its need, and its budget in words.

    A plan is made for a peak. Where more is reserved than there is, the next one is made for a peak that is lower in the
    same proportion. Budgets are rounded down to what is short to write (`budget_words`). None: no plan fits.

    Args:
        make: makes the fastest plan within so many bytes of peak; None: none fits.
    """
    budget = most_allocated(planner, limit)
    for _ in range(_ATTEMPTS):
        for word in budget_words(budget):
            planned = make(parse_bytes(word))
            if planned is not None:
                break
        else:
            return None
        choices, peak = planned
        need = verdict(planner, choices, peak, limit)
        if need.bytes <= limit:
            return choices, peak, need, word
        budget = min(budget, peak.total) * limit // need.bytes
    return None


_ATTEMPTS = 6
"""Plans for ever lower peaks, until what is reserved fits."""


def budget_words(size: int) -> tuple[str, str]:
    """Return the budget of `size` bytes, rounded down: to a tenth or hundredth, and in whole units of a finer size.

    >>> budget_words((72 << 30) - 4096), budget_words(5 << 19), budget_words(1000)
    (('71.9GiB', '73727MiB'), ('2.50MiB', '2560KiB'), ('1000B', '1000B'))
    """
    size = max(size, 1)
    powers = {"GiB": 30, "MiB": 20, "KiB": 10, "B": 0}
    units = list(powers)
    unit = next((unit for unit in units if size >> powers[unit]), "B")
    finer = units[min(units.index(unit) + 1, 3)]
    whole = size >> powers[unit]
    digits = 0 if unit == "B" else 1 if whole >= 10 else 2
    rounded = (size * 10**digits >> powers[unit]) / 10**digits
    return f"{rounded:.{digits}f}{unit}", f"{size >> powers[finer]}{finer}"


def reserved_within(planner: PipelinePlanner, choices: Choices, limit: int) -> list[int] | None:
    """Return what the caching allocator reserves on every rank of a pipeline with `limit` bytes; None: it has none."""
    if planner.device.cuda is None:
        return None
    return _of_ranks(planner, choices, range(planner.pp.size), limit - planner.input_bytes)


def _on_one(planner: Any, choices: Sequence[Choice], limit: int) -> int:
    """Bytes that are reserved on a device with `limit`, or, where it does not have them, those that would be on a larger
    one."""
    return _within(limit, partial(replay, StepLogs.of(planner, choices), planner.device, planner.job.allocator))


def _on_ranks(planner: Any, choices: Choices, limit: int) -> int:
    """`_on_one` of the rank of a pipeline that reserves most."""
    return max(_of_ranks(planner, choices, ranks_to_replay(planner, choices), limit))


def _of_ranks(planner: PipelinePlanner, choices: Choices, ranks: Iterable[int], limit: int) -> list[int]:
    how = planner.device, planner.job.allocator
    every = (StepLogs.of_rank(planner, rank, choices) for rank in ranks)
    return [_within(limit, partial(replay, logs, *how)) for logs in every]


def _within(limit: int, replayed: Callable[[int | None], Reserved]) -> int:
    """Bytes that are reserved on a device with `limit`; `replayed`: on one with so many, or (None) as many as are asked
    for."""
    try:
        held = replayed(limit)
    except DeviceMemoryError:
        return replayed(None).reserved
    return replayed(None).reserved if held.given_back else held.reserved
