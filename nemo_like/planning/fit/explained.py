"""Sources of each GiB and each millisecond of one configuration: rows that add up to its peak and its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.program import roofline
from nemo_like.planning.program.block_seconds import BACKWARD_TIMES, LayerRun
from nemo_like.planning.program.roofline import RankGroup
from nemo_like.planning.program.seconds import (
    Links,
    Waits,
    copy_seconds,
    host_sum_seconds,
    inside_seconds,
    unit_seconds,
    waits_of,
)
from nemo_like.planning.program.storages import StepPoint
from nemo_like.planning.query import Stage
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
    lines: Mapping[str, Callable[[], list[StepPoint]]] = field(default_factory=dict, compare=False, repr=False)
    """Stretches of a step in order, by rank of the pipeline; made when the function is called."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `lines`, which stay with the process that planned the step."""
        return {**self.__dict__, "lines": {}}

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


Rows = dict[str, list[Row]]


_SUMS = "gradient sums on the host"


def kernel_rows(run: LayerRun, reachable: int, count: float, where: str) -> Rows:
    """Return rows of the kernels of `count` equal layer calls, by kind; `where`: words before each kind."""
    block, choice = run.block, run.choice
    assert choice is not None
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for number, (seconds, kind) in enumerate(zip(block.kernels, block.kinds)):
        sums["forward", kind] += seconds
        if block.backward:
            sums["backward", kind] += seconds * BACKWARD_TIMES[block.attends[number]]
        if number < reachable and choice.decisions and choice.decisions[number] == "recompute":
            sums["replay", kind] += seconds
    rows: Rows = {}
    for (part, kind), seconds in sums.items():
        rows.setdefault(part, []).append(Row(part, f"{where}{kind}", count * seconds))
    return rows


def outer_rows(kinds: Mapping[str, float], turns: int, where: str) -> list[Row]:
    """Return rows of what runs outside the layers, forward and backward, by kind of kernel."""
    return [Row("head and embedding", f"{where}{kind}", turns * seconds) for kind, seconds in kinds.items()]


def second_rows(
    runs: Sequence[LayerRun], outside: Sequence[UnitBytes], stage: Stage, links: Links, conf: Configuration
) -> Rows:
    """Return, for each part of a step without stages, the rows that add up to it.

    Args:
        runs, outside, links, conf: arguments that `nemo_like.planning.program.seconds.loop_seconds` was called with.
        stage: the stage of the layers that `runs` are calls of.
    """
    turns, step = conf.grad_accum, stage.job.step
    reduced = turns if step.sync == "every" else 1
    summed = reduced - (0 if step.zero_grad == "zero" else 1)
    all_rows: list[Rows] = []
    for run in runs:
        reachable = stage.part.problems[run.kind].reachable
        all_rows.append(kernel_rows(run, reachable, run.count * turns, ""))
        all_rows.append(inside_rows(run, links, run.count * turns))
        if run.unit is not None:
            all_rows.append(_unit_rows(run, links, run.count * turns, run.count * reduced, run.count * summed))
    for unit in outside:
        all_rows.append(_outside_rows(unit, links, turns, reduced, summed))
    all_rows.append({"head and embedding": outer_rows(stage.outside().kinds, turns, "")})
    return merged(all_rows)


def merged(several: Iterable[Rows]) -> Rows:
    """Return several rows of the same words as one."""
    sums: dict[tuple[str, str], list[float]] = {}
    for rows in several:
        for part_rows in rows.values():
            for row in part_rows:
                entry = sums.setdefault((row.part, row.what), [0.0, 0.0])
                entry[0] += row.amount
                entry[1] += row.hidden
    merged_rows: Rows = {}
    for (part, what), (amount, hidden) in sums.items():
        merged_rows.setdefault(part, []).append(Row(part, what, amount, hidden))
    return merged_rows


def ranks(axis: str, group: RankGroup) -> str:
    """Return an axis in words."""
    return f"{axis}, {group.ranks} ranks" + (f" on {group.hosts} hosts" if group.hosts > 1 else "")


def inside_rows(run: LayerRun, links: Links, count: int) -> Rows:
    """Return rows of the collectives that nothing hides: sums of ``tp``, gathers of ``cp``, exchanges of ``ep``."""
    sums, gathered, sent = inside_seconds(run, links)
    again = 1 if run.replays_exchanges else 0
    rows: Rows = {}
    for part, what, each, times in (
        ("tensor-parallel sums", f"all-reduce ({ranks('tp', links.tensor)})", sums, (2, 2)),
        ("sequence gathers", f"all-gather of keys and values ({ranks('cp', links.sequence)})", gathered, (1, 1)),
        ("expert exchanges", f"all-to-all of rows ({ranks('ep', links.experts)})", sent, (1, 1)),
    ):
        for phase, often in zip(("forward", "backward", "replay"), (*times, again)):
            rows.setdefault(part, []).append(Row(part, f"{what}, {phase}", count * often * each))
    rows["host copies"] = [Row("host copies", "layers' inputs to host memory and back", count * run.copies)]
    return rows


def _unit_rows(run: LayerRun, links: Links, count: int, reductions: int, summed: int) -> Rows:
    """Return rows of FSDP2's gathers and reductions for layers, with the seconds of them that computing hides.

    `summed`: of the reductions, those whose gradients are added to others in host memory, for which the host waits.
    """
    assert run.unit is not None
    waits = waits_of(run, links)
    over = ranks("dp_shard", links.shards) + (f"; experts: {links.expert_shards.ranks}" if run.experts else "")
    gathers = [
        Row(
            "parameter gathers",
            f"all-gather of layers ({over}), forward",
            count * waits.forward,
            count * (waits.gather - waits.forward),
        )
    ]
    if run.unit.reshard:
        gathers.append(
            Row(
                "parameter gathers",
                f"all-gather of layers ({over}), backward",
                count * waits.backward,
                count * (waits.gather - waits.backward),
            )
        )
    replicas = sum(
        roofline.reduce_seconds(unit.reduce_output, links.replicas, links.device)
        for unit in (run.unit, run.experts)
        if unit is not None
    )
    # The replicas' sum comes after the reduce-scatter, so what is hidden is that one first.
    late = min(replicas, waits.reduction)
    first = waits.reduction - late
    beside = reductions - (summed if waits.summing else 0)
    scatter = f"reduce-scatter of layers' gradients ({over})"
    total = f"all-reduce of layers' gradients ({ranks('dp_replicate', links.replicas)})"
    return {
        "parameter gathers": gathers,
        "gradient reductions": [
            Row("gradient reductions", scatter, reductions * first, beside * (waits.reduce - replicas - first)),
            Row("gradient reductions", total, reductions * late, beside * (replicas - late)),
        ],
    } | _host_rows(waits, run.unit.reshard, count, reductions, summed)


def _host_rows(waits: Waits, reshard: bool, count: int, reductions: int, summed: int) -> Rows:
    """Return rows of layers whose parameters and gradients are in host memory."""
    fetch, store = waits.copies
    beside = reductions - (summed if waits.summing else 0)
    copies = [
        Row(
            "host copies",
            "layers' parameters from host memory, forward",
            count * waits.fetch_forward,
            count * (fetch - waits.fetch_forward),
        )
    ]
    if reshard:
        copies.append(
            Row(
                "host copies",
                "layers' parameters from host memory, backward",
                count * waits.fetch_backward,
                count * (fetch - waits.fetch_backward),
            )
        )
    copies.append(
        Row("host copies", "layers' gradients to host memory", reductions * waits.store, beside * (store - waits.store))
    )
    return {
        "host copies": copies,
        _SUMS: [Row(_SUMS, "of layers, with their reductions and copies", summed * waits.summing)],
    }


def _outside_rows(unit: UnitBytes, links: Links, gathers: int, reductions: int, summed: int) -> Rows:
    gather, reduce = unit_seconds(unit, links.shards, links)
    replicas = roofline.reduce_seconds(unit.reduce_output, links.replicas, links.device)
    name = "head" if unit.kind == "tail" else "embedding and what else is around the layers"
    over = ranks("dp_shard", links.shards)
    fetch, store = copy_seconds((unit,), links.device)
    return {
        "parameter gathers": [Row("parameter gathers", f"all-gather of {name} ({over})", gathers * gather)],
        "host copies": [
            Row("host copies", f"parameters of {name} from host memory", gathers * fetch),
            Row("host copies", f"gradients of {name} to host memory", reductions * store),
        ],
        _SUMS: [Row(_SUMS, f"of {name}", summed * host_sum_seconds((unit,), links.device))],
        "gradient reductions": [
            Row("gradient reductions", f"reduce-scatter of {name} ({over})", reductions * (reduce - replicas)),
            Row(
                "gradient reductions",
                f"all-reduce of {name} ({ranks('dp_replicate', links.replicas)})",
                reductions * replicas,
            ),
        ],
    }
