"""Suite ``published``: what others measured on GPUs beside what is predicted for the same job, row by row.

The rows are torchtitan's (``published_h100.csv``, with its source in the first line). One set of device constants serves
all of them; none is fitted to a row.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from importlib import resources
from typing import Any

import torch

from nemo_like.bench import torchtitan_step
from nemo_like.bench.bench_report import Column, Table, surroundings
from nemo_like.bench.suite_options import BenchOptions
from nemo_like.models import resolve_model
from nemo_like.options import Precision
from nemo_like.planning.devices import Device, resolve_device
from nemo_like.planning.fit.layouts import Layout
from nemo_like.planning.fit.question import Question
from nemo_like.planning.fit.seconds import BlockSeconds
from nemo_like.planning.fit.shapes import ShapeKey, Shared, TracedShape, Variant

HELP = "predict the published steps of Llama 3 on 8 to 512 H100, and print prediction and publication side by side"

COLUMNS = (
    Column("model", "model"),
    Column("gpus", "GPUs"),
    Column("axes", "axes"),
    Column("step", "sequences x tokens"),
    Column("how", "how"),
    Column("tokens_per_second", "tokens/s/GPU", "{:,.0f}"),
    Column("published_tokens_per_second", "published", "{:,.0f}"),
    Column("speed_off", "off", "{:+.0%}"),
    Column("reserved_gib", "reserved GiB", "{:.1f}"),
    Column("published_reserved_gib", "published", "{:.1f}"),
    Column("memory_off", "off", "{:+.0%}"),
    Column("peak_gib", "peak GiB", "{:.1f}"),
    Column("left_out", "not predicted because of"),
)


def published_device() -> Device:
    """The H100 of these tables: 96 GB of HBM2e at 2.4 TB/s and 500 W, as their page says.

    Everything else is the table's H100 with 80 GB and 700 W. Its reachable FLOP/s are lowered with the power: an assumption,
    not a measurement, and the one constant that was chosen with these rows in sight (see docs/benchmarks/published.md).
    """
    known = resolve_device("h100-80gb")
    clock = 500 / 700
    return replace(
        known, name="h100-96gb-500w", memory_bytes=int(96e9), bandwidth=2.4e12 * 0.84,
        matmul_flops={kind: value * clock for kind, value in known.matmul_flops.items()},
        attention_flops={kind: value * clock for kind, value in known.attention_flops.items()},
    )  # fmt: skip


def published_rows() -> list[dict[str, str]]:
    """The rows of the table as they were published."""
    text = resources.files("nemo_like.bench").joinpath("published_h100.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def run(options: BenchOptions) -> Table:
    """Predict every row (or those of `options.model`, if it is one of their models)."""
    rows = published_rows()
    if options.model in {row["model"] for row in rows}:
        rows = [row for row in rows if row["model"] == options.model]
    made = [predicted(row) for row in rows]
    about = {"gpu": published_device().name, "source": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"}
    notes = [
        "One set of device constants for all rows; what was left out of a prediction is in its last column.",
        "reserved: of our model of CUDA's caching allocator; where it has none, none is printed.",
    ]
    return Table("Published steps", COLUMNS, made, about | surroundings(torch.device("cpu")), notes)


def predicted(row: dict[str, str]) -> dict[str, Any]:
    """One row: prediction and publication."""
    sizes = {name: int(row[name]) for name in ("gpus", "dp_shard", "tp", "cp", "pp", "local_batch", "seq_len")}
    said: dict[str, Any] = {
        "model": row["model"], "gpus": sizes["gpus"],
        "axes": ", ".join(f"{name} {sizes[name]}" for name in ("dp_shard", "tp", "cp", "pp") if sizes[name] > 1),
        "step": f"{sizes['local_batch']} x {sizes['seq_len']}",
        "how": ", ".join(_how(row)), "published_tokens_per_second": float(row["tokens_per_second_per_gpu"]),
        "published_reserved_gib": float(row["reserved_gib"]),
    }  # fmt: skip
    if sizes["pp"] > 1:
        return said | {"left_out": "pp"}
    shape, layout, variant = _shape(row, sizes)
    choices = shape.uniform[row["ac"]]
    seconds = shape.seconds(layout, variant, choices).total
    speed = layout.sequences * sizes["seq_len"] / layout.gpus / seconds
    said |= {"tokens_per_second": speed, "speed_off": speed / said["published_tokens_per_second"] - 1}
    peak = shape.peak(layout, variant, choices).total
    said["peak_gib"] = peak / 2**30
    left = ["async_tp"] * (row["async_tp"] == "yes") + ["memory of fp8"] * (row["precision"] == "fp8")
    left += ["memory of compiled layers"] * (row["compile"] == "yes")
    if sizes["tp"] > 1:
        return said | {"left_out": ", ".join([*left, "sequence parallel, split logits"])}
    eager_selective = row["ac"] == "selective" and row["compile"] == "no"
    found = torchtitan_step.reserved(shape.planner(layout, variant), choices, eager_selective=eager_selective)
    said["peak_gib"], said["reserved_gib"] = found.tensors / 2**30, found.reserved / 2**30
    said["memory_off"] = said["reserved_gib"] / said["published_reserved_gib"] - 1
    return said | {"left_out": ", ".join(left) or None}


def _how(row: dict[str, str]) -> list[str]:
    words = [row["ac"], row["precision"]]
    return words + ["compiled"] * (row["compile"] == "yes") + ["async tp"] * (row["async_tp"] == "yes")


def _shape(row: dict[str, str], sizes: dict[str, int]) -> tuple[TracedShape, Layout, Variant]:
    """The local shape, with its blocks timed as the row runs them."""
    device = published_device()
    layout = Layout(1, sizes["dp_shard"], sizes["tp"], sizes["cp"], micro_batch=sizes["local_batch"])
    question = Question(
        gpus=sizes["gpus"], device=device, seq_len=sizes["seq_len"], limit=device.memory_bytes,
        precision=Precision("bf16"), step=torchtitan_step.STEP,
    )  # fmt: skip
    model = resolve_model(row["model"]).build("meta")

    def sample(batch: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(batch, sizes["seq_len"], dtype=torch.long)}

    shape = TracedShape(model, ShapeKey.of(layout), question, sample, Shared())
    compiled, fp8 = row["compile"] == "yes", row["precision"] == "fp8"
    # Twice the products per second: the H100's data sheet (1,979 TFLOPS in 8 bits, 989.4 in 16).
    rate = 2 * device.matmul_flops["half"] if fp8 else 0.0
    shape.blocks = [
        BlockSeconds.of(problem, device, compiled=compiled, fp8_flops=rate) for problem in shape.base.problems
    ]
    return shape, layout, Variant(row["ac"], "model", "none", None)
