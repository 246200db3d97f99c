"""Suites of benchmarks: what each is asked with, and how its rows become a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nemo_like._util.words import check_whole
from nemo_like.bench.table import Column, Table, surroundings
from nemo_like.compile import parse_compile
from nemo_like.distributed.launch import checked_device, local_device
from nemo_like.options import MemoryBudget


@dataclass(frozen=True)
class BenchOptions:
    """One benchmark run, as `nemo-like bench` or a caller asks for it."""

    model: str = "llama-tiny"
    """A preset, a config.json or its folder, or ``module:function``."""
    batch_size: int = 2
    """Samples per step and rank."""
    seq_len: int = 256
    """Tokens per sample."""
    input_shape: tuple[int, ...] | None = None
    """Shape of the float input of a model that takes no tokens."""
    device: str | None = None
    """``cpu`` or a CUDA device; None: the accelerator of this rank, else the CPU."""
    dtype: torch.dtype | None = None
    """Dtype of the parameters; None: float32."""
    strategy: str = "single"
    """``single``, ``fsdp2`` or ``ddp``."""
    modes: tuple[str, ...] | None = None
    """Names of the modes to run; None: every one that can run here. ``none`` always runs: the others are compared
    with it."""
    budgets: tuple[str, ...] = ("25%", "50%", "75%")
    """Memory budgets for the planner, as ``ac=`` takes them."""
    compile: tuple[str, ...] = ()
    """Compile back ends (``inductor``, ``aot_eager``) to run the modes under as well."""
    peers: bool = True
    """Whether to run other implementations where they can be imported."""
    repeats: int = 5
    """Measured steps per mode; the modes take turns."""
    warmup: int = 2
    """Steps per mode before the measured ones."""
    threads: int | None = None
    """CPU threads; None: as they are."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seq_len", 1), ("repeats", 1), ("warmup", 0), ("threads", 1)):
            if (value := getattr(self, name)) is not None or name != "threads":
                check_whole(f"BenchOptions.{name}", value, least)
        if self.device is not None:
            checked_device(self.device)
        for budget in self.budgets:
            MemoryBudget.parse(budget)
        for backend in self.compile:
            parse_compile(backend)
        if self.strategy not in ("single", "fsdp2", "ddp"):
            raise ValueError(f"BenchOptions.strategy is {self.strategy!r}; it must be single, fsdp2 or ddp.")

    def place(self) -> torch.device:
        """Where to run: the device that was asked for, else this rank's."""
        return local_device() if self.device is None else torch.device(self.device)


@dataclass
class Measured:
    """What a suite found out; `Suite.measure` makes a `Table` of it."""

    title: str
    rows: list[dict[str, Any]]
    about: dict[str, Any]
    """How it was measured: model, sizes, repeats."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Suite:
    """One thing to measure. `measure` does it."""

    help: str
    reads: tuple[str, ...]
    """Fields of `BenchOptions` that it reads, and ``plot`` where its rows can be drawn."""
    columns: tuple[Column, ...]
    run: Callable[[BenchOptions], Measured]
    """Measure and return the rows; the threads are set."""
    x: str = ""
    """Key of the plot's horizontal axis; empty: no plot."""
    y: str = ""

    def measure(self, options: BenchOptions) -> Table:
        """Run the suite as `options` ask, and add what its numbers depend on; the CPU threads are put back after it.

        Raises:
            ValueError: an unknown mode, a model that cannot be built, or what else the suite refuses.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(options.threads or threads)
        try:
            measured = self.run(options)
            device = options.place() if "device" in self.reads else torch.device("cpu")
            about = measured.about | surroundings(device)
        finally:
            torch.set_num_threads(threads)
        return Table(measured.title, self.columns, measured.rows, about, measured.notes, self.x, self.y)
