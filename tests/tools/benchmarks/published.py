"""Suite ``published``: what others measured on GPUs beside what is predicted for the same job, row by row.

The tables are ``public/torchtitan_*.csv``, each with its source in its first line. One set of device constants serves
all rows of a GPU; none is fitted to a row.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_like.bench import BenchOptions
from nemo_like.planning.devices import Device, resolve_device
from tests.tools.benchmarks.suite import Column, Measured, Suite
from tests.tools.benchmarks.torchtitan_plan import PublishedStep, plan_step

_FOLDER = Path(__file__).with_name("public")
_FILES = {"h100": "torchtitan_2024_12", "h200": "torchtitan_2025_06_h200"}
"""The file of torchtitan's rows, by GPU."""


def published_device() -> Device:
    """The H100 of torchtitan's tables: 96 GB of HBM2e at 2.4 TB/s and 500 W, as their page says.

    Everything else is the table's H100 with 80 GB and 700 W. Its reachable FLOP/s are lowered with the power: an assumption,
    not a measurement, and the one constant that was chosen with their rows in sight (see docs/evidence/published.md).
    """
    known = resolve_device("h100-80gb")
    clock = 500 / 700
    return replace(
        known,
        name="h100-96gb-500w",
        memory_bytes=int(96e9),
        bandwidth=2.4e12 * 0.84,
        matmul_flops={kind: value * clock for kind, value in known.matmul_flops.items()},
        attention_flops={kind: value * clock for kind, value in known.attention_flops.items()},
    )


def published_rows(gpu: str = "h100") -> list[dict[str, str]]:
    """The rows of the table for ``h100`` or ``h200`` as they were published."""
    return lines_of(_FILES[gpu])


def lines_of(name: str) -> list[dict[str, str]]:
    """The rows of a file of published steps; lines that begin with ``#`` name its source."""
    text = (_FOLDER / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#")))


def _run(options: BenchOptions) -> Measured:
    """Predict every row (or those of `options.model`, if it is one of their models)."""
    rows = [(row, gpu) for gpu in ("h100", "h200") for row in published_rows(gpu)]
    if options.model in {row["model"] for row, _ in rows}:
        rows = [(row, gpu) for row, gpu in rows if row["model"] == options.model]
    about = {"source": "torchtitan, benchmarks/: first line of tests/tools/benchmarks/public/torchtitan_*.csv"}
    notes = [
        "One set of device constants for all rows; what was left out of a prediction is in its last column.",
        "reserved: of our model of CUDA's caching allocator; of a pipeline, on the rank that has most.",
    ]
    return Measured("Published steps", [predicted(row, gpu) for row, gpu in rows], about, notes)


def predicted(row: dict[str, str], gpu: str = "h100") -> dict[str, Any]:
    """One row of the table for `gpu`: prediction and publication."""
    step = PublishedStep.of(row, compiled_loss=gpu == "h200" and row["compile"] == "yes")
    planned = plan_step(step, published_device() if gpu == "h100" else resolve_device(gpu))
    speed = step.sequences * step.seq_len / step.gpus / planned.seconds
    reserved = planned.memory.reserved / 2**30
    theirs = {
        "published_tokens_per_second": float(row["tokens_per_second_per_gpu"]),
        "published_reserved_gib": float(row["reserved_gib"]),
    }
    left = ["fp8's memory"] * step.fp8 + ["compiled layers' memory"] * step.compiled
    return theirs | {
        "model": row["model"],
        "gpus": step.gpus,
        "gpu": gpu,
        "axes": ", ".join(
            f"{name} {size}" for name in ("dp_shard", "tp", "cp", "pp") if (size := getattr(step, name)) > 1
        ),
        "step": f"{step.local_batch} x {step.seq_len}",
        "how": ", ".join(_how(row)),
        "tokens_per_second": speed,
        "speed_off": speed / theirs["published_tokens_per_second"] - 1,
        "reserved_gib": reserved,
        "memory_off": reserved / theirs["published_reserved_gib"] - 1,
        "peak_gib": planned.memory.tensors / 2**30,
        "left_out": ", ".join(left) or None,
    }


def _how(row: dict[str, str]) -> list[str]:
    words = [row["ac"], row["precision"]] + [row["schedule"]] * bool(row["schedule"])
    return words + ["compiled"] * (row["compile"] == "yes") + ["async tp"] * (row["async_tp"] == "yes")


STEP_COLUMNS = (
    Column("model", "model"),
    Column("gpus", "GPUs"),
    Column("gpu", "GPU"),
    Column("axes", "axes"),
    Column("step", "sequences x tokens"),
    Column("how", "how"),
    Column("tokens_per_second", "tokens/s/GPU", "{:,.0f}".format),
    Column("published_tokens_per_second", "published", "{:,.0f}".format),
    Column("speed_off", "off", "{:+.0%}".format),
)
"""A published step, and its speed beside the predicted one."""
PUBLISHED = Suite(
    help="predict published steps of Llama 3 on 8 to 512 H100, and print prediction and publication side by side",
    columns=(
        *STEP_COLUMNS,
        Column("reserved_gib", "reserved GiB", "{:.1f}".format),
        Column("published_reserved_gib", "published", "{:.1f}".format),
        Column("memory_off", "off", "{:+.0%}".format),
        Column("peak_gib", "peak GiB", "{:.1f}".format),
        Column("left_out", "not modelled"),
    ),
    run=_run,
)
