"""A pipeline's schedule in a file of torch's: one line per rank, one cell per action (``0F0,0F1,,0B0``)."""

from __future__ import annotations

import csv
import functools
import os
import re
from dataclasses import dataclass

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")

Cell = tuple[int, str, int]
"""Stage; forward (F), backward (B) or its halves for inputs (I) and weights (W); microbatch."""


@dataclass(frozen=True)
class ScheduleFile:
    """What a file says, checked: every microbatch goes through every stage once, and no rank waits for ever."""

    ranks: tuple[tuple[Cell, ...], ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return 1 + max(stage for row in self.ranks for stage, _, _ in row)

    @property
    def microbatches(self) -> int:
        """How many microbatches there are."""
        return 1 + max(number for row in self.ranks for _, _, number in row)

    @property
    def splits_backward(self) -> bool:
        """Some backward is cut in two."""
        return any(kind == "I" for row in self.ranks for _, kind, _ in row)

    def of_rank(self, rank: int) -> list[int]:
        """Stages of `rank`, ascending."""
        return sorted({stage for stage, _, _ in self.ranks[rank]})


def is_schedule_file(word: object) -> bool:
    """Whether a ``schedule=`` names a file."""
    return isinstance(word, str | os.PathLike) and str(word).endswith(".csv")


def read_schedule(path: str) -> ScheduleFile:
    """Read a file as ``schedule._dump_csv(path, format="compute_only")`` of torch writes it.

    Raises:
        ValueError: no such file, a cell that is none, or an order in which some action never gets what it needs.
    """
    try:
        return _read(path, os.stat(path).st_mtime_ns)
    except OSError as error:
        raise ValueError(f"PipelineParallel.schedule is the file {path!r}, which can't be read: {error}.") from error


@functools.lru_cache(maxsize=16)
def _read(path: str, changed: int) -> ScheduleFile:
    with open(path, newline="", encoding="utf-8") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    ranks = []
    for rank, row in enumerate(rows):
        cells: list[Cell] = []
        for cell in filter(None, row):
            match = _CELL.fullmatch(cell)
            if match is None:
                raise ValueError(
                    f"Schedule file {path!r}, line {rank + 1}: {cell!r} is no action. An action is stage, F, B, I or W, and "
                    'microbatch, such as 0F3 (torch writes that with format="compute_only").'
                )
            cells.append((int(match[1]), match[2], int(match[3])))
        ranks.append(tuple(cells))
    if not ranks or not all(ranks):
        raise ValueError(f"Schedule file {path!r} has a line without an action: each rank needs one line.")
    found = ScheduleFile(tuple(ranks))
    _check(path, found)
    return found


def _check(path: str, table: ScheduleFile) -> None:
    places: dict[int, int] = {}
    for rank, row in enumerate(table.ranks):
        for stage, _, _ in row:
            if places.setdefault(stage, rank) != rank:
                raise ValueError(f"Schedule file {path!r}: stage {stage} is on ranks {places[stage]} and {rank}.")
    done = [cell for row in table.ranks for cell in row]
    seen = set(done)
    for stage in range(table.stages):
        for number in range(table.microbatches):
            whole = {(stage, kind, number) for kind in "FB"} <= seen
            halves = {(stage, kind, number) for kind in "FIW"} <= seen
            if whole == halves:
                raise ValueError(
                    f"Schedule file {path!r}: stage {stage} must run microbatch {number} forward (F) and back (B, or I "
                    "and W)."
                )
    if len(done) != len(seen):
        raise ValueError(f"Schedule file {path!r}: {len(done) - len(seen)} action(s) stand there twice.")
    _check_order(path, table)


def _check_order(path: str, table: ScheduleFile) -> None:
    """Run it, each rank as far as it gets."""
    ran: set[Cell] = set()
    at = [0] * len(table.ranks)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table.ranks):
            while at[rank] < len(row) and _can_run(row[at[rank]], ran, table.stages):
                ran.add(row[at[rank]])
                at[rank] += 1
                moved = True
    stuck = [f"{s}{k}{n}" for row, i in zip(table.ranks, at) for s, k, n in row[i : i + 1]]
    if stuck:
        raise ValueError(f"Schedule file {path!r} comes to a standstill: {', '.join(stuck)} wait for each other.")


def _can_run(cell: Cell, ran: set[Cell], stages: int) -> bool:
    stage, kind, number = cell
    if kind == "F":
        return stage == 0 or (stage - 1, "F", number) in ran
    if kind == "W":
        return (stage, "I", number) in ran
    next_stage = stage + 1
    back = next_stage == stages or (next_stage, "B", number) in ran or (next_stage, "I", number) in ran
    return (stage, "F", number) in ran and back
