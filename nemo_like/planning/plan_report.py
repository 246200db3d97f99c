"""A planner's answers for people: the table of modes and plans, the recommendation, and the picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like.extras import require
from nemo_like.options import MemoryBudget
from nemo_like.planning.plan import Plan
from nemo_like.planning.planner import BudgetError, Planner

MODES = ("none", "full", "selective")
_MARKS = {"none": "none", "full": "full", "selective": "selective (every second matmul)"}
FRACTIONS = (0.75, 0.5, 0.25, 0.125)


@dataclass(frozen=True)
class PlanRow:
    """One line of the table."""

    name: str
    """What to write after ``ac=``."""
    plan: Plan
    fits: bool


@dataclass(frozen=True)
class PlanReport:
    """All rows, and the one to take."""

    rows: tuple[PlanRow, ...]
    best: PlanRow | None
    """The fastest that fits; None where nothing does."""
    limit: int
    """Bytes that a step may peak at on the device."""
    problem: str = ""
    """Why nothing fits."""


def make_report(planner: Planner, budgets: Sequence[str] = (), limit: int | None = None) -> PlanReport:
    """The three modes, plans at a few shares, at `budgets` if given, and the best plan within `limit` bytes.

    `limit` defaults to the share of the device's memory that ``"auto"`` means.
    """
    limit = int(planner.device.memory_bytes * (MemoryBudget.parse("auto").device_share or 0)) if limit is None else limit
    rows = [_row(mode, planner.describe(planner.uniform(mode), mode), limit) for mode in MODES]
    asked = [*budgets] or [f"{share:g}%" for share in (100 * f for f in FRACTIONS)]
    for text in asked:
        try:
            rows.append(_row(text, planner.plan(MemoryBudget.parse(text), text), limit))
        except BudgetError:
            if budgets:
                raise  # it was asked for, so it is an error
    problem = ""
    try:
        text = _gib(limit)  # rounded down, so that whoever writes it stays within the limit
        if text not in asked:
            rows.append(_row(text, planner.plan(MemoryBudget.parse(text), text), limit))
    except BudgetError as error:
        problem = str(error)
    fitting = [row for row in rows if row.fits]
    best = min(fitting, key=lambda row: (row.plan.step_time, row.plan.peak_bytes)) if fitting else None
    return PlanReport(tuple(rows), best, limit, problem)


def _row(name: str, plan: Plan, limit: int) -> PlanRow:
    return PlanRow(name, plan, plan.peak_bytes <= limit)


def _gib(size: int) -> str:
    if size >= 2**30:
        return f"{size * 10 // 2**30 / 10:.1f}GiB"
    return f"{size // 2**20}MiB" if size >= 2**20 else f"{size}B"


def table(report: PlanReport) -> str:
    """The rows as text: bytes in GiB, times relative to a step without checkpointing."""
    head = ("ac=", "held", "peak", "at", "replay", "step", "fits")
    lines = [head]
    for row in report.rows:
        plan = row.plan
        lines.append((
            row.name, f"{plan.held_bytes / 2**30:.2f}", f"{plan.peak_bytes / 2**30:.2f}", plan.peak_at,
            f"{plan.replay_share:.3f}", f"{plan.step_time:.3f}", "yes" if row.fits else "no",
        ))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = (1, 2, 4, 5)  # the columns of numbers
    cells = [[c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def breakdown(plan: Plan) -> str:
    """What the predicted peak is made of, largest first."""
    parts = sorted(plan.peak.items(), key=lambda item: -item[1])
    return "\n".join(f"  {size / 2**30:9.3f} GiB  {name}" for name, size in parts)


def advice(report: PlanReport, sample: str, precision: str | None = None) -> str:
    """The recommendation and the code that uses it, with what it was planned for: a batch, a dtype to compute in."""
    if report.best is None:
        return f"Nothing fits. {report.problem}"
    row = report.best
    plan = row.plan
    needs = f", precision={precision!r}" if precision is not None else ""
    needs += f", sample_input={sample}" if row.name not in MODES else ""
    return (
        f"Recommended: ac={row.name!r} (predicted peak {plan.peak_bytes / 2**30:.2f} GiB, step {plan.step_time:.3f} of "
        f"one without checkpointing).\n  model = parallelize(model, strategy=\"fsdp2\", ac={row.name!r}{needs})\n"
        f"  # recipe YAML:  ac: {row.name}"
    )


def as_json(report: PlanReport) -> dict[str, Any]:
    """The report in JSON values; all bytes, seconds and shares as in `Plan`."""
    return {
        "limit_bytes": report.limit,
        "recommended": report.best.name if report.best else None,
        "problem": report.problem or None,
        "rows": [
            {
                "ac": row.name, "held_bytes": row.plan.held_bytes, "peak_bytes": row.plan.peak_bytes,
                "peak_at": row.plan.peak_at, "peak": dict(row.plan.peak), "replay_flops": row.plan.replay_flops,
                "replay_share": row.plan.replay_share, "step_time": row.plan.step_time,
                "gap_seconds": row.plan.gap_seconds, "fits": row.fits,
                "layers": dict(Counter(layer.label for layer in row.plan.layers)),
            }
            for row in report.rows
        ],
    }  # fmt: skip


def plot(planner: Planner, report: PlanReport, path: str | Path, points: int = 24) -> None:
    """Peak per rank against relative step time: the best plans as a line, the modes as marks, the device as a limit.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    matplotlib = require("matplotlib", "plot", "to draw the picture")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", "plot", "to draw the picture")
    step = max(1, len(planner.stack.mixes) // points)
    chosen = [*planner.stack.mixes[::step], planner.stack.mixes[-1]]
    curve = [planner.describe(planner.proved_all(planner.stack.assignment(mix)), "") for mix in chosen]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.plot([p.step_time for p in curve], [p.peak_bytes / 2**30 for p in curve], ".-", label="best plans")
    for row in report.rows:
        if row.name in MODES:
            axes.plot(row.plan.step_time, row.plan.peak_bytes / 2**30, "o", label=_MARKS[row.name])
    axes.axhline(report.limit / 2**30, linestyle="--", color="grey", label=f"limit on {planner.device.name}")
    axes.set_xlabel("step time, 1 = no checkpointing (roofline)")
    axes.set_ylabel("predicted peak per rank, GiB")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
