"""Verdict whether a configuration fits, by what CUDA's caching allocator reserves, where that is predicted.

Users run out of what is reserved, not of what tensors take. The step is run through a model of the allocator with no more
memory than the limit. It fits where this ends without giving segments back in every step, since the device would have to
wait for that. Where nothing reserves more than tensors take (the CPU), tensors decide. In a pipeline, the rank that
reserves most decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nemo_like.activation_checkpointing.plan import BudgetError
from nemo_like.options import MemoryBudget, parse_bytes
from nemo_like.planning.memory_model.allocator import DeviceMemoryError
from nemo_like.planning.memory_model.storages import Peak
from nemo_like.planning.predictions.budget_search import choose
from nemo_like.planning.predictions.rank import fullest_peaks, peak_of
from nemo_like.planning.predictions.reserved import StepLogs, replay
from nemo_like.planning.query import Choices, PlanQuery

RESERVED, ALLOCATED = "reserved", "allocated"


@dataclass(frozen=True)
class Need:
    """Bytes that one rank must have."""

    bytes: int
    by: str
    """Kind of `bytes`: `RESERVED` or `ALLOCATED`."""
    reserved: int | None = None
    """Most bytes that the caching allocator reserves; None: the device has no such allocator."""
    inputs: int = 0
    """Part of `bytes` that is the step's input (token ids and labels), which peaks and reserved bytes leave out."""


def verdict(query: PlanQuery, choices: Choices, peaks: Mapping[int, Peak], limit: int) -> Need:
    """Return what decides whether a step fits in `limit` bytes of each rank; where it does not, of the first rank so.

    `peaks`: those of `choices` on the fullest ranks (`nemo_like.planning.predictions.rank.fullest_peaks`).
    """
    sizes = {rank: peak.total for rank, peak in peaks.items()}
    reserved = list[int]()
    for rank in sorted(sizes, key=lambda rank: -sizes[rank]) if query.device.cuda is not None else ():
        # What is reserved above the peak is at most twice that of another rank, which runs the same kinds of layers.
        if reserved and sizes[rank] + 2 * (reserved[0] - max(sizes.values())) < max(reserved):
            continue
        reserved += reserved_within(query, choices, limit, [rank])
        if reserved[-1] + query.input_bytes > limit:
            break
    return need_of(query, max(peaks.values(), key=lambda peak: peak.total), reserved)


def need_of(query: PlanQuery, peak: Peak, reserved: Iterable[int]) -> Need:
    """Return the bytes that decide, from what is `reserved` on ranks; empty: nothing reserves more than tensors take."""
    inputs, most = query.input_bytes, max(reserved, default=None)
    if most is None:
        return Need(peak.total + inputs, ALLOCATED, inputs=inputs)
    return Need(most + inputs, RESERVED, most, inputs)


def most_allocated(query: PlanQuery, limit: int) -> int:
    """Return the highest peak that could fit in `limit` bytes."""
    return max(0, limit - query.input_bytes)


def reserved_within(query: PlanQuery, choices: Choices, limit: int, ranks: Iterable[int] | None = None) -> list[int]:
    """Return the bytes that the caching allocator reserves on `ranks` (None: all), where a step may take `limit` bytes.

    Where `limit` does not suffice, they are what it would reserve on a larger device. Empty: there is no such allocator.
    """
    if query.device.cuda is None:
        return []
    every = range(query.pp.size) if ranks is None else ranks
    return [_within(query, StepLogs(query, rank, choices), limit - query.input_bytes) for rank in every]


def _within(query: PlanQuery, logs: StepLogs, memory: int) -> int:
    device, config = query.device, query.job.allocator
    try:
        run = replay(logs, device, config, memory)
    except DeviceMemoryError:
        return replay(logs, device, config).reserved
    return replay(logs, device, config).reserved if run.given_back else run.reserved


def plan_within(query: PlanQuery, limit: int) -> tuple[Choices, Peak, Need, str] | None:
    """Return the fastest plan whose deciding bytes are within `limit`: its choices, peak, need, and budget in words.

    A plan is made for a peak. Where more is reserved than `limit`, the next plan is made for a peak that is lower in the
    same proportion. Budgets are rounded down to what is short to write (`budget_words`). The last plan is made for the peak
    of full checkpointing, since segments are so large that less peak may not reserve less. None: no plan fits.
    """
    budget = most_allocated(query, limit)
    for left in reversed(range(_ATTEMPTS)):
        words = budget_words(budget)
        if not left:
            budget = peak_of(query, query.uniform("full")).total
            words = (f"{budget}B",)
        for word in words:
            try:
                choices, _ = choose(query, MemoryBudget(peak_bytes=parse_bytes(word)))
                break
            except BudgetError:
                continue
        else:
            return None
        peaks = fullest_peaks(query, choices)
        peak = max(peaks.values(), key=lambda peak: peak.total)
        need = verdict(query, choices, peaks, limit)
        if need.bytes <= limit:
            return choices, peak, need, word
        budget = min(budget, peak.total) * limit // need.bytes
    return None


_ATTEMPTS = 7
"""Most plans that are made, for ever lower peaks, until reserved bytes fit."""


def budget_words(size: int) -> tuple[str, ...]:
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
