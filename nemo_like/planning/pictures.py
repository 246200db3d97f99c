"""Pictures of a plan: memory against step time, and the schedule of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_like._util.extras import require
from nemo_like._util.words import GIB
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.distributed.pipeline.schedules import all_actions_of
from nemo_like.planning.answers.rank import ActionBytes, rank_peak
from nemo_like.planning.answers.seconds import timeline_of
from nemo_like.planning.fit.candidate import Candidate
from nemo_like.planning.fit.fitting import FitReport
from nemo_like.planning.model.traced import MODES
from nemo_like.planning.program.storages import StepPoint
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import PlanReport, ReportRow, row_of

_POINTS = 24
"""Most plans on the line of a picture."""


def plot(query: PlanQuery, report: PlanReport, path: str | Path) -> None:
    """Draw the report into a file: for a whole model its plans, for a pipeline the schedule of the recommended row.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    pyplot = headless_pyplot()
    if query.is_pipeline:
        figure = _schedule(pyplot, query, report.best or report.rows[0])
    else:
        figure = _plans(pyplot, query, report)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def headless_pyplot() -> Any:
    """Return `matplotlib.pyplot`, drawing into files alone.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib", "plot", "to draw the picture").use("Agg")
    return require("matplotlib.pyplot", "plot", "to draw the picture")


def _plans(pyplot: Any, query: PlanQuery, report: PlanReport) -> Any:
    """Draw what decides against the step's seconds: plans as a line, modes as marks, and what a step may take."""
    stage = query.stages[0]
    mixes = stage.stack.mixes
    some = [*mixes[:: max(1, len(mixes) // _POINTS)], mixes[-1]]
    choices = [stage.part.proved_all(stage.stack.assignment(mix)) for mix in some]
    rows = [row_of("", query, [chosen], report.limit) for chosen in choices]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.plot([1e3 * row.seconds for row in rows], [row.need.bytes / GIB for row in rows], ".-", label="plans")
    for row in report.rows:
        if row.ac in MODES:
            axes.plot(1e3 * row.seconds, row.need.bytes / GIB, "o", label=f"ac={row.ac!r}")
    axes.axhline(report.limit / GIB, linestyle="--", color="grey", label=f"limit on {report.device}")
    axes.set_xlabel("ms of a step (roofline)")
    axes.set_ylabel(f"GiB {report.rows[0].need.by} on each device, predicted")
    axes.legend()
    return figure


def _schedule(pyplot: Any, query: PlanQuery, row: ReportRow) -> Any:
    """Draw the actions of each rank over time, and the bytes that are alive."""
    spans, actions = timeline_of(query, row.choices).spans, all_actions_of(query.pp)
    figure, rows = pyplot.subplots(
        len(spans), 1, figsize=(11, 1.6 * len(spans) + 0.6), sharex=True, sharey=True, squeeze=False
    )
    most = max(peak.total for peak in row.peaks) / GIB
    for rank, (rank_spans, axes) in enumerate(zip(spans, rows[:, 0])):
        log: list[ActionBytes] = []
        rank_peak(query, rank, row.choices, log=log, actions=actions[rank])
        _boxes(axes, rank_spans, most)
        points = [(begin, one.most) for one, (_, begin, _) in zip(log, rank_spans)]
        ends = [(end, one.left) for one, (_, _, end) in zip(log, rank_spans)]
        line = [point for pair in zip(points, ends) for point in pair]
        axes.step([1e3 * at for at, _ in line], [size / GIB for _, size in line], where="post", color="black", lw=0.9)
        axes.set_ylabel(f"rank {rank}\nGiB")
    rows[-1, 0].set_xlabel("ms, by the roofline, without communication")
    figure.suptitle(f"{query.pp.schedule}, ac={row.ac!r}: forward blue, backward green (its second half grey)")
    return figure


_COLOURS = {"F": "#a6c8e8", "B": "#b7dbb0", "I": "#b7dbb0", "W": "#d8d8d8"}


def _boxes(axes: Any, spans: Sequence[Any], height: float) -> None:
    bar: Callable[..., Any] = axes.bar
    for action, begin, end in spans:
        width, colour = 1e3 * (end - begin), _COLOURS[action.kind]
        bar(1e3 * begin, 1.05 * height, width, align="edge", color=colour, edgecolor="white", lw=0.4)
        if len(spans) <= 64 and end > begin:
            number = str(action.microbatch)
            axes.text(500 * (begin + end), 0.02 * height, number, ha="center", va="bottom", fontsize=6)


_SHADES = {"forward": "#eaf2fb", "backward": "#fdf1e3", "optimizer": "#e9f6e9"}


def plot_fit(report: FitReport, path: str | Path, number: int = 1) -> None:
    """Write the picture of `draw`.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = draw(report, number)
    figure.savefig(path, dpi=120)
    headless_pyplot().close(figure)


def draw(report: FitReport, number: int = 1) -> Any:
    """Return a figure of the `number`-th configuration, with the peaks of all configurations as bars.

    It shows bytes over one step, stacked by part, with its phases and the limit. For a pipeline, they are of its highest
    rank, and there is one line per rank.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: the report came from another process, which planned the step.
    """
    pyplot = headless_pyplot()
    candidate = report.candidates[number - 1]
    lines = timelines(candidate)
    highest = max(lines, key=lambda name: max(point.total for point in lines[name]))
    figure, every = pyplot.subplots(2 + (len(lines) > 1), 1, figsize=(9, 4 * (2 + (len(lines) > 1))))
    limit = report.question.limit_of(candidate.job) / GIB
    _stack(every[0], lines[highest])
    every[0].set_title(f"configuration {number}{highest and ', ' + highest}: {candidate.ac}, peak {candidate.peak.at}")
    for axes in every[1:-1]:
        for name, points in lines.items():
            axes.step(range(len(points)), [point.total / GIB for point in points], where="post", label=name)
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
    """Return the stretches of a step in order, by rank of the pipeline (without one: under ``""``).

    The highest of all stretches is `Candidate.peak_bytes`. Of several micro-batches, the one with most bytes is shown.

    Raises:
        ValueError: the candidate came from another process, which planned the step.
    """
    if candidate.account is None or not candidate.account.lines:
        raise ValueError(
            "Bytes over the step are known to the process that planned it: draw on rank 0, with the report that fit() "
            "returned there, not with one that was sent or loaded."
        )
    return {name: line() for name, line in candidate.account.lines.items()}


def _stack(axes: Any, points: Sequence[StepPoint]) -> None:
    names = [name for name in Part if any(point.parts[name] for point in points)]
    sizes = [[point.parts[name] / GIB for point in points] for name in names]
    axes.stackplot(range(len(points)), *sizes, labels=names, colors=list(map(_color, names)), step="post", linewidth=0)
    begin, seen = 0, set[str]()
    for phase, group in itertools.groupby(points, key=lambda point: point.phase):
        end = begin + len(list(group))
        axes.axvspan(begin, end, color=_SHADES[phase], zorder=0, label=None if phase in seen else phase)
        seen.add(phase)
        begin = end


def _color(part: str) -> str:
    """Return the colour of a part in all pictures: one of matplotlib's first ten, then the same ones lighter."""
    number = list(Part).index(Part(part))
    color = require("matplotlib.colors", "plot", "to draw the picture").to_rgb(f"C{number % 10}")
    white = 0.5 if number >= 10 else 0.0
    return require("matplotlib.colors", "plot", "to draw the picture").to_hex([c + (1 - c) * white for c in color])


def _bars(axes: Any, report: FitReport) -> None:
    places = list(range(1, len(report.candidates) + 1))
    below = [0.0] * len(places)
    for name in (name for name in Part if any(name in candidate.peak.parts for candidate in report.candidates)):
        sizes = [candidate.peak.parts.get(name, 0) / GIB for candidate in report.candidates]
        axes.bar(places, sizes, bottom=below, label=name, color=_color(name))
        below = [low + size for low, size in zip(below, sizes)]
    axes.set_xticks(places)
    axes.set_xlabel(f"configuration, fastest first ({report.question.gpus} x {report.question.device.name})")
