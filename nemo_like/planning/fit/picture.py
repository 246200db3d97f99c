"""A fit's answers as a picture: bytes over the step of one configuration, and the peaks of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_like._util.extras import require
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.planning.fit.candidate import Candidate
from nemo_like.planning.fit.fitting import FitReport
from nemo_like.planning.pictures import headless_pyplot
from nemo_like.planning.program.readers import StepPoint

_SHADES = {"forward": "#eaf2fb", "backward": "#fdf1e3", "optimizer": "#e9f6e9"}


def plot(report: FitReport, path: str | Path, number: int = 1) -> None:
    """Write the picture of `draw`.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = draw(report, number)
    figure.savefig(path, dpi=120)
    headless_pyplot().close(figure)


def draw(report: FitReport, number: int = 1) -> Any:
    """A figure: bytes of the `number`-th configuration over one step, stacked by part, with its phases and the limit; for
    a pipeline those of its highest rank, and one line per rank; and the peaks of all configurations as bars.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: the report came from another process, which planned the step.
    """
    pyplot = headless_pyplot()
    candidate = report.candidates[number - 1]
    lines = timelines(candidate)
    highest = max(lines, key=lambda name: max(point.total for point in lines[name]))
    figure, every = pyplot.subplots(2 + (len(lines) > 1), 1, figsize=(9, 4 * (2 + (len(lines) > 1))))
    limit = report.question.limit / 2**30
    _stack(every[0], lines[highest])
    every[0].set_title(f"configuration {number}{highest and ', ' + highest}: {candidate.ac}, peak {candidate.peak.at}")
    for axes in every[1:-1]:
        for name, points in lines.items():
            axes.step(range(len(points)), [point.total / 2**30 for point in points], where="post", label=name)
        axes.set_title("all ranks of the pipeline")
    for axes in every[:-1]:
        axes.set_xlabel("stretches of a step in their order, each at its highest (not to scale in time)")
    _bars(every[-1], report)
    for axes in every:
        axes.axhline(limit, linestyle="--", color="grey", label="limit")
        axes.set_ylabel("predicted bytes per GPU, GiB")
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    return figure


def timelines(candidate: Candidate) -> dict[str, list[StepPoint]]:
    """The stretches of a step in order, by rank of the pipeline (without one: under ``""``); the highest of all of them is
    `Candidate.peak_bytes`. Of several microbatches it is the one that holds most."""
    if candidate.account is None or not candidate.account.lines:
        raise ValueError(
            "Bytes over the step are known to the process that planned it: draw on rank 0, with the report that fit() "
            "returned there, not with one that was sent or loaded."
        )
    return {name: line() for name, line in candidate.account.lines.items()}


def _stack(axes: Any, points: Sequence[StepPoint]) -> None:
    names = [name for name in Part if any(point.parts[name] for point in points)]
    sizes = [[point.parts[name] / 2**30 for point in points] for name in names]
    axes.stackplot(range(len(points)), *sizes, labels=names, colors=list(map(_color, names)), step="post", linewidth=0)
    begin, seen = 0, set[str]()
    for phase, own in itertools.groupby(points, key=lambda point: point.phase):
        end = begin + len(list(own))
        axes.axvspan(begin, end, color=_SHADES[phase], zorder=0, label=None if phase in seen else phase)
        seen.add(phase)
        begin = end


def _color(part: str) -> str:
    """The same in all pictures: of matplotlib's first ten colours, then the same ones lighter."""
    number = list(Part).index(Part(part))
    color = require("matplotlib.colors", "plot", "to draw the picture").to_rgb(f"C{number % 10}")
    white = 0.5 if number >= 10 else 0.0
    return require("matplotlib.colors", "plot", "to draw the picture").to_hex([c + (1 - c) * white for c in color])


def _bars(axes: Any, report: FitReport) -> None:
    places = list(range(1, len(report.candidates) + 1))
    below = [0.0] * len(places)
    for name in (name for name in Part if any(name in candidate.peak.parts for candidate in report.candidates)):
        sizes = [candidate.peak.parts.get(name, 0) / 2**30 for candidate in report.candidates]
        axes.bar(places, sizes, bottom=below, label=name, color=_color(name))
        below = [low + size for low, size in zip(below, sizes)]
    axes.set_xticks(places)
    axes.set_xlabel(f"configuration, fastest first ({report.question.gpus} x {report.question.device.name})")
