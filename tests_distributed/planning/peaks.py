"""Families under axes of parallelism: what is predicted of a step's peak, and what the worst of the ranks takes.

`rows_of` runs the cells that a file does not have yet, and appends what became of them, one JSON object a line.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nemo_like import parallelize
from nemo_like.planning.fit import fit
from nemo_like.planning.program.storages import Peak
from tests_distributed.allocated import loop_peak_bytes, pipeline_peak_range
from tests_distributed.planning.peak_families import FAMILIES, SEQ, WITH_EXPERTS, build, tokens
from tests_distributed.spawn import run_ranks

ONE = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "ep": 1, "pp": 1}
ALONE: tuple[dict[str, int], ...] = (
    {"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}, {"cp": 2}, {"dp_shard": 2, "ep": 2}, {"pp": 2},
)  # fmt: skip
"""On two ranks. Experts are split over ranks that shard everything else."""
PAIRS: tuple[dict[str, int], ...] = (
    {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 4, "ep": 2},
    {"dp_shard": 2, "pp": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "cp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"dp_replicate": 2, "pp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2},
    {"cp": 2, "pp": 2}, {"dp_shard": 2, "ep": 2, "tp": 2}, {"dp_shard": 2, "ep": 2, "cp": 2},
    {"dp_shard": 2, "ep": 2, "pp": 2},
)  # fmt: skip
"""On four."""
MODES = ("none", "full", "selective", "plan")
SCHEDULES = ("1f1b", "interleaved_1f1b", "zbv", "gpipe")
ROWS, MICROBATCHES = 2, 4


class Cell(NamedTuple):
    """One family on the ranks of some axes."""

    family: str
    axes: dict[str, int]
    """Sizes of those that are not 1."""
    ac: str
    """A mode; ``plan``: the best one for half of what lies between the peaks of ``full`` and ``none``."""
    schedule: str = "1f1b"

    @property
    def label(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes.items())

    @property
    def ranks(self) -> int:
        return 4 if self.axes in PAIRS else 2


class Row(NamedTuple):
    """What became of a cell."""

    cell: Cell
    predicted: int = 0
    measured: int = 0
    """Bytes of the worst rank; of what lies within `spread`, the nearest to what was predicted."""
    at: str = ""
    ac: str = ""
    refused: str = ""
    """Why it does not run, where it does not."""
    spread: int = 0
    """Bytes between the least and the most that it can have been, where no step's events were complete."""

    @property
    def error(self) -> float:
        """Of the prediction, as a share."""
        return self.predicted / self.measured - 1


def cells(families: Sequence[str], axes: Sequence[dict[str, int]]) -> Iterator[Cell]:
    """All of them; from cell to cell and family to family another mode."""
    for family in families:
        for place, sizes in enumerate(axes):
            if "ep" in sizes and family not in WITH_EXPERTS:
                continue
            turn = list(FAMILIES).index(family) + place
            yield Cell(family, sizes, MODES[turn % len(MODES)], SCHEDULES[turn // len(MODES) % len(SCHEDULES)])


class _Asked(NamedTuple):
    kwargs: dict[str, Any]
    """Of `parallelize`."""
    peak: Peak
    ac: str


def run_cells(rank: int, world_size: int, wanted: Sequence[Cell], path: str | None = None) -> list[Row]:
    """What becomes of each; rank 0 appends it to `path` at once."""
    rows = []
    for cell in wanted:
        rows.append(run_cell(cell))
        if path is not None and rank == 0:
            with Path(path).open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return rows


def run_cell(cell: Cell) -> Row:
    try:
        asked = _by_fit(cell)
        model = parallelize(build(cell.family), device="cpu", **asked.kwargs)
    except (ValueError, NotImplementedError) as error:
        return Row(cell, refused=str(error))
    mine = _pipeline_peak(model) if "pp" in cell.axes else (_peak(model),) * 2
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    del model
    gc.collect()
    least, most = (max(ends) for ends in zip(*every))
    measured = min(max(asked.peak.total, least), most)
    return Row(cell, asked.peak.total, measured, asked.peak.at, asked.ac, spread=most - least)


def _by_fit(cell: Cell) -> _Asked:
    """`nemo_like.planning.fit.fit` with all axes pinned."""
    model = build(cell.family)
    pins: dict[str, Any] = {**ONE, **cell.axes, "loss": "model", "offload": "none"}
    pins |= {"micro_batch": ROWS, "grad_accum": 1}
    if "pp" in cell.axes:
        pins |= {"grad_accum": MICROBATCHES, "schedule": cell.schedule}
    if "ep" in cell.axes:
        pins["imbalance"] = 2.0

    def ask(memory: int, ac: str) -> Any:
        return fit(model, gpus=cell.ranks, gpu="cpu", seq_len=SEQ, memory=memory, ac=ac, **pins)

    plenty = 1 << 40
    if cell.ac == "plan":
        # Asked for both at once, a report has the faster one alone.
        ends = [ask(plenty, mode).best.peak_bytes for mode in ("none", "full")]
        best = ask((max(ends) + min(ends)) // 2, "plan").best
    else:
        best = ask(plenty, cell.ac).best
    return _Asked(best.kwargs(), best.peak, best.ac)


def _batch(rows: int) -> dict[str, torch.Tensor]:
    ids = tokens(rows)
    return {"input_ids": ids, "labels": ids}


def _pipeline_peak(pipeline: Any) -> tuple[int, int]:
    return pipeline_peak_range(pipeline, _batch(ROWS * MICROBATCHES), 20)


def _peak(model: Any) -> int:
    """With a learning rate of 0, so that routers go on to send tokens where they did."""
    return loop_peak_bytes(model, _batch(ROWS), lr=0.0)


def read_rows(path: Path) -> list[Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Row(Cell(*cell), *rest) for cell, *rest in map(json.loads, lines)]


def rows_of(path: Path, families: Sequence[str]) -> list[Row]:
    """All rows of `families`; those that `path` does not have are run, and written to it."""
    for axes in (ALONE, PAIRS):
        for family in families:
            known = [(row.cell.family, row.cell.axes) for row in read_rows(path)]
            wanted = [cell for cell in cells([family], axes) if (cell.family, cell.axes) not in known]
            if wanted:
                run_ranks(wanted[0].ranks, run_cells, wanted, str(path), timeout=180 * len(wanted))
    return [row for row in read_rows(path) if row.cell.family in families]


def table(rows: Sequence[Row], axes: Sequence[dict[str, int]]) -> str:
    """Markdown: a line per family, a column per combination of `axes`; what was not run is empty."""
    found = {(row.cell.family, row.cell.label): row for row in rows}
    labels = [Cell("", sizes, "").label for sizes in axes]
    lines = ["| family | " + " | ".join(labels) + " |", "|---" * (len(labels) + 1) + "|"]
    for family in dict.fromkeys(row.cell.family for row in rows):
        row_of = [found.get((family, label)) for label in labels]
        lines.append(f"| {family} | " + " | ".join("" if row is None else _said(row) for row in row_of) + " |")
    return "\n".join(lines)


def _said(row: Row) -> str:
    schedule = f" {row.cell.schedule}" if "pp" in row.cell.axes else ""
    within = "~" if row.spread > 0.01 * max(1, row.measured) else ""
    return f"{row.cell.ac}{schedule}: " + ("refused" if row.refused else f"{within}{100 * row.error:+.2f}")
