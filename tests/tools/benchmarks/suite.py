"""Suites of measurements and predictions, printed as a Markdown table."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL = "llama-tiny"  # Without ``--model``.


@dataclass(frozen=True)
class Column:
    """One column: its key in a row, its heading, and how a value is written (None is written as ``-``)."""

    key: str
    heading: str
    form: Callable[[Any], str] = str


@dataclass
class Measured:
    """Results of a suite."""

    title: str
    rows: list[dict[str, Any]]
    about: dict[str, Any]
    """Conditions of the measurement: model, sizes, repeats."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Suite:
    """One thing to measure."""

    help: str
    columns: tuple[Column, ...]
    run: Callable[[Namespace], Measured]


def markdown(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as a table of a document."""
    lines = ["| " + " | ".join(column.heading for column in columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        values = [(column, row.get(column.key)) for column in columns]
        lines.append("| " + " | ".join("-" if v is None else c.form(v) for c, v in values) + " |")
    return "\n".join(lines)
