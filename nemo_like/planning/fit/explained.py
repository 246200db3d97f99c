"""Sources of each GiB and each millisecond of one configuration: rows that add up to its peak and its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_like.options import StepSpec
from nemo_like.planning import roofline
from nemo_like.planning.answers.seconds import (
    Links,
    copy_seconds,
    host_sum_seconds,
    inside_seconds,
    regathered_seconds,
    unit_seconds,
    waits_of,
)
from nemo_like.planning.choose.layer_seconds import LayerRun
from nemo_like.planning.query import Stage
from nemo_like.planning.roofline import RankGroup
from nemo_like.planning.sharding import UnitBytes


@dataclass(frozen=True)
class Row:
    """One line of an account."""

    part: str
    """A key of `Candidate.peak.parts` or `Candidate.seconds.parts`."""
    what: str
    """Share of the part, in words; empty: the whole part."""
    amount: float
    """Bytes (whole numbers), or seconds."""
    hidden: float = 0.0
    """Seconds in addition to `amount` that computing hides."""


@dataclass(frozen=True)
class RankPeak:
    """One rank of a pipeline."""

    stages: tuple[int, ...]
    total: int
    """Bytes of its peak."""
    at: str


@dataclass(frozen=True)
class Account:
    """Rows of one configuration: bytes, seconds, and the ranks of a pipeline."""

    bytes: tuple[Row, ...]
    """Rows in bytes that add up to the peak."""
    seconds: tuple[Row, ...]
    """Rows in seconds that add up to the step."""
    ranks: tuple[RankPeak, ...] = ()
    """Peaks of the ranks of a pipeline; empty: no pipeline."""

    def as_json(self) -> dict[str, Any]:
        """Return the account in JSON values; bytes and seconds."""
        return {
            "bytes": [{"part": row.part, "what": row.what, "bytes": row.amount} for row in self.bytes],
            "seconds": [
                {"part": row.part, "what": row.what, "seconds": row.amount, "hidden": row.hidden}
                for row in self.seconds
            ],
            "ranks": [{"stages": list(rank.stages), "peak_bytes": rank.total, "at": rank.at} for rank in self.ranks],
        }


def rows_of(totals: Mapping[str, float], finer: Mapping[str, Iterable[Row]], least: float) -> tuple[Row, ...]:
    """Return the parts of `totals`, each by its rows in `finer`, where it has any; the largest part first.

    If the rows of a part leave over more than `least`, the rest is a row of its own.
    """
    rows: list[Row] = []
    for part, total in sorted(totals.items(), key=lambda item: -item[1]):
        part_rows = sorted(
            (row for row in finer.get(part, ()) if row.amount or row.hidden), key=lambda row: -row.amount
        )
        left = total - sum(row.amount for row in part_rows)
        if abs(left) > least:
            part_rows.append(Row(part, "other" if part_rows else "", left))
        rows += part_rows
    return tuple(rows)


_SUMS = "gradient sums on the host"


def merged(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return rows by part, with those of the same words as one."""
    sums: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        entry = sums.setdefault((row.part, row.what), [0.0, 0.0])
        entry[0] += row.amount
        entry[1] += row.hidden
    merged_rows: dict[str, list[Row]] = {}
    for (part, what), (amount, hidden) in sums.items():
        merged_rows.setdefault(part, []).append(Row(part, what, amount, hidden))
    return merged_rows


def microbatch_rows(stage: Stage, runs: Iterable[LayerRun], links: Links, turns: int, where: str = "") -> Iterator[Row]:
    """Yield rows of `turns` micro-batches in a stage, without FSDP2; `where`: words before each kind of kernel."""
    for kind, seconds in stage.outside().kinds.items():
        yield Row("head and embedding", f"{where}{kind}", turns * seconds)
    for run in runs:
        yield from _kernel_rows(run, stage.part.problems[run.kind].reachable, run.count * turns, where)
        yield from _inside_rows(run, links, run.count * turns)


def _kernel_rows(run: LayerRun, reachable: int, count: float, where: str) -> Iterator[Row]:
    block, choice = run.block, run.choice
    assert choice is not None
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for number, (seconds, kind) in enumerate(zip(block.kernels, block.kinds)):
        sums["forward", kind] += seconds
        if block.backward:
            sums["backward", kind] += seconds * block.backward_times[number]
        if number < reachable and choice.decisions and choice.decisions[number] == "recompute":
            sums["replay", kind] += seconds
    for (part, kind), seconds in sums.items():
        yield Row(part, f"{where}{kind}", count * seconds)


def _inside_rows(run: LayerRun, links: Links, count: int) -> Iterator[Row]:
    """The collectives that nothing hides: sums of ``tp``, gathers of ``cp``, exchanges of ``ep``."""
    sums, gathered, sent = inside_seconds(run, links)
    again = 1 if run.replays_exchanges else 0
    for part, what, each, times in (
        ("tensor-parallel sums", f"all-reduce ({ranks('tp', links.tensor)})", sums, (2, 2)),
        ("sequence gathers", f"all-gather of keys and values ({ranks('cp', links.sequence)})", gathered, (1, 1)),
        ("expert exchanges", f"all-to-all of rows ({ranks('ep', links.experts)})", sent, (1, 1)),
    ):
        for phase, often in zip(("forward", "backward", "replay"), (*times, again)):
            yield Row(part, f"{what}, {phase}", count * often * each)
    again_seconds = count * regathered_seconds(run, links)
    yield Row("sequence gathers", "all-gather of keys and values again, backward", again_seconds)
    yield Row("host copies", "layers' inputs to host memory and back", count * run.copies)


def fsdp_rows(
    runs: Iterable[LayerRun], outside: Iterable[UnitBytes], step: StepSpec, links: Links, turns: int
) -> Iterator[Row]:
    """Yield rows of FSDP2's gathers and reductions without a pipeline, with the seconds that computing hides.

    Args:
        runs, outside, step, links: as for `nemo_like.planning.answers.seconds.loop_seconds`.
        turns: micro-batches.
    """
    reduced = turns if step.sync == "every" else 1
    # Reductions whose gradients are added to others in host memory, for which the host waits.
    summed = reduced - (0 if step.zero_grad == "zero" else 1)
    for run in runs:
        if run.unit is not None:
            yield from _unit_rows(run, links, run.count * turns, run.count * reduced, run.count * summed)
    for unit in outside:
        yield from _outside_rows(unit, links, turns, reduced, summed)


def ranks(axis: str, group: RankGroup) -> str:
    """Return an axis in words."""
    return f"{axis}, {group.ranks} ranks" + (f" on {group.hosts} hosts" if group.hosts > 1 else "")


def _unit_rows(run: LayerRun, links: Links, count: int, reductions: int, summed: int) -> Iterator[Row]:
    assert run.unit is not None
    waits, units = waits_of(run, links), [unit for unit in (run.unit, run.experts) if unit is not None]
    over = ranks("dp_shard", links.shards) + (f"; experts: {links.expert_shards.ranks}" if run.experts else "")
    fetch, store = waits.copies

    def shown(part: str, what: str, late: float, whole: float) -> Row:
        return Row(part, what, count * late, count * (whole - late))

    for phase, gather, copy in (
        ("forward", waits.forward, waits.fetch_forward),
        *([("backward", waits.backward, waits.fetch_backward)] if run.unit.reshard else []),
    ):
        yield shown("parameter gathers", f"all-gather of layers ({over}), {phase}", gather, waits.gather)
        yield shown("host copies", f"layers' parameters from host memory, {phase}", copy, fetch)
    replicas = sum(roofline.reduce_seconds(unit.reduce_output, links.replicas, links.device) for unit in units)
    # The replicas' sum comes after the reduce-scatter, so what is hidden is that one first.
    late = min(replicas, waits.reduction)
    first, hiding = waits.reduction - late, reductions - (summed if waits.summing else 0)
    scatter = f"reduce-scatter of layers' gradients ({over})"
    total = f"all-reduce of layers' gradients ({ranks('dp_replicate', links.replicas)})"
    yield Row("gradient reductions", scatter, reductions * first, hiding * (waits.reduce - replicas - first))
    yield Row("gradient reductions", total, reductions * late, hiding * (replicas - late))
    stored = reductions * waits.store
    yield Row("host copies", "layers' gradients to host memory", stored, hiding * (store - waits.store))
    yield Row(_SUMS, "of layers, with their reductions and copies", summed * waits.summing)


def _outside_rows(unit: UnitBytes, links: Links, gathers: int, reductions: int, summed: int) -> Iterator[Row]:
    gather, reduce = unit_seconds(unit, links.shards, links)
    replicas = roofline.reduce_seconds(unit.reduce_output, links.replicas, links.device)
    name = "head" if unit.kind == "tail" else "embedding and what else is around the layers"
    over, replicated = ranks("dp_shard", links.shards), ranks("dp_replicate", links.replicas)
    fetch, store = copy_seconds((unit,), links.device)
    yield Row("parameter gathers", f"all-gather of {name} ({over})", gathers * gather)
    yield Row("host copies", f"parameters of {name} from host memory", gathers * fetch)
    yield Row("host copies", f"gradients of {name} to host memory", reductions * store)
    yield Row(_SUMS, f"of {name}", summed * host_sum_seconds((unit,), links.device))
    yield Row("gradient reductions", f"reduce-scatter of {name} ({over})", reductions * (reduce - replicas))
    yield Row("gradient reductions", f"all-reduce of {name} ({replicated})", reductions * replicas)
