"""The error of a budget that cannot be met."""

from __future__ import annotations

from typing import Any


class BudgetError(ValueError):
    """No plan fits the budget. `smallest_bytes` is the least that one does fit."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.smallest_bytes)  # it travels from rank 0 to the others


def gib(size: int) -> str:
    """Bytes for a message."""
    return f"{size / 2**30:.2f}GiB" if size >= 2**28 else f"{size / 2**20:.2f}MiB"
