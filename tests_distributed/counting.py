"""Counts collectives while a block runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountCollectives(TorchDispatchMode):
    """``counts["_allgather_base_"]`` and the like: how often each c10d op was called in the block, on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def gathers(self) -> int:
        """All-gathers of parameters."""
        return sum(count for name, count in self.counts.items() if "allgather" in name)
