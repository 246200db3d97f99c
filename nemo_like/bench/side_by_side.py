"""Modes side by side on one model: step time, bytes, gradients.

On a CPU both sides of offloading are main memory. The copying back end copies as a GPU's would, so the bytes are those of a
GPU. The device's share is PyTorch's memory: copies are in Python's. Step times show the cost of the copies, without overlap.
"""

import copy
import datetime
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nemo_like._util import table
from nemo_like._util.table import ByteUnit, paragraph
from nemo_like.bench.measured_step import (
    clock_for,
    compare_gradients,
    cpu_threads,
    gradients_of,
    measure_bytes,
    measure_flops,
    summarize,
    time_steps,
)
from nemo_like.bench.modes import Mode, our_modes, peer_modes, pick
from nemo_like.bench.options import BenchOptions
from nemo_like.distributed.launch import world_size
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.layers import find_layers
from nemo_like.models import ModelSource, resolve_model

# Errors that a mode may raise on a model or machine that is not for it.
_ERRORS = (ValueError, TypeError, RuntimeError, ImportError, AttributeError, NotImplementedError)


@dataclass
class MeasuredMode:
    """A model in one mode, and its row of the table."""

    mode: Mode
    model: nn.Module
    moved: Callable[[], int]  # Bytes moved to CPU memory so far.
    row: dict[str, Any]


class SideBySide:
    """One model in several modes; the others are compared with ``none``, the first.

    A mode that cannot run here has its reason in `notes` instead of a row.
    """

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self.device = options.place()
        self.source = resolve_model(options.model)
        self.sample = sample_of(self.source, options, self.device)
        self.notes: list[str] = []

    def run(self, modes: Sequence[Mode]) -> list[MeasuredMode]:
        """Prepare and measure each mode, then let all take turns."""
        candidates = self._measured(self._prepared(modes))
        models, options = [candidate.model for candidate in candidates], self.options
        timed = time_steps(models, self.sample, self.device, options.repeats, options.warmup)
        for candidate, times in zip(candidates, timed):
            candidate.row |= summarize(times, timed[0])
        return candidates

    def _prepared(self, modes: Sequence[Mode]) -> list[MeasuredMode]:
        """One model per mode. On one device they share their parameters, so that large models fit."""
        base, candidates = None, list[MeasuredMode]()
        for mode in modes:
            if base is None or self.options.strategy != "single":
                torch.manual_seed(0)
                base = self.source.build(device=self.device, dtype=self.options.dtype)
            model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
            try:
                moved = mode.prepare(model, self.sample)
                model = _distribute(model, self.options.strategy, self.device)
            except _ERRORS as error:
                self._leave_out(mode, "not run", error)
                continue
            row = {"mode": ("x " if mode.peer else "") + mode.name, "peer": mode.peer}
            candidates.append(MeasuredMode(mode, model, moved, row))
        return candidates

    def _measured(self, candidates: list[MeasuredMode]) -> list[MeasuredMode]:
        """Return the `candidates` that ran, with their bytes, FLOPs and gradients."""
        wanted, ran = dict[str, torch.Tensor](), list[MeasuredMode]()
        for candidate in candidates:
            try:
                before = candidate.moved()
                gradients = gradients_of(candidate.model, self.sample)
                candidate.row["moved_mb"] = (candidate.moved() - before) / 1e6 or None
                wanted = wanted or {key: gradient.clone() for key, gradient in gradients.items()}
                candidate.row["gradients"] = compare_gradients(wanted, gradients)
                eager = candidate.mode.backend is None  # a compiled graph is one operator to the counters
                if eager or self.device.type != "cpu":
                    held, peak = measure_bytes(candidate.model, self.sample, self.device)
                    candidate.row |= {"peak_mb": peak / 1e6, "held_mb": held / 1e6}
                if eager:
                    candidate.row["flops"] = measure_flops(candidate.model, self.sample)
            except _ERRORS as error:
                self._leave_out(candidate.mode, "failed", error)
                continue
            ran.append(candidate)
        return ran

    def _leave_out(self, mode: Mode, what: str, error: Exception) -> None:
        """Write a note; without ``none`` there is nothing to compare with, so its error is raised."""
        if mode.name == "none":
            raise error
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        self.notes.append(f"{mode.name}: {what}: {first_line}")


def sample_of(source: ModelSource, options: BenchOptions, device: torch.device) -> Any:
    """The input of every step."""
    if options.input_shape is None:
        return source.sample_input(options.batch_size, options.seq_len, device)
    return torch.randn(options.input_shape, generator=torch.Generator().manual_seed(0)).to(device, options.dtype)


def choose_modes(options: BenchOptions, device: torch.device) -> list[Mode]:
    """The modes that `options` requests, ``none`` first.

    Raises:
        ValueError: an unknown mode.
    """
    modes = our_modes(options.budgets) + (peer_modes() if options.peers else [])
    if device.type == "cpu":
        modes = [mode for mode in modes if mode.on_cpu]
    modes += [mode.under(backend) for backend in options.compile for mode in modes[:3]]  # none, full, selective
    return pick(modes, options.modes)


def _distribute(model: nn.Module, strategy: str, device: torch.device) -> nn.Module:
    if strategy == "single" or world_size() == 1:
        return model
    if strategy == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    shard_layers(model, find_layers(model), build_mesh(device_type=device.type))
    return model


# For each column its key in a row, its heading, and how a value is written; None: MB, in the one unit of the table.
_COLUMNS: tuple[tuple[str, table.Column, Callable[[Any], str] | None], ...] = (
    ("mode", table.Column("mode", left=True, least=28), str),
    ("ratio", table.Column("step / none"), "{:.2f}".format),
    ("step_ms", table.Column("step ms", keep=2), table.three_digits),
    ("spread", table.Column("spread", keep=5), table.percent),
    ("tokens_per_s", table.Column("tokens/s", keep=3), table.three_digits),
    ("peak_mb", table.Column("peak"), None),
    ("held_mb", table.Column("saved"), None),
    ("moved_mb", table.Column("moved", keep=4), None),
    ("recompute", table.Column("recompute", keep=1), table.percent),
    ("gradients", table.Column("gradients", keep=4), str),
)

_NOTE = (
    "peak: bytes beyond parameters, gradients and inputs, by the device's allocator, on a CPU by the storages that "
    "operators make; saved: of them, between forward and backward. step / none: median over turns; the modes take turns. "
    "recompute: FLOPs, as a share of a forward. moved: to CPU memory in a step. gradients: against those of none. "
    "x: another project's code."
)


@dataclass(frozen=True)
class Comparison:
    """A model in several modes."""

    # For each mode its values by name, such as ``peak_mb`` (10**6 bytes) or ``step_ms``.
    rows: list[dict[str, Any]]
    about: dict[str, Any]  # Conditions of the measurement: model, sizes, device, versions.
    notes: list[str]  # Modes that could not run, with the reason.

    def text(self, width: int | None = None) -> str:
        """Return the table and its conditions for a screen of `width` columns (None: as wide as it gets)."""
        shown = [each for each in _COLUMNS if any(row.get(each[0]) is not None for row in self.rows)]
        sizes = (row.get(key) for row in self.rows for key, _, form in shown if form is None)
        unit = ByteUnit.for_sizes(round(size * 1e6) for size in sizes if size is not None)
        columns = tuple(c if form is not None else replace(c, name=f"{c.name} {unit.name}") for _, c, form in shown)
        cells = tuple(tuple(_cell(row.get(key), form, unit) for key, _, form in shown) for row in self.rows)
        about = ", ".join(f"{key}: {value}" for key, value in self.about.items())
        fastest = min(self.rows, key=lambda row: row["step_ms"])
        least = min((row for row in self.rows if row.get("peak_mb") is not None), key=lambda row: row["peak_mb"])
        answer = (
            f"Fastest: {fastest['mode']}, {table.three_digits(fastest['step_ms'])} ms. Least memory: {least['mode']}, "
            f"{unit.word(round(least['peak_mb'] * 1e6))} at {least['ratio']:.2f} times the step of none."
        )
        lines = [
            paragraph(answer, width),
            paragraph(f"Measured: {about}.", width),
            "",
            table.Table(columns, cells).with_note(width=width),
            *(paragraph(note, width) for note in (*self.notes, _NOTE)),
            f"Next: nemo-like plan --model {self.about['model']} --gpus 8, for GPUs that you do not have.",
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return everything, values unrounded."""
        return json.dumps({"about": self.about, "rows": self.rows, "notes": self.notes}, indent=2, default=str)


def _cell(value: Any, form: Callable[[Any], str] | None, unit: ByteUnit) -> str:
    if value is None:
        return "-"
    return unit.number(value * 1e6) if form is None else form(value)


def compare_modes(options: BenchOptions) -> Comparison:
    """Measure a model in the modes that `options` requests; the CPU threads are put back after it.

    Raises:
        ValueError: an unknown mode, or a model that cannot be built.
    """
    with cpu_threads(options.threads):
        compared = SideBySide(options)
        rows = [candidate.row for candidate in compared.run(choose_modes(options, compared.device))]
        tokens = f"{options.batch_size} x {options.seq_len} tokens"
        conditions = {
            "model": options.model,
            "step": f"input {options.input_shape}" if options.input_shape else tokens,
            "strategy": options.strategy,
            "ranks": world_size(),
            "clock": "CPU time" if clock_for(compared.device) is time.process_time else "wall time",
            "dtype": str(options.dtype or torch.float32),
            "repeats": options.repeats,
        }
        return Comparison(_with_rates(rows, options), conditions | surroundings(compared.device), compared.notes)


def _with_rates(rows: list[dict[str, Any]], options: BenchOptions) -> list[dict[str, Any]]:
    """Add tokens per second, and recomputation as a share of a forward."""
    tokens = options.batch_size * (options.seq_len if options.input_shape is None else 1) * world_size()
    forward, plain = rows[0]["flops"]
    for row in rows:
        row["tokens_per_s"] = tokens / row["step_ms"] * 1000
        if "flops" in row:
            row["recompute"] = (row.pop("flops")[1] - plain) / forward if forward else 0.0
    return rows


def surroundings(device: torch.device) -> dict[str, Any]:
    """Return the facts that a number depends on besides the code: device, versions, threads, date."""
    return {
        "device": platform.machine()
        if device.type == "cpu"
        else torch.get_device_module(device).get_device_name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }
