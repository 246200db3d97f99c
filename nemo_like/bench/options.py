"""Options of a benchmark; nothing here imports torch, so that the help of `nemo-like bench` is there at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_like._util.words import check_whole
from nemo_like.options import MemoryBudget, parse_compile

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BenchOptions:
    """One benchmark run, as `nemo-like bench` or a caller requests it."""

    model: str = "llama-tiny"  # A preset, a config.json or its folder, or ``module:function``.
    batch_size: int = 2  # Samples per step and rank.
    seq_len: int = 256  # Tokens per sample.
    input_shape: tuple[int, ...] | None = None  # Shape of the float input of a model that takes no tokens.
    device: str | None = None  # ``cpu`` or a CUDA device; None: the accelerator of this rank, else the CPU.
    dtype: torch.dtype | None = None  # Dtype of the parameters; None: float32.
    strategy: str = "single"  # ``single``, ``fsdp2`` or ``ddp``.
    # Names of the modes to run; None: every one that can run here. ``none`` always runs: the others are compared with
    # it.
    modes: tuple[str, ...] | None = None
    budgets: tuple[str, ...] = ("25%", "50%", "75%")  # Memory budgets for the planner, as ``ac=`` takes them.
    # Compile back ends (``inductor``, ``aot_eager``) to run the modes under as well.
    compile: tuple[str, ...] = ()
    peers: bool = True  # Run PyTorch's own implementations, too.
    repeats: int = 5  # Measured steps per mode; the modes take turns.
    warmup: int = 2  # Steps per mode before the measured ones.
    threads: int | None = None  # CPU threads; None: as they are.

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seq_len", 1), ("repeats", 1), ("warmup", 0), ("threads", 1)):
            if (value := getattr(self, name)) is not None or name != "threads":
                check_whole(f"BenchOptions.{name}", value, least)
        if self.device is not None:
            from nemo_like.distributed.launch import checked_device

            checked_device(self.device)
        for budget in self.budgets:
            MemoryBudget.parse(budget, "budgets")
        for backend in self.compile:
            parse_compile(backend)
        if self.strategy not in ("single", "fsdp2", "ddp"):
            raise ValueError(f"BenchOptions.strategy is {self.strategy!r}; it must be single, fsdp2 or ddp.")

    def place(self) -> torch.device:
        """Return the device to run on: the one that was asked for, else this rank's."""
        import torch

        from nemo_like.distributed.launch import local_device

        return local_device() if self.device is None else torch.device(self.device)
