"""The fastest choices within a budget, or within the memory; where none fit, the least, and changes to lower it."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import BudgetError
from nemo_like.options import MemoryBudget, parse_bytes
from nemo_like.planning.advise import changes, helping, in_words
from nemo_like.planning.memory_model.storages import Peak
from nemo_like.planning.predictions.rank import fullest_peaks, parts_at_peak, peak_of, rank_peak
from nemo_like.planning.predictions.reserved import Need, most_allocated, outside_of, verdict
from nemo_like.planning.query import Choices, PlanQuery, Stage
from nemo_like.planning.selection import solver
from nemo_like.planning.selection.layer import Choice, Stack

Mixed = tuple[Stack, solver.Mix]  # Choices of the layers of one stage, and the mix of them that is taken.


def choose(query: PlanQuery, budget: MemoryBudget, asked: str = "") -> list[list[Choice]]:
    """Return the fastest choices within `budget`.

    Args:
        query: the job.
        budget: a share of the saved activations, or the peak of every rank.
        asked: the budget as the caller wrote it, for errors.

    Raises:
        BudgetError: none fit; with the smallest budget that some do.
    """
    asked = asked or str(budget)
    taken: dict[int, Mixed] = {}
    stacks = {stage.slice.index: stage.stack(budget.fixed) for stage in query.stages}
    if budget.fraction is not None:
        taken = {
            stage.slice.index: _within_share(query, stage, stacks[stage.slice.index], budget.fraction, asked)
            for stage in query.stages
        }
    else:
        share = budget.device_share or 0.0
        memory = query.device.memory_bytes
        room = max(0, memory - outside_of(query.job, query.device).total)
        limit = min(int(memory * share), room) if budget.peak_bytes is None else budget.peak_bytes
        for rank in range(query.pp.size):
            taken |= _within_peak(query, rank, stacks, limit, asked)
    mixed = [taken[index] for index in range(len(query.stages))]
    return [_choices(stage, *each) for stage, each in zip(query.stages, mixed)]


def _choices(stage: Stage, stack: Stack, mix: solver.Mix) -> list[Choice]:
    """Return the choices of a mix, as the engine runs them."""
    return stage.part.proved_all(stack.assignment(mix))


def _within_share(query: PlanQuery, stage: Stage, stack: Stack, fraction: float, asked: str) -> Mixed:
    shared = stage.part.traced.shared_bytes
    none = stage.part.saved(stage.part.uniform("none"))
    limit = int(fraction * none) - shared
    best = bisect_right(stack.mixes, limit, key=lambda mix: mix.bytes) - 1
    if best < 0:
        raise _too_small_share(query, asked, limit + shared, stack.mixes[0].bytes + shared, none)
    return stack, stack.mixes[best]


def _within_peak(query: PlanQuery, rank: int, stacks: Mapping[int, Stack], limit: int, asked: str) -> dict[int, Mixed]:
    """Return the fastest mixes of the stages of one rank, by stage.

    From those that save least, step by step to the next mix of the stage where a byte saves most time; a byte of a stage
    counts for each micro-batch that it has in flight.
    """
    indices = query.of_rank(rank)
    stages = {index: query.stages[index] for index in indices}
    flights = {index: max(1, query.most_in_flight(index)) for index in indices}
    steps = []
    for index in indices:
        for number, (low, high) in enumerate(pairwise(stacks[index].mixes)):
            gain = (low.cost - high.cost) / max(1, (high.bytes - low.bytes) * flights[index])
            steps.append((-gain, number, index))
    path = [dict.fromkeys(indices, 0)]
    for _, _, index in sorted(steps):  # of one stage, in their order: a byte of a later mix saves less
        path.append({**path[-1], index: path[-1][index] + 1})
    rows = [{index: (stacks[index], stacks[index].mixes[at]) for index, at in row.items()} for row in path]

    def saved(row: Mapping[int, Mixed]) -> int:
        return sum(mix.bytes * flights[index] for index, (_, mix) in row.items())

    def peak(row: Mapping[int, Mixed]) -> int:
        chosen = {index: _choices(stages[index], *mixed) for index, mixed in row.items()}
        total = rank_peak(query, rank, [chosen.get(index, []) for index in range(len(query.stages))]).total
        query.near[rank] = saved(row), total
        return total

    def last_of(rows: Sequence[Mapping[int, Mixed]]) -> int:
        about = [saved(row) for row in rows]
        last_saved, last_peak = query.near[rank]
        return last_within(limit, lambda at: peak(rows[at]), about, last_saved + limit - last_peak)

    best, before = len(rows) - 1, query.near.get(rank)
    if peak(rows[best]) > limit:
        query.near[rank] = before or query.near[rank]
        best = last_of(rows[:-1])
    if best < 0:
        raise _too_small(query, rank, stacks, limit, asked)
    return rows[best]


def _too_small_share(query: PlanQuery, asked: str, limit: int, least: int, none: int) -> BudgetError:
    inputs = "the layers' inputs" + (" and the numbers of the experts that rows go to" if query.job.ep.size > 1 else "")
    return BudgetError(
        f"Budget {asked!r} allows {write_bytes(limit)} of activations, and {inputs} alone take {write_bytes(least)} "
        f"({least / none:.1%} of the {write_bytes(none)} of no checkpointing). Ask for at least {least / none:.1%}, or "
        "use a smaller batch or sequence.",
        least,
    )


def _too_small(query: PlanQuery, rank: int, stacks: Mapping[int, Stack], limit: int, asked: str) -> BudgetError:
    least = [_choices(stage, stack, stack.mixes[0]) for stage, stack in zip(query.stages, stacks.values())]
    peak = rank_peak(query, rank, least)
    tried = []
    for change in changes(query.job):
        other = query.changed(change.job)
        if other is not None and not (query.stages[0].host and change.job.offload != query.job.offload):
            tried.append((change.words, rank_peak(other, rank, least).total))
    ways = [
        "a smaller batch or sequence",
        *([f"more stages (now {len(query.stages)})", "balance='memory'"] if query.is_pipeline else []),
        f"more ranks to shard over (now {query.job.shard_ranks})",
    ]
    help_ = "".join(f"; or {words}" for words in in_words(*helping(peak.total, limit, tried)))
    where = f" on rank {rank} of the pipeline" if query.is_pipeline else ""
    parts = Counter(parts_at_peak(query, rank, least)).most_common(4)
    words = f"{peak.at}: {', '.join(f'{name} {write_bytes(size)}' for name, size in parts)}"
    return BudgetError(
        f"Budget {asked!r} is {write_bytes(limit)} per rank, and the least that any plan peaks at{where} is "
        f"{write_bytes(peak.total)} ({words}). Give it at least that, or lower it with {', '.join(ways)}{help_}.",
        peak.total,
    )


_GUESSES = 6  # Guesses that may go wrong before the row is halved instead.


def last_within(limit: int, size: Callable[[int], int], about: Sequence[int], first: int | None = None) -> int:
    """Return the last position whose size is at most `limit`; -1: none is. Bisection finds the same in more steps.

    Args:
        limit: bytes.
        size: of a position, ascending; each takes long to find.
        about: as many numbers, ascending, between which sizes differ about as much: one that is known says where to look
            next.
        first: the number among these near which to begin; None: the middle.

    >>> last_within(25, [11, 20, 30, 41].__getitem__, [0, 10, 20, 30])
    1
    """
    low, high, at, guesses = -1, len(about), len(about) // 2, _GUESSES
    if first is not None:
        at = max(0, min(high - 1, bisect_right(about, first) - 1))
    while high - low > 1:
        bytes_there = size(at)
        if bytes_there <= limit:
            low = at
        else:
            high = at
        guess = bisect_right(about, limit - bytes_there + about[at]) - 1 if guesses else (low + high) // 2
        at, guesses = max(low + 1, min(high - 1, guess)), max(0, guesses - 1)
    return low


def plan_within(query: PlanQuery, limit: int) -> tuple[Choices, Peak, Need, str] | None:
    """Return the fastest plan whose deciding bytes are within `limit`: its choices, peak, need, and budget in words.

    A plan is made for a peak. Where more is reserved than `limit`, the next plan is made for a peak that is lower in the
    same proportion. Budgets are rounded down to short numbers (`budget_words`). The last plan is made
    for the peak of full checkpointing, since segments are so large that less peak may not reserve less. None: no plan
    fits.
    """
    budget = most_allocated(query, limit)
    for margin in _MARGINS:
        last = margin == 100
        budget = peak_of(query, query.uniform("full")).total if last else budget * (100 - margin) // 100
        words = (f"{budget}B",) if last else budget_words(budget)
        for word in words:
            try:
                choices = choose(query, MemoryBudget(peak_bytes=parse_bytes(word)))
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


# Plans for ever lower peaks, until reserved bytes fit: percent by which each is lower than in proportion. Reserved bytes are
# not in proportion to peaks, so that the same proportion again and again comes ever closer and never there. The last one
# stands for the peak of full checkpointing.
_MARGINS = (0, 0, 1, 2, 4, 100)


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
