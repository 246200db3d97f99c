"""Suites ``memory`` and ``offload``: modes side by side on one model: step time, bytes, gradients.

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
from nemo_like.bench.measured_step import (
    clock_for,
    compare_gradients,
    gradients_of,
    measure_bytes,
    measure_flops,
    summarize,
    time_steps,
)
from nemo_like.bench.modes import (
    Copies,
    Mode,
    compiler_budget_modes,
    offloaded,
    our_modes,
    peer_modes,
    pick,
    save_on_cpu,
    trl_modes,
)
from nemo_like.bench.options import BenchOptions
from nemo_like.bench.suite import Column, Measured, Suite
from nemo_like.distributed.launch import world_size
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.layers import find_layers
from nemo_like.models import ModelSource, resolve_model
from nemo_like.options import OffloadConfig

_ERRORS = (ValueError, TypeError, RuntimeError, ImportError, AttributeError, NotImplementedError)
"""Errors that a mode may raise on a model or machine that is not for it."""

MIN_BYTES = 1 << 16
"""Smaller storages stay, so that small models on a CPU show something too."""

_TIMES = (
    Column("mode", "mode"),
    Column("ratio", "step / none", "{:.2f}".format),
    Column("step_ms", "step ms", three_digits, keep=2),
    Column("spread", "spread", percent, keep=5),
)

_READS = (
    *("model", "batch_size", "seq_len", "input_shape", "device", "dtype", "strategy", "modes", "peers", "repeats"),
    *("warmup", "threads", "plot"),
)


@dataclass
class MeasuredMode:
    """A model in one mode, and its row of the table."""

    mode: Mode
    model: nn.Module
    copies: Copies
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

    def run(self, modes: Sequence[Mode], also: Callable[[MeasuredMode], None]) -> list[MeasuredMode]:
        """Prepare and measure each mode, then let all take turns; `also` measures more into a candidate's row."""
        candidates = self._measured(self._prepared(modes), also)
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
                copies = mode.prepare(model, self.sample)
                model = _distribute(model, self.options.strategy, self.device)
            except _ERRORS as error:
                self._leave_out(mode, "not run", error)
                continue
            row = {"mode": ("x " if mode.peer else "") + mode.name, "peer": mode.peer}
            candidates.append(MeasuredMode(mode, model, copies, row))
        return candidates

    def _measured(self, candidates: list[MeasuredMode], also: Callable[[MeasuredMode], None]) -> list[MeasuredMode]:
        """Return the `candidates` that ran, with their bytes and gradients."""
        wanted: dict[str, torch.Tensor] = {}
        ran = []
        for candidate in candidates:
            try:
                gradients = gradients_of(candidate.model, self.sample)
                wanted = wanted or {key: gradient.clone() for key, gradient in gradients.items()}
                candidate.row["gradients"] = compare_gradients(wanted, gradients)
                counted = measure_bytes(candidate.model, self.sample, self.device)
                candidate.row |= {"peak_mb": counted.peak / 1e6, "held_mb": counted.held / 1e6}
                also(candidate)
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
    if device.type == "cpu":  # tensors of the CPU are in host memory already
        modes = [mode for mode in modes if not mode.offloads]
    modes += [mode.under(backend) for backend in options.compile for mode in modes[:3]]  # none, full, selective
    if options.peers:
        modes += [mode for backend in options.compile for mode in compiler_budget_modes(backend)]
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
    modes = choose_modes(options, compared.device)
    flops: dict[str, tuple[int, int]] = {}

    def count_flops(candidate: MeasuredMode) -> None:
        if candidate.mode.backend is None:  # a compiled graph is one operator to the counter
            flops[candidate.row["mode"]] = measure_flops(candidate.model, compared.sample)

    candidates = compared.run([mode for mode in modes if not mode.isolated], count_flops)
    for mode in (mode for mode in modes if mode.isolated):
        torch.compiler.reset()
        candidates += compared.run([modes[0], mode], count_flops)[1:]  # against a ``none`` of its own turns
    tokens = options.batch_size * (options.seq_len if options.input_shape is None else 1) * world_size()
    forward, whole = flops["none"]
    for row in (candidate.row for candidate in candidates):
        row["tokens_per_s"] = tokens / row["step_ms"] * 1000
        if row["mode"] in flops:
            row["recompute"] = (flops[row["mode"]][1] - whole) / forward if forward else 0.0
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
        "gradients: against those of none. x: another project's code."
    )
    rows = [candidate.row for candidate in candidates]
    return Measured(f"Modes of training {options.model}", rows, about, [*compared.notes, note])


MEMORY = Suite(
    help="all modes on one model: step time, peak and saved bytes, recompute FLOPs, tokens/s, gradient equality",
    reads=(
        *(
            "model",
            "batch_size",
            "seq_len",
            "input_shape",
            "device",
            "dtype",
            "strategy",
            "modes",
            "budgets",
            "compile",
        ),
        *("peers", "repeats", "warmup", "threads", "plot"),
    ),
    columns=(
        *_TIMES,
        Column("tokens_per_s", "tokens/s", three_digits, keep=3),
        Column("peak_mb", "peak", megabytes=True),
        Column("held_mb", "saved", megabytes=True),
        Column("recompute", "recompute", percent, keep=1),
        Column("gradients", "gradients", keep=4),
    ),
    run=_memory,
    x="ratio",
    y="peak_mb",
)


def _offload_modes(options: BenchOptions) -> list[Mode]:
    """Each way of offloading behind the same checkpointing without it, then other implementations."""
    plain = {mode.name: mode for mode in our_modes(())}
    modes = [
        plain["none"],
        plain["full"],
        offloaded("full + boundary", "full", OffloadConfig(mode="boundary", min_bytes=MIN_BYTES)),
        plain["selective"],
        offloaded("selective + saved", "selective", OffloadConfig(mode="saved", min_bytes=MIN_BYTES)),
        offloaded("all", "none", OffloadConfig(mode="all", min_bytes=MIN_BYTES)),
    ]
    peers = [Mode("torch: save_on_cpu", save_on_cpu, peer=True, offloads=True), *trl_modes()] if options.peers else []
    return pick(modes + peers, options.modes)


def _offload(options: BenchOptions) -> Measured:
    if world_size() > 1 or options.strategy != "single":
        raise ValueError("The offload suite runs on one rank with strategy 'single'; start it without torchrun.")
    compared = SideBySide(options)

    def count_copies(candidate: MeasuredMode) -> None:
        """Count on a step of its own, since measuring a CPU's bytes takes several steps."""
        copies = candidate.copies
        before = (copies.moved(), copies.back(), copies.stalls())
        gradients_of(candidate.model, compared.sample)
        after = (copies.moved(), copies.back(), copies.stalls())
        moved, back, stalls = (now - then for now, then in zip(after, before))
        candidate.row |= {
            "moved_mb": moved / 1e6 if copies.known else None,
            "both_ways": moved + back,
            "stalls": stalls if copies.host_peak is not None else None,
            "host_mb": None if copies.host_peak is None else copies.host_peak() / 1e6,
        }

    rows = [candidate.row for candidate in compared.run(_offload_modes(options), count_copies)]
    for row in rows:
        row["gb_per_s"] = row.pop("both_ways") / row["step_ms"] / 1e6 or None
    about = {
        "model": options.model,
        "step": tokens_of(options),
        "dtype": str(options.dtype or torch.float32),
        "min_bytes": MIN_BYTES,
        "repeats": options.repeats,
    }
    note = (
        "peak: bytes on the device beyond parameters, gradients and inputs, from PyTorch's allocator, host slabs not "
        "counted; saved: of them, between forward and backward. moved: to the host in a step. host: its peak. stalls: in a "
        "step. GB/s: bytes both ways over the step time. gradients: against those of none. x: another project's code."
    )
    if compared.device.type == "cpu":
        note += " On a CPU save_on_cpu copies nothing: what is moved is what a GPU would move."
    return Measured(f"Offloading on {options.model}", rows, about, [*compared.notes, note])


OFFLOAD = Suite(
    help="offloading modes on one model: bytes moved, device and host peaks, step time, together with save_on_cpu and TRL",
    reads=_READS,
    columns=(
        *_TIMES,
        Column("peak_mb", "peak", megabytes=True),
        Column("held_mb", "saved", megabytes=True),
        Column("moved_mb", "moved", megabytes=True),
        Column("host_mb", "host", keep=1, megabytes=True),
        Column("stalls", "stalls", "{:.1f}".format, keep=4),
        Column("gb_per_s", "GB/s", three_digits, keep=3),
        Column("gradients", "gradients", keep=4),
    ),
    run=_offload,
    x="ratio",
    y="peak_mb",
)
