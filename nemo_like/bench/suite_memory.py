"""Suite ``memory``: every mode side by side on one model: step time, bytes, recompute FLOPs, gradients."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nemo_like.bench.bench_report import Column, Table, surroundings
from nemo_like.bench.measured_step import (
    clock_for,
    compare_gradients,
    gradients_of,
    measure_bytes,
    measure_flops,
    summarize,
    time_steps,
    use_threads,
)
from nemo_like.bench.modes import Mode, compiler_budget_modes, our_modes, peer_modes
from nemo_like.bench.suite_options import BenchOptions
from nemo_like.distributed.launch import world_size
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.layers import find_layers
from nemo_like.models import ModelSource, resolve_model
from nemo_like.options import did_you_mean, normalise

HELP = "all modes on one model: step time, peak and held bytes, recompute FLOPs, tokens/s, gradient equality"
READS = (
    "model", "batch_size", "seq_len", "input_shape", "device", "dtype", "strategy", "modes", "budgets", "compile",
    "peers", "repeats", "warmup", "threads", "plot",
)  # fmt: skip

COLUMNS = (
    Column("mode", "mode"),
    Column("ratio", "step time / none", "{:.2f}"),
    Column("step_ms", "step ms", "{:.1f}"),
    Column("spread", "spread", "{:.0%}"),
    Column("tokens_per_s", "tokens/s", "{:,.0f}"),
    Column("peak_mb", "peak MB", "{:.2f}"),
    Column("held_mb", "held MB", "{:.2f}"),
    Column("recompute", "recompute / forward FLOPs", "{:.1%}"),
    Column("gradients", "gradients = none's"),
)


@dataclass
class _Candidate:
    mode: Mode
    model: nn.Module
    row: dict[str, Any]


def run(options: BenchOptions) -> Table:
    """Measure; a mode that cannot run on this model or machine has its reason in the notes instead of a row.

    Raises:
        ValueError: an unknown mode, or a model that cannot be built or has no layers.
    """
    use_threads(options.threads)
    device = options.place()
    source = resolve_model(options.model)
    sample = sample_of(source, options, device)
    notes: list[str] = []
    modes = choose_modes(options, device)
    shared = _prepare(source, [mode for mode in modes if not mode.isolated], sample, options, device, notes)
    reference = _measure(shared, sample, device, notes)
    candidates = _time(shared, sample, device, options)
    for mode in (mode for mode in modes if mode.isolated):
        torch.compiler.reset()
        alone = _prepare(source, [modes[0], mode], sample, options, device, notes)
        _measure(alone, sample, device, notes)
        candidates += _time(alone, sample, device, options)[1:]  # against a ``none`` of its own turns
    tokens = options.batch_size * (options.seq_len if options.input_shape is None else 1) * world_size()
    for candidate in candidates:
        candidate.row["tokens_per_s"] = tokens / candidate.row["step_ms"] * 1000
        flops = candidate.row.pop("flops")
        if flops is not None and reference is not None:
            forward, whole = reference
            candidate.row["recompute"] = (flops - whole) / forward if forward else 0.0
    size = f"input {options.input_shape}" if options.input_shape else f"{options.batch_size} x {options.seq_len} tokens"
    clock = "CPU time" if clock_for(device) is time.process_time else "wall time"
    about = {"model": options.model, "step": size, "strategy": options.strategy, "ranks": world_size(), "clock": clock}
    notes += [
        "Peak and held: bytes beyond parameters, gradients and inputs, from PyTorch's allocator; held is between "
        "forward and backward. Ratio: median over turns; the modes take turns. x: somebody else's code.",
    ]
    return Table(
        f"Modes of training {options.model}",
        COLUMNS,
        [candidate.row for candidate in candidates],
        about | {"dtype": str(options.dtype or torch.float32), "repeats": options.repeats} | surroundings(device),
        notes,
        x="ratio",
        y="peak_mb",
    )


def choose_modes(options: BenchOptions, device: torch.device) -> list[Mode]:
    """The modes that `options` asks for, ``none`` first.

    Raises:
        ValueError: an unknown mode.
    """
    modes = our_modes(options.budgets) + (peer_modes() if options.peers else [])
    if device.type == "cpu":  # tensors of the CPU are in host memory already
        modes = [mode for mode in modes if not mode.offloads]
    modes += [mode.under(backend) for backend in options.compile for mode in modes[:3]]  # none, full, selective
    if options.peers:
        modes += [mode for backend in options.compile for mode in compiler_budget_modes(backend)]
    if options.modes is None:
        return modes
    known = {normalise(mode.name): mode for mode in modes}
    for name in options.modes:
        if normalise(name) not in known:
            names = [mode.name for mode in modes]
            hint = did_you_mean(name, names)
            raise ValueError(f"There is no mode {name!r} here; there are: {'; '.join(names)}.{hint}")
    return [known["none"]] + [known[normalise(name)] for name in options.modes if normalise(name) != "none"]


def sample_of(source: ModelSource, options: BenchOptions, device: torch.device) -> Any:
    """The input of every step."""
    if options.input_shape is None:
        return source.sample_input(options.batch_size, options.seq_len, device)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(options.input_shape, generator=generator).to(device, options.dtype)


def _prepare(
    source: ModelSource,
    modes: list[Mode],
    sample: Any,
    options: BenchOptions,
    device: torch.device,
    notes: list[str],
) -> list[_Candidate]:
    """One model per mode. On one device they share their parameters, so that large models fit."""
    base: nn.Module | None = None
    candidates: list[_Candidate] = []
    for mode in modes:
        if base is None or options.strategy != "single":
            torch.manual_seed(0)
            base = source.build(device=device, dtype=options.dtype)
        model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
        try:
            mode.prepare(model, sample)
            candidates.append(_Candidate(mode, _distribute(model, options.strategy, device), _row(mode)))
        except (ValueError, TypeError, RuntimeError, ImportError, AttributeError, NotImplementedError) as error:
            if mode.name == "none":
                raise
            notes.append(f"{mode.name}: not run: {_first_line(error)}")
    return candidates


def _time(candidates: list[_Candidate], sample: Any, device: torch.device, options: BenchOptions) -> list[_Candidate]:
    """Let the candidates take turns, the first of them being ``none``."""
    timed = time_steps([c.model for c in candidates], sample, device, options.repeats, options.warmup)
    for candidate, times in zip(candidates, timed):
        candidate.row |= summarize(times, timed[0])
    return candidates


def _distribute(model: nn.Module, strategy: str, device: torch.device) -> nn.Module:
    if strategy == "single" or world_size() == 1:
        return model
    if strategy == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    shard_layers(model, find_layers(model), build_mesh(device_type=device.type))
    return model


def _measure(
    candidates: list[_Candidate], sample: Any, device: torch.device, notes: list[str]
) -> tuple[int, int] | None:
    """Bytes, FLOPs and gradients of each candidate; those that fail leave the list.

    Returns the FLOPs of ``none``: of its forward and of its step.
    """
    wanted: dict[str, torch.Tensor] = {}
    flops_of_none: tuple[int, int] | None = None
    for candidate in list(candidates):
        name, row = candidate.mode.name, candidate.row
        try:
            gradients = gradients_of(candidate.model, sample)
            if name == "none":
                wanted = {key: gradient.clone() for key, gradient in gradients.items()}
            row["gradients"] = compare_gradients(wanted, gradients)
            counted = measure_bytes(candidate.model, sample, device)
            # A compiled graph is one operator to the counter.
            flops = measure_flops(candidate.model, sample) if candidate.mode.backend is None else None
            row["flops"] = None if flops is None else flops[1]
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, ImportError) as error:
            if name == "none":
                raise
            candidates.remove(candidate)
            notes.append(f"{name}: failed: {_first_line(error)}")
            continue
        row |= {"peak_mb": counted.peak / 1e6, "held_mb": counted.held / 1e6}
        if name == "none":
            flops_of_none = flops
    return flops_of_none


def _row(mode: Mode) -> dict[str, Any]:
    return {"mode": ("x " if mode.peer else "") + mode.name, "peer": mode.peer}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
