"""Check 4: the peak that a plan predicts, and the allocator's. Check 10: snapshots of the allocator."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from nemo_like import Job, predict
from nemo_like.options import AllocatorConfig
from nemo_like.planning.report import ReportRow
from tests.allocator_events import cpu_events
from tests.tools.gpu.driver import Run
from tests.tools.gpu.machine import Machine, training

BUDGETS = ("40%", "70%")
MODES = ("none", "full", "selective")
WITHIN = 0.02
"""How far from the allocator's a predicted peak may be: the worst of docs/evidence/peaks.md is closer on ranks of gloo."""


def check(run: Run) -> None:
    """Compare the peaks of every mode, then train under a budget with no more memory than that."""
    machine = Machine(run.cpu)
    rows = _compare(run, machine, [*MODES, *machine.pick(BUDGETS, BUDGETS[:1])])
    _compare(run, machine, ["selective"], " offload", offload="saved")
    _within_a_budget(run, machine, {row.ac: row.need.bytes for row in rows})


def expandable(run: Run) -> None:
    """Compare once more under segments that grow."""
    machine = Machine(run.cpu)
    _compare(run, machine, machine.pick(MODES, MODES[1:2]), " expandable", allocator="expandable_segments:True")


def _size(machine: Machine) -> tuple[int, dict[str, torch.Tensor]]:
    """Return layers and batch: on a GPU 16 GB of states and up to 40 GB of activations."""
    return machine.pick(8, 2), machine.batch(2, machine.pick(8192, 64))


def _report(machine: Machine, layers: int, batch: Any, memory: int | None = None, **options: Any) -> Any:
    """Return the plans of the loop of `training`, for the device at hand."""
    allocator = AllocatorConfig.of(options.pop("allocator", None))
    job = Job.of("single", device=machine.device, allocator=allocator, **options)
    budgets = BUDGETS if memory is None and machine.is_cuda else BUDGETS[:1]
    return predict(machine.model(layers, place="meta"), job, sample_input=batch, budgets=budgets, memory=memory)


def _compare(run: Run, machine: Machine, modes: Sequence[str], title: str = "", **options: Any) -> list[ReportRow]:
    layers, batch = _size(machine)
    report = _report(machine, layers, batch, **options)
    options.pop("allocator", None)
    for row in report.rows:
        if row.ac not in modes:
            continue
        with run.guarded(row.ac + title):
            allocated, reserved = _peaks(machine, layers, batch, row, **options)
            predicted = row.plan.peak_bytes
            near = abs(allocated / predicted - 1) <= WITHIN
            if "offload" in options:  # which plans do not count
                near = allocated <= predicted * (1 + WITHIN)
            run.row(f"{row.ac}{title}: allocated", predicted, allocated, ok=near, at=row.plan.peak_at)
            if reserved is not None and row.plan.reserved_bytes is not None:
                near = abs(reserved / row.plan.reserved_bytes - 1) <= WITHIN
                run.row(f"{row.ac}{title}: reserved", row.plan.reserved_bytes, reserved, ok=near)
        machine.settle()
    return list(report.rows)


def _peaks(machine: Machine, layers: int, batch: Any, row: ReportRow, **options: Any) -> tuple[int, int | None]:
    """Return the most bytes allocated and reserved in the first three steps."""
    machine.settle()
    ac = row.ac if row.ac in MODES else row.plan
    model = machine.parallelize(machine.model(layers), ac, batch, **options)
    machine.settle()
    steps = training(model, batch)
    return machine.peaks(lambda: steps(3), model.parameters())


def _within_a_budget(run: Run, machine: Machine, needs: dict[str, int]) -> None:
    """Train with half of what lies between full checkpointing and none; less than the least must be refused."""
    layers, batch = _size(machine)
    limit = (needs["full"] + needs["none"]) // 2
    with run.guarded("the fastest plan in a budget"):
        best = _report(machine, layers, batch, limit).best
        if machine.is_cuda:
            total = torch.cuda.get_device_properties(machine.device).total_memory
            machine.settle()
            torch.cuda.set_per_process_memory_fraction(limit / total)
            try:
                allocated, reserved = _peaks(machine, layers, batch, best)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            run.row(f"{best.ac} in {limit / 2**30:.2f} GiB", best.need.bytes, reserved, allocated=allocated)
        else:
            run.row(f"{best.ac} in {limit / 2**20:.2f} MiB", best.need.bytes, None, ok=best.need.bytes <= limit)
    machine.settle()
    with run.guarded("too little memory"):
        less = needs["full"] - machine.pick(1 << 30, needs["full"] // 10)
        best = _report(machine, layers, batch, less).best
        run.row("less than full needs", "refused", "refused" if best is None else best.ac, ok=best is None)


def snapshots(run: Run) -> None:
    """Leave what the allocator did in two steps of three modes, for https://pytorch.org/memory_viz."""
    machine = Machine(run.cpu)
    layers, batch = machine.pick(4, 2), machine.batch(1, machine.pick(4096, 32))
    for name, ac, options in (
        ("none", "none", {}),
        ("selective", "selective", {}),
        ("offload", "selective", {"offload": "saved"}),
    ):
        with run.guarded(name):
            machine.settle()
            steps = training(machine.parallelize(machine.model(layers), ac, **options), batch)
            steps(1)
            path = run.out / f"snapshot-{name}.{'pickle' if machine.is_cuda else 'json'}.gz"
            with gzip.open(path, "wb") as file:
                if machine.is_cuda:
                    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
                    steps(2)
                    torch.cuda.synchronize()
                    snapshot = torch.cuda.memory._snapshot()
                    torch.cuda.memory._record_memory_history(enabled=None)
                    pickle.dump(snapshot, file)
                else:
                    file.write(json.dumps(cpu_events(lambda: steps(2))).encode())  # noqa: B023
            run.row(name, None, path.stat().st_size, file=path.name)
        machine.settle()
