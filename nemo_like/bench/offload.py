"""Suite ``offload``: activations in host memory. Bytes moved, device and host peaks, step time, other offloaders.

On a CPU both sides are main memory. The copying back end copies as a GPU's would, so the bytes are those of a GPU. The
device's share is what PyTorch allocates besides the slabs. Step times there say what the copies cost, not what overlaps.
"""

from __future__ import annotations

import torch

from nemo_like.bench.measured_step import gradients_of
from nemo_like.bench.memory import Candidate, SideBySide, tokens_of
from nemo_like.bench.modes import Mode, offloaded, our_modes, pick, save_on_cpu, trl_modes
from nemo_like.bench.suite import BenchOptions, Measured, Suite
from nemo_like.bench.table import Column
from nemo_like.distributed.launch import world_size
from nemo_like.options import OffloadConfig

MIN_BYTES = 1 << 16
"""Smaller storages stay, so that small models on a CPU show something too."""


def _modes(options: BenchOptions) -> list[Mode]:
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


def _run(options: BenchOptions) -> Measured:
    if world_size() > 1 or options.strategy != "single":
        raise ValueError("The offload suite runs on one rank with strategy 'single'; start it without torchrun.")
    compared = SideBySide(options)

    def count_copies(candidate: Candidate) -> None:
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

    rows = [candidate.row for candidate in compared.run(_modes(options), count_copies)]
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
        "Device peak and held: bytes beyond parameters, gradients and inputs, from PyTorch's allocator, host slabs not "
        "counted; held is between forward and backward. Copied GB/s: bytes both ways over the step time. "
        "x: somebody else's code."
    )
    if compared.device.type == "cpu":
        note += " On a CPU save_on_cpu copies nothing: its MB moved are those a GPU would move."
    return Measured(f"Offloading on {options.model}", rows, about, [*compared.notes, note])


OFFLOAD = Suite(
    help="offloading modes on one model: bytes moved, device and host peaks, step time, beside save_on_cpu and TRL",
    reads=(
        *("model", "batch_size", "seq_len", "input_shape", "device", "dtype", "strategy", "modes"),
        *("peers", "repeats", "warmup", "threads", "plot"),
    ),
    columns=(
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
    ),
    run=_run,
    x="ratio",
    y="peak_mb",
)
