"""Check 1: the peak that a plan predicts, and the allocator's. Check 11: memory that runs out, and snapshots."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nemo_like import Job, explain
from nemo_like.options import AllocatorConfig, MemoryBudget
from nemo_like.planning.model.traced import MODES
from nemo_like.planning.planner import choose, query_of
from nemo_like.planning.predictions.reserved import default_limit
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import ReportRow, fastest_within, row_of
from tests.allocator_events import cpu_events
from tests.tools.gpu.driver import Run
from tests.tools.gpu.machine import Machine, training

WITHIN = 0.02
"""How far from the allocator's a predicted peak may be: the worst of docs/evidence/peaks.md is closer on ranks of gloo."""
GROWING = "expandable_segments:True"
MESSAGE = (
    "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 40.10 GiB is free. "
    "Including non-PyTorch memory, this process has 39.00 GiB memory in use. 38.50 GiB allowed; Of the allocated memory "
    "38.10 GiB is allocated by PyTorch, and 210.00 MiB is reserved by PyTorch but unallocated."
)
"""The text of a GPU, for the CPU, which has no limit."""


class Plans:
    """Plans for a model and its input on the device at hand. One trace serves every job that has the same kernels."""

    def __init__(self, machine: Machine, model: nn.Module, batch: Any) -> None:
        self.machine, self.model, self.batch = machine, model, batch
        self._query: PlanQuery | None = None

    def query(self, **options: Any) -> PlanQuery:
        """Return the planner's query for the loop of `training`, with these keywords of `parallelize`."""
        job = Job.of("single", device=self.machine.device, **options)
        self._query = query_of(self.model, self.batch, job) if self._query is None else self._query.under(job)
        return self._query

    def row(self, ac: str, **options: Any) -> ReportRow:
        """Return the plan of one mode or budget."""
        query = self.query(**options)
        choices = query.uniform(ac) if ac in MODES else choose(query, MemoryBudget.parse(ac), ac)
        return row_of(ac, query, choices, default_limit(query.job, query.device))


def check(run: Run) -> None:
    """Compare the peaks of every mode, then train under a budget with no more memory than that."""
    machine = Machine(run.cpu)
    # On a GPU 16 GB of states and up to 40 GB of activations.
    layers, batch = machine.pick(8, 2), machine.batch(2, machine.pick(8192, 64))
    llama, experts = (Plans(machine, machine.model(layers, kind, place="meta"), batch) for kind in ("llama", "moe"))
    acs = machine.pick(("none", "full", "selective", "40%", "70%"), ("full", "40%"))
    cases: list[tuple[str, str, str, dict[str, Any]]] = [(ac, ac, "llama", {}) for ac in acs]
    cases += [
        ("full of experts", "full", "moe", {}),
        ("none + chunked loss", "none", "llama", {"loss": "chunked"}),
        ("selective + offload saved", "selective", "llama", {"offload": "saved"}),
    ][: machine.pick(3, 1)]  # a measurement on the CPU takes 3 s
    for name, ac, kind, options in cases:
        with run.guarded(name):
            row = (llama if kind == "llama" else experts).row(ac, **options)
            allocated, reserved = _peaks(machine, layers, batch, row, kind, **options)
            write_peaks(run, name, row, allocated, reserved, at_most="offload" in options)
    with run.guarded("the fastest plan in a budget"):
        none, full = (llama.row(ac).need.bytes for ac in ("none", "full"))
        best = fastest_within(llama.query(), limit := (none + full) // 2)
        assert best is not None
        run.row("fastest plan within a budget", limit, best.need.bytes, ok=best.need.bytes <= limit, ac=best.ac)
        if machine.is_cuda:
            allocated, reserved = _with_at_most(machine, limit, lambda: _peaks(machine, layers, batch, best))
            run.row(f"fastest plan: {best.ac}", best.need.bytes, reserved, "bytes", allocated=allocated)
    if machine.is_cuda:  # the last, since it stays
        with run.guarded(GROWING):
            machine.settle()
            torch.cuda.memory._set_allocator_settings(GROWING)
            row = llama.row("full", allocator=AllocatorConfig.of(GROWING))
            write_peaks(run, "full + expandable segments", row, *_peaks(machine, layers, batch, row))


def write_peaks(
    run: Run, name: str, row: ReportRow, allocated: int, reserved: int | None, at_most: bool = False
) -> None:
    """Write the measured peak together with the predicted one; `at_most`: plans do not count what makes it lower."""
    pairs = {"allocated": (row.plan.peak_bytes, allocated), "reserved": (row.plan.reserved_bytes, reserved)}
    for kind, (predicted, measured) in pairs.items():
        if predicted is not None and measured is not None:
            off = measured / predicted - 1
            near = off <= WITHIN and (at_most or off >= -WITHIN)
            run.row(f"{name}: {kind}", predicted, measured, "bytes", ok=near, at=row.plan.peak_at)


def _peaks(
    machine: Machine, layers: int, batch: Any, row: ReportRow, kind: str = "llama", **options: Any
) -> tuple[int, int | None]:
    """Return the most bytes allocated and reserved in the first three steps."""
    machine.settle()  # parts of old segments, which the new weights would keep, are reserved bytes
    ac = row.ac if row.ac in MODES else row.plan
    model = machine.parallelize(machine.model(layers, kind), ac, batch, **options)
    machine.settle()
    steps = training(model, batch)
    return machine.peaks(lambda: steps(machine.pick(3, 2)), model.parameters())


def _with_at_most(machine: Machine, limit: float, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, in which the allocator reserves no more than `limit` bytes."""
    machine.settle()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(machine.device).total_memory)
    try:
        return call()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def out_of_memory(run: Run) -> None:
    """Run out of memory on purpose; keep the snapshot and the plan of it for `nemo-like explain`, and two more snapshots."""
    machine = Machine(run.cpu)
    layers, batch = machine.pick(4, 2), machine.batch(1, machine.pick(4096, 32))
    model = machine.model(layers, place="meta")
    with run.guarded("plan"):
        none = Plans(machine, model, batch).row("none")
        run.keep("plan-none.json", json.dumps(none.plan.as_json()).encode())
    modes = {"none": ("none", {}), "selective": ("selective", {}), "offload": ("selective", {"offload": "saved"})}
    for name, (ac, options) in list(modes.items())[: machine.pick(3, 1)]:
        with run.guarded(name):

            def train(ac: str = ac, options: Any = options) -> None:
                # With the weights in the recording, as `explain` names parts by where they were made.
                training(machine.parallelize(machine.model(layers), ac, **options), batch)(2)

            limit = none.need.bytes * (0.85 if name == "none" else 1.0)
            message, snapshot = _recorded(machine, train, limit)
            size = run.keep(f"snapshot-{name}.pickle", pickle.dumps(snapshot))
            run.row(f"snapshot of {name}", None, size, "bytes", message=message)
            if name == "none":
                run.keep("out-of-memory.txt", message.encode())
                run.row("out of memory: allocated", None, explain(message).peak_bytes, "bytes", limit=limit)
            if name == "none" and machine.is_cuda:
                job = Job.of("single", device=machine.device, ac="none")
                answer = explain(snapshot, model=model, job=job, sample_input=batch)
                share = answer.named_bytes / answer.peak_bytes
                run.row("explain: share of bytes with a name", None, share, ok=share > 0.95, where=answer.where)
        machine.settle()


def _recorded(machine: Machine, train: Callable[[], Any], limit: float) -> tuple[str, Any]:
    """Return the message of memory that runs out while `train` runs in `limit` bytes, and the allocator's recording."""
    if not machine.is_cuda:
        return MESSAGE, cpu_events(train)

    def record() -> tuple[str, Any]:
        torch.cuda.memory._record_memory_history(max_entries=30_000, stacks="python")
        message = ""
        try:
            train()
        except torch.OutOfMemoryError as error:
            message = str(error)
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        return message, snapshot

    return _with_at_most(machine, limit, record)
