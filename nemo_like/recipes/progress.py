"""The progress display of a run: a bar on rank 0 where rich is installed and standard output is a terminal, else lines."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
from types import TracebackType
from typing import Any

import torch

from nemo_like._util.log import is_rank_zero
from nemo_like._util.table import paragraph, screen_width
from nemo_like._util.words import GIB


def memory_kind(device: torch.device) -> str:
    """Return the kind of memory that `memory_used` and `memory_peak` count on `device`."""
    if device.type != "cpu":
        return f"bytes of tensors in the {device.type.upper()} caching allocator"
    return "resident bytes of the whole process, interpreter and libraries included"


def memory_used(device: torch.device) -> int:
    """Bytes in use now on this rank; see `memory_kind`. On a system without /proc it is the peak."""
    if device.type != "cpu":
        return torch.get_device_module(device).memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # macOS has no /proc
        return memory_peak(device)


def memory_peak(device: torch.device) -> int:
    """The most bytes in use so far on this rank; see `memory_kind`."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


def memory(device: torch.device) -> dict[str, int]:
    """Bytes on this rank, for a log: in use, the most so far, and what the caching allocator has reserved at most."""
    figures = {"memory_bytes": memory_used(device), "peak_bytes": memory_peak(device)}
    if device.type != "cpu":
        figures["reserved_bytes"] = torch.get_device_module(device).max_memory_reserved(device)
    return figures


class Progress:
    """A context manager that shows steps, loss, speed and memory on rank 0, and nothing on the others."""

    def __init__(self, first: int, steps: int, device: torch.device, *, plain: bool = False):
        self._steps = steps
        self._device = device
        self._shown = is_rank_zero()
        terminal = sys.stdout.isatty()
        bar = self._shown and not plain and terminal and importlib.util.find_spec("rich") is not None
        self._width = screen_width() if terminal or "COLUMNS" in os.environ else None
        self._counter = 2 * len(str(steps)) + 3
        """Characters of the steps, and of the blanks after them."""
        self._bar: Any = _make_bar(screen_width() - self._counter) if bar else None
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
        fields = self._fields(loss, learning_rate, tokens_per_second, mfu)
        if self._bar is not None:
            room = screen_width() - self._counter
            text = _fitting(fields, room - _BAR if _has_room(room) else room)
            self._bar.update(self._task, completed=done, text=text)
        else:
            word = "" if self._width is not None and self._width < 80 else "step "
            step = f"{word}{done:>{len(str(self._steps))}}/{self._steps}"
            text = _fitting(fields, None if self._width is None else self._width - len(step) - 2)
            print(f"{step}  {text}", flush=True)

    def _fields(
        self, loss: float, learning_rate: float, tokens_per_second: float, mfu: float | None
    ) -> list[tuple[int, str]]:
        figures = memory(self._device)
        fields = [(0, f"loss {loss:.4f}"), (3, f"lr {learning_rate:.2e}"), (1, f"{tokens_per_second:,.0f} tokens/s")]
        if mfu is not None:
            fields.append((4, f"MFU {mfu:.1%}"))
        sizes = {"memory": (5, "memory_bytes"), "peak": (2, "peak_bytes"), "reserved": (6, "reserved_bytes")}
        for word, (keep, key) in sizes.items():
            if key in figures:
                fields.append((keep, f"{word} {figures[key] / GIB:.2f} GiB"))
        return fields

    def say(self, line: str) -> None:
        """Print one line, above the bar."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        elif self._width is None:
            print(line, flush=True)
        else:
            print("\n".join(paragraph(part, self._width) for part in line.split("\n")), flush=True)


_BAR = 19
"""Characters of the bar, of the time that is left, and of the blanks after them."""
_ESSENTIAL = 46
"""Characters that loss, speed and the peak may take; what is next to them is shown where the line is wide enough."""


def _has_room(width: int) -> bool:
    return width >= _ESSENTIAL + _BAR


def _fitting(fields: list[tuple[int, str]], width: int | None) -> str:
    """Return `fields` in a line of at most `width`; those of the largest numbers are left out first, and 0 never.

    >>> _fitting([(0, "loss 2.5"), (3, "lr 0.1"), (1, "90 tokens/s")], 22)
    'loss 2.5  90 tokens/s'
    """
    kept = list(fields)
    while width is not None and len(_joined(kept)) > width and any(keep for keep, _ in kept):
        kept.remove(max(kept))
    return _joined(kept)


def _joined(fields: list[tuple[int, str]]) -> str:
    return "  ".join(text for _, text in fields)


def _make_bar(room: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    beside = [BarColumn(bar_width=10), TimeRemainingColumn(compact=True)] if _has_room(room) else []
    return Bar(MofNCompleteColumn(), *beside, TextColumn("{task.fields[text]}"), console=Console())
