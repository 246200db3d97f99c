"""The progress display of a run: a bar on rank 0 where rich is installed and standard output is a terminal, else lines."""

from __future__ import annotations

import importlib.util
import resource
import sys
from types import TracebackType
from typing import Any

import torch

from nemo_like._util.log import is_rank_zero

_GIB = 2**30


def memory_kind(device: torch.device) -> str:
    """What `memory_used` and `memory_peak` count on `device`."""
    if device.type == "cuda":
        return "bytes of tensors in the CUDA caching allocator"
    return "resident bytes of the whole process, interpreter and libraries included"


def memory_used(device: torch.device) -> int:
    """Bytes in use now on this rank; see `memory_kind`. On a system without /proc it is the peak."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # macOS has no /proc
        return memory_peak(device)


def memory_peak(device: torch.device) -> int:
    """The most bytes in use so far on this rank; see `memory_kind`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


def memory(device: torch.device) -> dict[str, int]:
    """Bytes on this rank, for a log: in use, the most so far, and what the caching allocator has reserved at most."""
    found = {"memory_bytes": memory_used(device), "peak_bytes": memory_peak(device)}
    if device.type == "cuda":
        found["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return found


class Progress:
    """A context manager that shows steps, loss, speed and memory on rank 0, and nothing on the others."""

    def __init__(self, first: int, steps: int, device: torch.device, *, plain: bool = False):
        self._steps = steps
        self._device = device
        self._shown = is_rank_zero()
        bar = self._shown and not plain and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
        self._bar: Any = _make_bar() if bar else None
        if self._bar is not None:
            self._task = self._bar.add_task("training", total=steps, completed=first, text="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(
        self, done: int, loss: float, learning_rate: float, tokens_per_second: float, mfu: float | None = None
    ) -> None:
        """Report after `done` steps; `loss` in nats per token, `mfu` a share of 1, left out where it is None."""
        if not self._shown:
            return
        found = memory(self._device)
        used, peak = found["memory_bytes"] / _GIB, found["peak_bytes"] / _GIB
        reserved = f", reserved {found['reserved_bytes'] / _GIB:.2f} GiB" if "reserved_bytes" in found else ""
        share = "" if mfu is None else f"MFU {mfu:.1%}  "
        text = (
            f"loss {loss:.4f}  lr {learning_rate:.2e}  {tokens_per_second:,.0f} tokens/s  {share}"
            f"memory {used:.2f} GiB, peak {peak:.2f} GiB{reserved}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=done, text=text)
        else:
            print(f"step {done:>{len(str(self._steps))}}/{self._steps}  {text}", flush=True)

    def say(self, line: str) -> None:
        """Print one line, above the bar."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)


def _make_bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
