"""Suite ``verify``: what the comparison of each region's first replay with its forward costs in that step, and later."""

from __future__ import annotations

import copy
import dataclasses
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nemo_like.activation_checkpointing.engine.verification import VARIABLE
from nemo_like.bench import BenchOptions
from nemo_like.bench.measured_step import measure_bytes, step_loss, time_steps, zero_gradients
from nemo_like.bench.side_by_side import choose_modes, sample_of
from nemo_like.models import resolve_model
from tests.allocator_events import quiet_profiler
from tests.tools.benchmarks.suite import Column, Measured, Suite


def _run(options: BenchOptions) -> Measured:
    """Measure our eager modes on `options.model`; a new copy of it has each first step.

    Raises:
        ValueError: an unknown mode, or a model that cannot be built or has no layers.
    """
    device = options.place()
    source = resolve_model(options.model)
    sample = sample_of(source, options, device)
    torch.manual_seed(0)
    base = source.build(device=device, dtype=options.dtype)
    _timed(copy.deepcopy(base), sample, device)  # what a process does once is no part of the first row
    rows = []
    for mode in choose_modes(dataclasses.replace(options, peers=False, compile=()), device)[1:]:
        new = _maker(base, lambda model, mode=mode: mode.prepare(model, sample))  # type: ignore[misc]
        row: dict[str, Any] = {"mode": mode.name}
        for word, value in (("off", "0"), ("on", "")):
            with _variable(value):
                row[f"{word}_ms"] = statistics.median(_timed(new(), sample, device) for _ in range(options.repeats))
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


def _maker(base: nn.Module, prepare: Callable[[nn.Module], None]) -> Callable[[], nn.Module]:
    """Copies of `base` that share its parameters, none of which has had a step."""

    def new() -> nn.Module:
        model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
        prepare(model)
        return model

    return new


def _timed(model: nn.Module, sample: Any, device: torch.device) -> float:
    """Milliseconds of the next step."""
    return time_steps([model], sample, device, 1, 0)[0][0]


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
