"""Check 2: gradients of every mode against none. Check 3: verification of the first step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.bench.measured_step import gradients_of
from nemo_like.options import OffloadConfig
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
    "60%": ("60%", {}),
    "full, offload boundary": ("full", {"offload": OffloadConfig("boundary", min_bytes=_LEAST)}),
    "selective, offload saved": ("selective", {"offload": OffloadConfig("saved", min_bytes=_LEAST)}),
    "offload all": ("none", {"offload": OffloadConfig("all", min_bytes=_LEAST)}),
    "selective, aot_eager": ("selective", {"compile": "aot_eager"}),
    "chunked loss": ("none", {"loss": "chunked"}),
}
ROUNDED = ("chunked loss",)
"""Modes that add in another order: of them the first step is compared, since AdamW magnifies roundings."""
FEW = {name: MODES[name] for name in ("full", "selective")}


def _worst(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference of a tensor relative to its largest number, and its name; 0: bitwise identical."""
    if wanted.keys() != got.keys():
        return float("inf"), sorted(wanted.keys() ^ got.keys())[0]
    worst = 0.0, ""
    for name, tensor in wanted.items():
        if not torch.equal(tensor, got[name]):
            scale = tensor.abs().max().double().clamp_min(torch.finfo(tensor.dtype).tiny)
            worst = max(worst, (((tensor - got[name]).abs().max() / scale).item() or 1e-30, name))
    return worst


def check(run: Run) -> None:
    """Compare the gradients of the third step with AdamW, which depend on all of the two before."""
    machine = Machine(run.cpu)
    layers, length = machine.pick((4, 2048), (2, 32))
    machine.same_bits(True)
    _compare(run, machine, "", lambda: machine.model(layers), MODES, length)
    _compare(run, machine, "dropout: ", lambda: machine.model(layers, attention_dropout=0.1), FEW, length)
    _compare(run, machine, "experts: ", lambda: machine.model(2, "moe"), FEW, length)
    machine.same_bits(False)
    _compare(run, machine, "any order: ", lambda: machine.model(layers), FEW, length)


def _compare(
    run: Run, machine: Machine, title: str, make: Callable[[], nn.Module], modes: Mapping[str, Any], length: int
) -> None:
    batch = machine.batch(1, length)

    def last_step(ac: Any, options: dict[str, Any], steps: int = 3) -> dict[str, Tensor]:
        model = machine.parallelize(make(), ac, batch, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(1, steps):
            gradients_of(model, batch, seed=step)
            optimizer.step()
        return gradients_of(model, batch, seed=steps)

    with run.guarded(f"{title}none"):
        wanted = last_step("none", {})
        floor, name = _worst(wanted, last_step("none", {}))
        run.row(f"{title}none, twice", 0.0, floor, worst=name)
        for mode, (ac, options) in modes.items():
            if OLDER and "compile" in options:
                run.skip(title + mode, NO_POLICIES)
                continue
            machine.settle()
            with run.guarded(title + mode):
                if mode in ROUNDED:
                    error, name = _worst(last_step("none", {}, 1), last_step(ac, options, 1))
                else:
                    error, name = _worst(wanted, last_step(ac, options))
                # Where none differs from itself, a mode may by twice as much; other orders by some roundings.
                bound = 4 * torch.finfo(machine.dtype).eps if mode in ROUNDED else 2 * floor
                run.row(title + mode, bound, error, ok=error <= bound, worst=name)
    machine.settle()


class _Noisy(LlamaBlock):
    """Draws from a generator of its own, whose state the engine puts back."""

    def __init__(self, width: int, heads: int, device: torch.device) -> None:
        super().__init__(width, heads)
        self.draws = torch.Generator(device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x * torch.rand(x.shape, generator=self.draws, device=x.device, dtype=x.dtype))
        return out


class _Elsewhere:
    """An object of a program: the engine does not look into it, since it has an attribute of no known kind."""

    def __init__(self) -> None:
        self.calls, self.program = 0, object()


class _Counting(LlamaBlock):
    """Multiplies by the number of its calls, which nobody puts back."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.elsewhere = _Elsewhere()

    def forward(self, x: Tensor) -> Tensor:
        self.elsewhere.calls += 1
        out: Tensor = super().forward(x * self.elsewhere.calls)
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
    layers, length = machine.pick((4, 8192), (2, 64))
    batch = machine.batch(1, length)
    _first_step(machine, machine.model(1), batch)  # the process's first kernels
    for ac in FEW:
        seconds, peaks = [], []
        with run.guarded(ac):
            for variable in ("0", None):
                _set(variable)
                model = machine.parallelize(machine.model(layers), ac)
                machine.settle()
                begun = time.perf_counter()
                peaks.append(machine.peaks(lambda: _first_step(machine, model, batch), model.parameters())[0])  # noqa: B023
                seconds.append(time.perf_counter() - begun)
            # The audit's bound of 0.1 GB for what the comparison itself takes.
            run.row(
                f"{ac}, first step, s",
                seconds[0],
                seconds[1],
                ok=peaks[1] - peaks[0] <= 1e8,
                peak_without=peaks[0],
                peak=peaks[1],
            )
    machine.settle()
    width, heads = machine.pick((2048, 16), (64, 4))
    x = machine.normal(2, machine.pick(1024, 32), width)

    def blocks(kind: Callable[..., nn.Module], *more: Any) -> nn.Module:
        torch.manual_seed(0)
        return Stack(kind(width, heads, *more) for _ in range(4)).to(machine.device, machine.dtype)

    def gradients(ac: str, kind: Callable[..., nn.Module], *more: Any) -> dict[str, Tensor]:
        return gradients_of(machine.parallelize(blocks(kind, *more), ac), x)

    planted: dict[str, tuple[Any, tuple[Any, ...], str]] = {
        "a generator of the layer": (_Noisy, (machine.device,), "bitwise"),
        "a count that is not put back": (_Counting, (), "refused"),
    }
    machine.same_bits(True)
    for name, (kind, more, predicted) in planted.items():
        with run.guarded(name):
            wanted = gradients("none", kind, *more)
            try:
                measured = "bitwise" if _worst(wanted, gradients("full", kind, *more))[0] == 0 else "wrong"
            except RegionError:
                measured = "refused"
            run.row(name, predicted, measured, ok=measured == predicted)
    machine.same_bits(False)
    kernels = machine.pick(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
        [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    )
    cases = {kernel.name.lower(): (_Even, kernel) for kernel in kernels} | {"scattered": (_Scattering, None)}
    for name, (kind, kernel) in cases.items():
        with run.guarded(f"{name}: no alarm"), nullcontext() if kernel is None else sdpa_kernel(kernel):
            try:
                gradients("full", kind)
                measured = "passed"
            except RegionError as error:
                measured = str(error).splitlines()[0][:100]
            run.row(f"{name}: no alarm", "passed", measured, ok=measured == "passed")


def _set(variable: str | None) -> None:
    os.environ.pop("NEMO_LIKE_VERIFY", None)
    if variable is not None:
        os.environ["NEMO_LIKE_VERIFY"] = variable


def _first_step(machine: Machine, model: Any, batch: Any) -> None:
    model(**batch).loss.backward()
    machine.wait()
