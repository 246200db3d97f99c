"""A pipeline's plans for people: peaks of every rank, the bubble, the line to paste, and the picture of the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_like._util.extras import require
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import BudgetError, Plan
from nemo_like.options import MemoryBudget
from nemo_like.planning.plan_report import FRACTIONS, MODES
from nemo_like.planning.program.rank import ActionBytes
from nemo_like.planning.program.readers import Peak
from nemo_like.planning.stage_plans import choose, describe, reserved_on_ranks
from nemo_like.planning.stage_seconds import times
from nemo_like.planning.stages import Choices, PipelinePlanner
from nemo_like.planning.tight import Tight, tight_rank
from nemo_like.planning.verdict import budget_word, plan_within, verdict


@dataclass(frozen=True)
class PipelineRow:
    """One line of the table."""

    name: str
    """What to write after ``ac=``."""
    choices: Choices
    plan: Plan
    peaks: tuple[Peak, ...]
    """Of every rank of the pipeline."""
    reserved: tuple[int, ...] | None
    """What the caching allocator reserves on each of them, bytes; None: not known."""
    bubble: float
    """The share of the ranks' time in which they wait, communication left out."""
    fits: bool
    planner: PipelinePlanner


@dataclass(frozen=True)
class PipelineReport:
    """All rows, and the one to take."""

    rows: tuple[PipelineRow, ...]
    best: PipelineRow | None
    """The fastest that fits; None where nothing does."""
    limit: int
    unmet: tuple[str, ...]
    """For each budget that was asked for and that nothing meets: why."""
    tight: Tight | None = None
    """Of the best, a rank would reserve more than the device has; None: none would."""


def pipeline_report(planner: PipelinePlanner, budgets: Sequence[str] = (), limit: int | None = None) -> PipelineReport:
    """The three modes, plans at `budgets` (default: a few shares), and the best plan within `limit` bytes per rank.

    `limit`: default, the share of the device's memory that ``"auto"`` means.
    """
    if limit is None:
        limit = int(planner.device.memory_bytes * (MemoryBudget.parse("auto").device_share or 0))
    rows = [_row(planner, mode, planner.uniform(mode), limit) for mode in MODES]
    unmet = []
    asked = [*budgets] or [f"{100 * share:g}%" for share in FRACTIONS]
    for text in dict.fromkeys(asked):
        try:
            rows.append(_row(planner, text, choose(planner, MemoryBudget.parse(text), text), limit))
        except BudgetError as error:
            if text in budgets:
                unmet.append(str(error))
    errors = list[str]()

    def within(budget: int) -> tuple[Choices, Peak] | None:
        try:
            choices = choose(planner, MemoryBudget(peak_bytes=budget), write_bytes(budget))
        except BudgetError as error:
            errors.append(str(error))
            return None
        return choices, max(planner.peaks(choices), key=lambda peak: peak.total)

    best_of_all = plan_within(planner, limit, within)
    if best_of_all is None:
        unmet += errors[-1:]
    else:
        text = budget_word(best_of_all[3], best_of_all[1].total)
        if text not in asked:
            rows.append(_row(planner, text, best_of_all[0], limit))
    fitting = [row for row in rows if row.fits]
    best = min(fitting, key=lambda row: (row.plan.step_seconds, row.plan.peak_bytes)) if fitting else None
    short = None if best is None else tight_rank(planner, best.choices, best.reserved)
    return PipelineReport(tuple(rows), best, limit, tuple(unmet), short)


def _row(planner: PipelinePlanner, name: str, choices: Choices, limit: int) -> PipelineRow:
    found = reserved_on_ranks(planner, choices)
    reserved = None if found is None else tuple(found)
    plan, peaks = describe(planner, choices, name, reserved), tuple(planner.peaks(choices))
    need = verdict(planner, choices, max(peaks, key=lambda peak: peak.total), limit)
    fits = need.bytes <= limit
    return PipelineRow(name, choices, plan, peaks, reserved, times(planner, choices).bubble, fits, planner)


def pipeline_table(report: PipelineReport, tokens: int | None) -> str:
    """The rows as text; `tokens`: of one microbatch on one rank. Of each rank its peak, and behind it, where that is known,
    what it reserves; GiB."""
    size = report.rows[0].planner.pp.size
    lines = [("ac=", *(f"rank {rank}" for rank in range(size)), "replay", "bubble", "ms", "tokens/s", "fits")]
    for row in report.rows:
        speed = "" if tokens is None else f"{tokens * row.planner.count / row.plan.step_seconds / size:,.0f}"
        lines.append((
            row.name, *_ranks(row), f"{row.plan.replay_share:.3f}",
            f"{row.bubble:.3f}", f"{1000 * row.plan.step_seconds:.3g}", speed, "yes" if row.fits else "no",
        ))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    )


def _ranks(row: PipelineRow) -> list[str]:
    peaks = [f"{peak.total / 2**30:.2f}" for peak in row.peaks]
    if row.reserved is None:
        return peaks
    return [f"{peak} ({size / 2**30:.2f})" for peak, size in zip(peaks, row.reserved)]


def pipeline_json(report: PipelineReport) -> dict[str, Any]:
    """The report in JSON values: bytes and seconds."""
    planner = report.rows[0].planner
    return {
        "device": planner.device.name,
        "pp": planner.pp.size, "schedule": planner.pp.schedule, "microbatches": planner.count,
        "layers_per_stage": list(planner.counts),
        "in_flight": [planner.most_in_flight(index) for index in range(len(planner.stages))],
        "limit_bytes": report.limit,
        "recommended": report.best.name if report.best else None,
        "unmet": list(report.unmet),
        "reserved_compared_with_gpu": False,
        "tight": None if report.tight is None else asdict(report.tight),
        "rows": [
            {
                "ac": row.name, "peak_bytes": row.plan.peak_bytes, "peak_at": row.plan.peak_at,
                "rank_peak_bytes": [peak.total for peak in row.peaks],
                "reserved_bytes": row.plan.reserved_bytes,
                "rank_reserved_bytes": None if row.reserved is None else list(row.reserved),
                "rank_parts": [dict(peak.parts) for peak in row.peaks],
                "bubble": row.bubble, "predicted_step_seconds": row.plan.step_seconds,
                "replay_share": row.plan.replay_share, "fits": row.fits,
                "layers": dict(Counter(layer.label for layer in row.plan.layers)),
                "held_bytes": {layer.fqn: layer.held_bytes for layer in row.plan.layers},
            }
            for row in report.rows
        ],
    }  # fmt: skip


def schedule_plot(row: PipelineRow, path: str | Path) -> None:
    """A picture: for each rank, its actions over time, and the bytes that are alive.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    matplotlib = require("matplotlib", "plot", "to draw the picture")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", "plot", "to draw the picture")
    planner = row.planner.with_all_microbatches()
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
    figure.suptitle(f"{row.planner.pp.schedule}, ac={row.name!r}: forward blue, backward green (its second half grey)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


_COLOURS = {"F": "#a6c8e8", "B": "#b7dbb0", "I": "#b7dbb0", "W": "#d8d8d8"}


def _boxes(axes: Any, spans: Sequence[Any], height: float) -> None:
    write: Callable[..., Any] = axes.text
    for action, begin, end in spans:
        axes.bar(
            1e3 * begin, 1.05 * height, 1e3 * (end - begin), align="edge", color=_COLOURS[action.kind], edgecolor="white",
            lw=0.4,
        )  # fmt: skip
        if len(spans) <= 64 and end > begin:
            write(500 * (begin + end), 0.02 * height, str(action.microbatch), ha="center", va="bottom", fontsize=6)


def least_help(report: PipelineReport) -> str:
    """What to say where nothing fits."""
    low = min(report.rows, key=lambda row: row.plan.peak_bytes)
    return (
        f"Nothing fits {write_bytes(report.limit)}: ac={low.name!r} peaks at {write_bytes(low.plan.peak_bytes)} "
        f"({low.plan.peak_at}). Use "
        "smaller microbatches, more stages, more ranks to shard over, loss='chunked' or balance='memory'."
    )
