"""A planner's answers for people: the table of modes and plans, the recommendation, and the picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_like._util.extras import require
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.job import Job
from nemo_like.options import MemoryBudget, PlanSearch, StepSpec
from nemo_like.planning.advise import changes, helping, in_words
from nemo_like.planning.balanced import balanced_peak
from nemo_like.planning.block import Choice
from nemo_like.planning.expert_twin import planned_imbalance
from nemo_like.planning.plan_search import Reach
from nemo_like.planning.planner import BudgetError, Planner
from nemo_like.planning.program.readers import Peak
from nemo_like.planning.tight import Tight, tight
from nemo_like.planning.verdict import Need, budget_word, plan_within, verdict

MODES = ("none", "full", "selective")
_MARKS = {"none": "none", "full": "full", "selective": "selective (every second matmul)"}
FRACTIONS = (0.75, 0.5, 0.25, 0.125)


@dataclass(frozen=True)
class PlanRow:
    """One line of the table."""

    name: str
    """What to write after ``ac=``."""
    plan: Plan
    need: Need
    """What decides whether it fits on the device."""
    fits: bool
    """On the device; and what it keeps in host memory, there."""
    choices: Any = field(default=None, compare=False, repr=False)
    """What each layer keeps."""
    state_on_host: int = 0
    """Bytes of parameters, gradients and optimizer state of one rank in host memory."""

    @property
    def host_bytes(self) -> int:
        """What one rank keeps in host memory, activations among it."""
        return sum(layer.host_bytes for layer in self.plan.layers) + self.state_on_host


@dataclass(frozen=True)
class PlanReport:
    """All rows, and the one to take."""

    rows: tuple[PlanRow, ...]
    best: PlanRow | None
    """The fastest that fits; None where nothing does."""
    limit: int
    """Bytes that a step may peak at on the device."""
    job: Job
    """What all rows were planned for, but for ``ac``."""
    device: str
    problem: str = ""
    """Why nothing fits."""
    unmet: tuple[str, ...] = ()
    """For each budget that was asked for and that nothing meets: why."""
    helps: tuple[str, ...] = ()
    """Changes of the job that lower what a rank needs under ``ac="full"``, with how much; what makes it fit first."""
    reach: Reach | None = None
    """How far the device goes; None: not looked for."""
    tokens: int | None = None
    """Of one rank in one microbatch; None: it takes no text."""
    balanced: int | None = None
    """Bytes that the recommended row peaks at where every rank's experts get as many tokens; None: it is planned so."""
    padding: int = 0
    """Bytes of parameters, gradients and optimizer state on a rank that are padding: the ranks do not divide a weight."""
    tight: Tight | None = None
    """The recommended row would reserve more than the device has; None: it would not."""

    def tokens_per_second(self, row: PlanRow) -> float | None:
        """Of one GPU, predicted; None where no text goes in."""
        if self.tokens is None or not row.plan.step_seconds:
            return None
        return self.tokens * self.job.step.microbatches / row.plan.step_seconds / self.job.tp.size

    def call(self, row: PlanRow, sample: str = "batch") -> str:
        """Return the line of Python that runs `row` as it was planned."""
        return planned_call(self.job, row.name, sample)


def planned_call(job: Job, ac: str, sample: str) -> str:
    """Return the line of Python that runs `job` with `ac`: a mode, which needs no sample, or a budget."""
    if ac in MODES and job.pp.size == 1:
        return job.change(ac=ac, step=StepSpec(), search=PlanSearch()).as_call()
    return job.change(ac=ac).as_call(sample=sample)


def make_report(
    planner: Planner, budgets: Sequence[str] = (), limit: int | None = None, *,
    reach: Callable[[int], Reach] | None = None, tokens: int | None = None,
) -> PlanReport:  # fmt: skip
    """The three modes, plans at a few shares, at `budgets` if given, and the best plan within `limit` bytes.

    Args:
        planner: of the model.
        budgets: as one writes them after ``ac=``.
        limit: bytes that a step may peak at; default: the share of the device's memory that ``"auto"`` means.
        reach: says for the limit how far the device goes.
        tokens: of one rank in one microbatch.
    """
    limit = (
        int(planner.device.memory_bytes * (MemoryBudget.parse("auto").device_share or 0)) if limit is None else limit
    )
    rows = [_row(mode, planner, planner.uniform(mode), limit) for mode in MODES]
    unmet: list[str] = []
    asked = [*budgets] or [f"{share:g}%" for share in (100 * f for f in FRACTIONS)]
    for text in asked:
        try:
            rows.append(_row(text, planner, *planner.choose(MemoryBudget.parse(text), text)[:1], limit))
        except BudgetError as error:
            if budgets:
                unmet.append(str(error))
    problem, errors = "", list[str]()

    def within(budget: int) -> tuple[Any, Peak] | None:
        try:
            choices, _ = planner.choose(MemoryBudget(peak_bytes=budget), write_bytes(limit))
        except BudgetError as error:
            errors.append(str(error))
            return None
        return choices, planner.peak(choices)

    best_of_all = plan_within(planner, limit, within)
    if best_of_all is None:
        problem = errors[-1] if errors else f"No plan reserves less than {write_bytes(limit)}."
    else:
        text = budget_word(best_of_all[3], best_of_all[1].total)
        if text not in asked:
            rows.append(_row(text, planner, best_of_all[0], limit))
    fitting = [row for row in rows if row.fits and (planner.takes_budget or row.name in MODES)]
    best = min(fitting, key=lambda row: (row.plan.step_time, row.plan.peak_bytes)) if fitting else None
    helps = () if best is not None and best.name == "none" else _helps(planner, limit)
    return PlanReport(
        tuple(rows), best, limit, planner.job, planner.device.name, problem, tuple(unmet), helps,
        None if reach is None else reach(limit), tokens, _balanced(planner, best), _padding(planner),
        None if best is None else tight(planner, best.choices),
    )  # fmt: skip


def _balanced(planner: Planner, best: PlanRow | None) -> int | None:
    if best is None or planner.job.ep.size == 1:
        return None
    peak = balanced_peak(planner, best.choices)
    return None if peak is None else peak.total


def _padding(planner: Planner) -> int:
    sharding = planner.sharding
    state = sum(sum(own[:2]) for own in planner.optimizer.states)  # a counter of steps has no padding
    trained = sum(param.size for param in sharding.trained)
    return int(sharding.padding * (2 + state / trained)) if trained else sharding.padding


def _helps(planner: Planner, limit: int) -> tuple[str, ...]:
    full = planner.uniform("full")

    def needs(made: Planner) -> int:
        return verdict(made, full, made.peak(full), limit).bytes

    tried = [(change.words, planner.under(change.job)) for change in changes(planner.job)]
    known = [(words, needs(made)) for words, made in tried if made is not None]
    return tuple(in_words(*helping(needs(planner), limit, known)))


def _row(name: str, planner: Planner, choices: Sequence[Choice], limit: int) -> PlanRow:
    plan = planner.describe(choices, name)
    need = verdict(planner, choices, planner.peak(choices), limit)
    row = PlanRow(name, plan, need, need.bytes <= limit, choices, planner.state_on_host)
    return row if row.host_bytes <= planner.host_memory else replace(row, fits=False)


def table(report: PlanReport) -> str:
    """The rows as text: bytes in GiB, times relative to a step without checkpointing and in milliseconds."""
    head = ("ac=", "held", "host", "peak", "reserved", "at", "replay", "step", "ms", "tokens/s", "fits")
    lines: list[tuple[str, ...]] = [head]
    for row in report.rows:
        plan, speed = row.plan, report.tokens_per_second(row)
        reserved = "" if plan.reserved_bytes is None else f"{plan.reserved_bytes / 2**30:.2f}"
        lines.append((
            row.name, f"{plan.held_bytes / 2**30:.2f}", f"{row.host_bytes / 2**30:.2f}", f"{plan.peak_bytes / 2**30:.2f}",
            reserved, plan.peak_at, f"{plan.replay_share:.3f}", f"{plan.step_time:.3f}",
            _three_digits(1000 * plan.step_seconds), "" if speed is None else _three_digits(speed),
            "yes" if row.fits else "no",
        ))  # fmt: skip
    # Nobody asked for host memory; no text goes in.
    empty = {
        "host": all(line[2] == "0.00" for line in lines[1:]), "reserved": not any(line[4] for line in lines[1:]),
        "tokens/s": report.tokens is None,
    }  # fmt: skip
    kept = [i for i, name in enumerate(head) if not empty.get(name)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = ("ac=", "at", "fits")
    cells = [
        [line[i].ljust(widths[i]) if head[i] in left else line[i].rjust(widths[i]) for i in kept] for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def _three_digits(value: float) -> str:
    """Three significant digits: a roofline says no more."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    scale = 10 ** max(0, len(str(int(value))) - 3)
    return f"{round(value / scale) * scale:,}" if value >= 100 else f"{value:.{digits}f}"


def breakdown(plan: Plan) -> str:
    """What the predicted peak is made of, largest first."""
    parts = sorted(plan.peak.items(), key=lambda item: -item[1])
    return "\n".join(f"  {size / 2**30:9.3f} GiB  {name}" for name, size in parts)


def routing(report: PlanReport) -> str:
    """Both peaks of the recommended row, by how its tokens are spread; empty where it counts with balanced routers."""
    if report.balanced is None or report.best is None:
        return ""
    peak = report.best.plan.peak_bytes / 2**30
    return (
        f"Where the fullest rank's experts get {planned_imbalance(report.job):g} times their share of the tokens: "
        f"{peak:.2f} GiB; where all get as many: {report.balanced / 2**30:.2f} GiB."
    )


def as_json(report: PlanReport) -> dict[str, Any]:
    """The report in JSON values; all bytes, seconds and shares as in `Plan`."""
    return {
        "device": report.device,
        "traced_for": report.rows[0].plan.traced_for,
        "job": job_json(report.job),
        "limit_bytes": report.limit,
        "recommended": report.best.name if report.best else None,
        "call": report.call(report.best) if report.best else None,
        "problem": report.problem or None,
        "unmet": list(report.unmet),
        "balanced_peak_bytes": report.balanced,
        "reserved_compared_with_gpu": False,
        "tight": None if report.tight is None else asdict(report.tight),
        "padding_bytes": report.padding,
        "tokens": report.tokens,
        "largest_batch": report.reach.largest_batch if report.reach else None,
        "larger_may_fit": report.reach.more if report.reach else None,
        "least_gpus": report.reach.least_gpus if report.reach else None,
        "helps": list(report.helps),
        "rows": [
            {
                "ac": row.name, "held_bytes": row.plan.held_bytes,
                "host_bytes": row.host_bytes, "peak_bytes": row.plan.peak_bytes, "reserved_bytes": row.plan.reserved_bytes,
                "predicted_step_seconds": row.plan.step_seconds,
                "predicted_tokens_per_second": report.tokens_per_second(row),
                "peak_at": row.plan.peak_at, "peak": dict(row.plan.peak), "replay_flops": row.plan.replay_flops,
                "replay_share": row.plan.replay_share, "step_time": row.plan.step_time,
                "gap_seconds": row.plan.gap_seconds, "fits": row.fits,
                "layers": dict(Counter(layer.label for layer in row.plan.layers)),
            }
            for row in report.rows
        ],
    }  # fmt: skip


def job_json(job: Job) -> dict[str, str]:
    """Return what was asked, as code by keyword; without what is at its default."""
    return job.words(machine=True)


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
