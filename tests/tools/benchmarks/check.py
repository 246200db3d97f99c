"""Suite ``check``: what the planner predicts against a rank on fake tensors, for published models on up to 4,096 ranks."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

from nemo_like.fake_rank import dry_run
from nemo_like.job import Job
from nemo_like.models import resolve_model
from tests.tools.benchmarks.suite import MODEL, Column, Measured, Suite

SHAPES: tuple[tuple[str, int, str, dict[str, int]], ...] = (
    ("llama3-8b", 8, "full", {}),
    ("llama3-8b", 64, "selective", {"tp": 8}),
    ("llama3-8b", 4096, "none", {"cp": 8}),
    ("llama3-8b", 1024, "50%", {"tp": 4, "cp": 2}),
    ("mixtral-8x7b", 8, "full", {"ep": 8}),
    ("mixtral-8x7b", 256, "selective", {"tp": 8}),
    ("mixtral-8x7b", 2048, "none", {"cp": 4, "ep": 8}),
    ("gpt-oss-20b", 8, "full", {"ep": 8}),
    ("gpt-oss-20b", 64, "selective", {"tp": 8}),
    ("gpt-oss-20b", 4096, "none", {"cp": 2}),
    ("qwen3-30b-a3b", 16, "full", {"ep": 8}),
    ("qwen3-30b-a3b", 128, "selective", {"tp": 4}),
    ("qwen3-30b-a3b", 4096, "none", {"cp": 4, "ep": 16}),
    ("deepseek-v3", 128, "full", {"ep": 64}),
    ("deepseek-v3", 2048, "selective", {"cp": 2, "ep": 64}),
    ("deepseek-v3", 4096, "full", {"tp": 8}),
)
"""(preset, ranks, ``ac``, axes)."""

TOKENS = 4096


def _run(options: Namespace) -> Measured:
    """Check each shape once (or, for another preset in `options.model`, that one on 8 ranks)."""
    shapes = SHAPES if options.model == MODEL else ((options.model, 8, "full", {}),)
    about = {"seq_len": TOKENS, "batch_size": 1}
    return Measured("Plans against a rank on fake tensors", [measure(*shape) for shape in shapes], about)


def measure(name: str, ranks: int, ac: str, axes: dict[str, int], tokens: int = TOKENS) -> dict[str, Any]:
    """One row: a step of 1 x `tokens` tokens in bfloat16 on rank 0."""
    source = resolve_model(name)
    start = time.process_time()
    job = Job.of(ac=ac, world_size=ranks, precision="bf16", **axes)
    checked = dry_run(source.build("meta"), job, source.sample_input(1, tokens))
    seconds, off = (
        time.process_time() - start,
        None if checked.against is None else checked.against - checked.peak_bytes,
    )
    return {
        "model": name,
        "ranks": ranks,
        "axes": " ".join(f"{axis}={size}" for axis, size in axes.items()),
        "ac": ac,
        "seconds": seconds,
        "peak_bytes": checked.peak_bytes,
        "planned_bytes": checked.against,
        "off": off,
        "share": None if off is None else 100 * off / checked.peak_bytes,
        "at": checked.at,
    }


CHECK = Suite(
    help="plans against the dry run of a rank (`nemo-like plan --check`): Llama, Mixtral, GPT-OSS, Qwen3-MoE, DeepSeek-V3",
    columns=(
        Column("model", "model"),
        Column("ranks", "ranks", "{:,}".format),
        Column("axes", "axes"),
        Column("ac", "ac"),
        Column("seconds", "CPU s", "{:.0f}".format),
        Column("peak_bytes", "dry run, bytes", "{:,}".format),
        Column("planned_bytes", "plan, bytes", "{:,}".format),
        Column("off", "plan - dry run", "{:+,}".format),
        Column("share", "%", "{:+.3f}".format),
        Column("at", "peak of the dry run"),
    ),
    run=_run,
)
