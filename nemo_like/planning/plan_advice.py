"""What a report recommends: the call to make, and what would lower the peak, by what the peak is made of."""

from __future__ import annotations

from nemo_like.activation_checkpointing.plan import GATHERED, STATE, largest_group
from nemo_like.planning.plan_report import MODES, PlanReport, routing


def binds(report: PlanReport) -> str:
    """Return the group of `GROUPS` that is most of the recommended row's peak; where nothing fits, of the lowest row's."""
    row = report.best or min(report.rows, key=lambda row: row.plan.peak_bytes)
    return largest_group(row.plan.peak)


def advice(report: PlanReport, sample: str) -> str:
    """The recommendation, the code that runs what was planned, and what would lower its peak."""
    row = report.best
    if row is None:
        return "\n".join([f"Nothing fits. {report.problem}", *_ways_out(report)])
    lines = [
        f"Recommended: ac={row.name!r} (predicted peak {row.plan.peak_bytes / 2**30:.2f} GiB, step "
        f"{row.plan.step_time:.3f} of one without checkpointing).",
        f"  {report.call(row, sample)}",
    ]
    if row.name in MODES and any(
        r.fits and r.name not in MODES and r.plan.step_time < row.plan.step_time for r in report.rows
    ):
        lines.append(
            "  # parallelize takes no budget beside this tp=: of what fits, this is the fastest that it can run."
        )
    if report.tight is not None:
        lines.append(report.tight.words(row.name))
    if spread := routing(report):
        lines.append(spread)
    return "\n".join([*lines, *_reach_lines(report), *_ways_out(report)])


def _ways_out(report: PlanReport) -> list[str]:
    lines = []
    if report.best is None or report.best.name != "none":  # what fits without any checkpointing has nothing to lower
        job, most = report.job, binds(report)
        more = {
            STATE: f"more ranks to shard over (now {job.shard_ranks})",
            GATHERED: "tensor parallelism (tp)",
        }.get(most, f"a smaller micro-batch with more of them (now {job.step.microbatches} per step)")
        lines.append(f"Most of the peak: {most}. What lowers that: {more}.")
    if report.helps:
        lines.append(f"What lowers it, under ac='full': {'; '.join(report.helps)}.")
    return [*lines, *_padding_line(report)]


def _reach_lines(report: PlanReport) -> list[str]:
    reach, lines = report.reach, []
    if reach is not None and reach.largest_batch is not None:
        more = " or more" if reach.more else ""
        lines.append(f"Largest micro-batch that fits: {reach.largest_batch}{more} per rank, with ac='full'.")
    if reach is not None and reach.problem:
        lines.append(f"No other micro-batch could be planned: {reach.problem}")
    if reach is not None and reach.least_gpus is not None:
        lines.append(f"Least GPUs for this micro-batch: {reach.least_gpus} (of powers of two), with ac='full'.")
    return lines


def _padding_line(report: PlanReport) -> list[str]:
    """Said where it is a twentieth of what the least plan peaks at."""
    least = min(row.plan.peak_bytes for row in report.rows)
    if report.padding < least / 20:
        return []
    return [
        f"Padding: {report.padding / 2**30:.2f} GiB per rank of parameters, gradients and optimizer state belong to no "
        f"weight, because {report.job.shard_ranks} ranks do not divide their sizes. Shard over fewer (dp_replicate=)."
    ]
