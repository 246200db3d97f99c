"""The progress of a run, in lines on rank 0."""

from __future__ import annotations

import os
import resource
import sys

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
    """Lines with steps, loss, speed and memory on rank 0; nothing on the others."""

    def __init__(self, steps: int, device: torch.device):
        self._steps = steps
        self._device = device
        self._shown = is_rank_zero()
        self._width = screen_width() if sys.stdout.isatty() or "COLUMNS" in os.environ else None

    def step(
        self, done: int, loss: float, learning_rate: float, tokens_per_second: float, mfu: float | None = None
    ) -> None:
        """Report after `done` steps; `loss` in nats per token, `mfu` a share of 1, left out where it is None."""
        if not self._shown:
            return
        fields = self._fields(loss, learning_rate, tokens_per_second, mfu)
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
        """Print one line."""
        if self._shown:
            print("\n".join(paragraph(part, self._width) for part in line.split("\n")), flush=True)


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
