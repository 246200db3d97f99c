"""Suites of benchmarks: what each is asked with, and its results as a table (by rich where it is installed)."""

from __future__ import annotations

import datetime
import io
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nemo_like._util.extras import require
from nemo_like.bench.options import BenchOptions


@dataclass(frozen=True)
class Column:
    """One column: its key in a row, its heading, and how a value is written (None is written as ``-``)."""

    key: str
    heading: str
    form: str = "{}"

    def write(self, row: dict[str, Any]) -> str:
        value = row.get(self.key)
        return "-" if value is None else self.form.format(value)


@dataclass
class Table:
    """Rows of named values."""

    title: str
    columns: Sequence[Column]
    rows: list[dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)
    """How it was measured: model, sizes, device, versions."""
    notes: list[str] = field(default_factory=list)
    x: str = ""
    """Key of the plot's horizontal axis; empty: no plot."""
    y: str = ""

    def cells(self) -> list[list[str]]:
        """Headings and rows as text."""
        return [[column.heading for column in self.columns]] + [
            [column.write(row) for column in self.columns] for row in self.rows
        ]

    def table(self) -> str:
        """For a terminal: by rich where it is installed, else plain columns."""
        try:
            from rich.console import Console
            from rich.table import Table as RichTable
        except ImportError:
            return self._plain()
        head, *rows = self.cells()
        rich_table = RichTable(title=self.title, title_justify="left")
        for index, heading in enumerate(head):
            rich_table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=index == 0)
        for row in rows:
            rich_table.add_row(*row)
        out = io.StringIO()
        Console(file=out, width=160, force_terminal=False).print(rich_table)
        return out.getvalue() + self._footer()

    def markdown(self) -> str:
        """For a document."""
        head, *rows = self.cells()
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        return f"{self.title}\n\n" + "\n".join(lines) + "\n\n" + self._footer()

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

    def _plain(self) -> str:
        cells = self.cells()
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.columns))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
            for row in cells
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        return f"{self.title}\n" + "\n".join(lines) + "\n" + self._footer()

    def _footer(self) -> str:
        lines = [", ".join(f"{key}: {value}" for key, value in self.about.items())] if self.about else []
        return "\n".join([*lines, *self.notes]) + "\n"


@dataclass
class Measured:
    """What a suite found out; `Suite.measure` makes a `Table` of it."""

    title: str
    rows: list[dict[str, Any]]
    about: dict[str, Any]
    """How it was measured: model, sizes, repeats."""
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
    """What a number depends on besides the code: device, versions, threads, date."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
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
