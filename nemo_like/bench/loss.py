"""Suite ``loss``: head and cross entropy of hidden states: bytes, time, and how far from float32.

Whole logits, `chunked_cross_entropy`, torch's `F.linear_cross_entropy`, and where they are installed Liger and
cut-cross-entropy take turns, step by step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like._util.table import three_digits
from nemo_like.bench.measured_step import peak_of, summarize, take_turns
from nemo_like.bench.options import BenchOptions
from nemo_like.bench.suite import Column, Measured, Suite
from nemo_like.losses import chunked_cross_entropy

VOCABULARIES = (32_000, 128_000, 256_000)
WIDTH, CHUNK = 256, 64
WHOLE, OURS = "whole logits", "ours"

Loss = Callable[[Tensor, nn.Linear, Tensor], Tensor]


def _whole(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), labels)


def _ours(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return chunked_cross_entropy(hidden, head, labels, chunk_tokens=CHUNK)


def _torchs(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None)
    return F.linear_cross_entropy(hidden, head.weight, labels, options=options)


def variants(device: torch.device, peers: bool) -> dict[str, Loss]:
    """Name → loss, for what is there on this machine."""
    losses: dict[str, Loss] = {WHOLE: _whole, OURS: _ours}
    if peers and hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions"):
        losses["x torch: linear_cross_entropy"] = _torchs
    if peers and device.type == "cuda":
        with contextlib.suppress(ImportError):  # not installed: the table has no such row
            liger = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
            losses["x Liger"] = lambda h, head, y: liger.LigerFusedLinearCrossEntropyFunction.apply(h, head.weight, y)[
                0
            ]
        with contextlib.suppress(ImportError):
            cut = importlib.import_module("cut_cross_entropy")
            losses["x cut-cross-entropy"] = lambda h, head, y: cut.linear_cross_entropy(h, head.weight, y)
    return losses


def run_loss(
    tokens: int,
    vocabulary: int,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    warmup: int,
    peers: bool = True,
) -> list[dict[str, Any]]:
    """One row for each variant. Errors are relative, against whole logits in float32 (float64 for float32)."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, device=device, dtype=dtype, requires_grad=True)
    head = nn.Linear(WIDTH, vocabulary, bias=False, device=device, dtype=dtype)
    labels = torch.randint(vocabulary, (tokens,), device=device)
    losses = variants(device, peers)
    exact = _exact(hidden, head, labels)
    rows = []
    for name, loss in losses.items():
        peak = _peak(functools.partial(loss, hidden, head, labels), [hidden, head.weight], device)
        value, grads = _step(loss, hidden, head, labels)
        row = {
            "variant": name,
            "vocabulary": vocabulary,
            "peak_mb": peak / 1e6,
            "chunks": peak / (CHUNK * vocabulary * dtype.itemsize),
            "peer": name.startswith("x "),
            "loss_error": abs(float(value) / float(exact[0]) - 1),
            "gradient_error": max(
                float((g.to(right.dtype) - right).norm() / right.norm()) for g, right in zip(grads, exact[1])
            ),
        }
        rows.append(row)
    steps = [functools.partial(_step, loss, hidden, head, labels) for loss in losses.values()]
    timed = take_turns(steps, device, repeats, warmup)
    for row, times in zip(rows, timed):
        summary = summarize(times, timed[0])
        row |= {"step_ms": summary["step_ms"], "ratio": summary["ratio"]}
    return rows


def _exact(hidden: Tensor, head: nn.Linear, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    wide = torch.float64 if hidden.dtype == torch.float32 else torch.float32
    states = hidden.detach().to(wide).requires_grad_()
    wide_head = copy.deepcopy(head).to(wide)
    loss = F.cross_entropy(wide_head(states), labels)
    return loss.detach(), list(torch.autograd.grad(loss, [states, wide_head.weight]))


def _step(loss: Loss, hidden: Tensor, head: nn.Linear, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    value = loss(hidden, head, labels)
    return value.detach(), list(torch.autograd.grad(value, [hidden, head.weight]))


def _peak(loss: Callable[[], Tensor], leaves: list[Tensor], device: torch.device) -> int:
    """The most bytes alive in one step, less those of the gradients that it leaves."""
    for leaf in leaves:
        leaf.grad = None
    peak = peak_of(lambda: loss().backward(), device)
    gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    for leaf in leaves:
        leaf.grad = None
    return peak - gradients


def _run(options: BenchOptions) -> Measured:
    device, dtype, tokens = options.place(), options.dtype or torch.float32, options.batch_size * options.seq_len
    rows: list[dict[str, Any]] = []
    for vocabulary in VOCABULARIES:
        rows += run_loss(tokens, vocabulary, device, dtype, options.repeats, options.warmup, options.peers)
    about = {
        "tokens": tokens,
        "width": WIDTH,
        "chunk": f"{CHUNK} tokens",
        "dtype": str(dtype),
        "repeats": options.repeats,
    }
    note = (
        "peak: bytes beyond gradients; in chunks: as a multiple of one chunk of logits. step / whole: median over turns. "
        "Errors are relative, against whole logits in a wider dtype. x: another project's code."
    )
    return Measured("Head and loss", rows, about, [note])


LOSS = Suite(
    help="head and loss: whole logits, ours in chunks, torch's linear_cross_entropy; bytes, time, errors",
    reads=("batch_size", "seq_len", "device", "dtype", "peers", "repeats", "warmup", "threads", "plot"),
    columns=(
        Column("variant", "variant"),
        Column("vocabulary", "vocabulary", "{:,}".format),
        Column("peak_mb", "peak", megabytes=True),
        Column("chunks", "in chunks", three_digits, keep=3),
        Column("step_ms", "step ms", three_digits),
        Column("ratio", "step / whole", "{:.2f}".format, keep=1),
        Column("loss_error", "loss error", "{:.1e}".format, keep=4),
        Column("gradient_error", "gradient error", "{:.1e}".format, keep=2),
    ),
    run=_run,
    x="step_ms",
    y="peak_mb",
)
