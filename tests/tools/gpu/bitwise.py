"""Check 3: gradients of every mode against none. Check 13: verification of the first step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.options import OffloadConfig
from nemo_like.profiling.measured_step import compare_gradients, gradients_of
from tests.models.blocks import LlamaBlock, Stack
from tests.tools.gpu.driver import Run
from tests.tools.gpu.machine import Machine
from tests.tools.gpu.torch_2_11 import NO_POLICIES, OLDER

_LEAST = 1 << 10
"""Bytes of what is offloaded at least: tiny models have something to move, too."""
MODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": ("full", {}),
    "selective": ("selective", {}),
    "submodule": ("submodule", {}),
    "sequential": ("sequential", {}),
    "30%": ("30%", {}),
    "full, offload boundary": ("full", {"offload": OffloadConfig("boundary", min_bytes=_LEAST)}),
    "selective, offload saved": ("selective", {"offload": OffloadConfig("saved", min_bytes=_LEAST)}),
    "offload all": ("none", {"offload": OffloadConfig("all", min_bytes=_LEAST)}),
    "selective, aot_eager": ("selective", {"compile": "aot_eager"}),
    "chunked loss": ("none", {"loss": "chunked"}),
}
SLOW = ("sequential", "selective, aot_eager")
"""Modes that the CPU leaves out, which trace for seconds."""
FEW = {name: MODES[name] for name in ("full", "selective")}


def _error(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a tensor relative to its largest number; 0: bitwise identical."""
    compared = compare_gradients(wanted, got)
    return 0.0 if compared == "bitwise" else float(compared)


def check(run: Run) -> None:
    """Compare the gradients of the third step with AdamW, which depend on all of the two before."""
    machine = Machine(run.cpu)
    layers, length = machine.pick((4, 2048), (2, 32))
    modes = {name: mode for name, mode in MODES.items() if machine.is_cuda or name not in SLOW}
    machine.same_bits(True)
    _compare(run, machine, "", lambda: machine.model(layers), modes, length)
    _compare(run, machine, "dropout: ", lambda: machine.model(layers, attention_dropout=0.1), FEW, length)
    _compare(run, machine, "experts: ", lambda: machine.model(2, "moe"), FEW, length)
    machine.same_bits(False)
    if machine.is_cuda:  # operators of the CPU have one order
        _compare(run, machine, "any order: ", lambda: machine.model(layers), FEW, length)


def _compare(
    run: Run, machine: Machine, title: str, make: Callable[[], nn.Module], modes: Mapping[str, Any], length: int
) -> None:
    batch = machine.batch(1, length)

    def last_step(ac: Any, options: dict[str, Any], steps: int = 3) -> tuple[dict[str, Tensor], str]:
        model = machine.parallelize(make(), ac, batch, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(1, steps):
            gradients_of(model, batch, seed=step)
            optimizer.step()
        return machine.attention(lambda: gradients_of(model, batch, seed=steps))

    with run.guarded(f"{title}none"):
        wanted, attention = last_step("none", {})
        floor = _error(wanted, last_step("none", {})[0])
        run.row(f"{title}none, twice", 0.0, floor, attention=attention)
        for mode, (ac, options) in modes.items():
            if OLDER and "compile" in options:
                run.skip(title + mode, NO_POLICIES)
                continue
            machine.settle()
            with run.guarded(title + mode):
                # It adds in another order: the first step is compared, since AdamW magnifies roundings.
                rounded = mode == "chunked loss"
                got, attention = last_step(ac, options, 1 if rounded else 3)
                error = _error(last_step("none", {}, 1)[0] if rounded else wanted, got)
                # Where none differs from itself, a mode may by twice as much; other orders by some roundings.
                bound = 4 * torch.finfo(machine.dtype).eps if rounded else 2 * floor
                run.row(title + mode, bound, error, ok=error <= bound, attention=attention)
    machine.settle()


class _Noisy(LlamaBlock):
    """Draws from a generator of its own, whose state the engine puts back."""

    def __init__(self, width: int, heads: int, device: torch.device) -> None:
        super().__init__(width, heads)
        self.draws = torch.Generator(device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x * torch.rand(x.shape, generator=self.draws, device=x.device, dtype=x.dtype))
        return out


class _Even(LlamaBlock):
    """Has as many key heads as query heads, which every kernel takes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(2))


class _Scattering(LlamaBlock):
    """Adds its tokens up in four rows, by atomic additions on a GPU, whose order is another in each run."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        rows = torch.arange(x.shape[1], device=x.device) % 4
        sums = torch.zeros_like(out[:, :4]).index_add(1, rows, out)
        return out + (sums / x.shape[1])[:, rows].sin()


def verification(run: Run) -> None:
    """Measure the first step with and without verification; plant a difference; see that no kernel raises an alarm."""
    machine = Machine(run.cpu)
    layers, batch = machine.pick(4, 2), machine.batch(1, machine.pick(8192, 64))
    _first_step(machine, machine.model(1), batch)  # the process's first kernels
    for ac in machine.pick(tuple(FEW), ("full",)):
        seconds, peaks = [], []
        with run.guarded(ac):
            for variables in ({"NEMO_LIKE_VERIFY": "0"}, {}):
                with mock.patch.dict(os.environ, variables):
                    model = machine.parallelize(machine.model(layers), ac)
                    machine.settle()
                    begun = time.perf_counter()
                    peaks.append(machine.peaks(lambda: _first_step(machine, model, batch), model.parameters())[0])  # noqa: B023
                    seconds.append(time.perf_counter() - begun)
            _, attention = machine.attention(lambda: _first_step(machine, model, batch))  # noqa: B023
            ok = peaks[1] - peaks[0] <= 1e8  # the audit's bound of 0.1 GB for what the comparison itself takes
            more = {"peak_without": peaks[0], "peak": peaks[1], "attention": attention}
            run.row(f"{ac}, first step with verification", None, seconds[1], "s", ok=ok, without=seconds[0], **more)
    machine.settle()
    width, heads = machine.pick((2048, 16), (64, 4))
    x = machine.normal(2, machine.pick(1024, 32), width)

    def gradients(ac: str, kind: Callable[..., nn.Module], *more: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        blocks = Stack(kind(width, heads, *more) for _ in range(4)).to(machine.device, machine.dtype)
        return gradients_of(machine.parallelize(blocks, ac), x)

    def alarm(kind: Callable[..., nn.Module]) -> str:
        try:
            gradients("full", kind)
        except RegionError as error:
            return str(error).splitlines()[0][:100]
        return "passed"

    with run.guarded("a generator of the layer"):
        machine.same_bits(True)
        got, attention = machine.attention(lambda: gradients("full", _Noisy, machine.device))
        result = compare_gradients(gradients("none", _Noisy, machine.device), got)
        run.row("a generator of the layer", "bitwise", result, ok=result == "bitwise", attention=attention)
    machine.same_bits(False)
    kernels = machine.pick(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
        [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    )
    cases = {kernel.name.lower(): (_Even, kernel) for kernel in kernels} | {"scattered": (_Scattering, None)}
    for name, (kind, kernel) in cases.items():
        with run.guarded(f"{name}: no alarm"), nullcontext() if kernel is None else sdpa_kernel(kernel):
            measured, attention = machine.attention(lambda: alarm(kind))  # noqa: B023
            run.row(f"{name}: no alarm", "passed", measured, ok=measured == "passed", attention=attention)


def _first_step(machine: Machine, model: Any, batch: Any) -> None:
    model(**batch).loss.backward()
    machine.wait()
