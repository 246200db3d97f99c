"""Pictures of a plan: memory against step time, and the schedule of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_like._util.extras import require
from nemo_like.planning.planner import MODES, Planner
from nemo_like.planning.program.rank import ActionBytes
from nemo_like.planning.report import AnyPlanner, PlanReport, ReportRow, row_of
from nemo_like.planning.stage_seconds import times
from nemo_like.planning.stages import PipelinePlanner

_POINTS = 24
"""Plans on the line of a picture, at most."""


def plot(planner: AnyPlanner, report: PlanReport, path: str | Path) -> None:
    """Draw the report into a file: of a whole model its plans, of a pipeline the schedule of the recommended row.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    pyplot = headless_pyplot()
    if isinstance(planner, PipelinePlanner):
        figure = _schedule(pyplot, planner, report.best or report.rows[0])
    else:
        figure = _plans(pyplot, planner, report)
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


def _plans(pyplot: Any, planner: Planner, report: PlanReport) -> Any:
    """Draw what decides against the step's seconds: plans as a line, modes as marks, and what a step may take."""
    mixes = planner.stack.mixes
    some = [*mixes[:: max(1, len(mixes) // _POINTS)], mixes[-1]]
    rows = [row_of("", planner, planner.proved_all(planner.stack.assignment(mix)), report.limit) for mix in some]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.plot([1e3 * row.seconds for row in rows], [row.need.bytes / 2**30 for row in rows], ".-", label="plans")
    for row in report.rows:
        if row.ac in MODES:
            axes.plot(1e3 * row.seconds, row.need.bytes / 2**30, "o", label=f"ac={row.ac!r}")
    axes.axhline(report.limit / 2**30, linestyle="--", color="grey", label=f"limit on {report.device}")
    axes.set_xlabel("ms of a step (roofline)")
    axes.set_ylabel(f"GiB {report.rows[0].need.by} on each device, predicted")
    axes.legend()
    return figure


def _schedule(pyplot: Any, pipeline: PipelinePlanner, row: ReportRow) -> Any:
    """Draw the actions of each rank over time, and the bytes that are alive."""
    planner = pipeline.with_all_microbatches()
    spans = times(planner, row.choices).spans
    figure, rows = pyplot.subplots(
        len(spans), 1, figsize=(11, 1.6 * len(spans) + 0.6), sharex=True, sharey=True, squeeze=False
    )
    most = max(peak.total for peak in row.peaks) / 2**30
    for rank, (own, axes) in enumerate(zip(spans, rows[:, 0])):
        log: list[ActionBytes] = []
        planner.rank_peak(rank, row.choices, log)
        _boxes(axes, own, most)
        points = [(begin, one.most) for one, (_, begin, _) in zip(log, own)]
        ends = [(end, one.left) for one, (_, _, end) in zip(log, own)]
        line = [point for pair in zip(points, ends) for point in pair]
        axes.step([1e3 * at for at, _ in line], [size / 2**30 for _, size in line], where="post", color="black", lw=0.9)
        axes.set_ylabel(f"rank {rank}\nGiB")
    rows[-1, 0].set_xlabel("ms, by the roofline, without communication")
    figure.suptitle(f"{planner.pp.schedule}, ac={row.ac!r}: forward blue, backward green (its second half grey)")
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
