"""Suites of benchmarks: what each is asked with, and its results as a table."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nemo_like._util import table
from nemo_like._util.extras import require
from nemo_like._util.table import ByteUnit, paragraph
from nemo_like.bench.options import BenchOptions


@dataclass(frozen=True)
class Column:
    """One column: its key in a row, its heading, and how a value is written (None is written as ``-``)."""

    key: str
    heading: str
    form: Callable[[Any], str] = str
    keep: int = 0
    """Place in the order in which columns are dropped where the screen is too narrow, see
    `nemo_like._util.table.Column`."""
    megabytes: bool = False
    """Its values are in MB (10**6 bytes); they are written in the one unit of the table."""


@dataclass
class Table:
    """Rows of named values."""

    title: str
    columns: Sequence[Column]
    rows: list[dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)
    """Conditions of the measurement: model, sizes, device, versions."""
    notes: list[str] = field(default_factory=list)
    x: str = ""
    """Key of the plot's horizontal axis; empty: no plot."""
    y: str = ""

    def cells(self) -> list[list[str]]:
        """Headings and rows as text."""
        sizes = [_bytes(row, column) for row in self.rows for column in self.columns if column.megabytes]
        unit = ByteUnit.of(size for size in sizes if size is not None)
        head = [f"{column.heading} {unit.name}" if column.megabytes else column.heading for column in self.columns]
        return [head] + [[_cell(row, column, unit) for column in self.columns] for row in self.rows]

    def table(self, width: int | None = None) -> str:
        """Return it for a screen of `width` columns (None: as wide as it gets)."""
        head, *rows = self.cells()
        columns = tuple(
            table.Column(heading, column.keep, left=index == 0, least=28 if index == 0 else None)
            for index, (heading, column) in enumerate(zip(head, self.columns))
        )
        columns_of_rows = table.Table(columns, tuple(map(tuple, rows)))
        below = [columns_of_rows.with_note(width=width), *(paragraph(note, width) for note in self.notes)]
        return "\n\n".join([paragraph(f"{self.title}. {self._about()}".strip(), width), "\n".join(filter(None, below))])

    def markdown(self) -> str:
        """Return it for a document."""
        head, *rows = self.cells()
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        below = "\n".join(line for line in (self._about(), *self.notes) if line)
        return f"{self.title}\n\n" + "\n".join(lines) + f"\n\n{below}\n"

    def to_json(self) -> str:
        """Everything, values unrounded."""
        return json.dumps(
            {"title": self.title, "about": self.about, "rows": self.rows, "notes": self.notes}, indent=2, default=str
        )

    def plot(self, path: str | os.PathLike[str]) -> Any:
        """A point per row, `x` against `y`, written to `path`; returns the figure.

        Raises:
            MissingExtraError: matplotlib is not installed. ValueError: nothing to draw.
        """
        require("matplotlib", "plot", "to plot a benchmark")
        from matplotlib.figure import Figure

        points = [row for row in self.rows if None not in (row.get(self.x), row.get(self.y))]
        if not points:
            raise ValueError(f"{self.title!r} has no rows with {self.x!r} and {self.y!r}: there is nothing to plot.")
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        headings = {column.key: column.heading for column in self.columns}
        first = self.columns[0].key
        for row in points:
            marker, colour = ("x", "tab:gray") if row.get("peer") else ("o", "tab:blue")
            place = (row[self.x], row[self.y])
            axes.scatter(*place, marker=marker, color=colour)
            axes.annotate(str(row[first]), place, textcoords="offset points", xytext=(4, 4), size=8)
        axes.set_xlabel(headings.get(self.x, self.x))
        axes.set_ylabel(headings.get(self.y, self.y))
        axes.set_title(self.title)
        figure.savefig(path)
        return figure

    def _about(self) -> str:
        return ", ".join(f"{key}: {value}" for key, value in self.about.items())


def _bytes(row: dict[str, Any], column: Column) -> int | None:
    value = row.get(column.key)
    return None if value is None else round(value * 1e6)


def _cell(row: dict[str, Any], column: Column, unit: ByteUnit) -> str:
    value = row.get(column.key)
    if value is None:
        return "-"
    return unit.number(value * 1e6) if column.megabytes else column.form(value)


@dataclass
class Measured:
    """Results of a suite; `Suite.measure` makes a `Table` of it."""

    title: str
    rows: list[dict[str, Any]]
    about: dict[str, Any]
    """Conditions of the measurement: model, sizes, repeats."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Suite:
    """One thing to measure. `measure` does it."""

    help: str
    reads: tuple[str, ...]
    """Fields of `BenchOptions` that it reads, and ``plot`` where its rows can be drawn."""
    columns: tuple[Column, ...]
    run: Callable[[BenchOptions], Measured]
    """Measure and return the rows; the threads are set."""
    x: str = ""
    """Key of the plot's horizontal axis; empty: no plot."""
    y: str = ""

    def measure(self, options: BenchOptions) -> Table:
        """Run the suite as `options` ask, and add what its numbers depend on; the CPU threads are put back after it.

        Raises:
            ValueError: an unknown mode, a model that cannot be built, or what else the suite refuses.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(options.threads or threads)
        try:
            measured = self.run(options)
            device = options.place() if "device" in self.reads else torch.device("cpu")
            about = measured.about | surroundings(device)
        finally:
            torch.set_num_threads(threads)
        return Table(measured.title, self.columns, measured.rows, about, measured.notes, self.x, self.y)


def surroundings(device: torch.device) -> dict[str, Any]:
    """Return what a number depends on besides the code: device, versions, threads, date."""
    name = _cpu_name() if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return {
        "device": name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
