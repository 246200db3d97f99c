"""Sources of each GiB and each millisecond of a step: rows that add up to its peak, and to its seconds."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from nemo_like._util.table import ByteUnit, grouped, totals
from nemo_like._util.words import dtype_word, write_bytes
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.job import Job
from nemo_like.planning.memory_model.storages import Label, Peak, part_bytes
from nemo_like.planning.predictions.rank import fullest_rank, labels_at_peak, peaks_of
from nemo_like.planning.predictions.seconds import (
    HOST,
    KERNELS_PER_PARAMETER,
    Links,
    Row,
    StepSeconds,
    axis_words,
    busiest_rank,
    fsdp_rows,
    handing_on,
    microbatch_rows,
    seconds_of_stages,
    step_seconds,
)
from nemo_like.planning.query import Choices, PlanQuery, Stage
from nemo_like.planning.roofline import host_optimizer_seconds, kernel_kind, optimizer_seconds


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the parameters of `model`; of several ones, that of the first."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def setting(device: str, job: Job, stored: torch.dtype) -> str:
    """Return the device and the dtype that `job` computes in, as a sentence; `stored`: the dtype of the parameters."""
    return f"On {device} in {job.precision.matmuls or dtype_word(job.param_dtype or stored)}."


_NOTHING = 1e-12  # A share of a step that rounding may leave over.


@dataclass(frozen=True)
class Account:
    """Rows of one step: bytes, seconds, and the ranks of a pipeline."""

    peak: Peak  # The highest point of the step, on the rank that has the highest.
    step: StepSeconds
    inputs: int  # Bytes of the step's input, which peaks leave out.
    bytes: tuple[Row, ...]  # Rows in bytes that add up to the peak.
    seconds: tuple[Row, ...]  # Rows in seconds that add up to the step.
    # Stages and peak of each rank of a pipeline; empty: no pipeline.
    ranks: tuple[tuple[list[int], Peak], ...] = ()

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the peak by part."""
        return dict(totals((row.part, int(row.amount)) for row in self.bytes))

    def as_json(self) -> dict[str, Any]:
        """Return the account in JSON values; bytes and seconds."""
        return {
            "bytes": [{"part": row.part, "what": row.what, "bytes": row.amount} for row in self.bytes],
            "seconds": [
                {"part": row.part, "what": row.what, "seconds": row.amount, "hidden": row.hidden}
                for row in self.seconds
            ],
            "ranks": [{"stages": stages, "peak_bytes": peak.total, "at": peak.at} for stages, peak in self.ranks],
        }


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A row of a report, which knows where its bytes and seconds come from."""

    explain: Callable[[], Account] = field(compare=False, repr=False)

    @cached_property
    def account(self) -> Account:
        """Sources of its bytes and seconds."""
        return self.explain()

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields that are sent to other ranks: the account, and not its sources."""
        return {**vars(self), "account": self.account, "explain": None}

    def explanation(self) -> str:
        """Return where each byte and each millisecond comes from.

        Parts, the largest first, add up to the peak and to the step; the lines below a part add up to it.
        """
        account = self.account
        unit = ByteUnit.for_sizes([account.peak.total])

        def size(amount: float) -> str:
            return f"{amount / unit.size:9.3f} {unit.name}"

        lines = [f"Peak: {unit.word(account.peak.total)}, {account.peak.at}"]
        lines += _parts(account.parts, account.bytes, size)
        lines.append(f"Also needed:\n  {size(account.inputs)}  step's input")
        if account.ranks:
            lines.append("Peak of each rank of the pipeline:")
        for number, (stages, peak) in enumerate(account.ranks):
            words = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
            lines.append(f"  {size(peak.total)}  rank {number}, {words}: {peak.at}")
        lines.append(f"Step: {1000 * account.step.total:,.2f} ms")
        return "\n".join(lines + _parts(account.step.parts, account.seconds, lambda s: f"{1000 * s:9,.3f} ms"))


def _parts(totals: Mapping[str, float], rows: Sequence[Row], word: Callable[[float], str]) -> list[str]:
    lines = []
    for part, total in sorted(totals.items(), key=lambda item: -item[1]):
        if not total:
            continue
        lines.append(f"  {word(total)}  {part}")
        for row in (row for row in rows if row.part == part and row.what):
            hidden = f", {word(row.hidden).strip()} hidden" if row.hidden else ""
            lines.append(f"    {word(row.amount)}  {row.what}{hidden}")
    return lines


def account_of(query: PlanQuery, choices: Choices) -> Account:
    """Return where the bytes of the peak and the seconds of a step come from."""
    seconds = step_seconds(query, choices)
    finer = merged(_second_rows(query, choices, seconds))
    peaks, most = peaks_of(query, choices), fullest_rank(query, choices)
    of_ranks = ((query.of_rank(rank), peak) for rank, peak in enumerate(peaks))
    return Account(
        peaks[most],
        seconds,
        query.input_bytes,
        byte_rows(query, choices, most),
        rows_of(seconds.parts, finer, seconds.total * _NOTHING),
        tuple(of_ranks) if query.is_pipeline else (),
    )


def _second_rows(query: PlanQuery, choices: Choices, seconds: StepSeconds) -> Iterator[Row]:
    """Yield the rows of the rank that is busy longest; of a pipeline, parts that its stages do not decide have one row."""
    links, turns, parts = Links.for_job(query.job, query.device), query.microbatches, seconds.parts
    every = [query.of_rank(rank) for rank in range(query.pp.size)]
    busiest = busiest_rank(every, seconds_of_stages(query, choices)) if query.is_pipeline else 0
    stages = [query.stages[index] for index in every[busiest]]
    for stage in stages:
        index = stage.slice.index
        where = f"stage {index}: " if query.is_pipeline else ""
        yield from microbatch_rows(stage, choices[index], links, turns, where)
        if not query.is_pipeline:
            yield from fsdp_rows(stage, choices[index], links)
    yield Row("optimizer", _optimizer(stages), parts.get("optimizer", 0.0))
    yield Row(HOST, "layers' kernels are launched more slowly than they run", parts.get(HOST, 0.0))
    if not query.is_pipeline:
        return
    late, sent = parts.get("pipeline sends", 0.0), handing_on(query) * turns * _sends(query, busiest)
    yield Row("pipeline sends", f"hand-overs (pp, {query.pp.size} ranks)", late, max(0.0, sent - late))
    over, replicas = axis_words("dp_shard", links.shards), axis_words("dp_replicate", links.replicas)
    for part, what in (
        ("pipeline bubble", f"rank {busiest} waits"),
        ("parameter gathers", f"all-gather of a rank's stages ({over})"),
        ("gradient reductions", f"reduce-scatter ({over}), then all-reduce ({replicas})"),
    ):
        yield Row(part, what, parts.get(part, 0.0))


def _sends(query: PlanQuery, rank: int) -> int:
    """Return how many tensors `rank` sends to other ranks for one micro-batch: outputs forward, gradients back."""
    indices = query.of_rank(rank)
    edges = [(index, other) for index in indices for other in (index - 1, index + 1) if 0 <= other < len(query.stages)]
    return sum(other not in indices for _, other in edges)


def _optimizer(stages: Sequence[Stage]) -> str:
    """Return in words the launches or passes that the optimizer's step waits for."""
    name, device = stages[0].job.step.optimizer, stages[0].device
    here = [param for stage in stages for param in stage.sharding.trained]
    on_host = [param for stage in stages for param in stage.sharding.trained_on_host]
    kernels, where = len([*here, *on_host]) * KERNELS_PER_PARAMETER, " in CPU memory" if on_host else ""
    passes = optimizer_seconds(here, name, device) + host_optimizer_seconds(on_host, name, device)
    if kernels * device.launch_seconds > passes:
        return f"{name}{where}: launches of {kernels} kernels"
    size = write_bytes(sum(param.size for param in [*here, *on_host]))
    return f"{name}{where}: passes over {size} of parameters, gradients and states"


def byte_rows(query: PlanQuery, choices: Choices, rank: int) -> tuple[Row, ...]:
    """Return the parts of the highest point of a step of one rank, which add up to it.

    In a pipeline, parts are given by stage.
    """
    alive = labels_at_peak(query, rank, choices)
    waiting = Counter((label.stage, label.where) for label in alive if label.part is Part.MICROBATCHES_IN_FLIGHT)
    rows: list[Row] = []
    for label, size in alive.items():
        where = f"stage {label.stage}: " if query.is_pipeline else ""
        what = _words(label, waiting[label.stage, label.where], query.job.step.optimizer)
        rows.append(Row(label.part, f"{where}{what}" if what else "", size))
    return rows_of(part_bytes(alive), merged(rows), 0)


_KINDS = {"matmul": "matrix products", "attention": "attention", "memory-bound": "norms and elementwise operators"}


def _words(label: Label, waiting: int, optimizer: str) -> str:
    """Return the words of a storage; `waiting`: micro-batches that wait where its own does."""
    part, origin = label.part, label.origin
    if part is Part.MICROBATCHES_IN_FLIGHT:
        return f"{waiting} {label.where}"
    if part in (Part.OPTIMIZER_STATE, Part.OPTIMIZER_STEP):
        return f"{optimizer}, {origin}"
    if isinstance(origin, str) or part not in (Part.SAVED_ACTIVATIONS, Part.RUNNING_LAYER, Part.OUTSIDE_OF_LAYERS):
        return origin if isinstance(origin, str) else ""
    by = "compiled layers" if origin is None else _KINDS[kernel_kind(origin, facts(origin).flops is not None)]
    return f"kept outputs of {by}" if part is Part.SAVED_ACTIVATIONS else f"{label.where}: outputs of {by}"


# --- seconds, part by part ------------------------------------------------------------------------------------------


def rows_of(totals: Mapping[str, float], finer: Mapping[str, Iterable[Row]], least: float) -> tuple[Row, ...]:
    """Return the parts of `totals`, each by its rows in `finer`, where it has any; the largest part first.

    If the rows of a part leave over more than `least`, the rest is a row of its own.
    """
    rows: list[Row] = []
    for part, total in sorted(totals.items(), key=lambda item: -item[1]):
        part_rows = sorted(
            (row for row in finer.get(part, ()) if row.amount or row.hidden), key=lambda row: -row.amount
        )
        rest = total - sum(row.amount for row in part_rows)
        if abs(rest) > least:
            part_rows.append(Row(part, "other" if part_rows else "", rest))
        rows += part_rows
    return tuple(rows)


def merged(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return rows by part, with those of the same words as one."""
    sums: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        entry = sums.setdefault((row.part, row.what), [0, 0])
        entry[0] += row.amount
        entry[1] += row.hidden
    return grouped((part, Row(part, what, *both)) for (part, what), both in sums.items())
