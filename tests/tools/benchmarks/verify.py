"""Suite ``verify``: what the comparison of each region's first replay with its forward costs in that step, and later."""

from __future__ import annotations

import copy
import functools
import os
import statistics
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nemo_like.activation_checkpointing.engine.verification import VARIABLE
from nemo_like.activation_checkpointing.kv_sharing import disable_cache
from nemo_like.comparison import in_mode
from nemo_like.models import resolve_model
from nemo_like.options import AC_STRATEGIES
from nemo_like.profiling.measured_step import measure_bytes, measure_seconds, step_loss, zero_gradients
from tests.allocator_events import quiet_profiler
from tests.tools.benchmarks.suite import Column, Measured, Suite


def _run(options: Namespace) -> Measured:
    """Measure our eager modes on `options.model`; a new copy of it has each first step.

    Raises:
        ValueError: an unknown mode, or a model that cannot be built or has no layers.
    """
    device = torch.device("cpu")
    source = resolve_model(options.model)
    sample = source.sample_input(options.batch_size, options.seq_len, device)
    torch.manual_seed(0)
    base = source.build()
    disable_cache(base)
    measure_seconds(copy.deepcopy(base), sample, device)  # what a process does once is no part of the first row
    rows = []
    for mode in AC_STRATEGIES[1:]:
        new = functools.partial(_new, base, mode, sample)
        row: dict[str, Any] = {"mode": mode}
        for word, value in (("off", "0"), ("on", "")):
            with _variable(value):
                taken = [1000 * measure_seconds(new(), sample, device) for _ in range(options.repeats)]
                row[f"{word}_ms"] = statistics.median(taken)
                row[f"{word}_peak"] = measure_bytes(new(), sample, device)[1] / 1e6
                counted = new()
                counts = [_count_operators(counted, sample) for _ in range(3)]
                row |= {f"{word}_first": counts[0], f"{word}_third": counts[2]}
        rows.append(row | {"ratio": row["on_ms"] / row["off_ms"]})
    about = {
        "model": options.model,
        "step": f"{options.batch_size} x {options.seq_len} tokens",
        "repeats": options.repeats,
    }
    return Measured("Verification of the first replay", rows, about)


def _new(base: nn.Module, mode: str, sample: Any) -> nn.Module:
    """Return a copy of `base` that shares its parameters, and has had no step."""
    model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
    return in_mode(model, mode, sample)


def _count_operators(model: nn.Module, sample: Any) -> int:
    """Operators of the next step, those that no dispatch mode sees among them."""
    zero_gradients(model)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
    with quiet_profiler():
        profiler.start()
    try:
        step_loss(model, sample).backward()
    finally:
        with quiet_profiler():
            profiler.stop()
    return sum(event.name.startswith("aten::") for event in profiler.events() or ())


@contextmanager
def _variable(value: str) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


VERIFY = Suite(
    help="the first step with and without verification: time, peak bytes, operators; and the operators of the third",
    columns=(
        Column("mode", "mode"),
        Column("off_ms", "first step, off, ms", "{:.0f}".format),
        Column("on_ms", "on, ms", "{:.0f}".format),
        Column("ratio", "on / off", "{:.2f}".format),
        Column("off_peak", "peak MB, off", "{:.1f}".format),
        Column("on_peak", "on", "{:.1f}".format),
        Column("off_first", "operators, off", "{:,}".format),
        Column("on_first", "on", "{:,}".format),
        Column("off_third", "third step, off", "{:,}".format),
        Column("on_third", "on", "{:,}".format),
    ),
    run=_run,
)
