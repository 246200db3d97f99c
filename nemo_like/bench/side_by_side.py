"""The suite ``memory``: modes side by side on one model: step time, bytes, gradients.

On a CPU both sides of offloading are main memory. The copying back end copies as a GPU's would, so the bytes are those of a
GPU. The device's share is what PyTorch allocates besides the slabs. Step times show what the copies cost, not what overlaps.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nemo_like._util.table import percent, three_digits
from nemo_like._util.words import field_names
from nemo_like.bench.measured_step import (
    clock_for,
    compare_gradients,
    gradients_of,
    measure_bytes,
    measure_flops,
    summarize,
    time_steps,
)
from nemo_like.bench.modes import Mode, our_modes, peer_modes, pick
from nemo_like.bench.options import SUITE_NAMES, BenchOptions
from nemo_like.bench.suite import Column, Measured, Suite
from nemo_like.distributed.launch import world_size
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.layers import find_layers
from nemo_like.models import ModelSource, resolve_model

_ERRORS = (ValueError, TypeError, RuntimeError, ImportError, AttributeError, NotImplementedError)
"""Errors that a mode may raise on a model or machine that is not for it."""


@dataclass
class MeasuredMode:
    """A model in one mode, and its row of the table."""

    mode: Mode
    model: nn.Module
    moved: Callable[[], int]
    """Bytes moved to host memory so far."""
    row: dict[str, Any]


class SideBySide:
    """One model in several modes; ``none``, the first, is what the others are compared with.

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
        models = [candidate.model for candidate in candidates]
        timed = time_steps(models, self.sample, self.device, self.options.repeats, self.options.warmup)
        for candidate, times in zip(candidates, timed):
            candidate.row |= summarize(times, timed[0])
        return candidates

    def _prepared(self, modes: Sequence[Mode]) -> list[MeasuredMode]:
        """One model per mode. On one device they share their parameters, so that large models fit."""
        base: nn.Module | None = None
        candidates: list[MeasuredMode] = []
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
        wanted: dict[str, torch.Tensor] = {}
        ran = []
        for candidate in candidates:
            try:
                before = candidate.moved()
                gradients = gradients_of(candidate.model, self.sample)
                candidate.row["moved_mb"] = (candidate.moved() - before) / 1e6 or None
                wanted = wanted or {key: gradient.clone() for key, gradient in gradients.items()}
                candidate.row["gradients"] = compare_gradients(wanted, gradients)
                counted = measure_bytes(candidate.model, self.sample, self.device)
                candidate.row |= {"peak_mb": counted.peak / 1e6, "held_mb": counted.held / 1e6}
                if candidate.mode.backend is None:  # a compiled graph is one operator to the counter
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
    generator = torch.Generator().manual_seed(0)
    return torch.randn(options.input_shape, generator=generator).to(device, options.dtype)


def tokens_of(options: BenchOptions) -> str:
    """The size of a step, for a table."""
    return f"{options.batch_size} x {options.seq_len} tokens"


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


def _memory(options: BenchOptions) -> Measured:
    compared = SideBySide(options)
    rows = [candidate.row for candidate in compared.run(choose_modes(options, compared.device))]
    tokens = options.batch_size * (options.seq_len if options.input_shape is None else 1) * world_size()
    forward, plain = rows[0]["flops"]
    for row in rows:
        row["tokens_per_s"] = tokens / row["step_ms"] * 1000
        if "flops" in row:
            row["recompute"] = (row.pop("flops")[1] - plain) / forward if forward else 0.0
    about = {
        "model": options.model,
        "step": f"input {options.input_shape}" if options.input_shape else tokens_of(options),
        "strategy": options.strategy,
        "ranks": world_size(),
        "clock": "CPU time" if clock_for(compared.device) is time.process_time else "wall time",
        "dtype": str(options.dtype or torch.float32),
        "repeats": options.repeats,
    }
    note = (
        "peak: bytes beyond parameters, gradients and inputs, from PyTorch's allocator; saved: of them, between forward and "
        "backward. step / none: median over turns; the modes take turns. recompute: FLOPs, as a share of a forward. "
        "moved: to host memory in a step. gradients: against those of none. x: another project's code."
    )
    return Measured(f"Modes of training {options.model}", rows, about, [*compared.notes, note])


MEMORY = Suite(
    help="all modes on one model: step time, peak, saved and moved bytes, recompute FLOPs, tokens/s, gradient equality",
    reads=(*field_names(BenchOptions), "plot"),
    columns=(
        Column("mode", "mode"),
        Column("ratio", "step / none", "{:.2f}".format),
        Column("step_ms", "step ms", three_digits, keep=2),
        Column("spread", "spread", percent, keep=5),
        Column("tokens_per_s", "tokens/s", three_digits, keep=3),
        Column("peak_mb", "peak", megabytes=True),
        Column("held_mb", "saved", megabytes=True),
        Column("moved_mb", "moved", keep=4, megabytes=True),
        Column("recompute", "recompute", percent, keep=1),
        Column("gradients", "gradients", keep=4),
    ),
    run=_memory,
    x="ratio",
    y="peak_mb",
)

SUITES = dict(zip(SUITE_NAMES, (MEMORY,), strict=True))
