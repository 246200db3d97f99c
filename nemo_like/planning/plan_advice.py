"""What a report recommends: the call to make, and what would lower the peak, by what the peak is made of."""

from __future__ import annotations

from nemo_like.options.optimizers import OPTIMIZER_OBJECTS
from nemo_like.planning.parts import ACTIVATIONS, GATHERED, HEAD, STATE, Part, largest_group
from nemo_like.planning.plan_report import MODES, PlanReport, routing


def binds(report: PlanReport) -> str:
    """The group of parts (`nemo_like.planning.parts.GROUPS`) that is most of the recommended row's peak; where nothing fits,
    of the lowest."""
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
    ways = {STATE: _state_line, GATHERED: _gathered_line, ACTIVATIONS: _activations_line, HEAD: _head_line}
    # What fits without any checkpointing has nothing to lower.
    first = [] if report.best is not None and report.best.name == "none" else ways[binds(report)](report)
    return [*first, *_chunks_line(report), *_padding_line(report)]


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


def _state_line(report: PlanReport) -> list[str]:
    job = report.job
    more = (
        "run on more than one rank, over which FSDP2 shards them" if job.fsdp is None
        else f"shard over more ranks (now {job.shard_ranks}), or keep them in host memory (FSDP2(cpu_offload=True))"
    )  # fmt: skip
    lighter = OPTIMIZER_OBJECTS[job.step.optimizer].lighter
    light = "" if lighter is None else f"; optimizer={lighter!r} holds less state"
    return [f"Parameters, gradients and optimizer state are most of the peak: {more}{light}."]


def _gathered_line(report: PlanReport) -> list[str]:
    fsdp = report.job.fsdp
    if fsdp is None:
        return []
    ways = ["a lower param_dtype"]
    if fsdp.reshard_after_forward is False:
        ways.append("freeing layers after forward (no reshard_after_forward=False)")
    if max(fsdp.forward_prefetch, fsdp.backward_prefetch) > 1:
        ways.append("fetching one layer ahead instead of more")
    return [f"Gathered layers are most of the peak: {', '.join(ways)}; or tensor parallelism, which gathers less."]


def _activations_line(report: PlanReport) -> list[str]:
    ways = [f"a smaller micro-batch with more of them (now {report.job.step.microbatches} per step)"]
    if report.job.offload.mode == "none":
        ways.append("offload='boundary' beside a budget")
    if report.best is not None and report.best.name != "full":
        ways.append("a lower budget")
    return [f"Activations are most of the peak: {', or '.join(ways)}."]


def _head_line(report: PlanReport) -> list[str]:
    """A chunked loss has a line of its own."""
    job = report.job
    lines = []
    if report.chunks is None and job.loss is None:
        lines.append(
            "What is outside of the layers is most of the peak, and its loss cannot be chunked: a smaller micro-batch."
        )
    if job.step.keeps_output and job.loss is None:
        kept = max(row.plan.peak.get(Part.KEPT_OUTPUT, 0) for row in report.rows)
        if kept:
            lines.append(
                f"Drop the output before backward (loss = model(**batch).loss; --drop-output): -{kept / 2**30:.2f} GiB."
            )
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


def _chunks_line(report: PlanReport) -> list[str]:
    gain = report.chunks
    if gain is None:
        return []
    line = (
        f"Chunk the loss (loss='chunked'): -{gain.saved_bytes / 2**30:.2f} GiB; ac='full' then peaks at "
        f"{gain.full_peak_bytes / 2**30:.2f} GiB, and "
    )
    if gain.best is None:
        return [line + "nothing fits still."]
    return [line + f"the fastest plan that fits takes {gain.best.step_time:.3f} of a step without checkpointing."]
