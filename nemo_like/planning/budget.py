"""What a budget asks for, and the error of one that cannot be met."""

from __future__ import annotations

from typing import Any

from nemo_like.options import MemoryBudget
from nemo_like.planning.devices import Device

AUTO_MARGIN = 0.1
"""Share of the device's memory that ``"auto"`` leaves free: CUDA context, communication buffers, fragmentation."""


class BudgetError(ValueError):
    """No plan fits the budget. `smallest_bytes` is the least that one does fit."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.smallest_bytes)  # it travels from rank 0 to the others


def parse_budget(budget: MemoryBudget | str, device: Device) -> MemoryBudget:
    """``"40GiB"``, ``"50%"``, ``"auto"`` (of `device`) or a `MemoryBudget`, as the latter."""
    if isinstance(budget, MemoryBudget):
        return budget
    if budget.strip().lower() == "auto":
        return MemoryBudget(peak_bytes=int(device.memory_bytes * (1 - AUTO_MARGIN)))
    return MemoryBudget.parse(budget)


def spell(budget: MemoryBudget) -> str:
    """A budget as one would write it."""
    return f"{budget.fraction:.0%}" if budget.fraction is not None else gib(budget.peak_bytes or 0)


def gib(size: int) -> str:
    """Bytes for a message."""
    return f"{size / 2**30:.2f}GiB" if size >= 2**28 else f"{size / 2**20:.2f}MiB"
