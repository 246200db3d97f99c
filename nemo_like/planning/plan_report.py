"""A planner's answers for people: the table of modes and plans, the recommendation, and the picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from nemo_like.extras import require
from nemo_like.options import (
    FSDP2,
    ChunkedLoss,
    ExpertParallel,
    MemoryBudget,
    OffloadConfig,
    Precision,
    StepSpec,
    dtype_word,
)
from nemo_like.planning.balanced import balanced_peak
from nemo_like.planning.block import Choice
from nemo_like.planning.expert_twin import planned_imbalance
from nemo_like.planning.plan import Plan
from nemo_like.planning.plan_search import Reach
from nemo_like.planning.planner import BudgetError, Planner, Setup
from nemo_like.planning.tight import Tight, tight

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
    """On the device; and what it keeps in host memory, there."""
    state_on_host: int = 0
    """Bytes of parameters, gradients and optimizer state of one rank in host memory."""

    @property
    def host_bytes(self) -> int:
        """What one rank keeps in host memory, activations among it."""
        return sum(layer.host_bytes for layer in self.plan.layers) + self.state_on_host


@dataclass(frozen=True)
class ChunkedGain:
    """What ``loss="chunked"`` would change."""

    saved_bytes: int
    """By how much lower ``full`` would peak."""
    full_peak_bytes: int
    """Where ``full`` would peak then."""
    best: Plan | None
    """The fastest plan that would fit; None where nothing would."""


@dataclass(frozen=True)
class PlanReport:
    """All rows, and the one to take."""

    rows: tuple[PlanRow, ...]
    best: PlanRow | None
    """The fastest that fits; None where nothing does."""
    limit: int
    """Bytes that a step may peak at on the device."""
    setup: Setup
    """What all rows were planned for."""
    device: str
    problem: str = ""
    """Why nothing fits."""
    dp_replicate: int = 1
    special: bool = False
    """The plans were made as `parallelize` would not make them (``host``, without skips, measured)."""

    unmet: tuple[str, ...] = ()
    """For each budget that was asked for and that nothing meets: why."""
    chunks: ChunkedGain | None = None
    """What a chunked loss would buy; None: nothing, or it is asked for."""
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
    file: str = "plan.json"
    """Where a plan that needs a file is kept."""

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.setup.tp

    def tokens_per_second(self, row: PlanRow) -> float | None:
        """Of one GPU, predicted; None where no text goes in."""
        if self.tokens is None or not row.plan.step_seconds:
            return None
        return self.tokens * self.setup.step.microbatches / row.plan.step_seconds / self.setup.tp

    def call(self, row: PlanRow, sample: str = "batch") -> str:
        """The line of Python that runs `row` as it was planned."""
        setup, mode = self.setup, row.name in MODES
        ac = f"Plan.load({self.file!r})" if self.special and not mode else repr(row.name)
        said = {
            "strategy": "'fsdp2'" if setup.fsdp in (None, FSDP2()) else _shown(setup.fsdp),
            "ac": ac,
            **setup_keywords(setup, self.dp_replicate, planned=not mode),
            "sample_input": sample if not mode and not self.special else None,
        }
        return f"model = parallelize(model, {', '.join(f'{k}={v}' for k, v in said.items() if v is not None)})"


def make_report(
    planner: Planner, budgets: Sequence[str] = (), limit: int | None = None, *,
    dp_replicate: int = 1, special: bool = False, reach: Callable[[int], Reach] | None = None, tokens: int | None = None,
) -> PlanReport:  # fmt: skip
    """The three modes, plans at a few shares, at `budgets` if given, and the best plan within `limit` bytes.

    Args:
        planner: of the model.
        budgets: as one writes them after ``ac=``.
        limit: bytes that a step may peak at; default: the share of the device's memory that ``"auto"`` means.
        dp_replicate: replicas of the sharded model.
        special: the plans are made as `parallelize` would not make them.
        reach: says for the limit how far the device goes.
        tokens: of one rank in one microbatch.
    """
    limit = (
        int(planner.device.memory_bytes * (MemoryBudget.parse("auto").device_share or 0)) if limit is None else limit
    )
    rows = [_row(mode, planner.describe(planner.uniform(mode), mode), limit, planner) for mode in MODES]
    unmet: list[str] = []
    asked = [*budgets] or [f"{share:g}%" for share in (100 * f for f in FRACTIONS)]
    for text in asked:
        try:
            rows.append(_row(text, planner.plan(MemoryBudget.parse(text), text), limit, planner))
        except BudgetError as error:
            if budgets:
                unmet.append(str(error))
    problem = ""
    try:
        text = _gib(limit)  # rounded down, so that whoever writes it stays within the limit
        if text not in asked:
            rows.append(_row(text, planner.plan(MemoryBudget.parse(text), text), limit, planner))
    except BudgetError as error:
        problem = str(error)
    fitting = [row for row in rows if row.fits and (planner.takes_budget or row.name in MODES)]
    best = min(fitting, key=lambda row: (row.plan.step_time, row.plan.peak_bytes)) if fitting else None
    return PlanReport(
        tuple(rows), best, limit, planner.setup, planner.device.name, problem, dp_replicate, special, tuple(unmet),
        _gain(planner, limit), None if reach is None else reach(limit), tokens, _balanced(planner, best), _padding(planner),
        None if best is None else tight(planner, _choices(planner, best)),
    )  # fmt: skip


def _choices(planner: Planner, row: PlanRow) -> list[Choice]:
    if row.name in MODES:
        return planner.uniform(row.name)
    return planner.choose(MemoryBudget.parse(row.name), row.name)[0]


def _balanced(planner: Planner, best: PlanRow | None) -> int | None:
    if best is None or planner.setup.ep == 1:
        return None
    peak = balanced_peak(planner, _choices(planner, best))
    return None if peak is None else peak.total


def _padding(planner: Planner) -> int:
    sharding = planner.sharding
    state = sum(sum(own[:2]) for own in planner.optimizer.states)  # a counter of steps has no padding
    trained = sum(param.size for param in sharding.trained)
    return int(sharding.padding * (2 + state / trained)) if trained else sharding.padding


def _gain(planner: Planner, limit: int) -> ChunkedGain | None:
    other = None if planner.setup.loss is not None else planner.with_chunks(ChunkedLoss())
    if other is None:
        return None
    before, after = (each.peak(each.uniform("full")).total for each in (planner, other))
    if after >= before:
        return None
    try:
        best = other.plan(MemoryBudget(peak_bytes=limit))
    except BudgetError:
        best = None
    return ChunkedGain(before - after, after, best)


def _shown(options: Any) -> str:
    """A dataclass as one would write it: the fields that are not at their defaults."""
    changed = [
        f"{field.name}={_value(getattr(options, field.name))}"
        for field in fields(options)
        if getattr(options, field.name) != field.default
    ]
    return f"{type(options).__name__}({', '.join(changed)})"


def setup_keywords(setup: Setup, dp_replicate: int, *, planned: bool) -> dict[str, str | None]:
    """The keywords of `parallelize` that say `setup`, as one writes them; None: the default. `planned`: for a budget."""
    return {
        "dp_replicate": str(dp_replicate) if dp_replicate > 1 else None,
        "tp": str(setup.tp) if setup.tp > 1 else None,
        "cp": str(setup.cp.size) if setup.cp.size > 1 else None,
        "ep": _experts(setup),
        "precision": _precision(setup.precision),
        "loss": None if setup.loss is None else _loss(setup.loss),
        "offload": None if setup.offload.mode == "none" else _offload(setup.offload),
        **(_step(setup.step) if planned else {}),
    }


def _experts(setup: Setup) -> str | None:
    if setup.ep == 1:
        return None
    return str(setup.ep) if setup.imbalance is None else _shown(ExpertParallel(setup.ep, imbalance=setup.imbalance))


def _offload(offload: OffloadConfig) -> str:
    return repr(offload.mode) if offload == OffloadConfig(offload.mode) else _shown(offload)


def _loss(loss: ChunkedLoss) -> str:
    return repr("chunked") if loss == ChunkedLoss() else _shown(loss)


def _value(value: Any) -> str:
    return getattr(value, "__name__", "...") if callable(value) else repr(value)


def _step(step: StepSpec) -> dict[str, str]:
    """The keyword that says `step`; none where it is the default."""
    if step.changed.keys() == {"optimizer"}:
        return {"optimizer": repr(step.optimizer)}
    return {"step": _shown(step)} if step.changed else {}


def _precision(precision: Precision) -> str | None:
    """``precision=`` as one would write it; None: nothing to write."""
    dtypes = {name: dtype_word(dtype) for name, dtype in precision.dtypes.items()}
    if precision == Precision():
        return None
    if precision == Precision(dtypes["param_dtype"]):
        return repr(dtypes["param_dtype"])
    if precision.matmuls is not None and precision == Precision.of(precision.matmuls):
        return repr(precision.matmuls)
    return f"Precision({', '.join(f'{name}={dtype!r}' for name, dtype in dtypes.items() if dtype is not None)})"


def _row(name: str, plan: Plan, limit: int, planner: Planner) -> PlanRow:
    row = PlanRow(name, plan, plan.peak_bytes <= limit, planner.state_on_host)
    return row if row.host_bytes <= planner.host_memory else replace(row, fits=False)


def _gib(size: int) -> str:
    if size >= 2**30:
        return f"{size * 10 // 2**30 / 10:.1f}GiB"
    return f"{size // 2**20}MiB" if size >= 2**20 else f"{size}B"


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
        f"Where the fullest rank's experts get {planned_imbalance(report.setup):g} times their share of the tokens: "
        f"{peak:.2f} GiB; where all get as many: {report.balanced / 2**30:.2f} GiB."
    )


def as_json(report: PlanReport) -> dict[str, Any]:
    """The report in JSON values; all bytes, seconds and shares as in `Plan`."""
    return {
        "device": report.device,
        "traced_for": report.rows[0].plan.traced_for,
        "setup": _setup_json(report.setup) | {"dp_replicate": report.dp_replicate},
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
        "chunked_loss": None if report.chunks is None else {
            "saved_bytes": report.chunks.saved_bytes, "full_peak_bytes": report.chunks.full_peak_bytes,
            "step_time": report.chunks.best.step_time if report.chunks.best else None,
        },
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


def _setup_json(setup: Setup) -> dict[str, Any]:
    made = asdict(setup)
    made["step"] = {name: _value(value) if callable(value) else value for name, value in made["step"].items()}
    made["precision"] = {
        name: dtype and str(dtype).removeprefix("torch.") for name, dtype in setup.precision.dtypes.items()
    }
    return made


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
