"""Suite ``offload``: activations in host memory. Bytes moved, device and host peaks and step time, beside other offloaders.

On a CPU both sides are main memory: the copying back end copies as a GPU's would, so the bytes are those of a GPU, and the
device's share is what PyTorch allocates besides the slabs. Step times there say what the copies cost, not what overlaps.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nemo_like.activation_checkpointing.kv_sharing import disable_cache
from nemo_like.bench.bench_report import Column, Table, surroundings
from nemo_like.bench.measured_step import (
    compare_gradients,
    gradients_of,
    measure_bytes,
    summarize,
    time_steps,
    use_threads,
)
from nemo_like.bench.suite_memory import sample_of
from nemo_like.bench.suite_options import BenchOptions
from nemo_like.distributed.launch import world_size
from nemo_like.layers import find_layers
from nemo_like.models import resolve_model
from nemo_like.offload import Offloader, apply_offloading
from nemo_like.options import OffloadConfig, did_you_mean, normalise
from nemo_like.parallelizer import apply_activation_checkpointing

HELP = "offloading modes on one model: bytes moved, device and host peaks, step time, beside save_on_cpu and TRL"
READS = (
    "model", "batch_size", "seq_len", "input_shape", "device", "dtype", "strategy", "modes",
    "peers", "repeats", "warmup", "threads", "plot",
)  # fmt: skip

MIN_BYTES = 1 << 16
"""Smaller storages stay, so that small models on a CPU show something too."""

COLUMNS = (
    Column("mode", "mode"),
    Column("ratio", "step time / none", "{:.2f}"),
    Column("step_ms", "step ms", "{:.1f}"),
    Column("spread", "spread", "{:.0%}"),
    Column("peak_mb", "device peak MB", "{:.2f}"),
    Column("held_mb", "device held MB", "{:.2f}"),
    Column("moved_mb", "moved MB / step", "{:.2f}"),
    Column("host_mb", "host peak MB", "{:.2f}"),
    Column("stalls", "stalls / step", "{:.1f}"),
    Column("gb_per_s", "copied GB/s", "{:.2f}"),
    Column("gradients", "gradients = none's"),
)


@dataclass
class _Counted:
    """What a way of offloading has moved so far, in bytes."""

    moved: Callable[[], int] = lambda: 0
    back: Callable[[], int] = lambda: 0
    stalls: Callable[[], int] = lambda: 0
    host_peak: Callable[[], int] | None = None
    known: bool = True
    """False: another implementation, which does not count."""


@dataclass(frozen=True)
class _Variant:
    name: str
    prepare: Callable[[nn.Module, torch.device], _Counted]
    peer: bool = False


@dataclass
class _Offloading:
    variant: _Variant
    model: nn.Module
    counted: _Counted
    row: dict[str, Any] = field(default_factory=dict)


def run(options: BenchOptions) -> Table:
    """Measure; a variant that cannot run here has its reason in the notes instead of a row.

    Raises:
        ValueError: an unknown variant, a model without layers, or more than one rank.
    """
    if world_size() > 1 or options.strategy != "single":
        raise ValueError("The offload suite runs on one rank with strategy 'single'; start it without torchrun.")
    use_threads(options.threads)
    device = options.place()
    source = resolve_model(options.model)
    sample = sample_of(source, options, device)
    notes: list[str] = []
    torch.manual_seed(0)
    base = source.build(device=device, dtype=options.dtype)
    candidates: list[_Offloading] = []
    wanted: dict[str, torch.Tensor] = {}
    for variant in _chosen(options):
        try:
            candidate = _prepare(variant, base, device)
            gradients = gradients_of(candidate.model, sample)  # the first step: host memory is allocated here
            wanted = wanted or {name: gradient.clone() for name, gradient in gradients.items()}
            candidate.row["gradients"] = compare_gradients(wanted, gradients)
            _count(candidate, sample, device)
        except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
            if variant.name == "none":
                raise
            notes.append(f"{variant.name}: not run: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
            continue
        candidates.append(candidate)
    timed = time_steps([c.model for c in candidates], sample, device, options.repeats, options.warmup)
    for candidate, times in zip(candidates, timed, strict=True):
        row = candidate.row
        row |= summarize(times, timed[0])
        row["gb_per_s"] = row.pop("both_ways") / row["step_ms"] / 1e6 or None
    return Table(
        f"Offloading on {options.model}",
        COLUMNS,
        [candidate.row for candidate in candidates],
        {
            "model": options.model,
            "step": f"{options.batch_size} x {options.seq_len} tokens",
            "dtype": str(options.dtype or torch.float32),
            "min_bytes": MIN_BYTES,
            "repeats": options.repeats,
        }
        | surroundings(device),
        [*notes, _explanation(device)],
        x="ratio",
        y="peak_mb",
    )


def _explanation(device: torch.device) -> str:
    text = (
        "Device peak and held: bytes beyond parameters, gradients and inputs, from PyTorch's allocator, host slabs not "
        "counted; held is between forward and backward. Copied GB/s: bytes both ways over the step time. "
        "x: somebody else's code."
    )
    if device.type == "cpu":
        text += " On a CPU save_on_cpu copies nothing: its MB moved are those a GPU would move."
    return text


def _chosen(options: BenchOptions) -> list[_Variant]:
    variants = [
        _ours("none", "none", "none"),
        _ours("full", "full", "none"),
        _ours("full + boundary", "full", "boundary"),
        _ours("selective", "selective", "none"),
        _ours("selective + saved", "selective", "saved"),
        _ours("all", "none", "all"),
    ]
    if options.peers:
        variants.append(_Variant("torch: save_on_cpu", _save_on_cpu, peer=True))
        if importlib.util.find_spec("trl") is not None:
            variants.append(_Variant("trl: OffloadActivations", _trl, peer=True))
    if options.modes is None:
        return variants
    known = {normalise(variant.name): variant for variant in variants}
    for name in options.modes:
        if normalise(name) not in known:
            hint = did_you_mean(name, [variant.name for variant in variants])
            raise ValueError(f"There is no mode {name!r} here; there are: {'; '.join(v.name for v in variants)}.{hint}")
    return [known["none"], *(known[normalise(name)] for name in options.modes if normalise(name) != "none")]


def _prepare(variant: _Variant, base: nn.Module, device: torch.device) -> _Offloading:
    model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
    disable_cache(model)
    counted = variant.prepare(model, device)
    return _Offloading(variant, model, counted, {"mode": ("x " if variant.peer else "") + variant.name})


def _count(candidate: _Offloading, sample: Any, device: torch.device) -> None:
    """The bytes of one step. Measuring a CPU's takes several steps, so the copies are counted on one of their own."""
    counted = candidate.counted
    before = (counted.moved(), counted.back(), counted.stalls())
    gradients_of(candidate.model, sample)
    moved, back, stalls = (now - then for now, then in zip((counted.moved(), counted.back(), counted.stalls()), before))
    bytes_of = measure_bytes(candidate.model, sample, device)
    candidate.row |= {
        "peak_mb": bytes_of.peak / 1e6,
        "held_mb": bytes_of.held / 1e6,
        "moved_mb": moved / 1e6 if counted.known else None,
        "both_ways": moved + back,
        "stalls": stalls if counted.host_peak is not None else None,
        "host_mb": None if counted.host_peak is None else counted.host_peak() / 1e6,
    }


def _ours(name: str, ac: str, mode: str) -> _Variant:
    def prepare(model: nn.Module, device: torch.device) -> _Counted:
        apply_activation_checkpointing(model, ac)
        if mode == "none":
            return _Counted()
        config = OffloadConfig(mode=mode, min_bytes=MIN_BYTES)
        return _counted(apply_offloading(model, [layer.module for layer in find_layers(model)], config))

    return _Variant(name, prepare)


def _counted(offloader: Offloader) -> _Counted:
    stats = offloader.stats
    return _Counted(
        lambda: stats.moved_bytes,
        lambda: stats.reloaded_bytes,
        lambda: stats.offload_stalls + stats.reload_stalls,
        lambda: stats.host_peak_live_bytes,
    )


def _save_on_cpu(model: nn.Module, device: torch.device) -> _Counted:
    inner = torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
    moved = [0, 0]

    def pack(tensor: torch.Tensor) -> Any:
        moved[0] += tensor.nbytes
        return inner.pack_hook(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        tensor = inner.unpack_hook(packed)
        moved[1] += tensor.nbytes
        return tensor

    _around_forward(model, lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))
    return _Counted(lambda: moved[0], lambda: moved[1])


def _trl(model: nn.Module, device: torch.device) -> _Counted:
    if device.type == "cpu":
        raise RuntimeError("it offloads accelerator tensors only")
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    manager = get_act_offloading_ctx_manager(model)
    _around_forward(model, lambda: manager)
    return _Counted(known=False)


def _around_forward(model: nn.Module, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    forward = model.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    model.forward = run
