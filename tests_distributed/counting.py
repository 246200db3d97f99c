"""What happens while a block runs: operators, collectives among them, and what our logger says."""

import logging
from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountOps(TorchDispatchMode):
    """``counts["name"]``: how often each operator of `namespace` was called in the block, on this thread."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == self.namespace:
            self.counts[func._schema.name.removeprefix(f"{self.namespace}::")] += 1
        return func(*args, **(kwargs or {}))


class CountCollectives(CountOps):
    """``counts["_allgather_base_"]`` and the like."""

    def __init__(self) -> None:
        super().__init__("c10d")

    @property
    def gathers(self) -> int:
        """All-gathers of parameters."""
        return sum(count for name, count in self.counts.items() if "allgather" in name)


def heard() -> list[str]:
    """What our logger says in this process from here on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nemo_like").addHandler(handler)
    return lines
