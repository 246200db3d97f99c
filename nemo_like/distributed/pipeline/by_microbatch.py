"""What a stage does once for each micro-batch, and the whole model once for each batch: batch norm, and counted calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import every_module

_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
_Counters = dict[tuple[str, str], int]


class ByMicrobatch:
    """Looks at the first two steps of a pipeline, and warns of what sees micro-batches in the place of the batch."""

    def __init__(self, stages: Sequence[nn.Module], microbatches: int) -> None:
        self._stages, self._microbatches = stages, microbatches
        self._seen: list[_Counters] = []

    def step_begins(self) -> None:
        """Call before each step."""
        if self._microbatches == 1 or len(self._seen) == 3:
            return
        self._seen.append(self._counters())
        if len(self._seen) == 1:
            norms = [name for name, module in self._modules() if isinstance(module, _NORMS)]
            if norms:
                self._warn(f"{norms[0]} is a batch norm, which takes the mean of the rows that it sees", "group norm")
        if len(self._seen) == 3:
            first, second, third = self._seen
            counted = [key for key, value in third.items() if self._is_counted(first.get(key), second.get(key), value)]
            if counted:
                module, name = counted[0]
                self._warn(f"{name!r} of {module or 'the model'} counts calls", "a counter that the training loop sets")

    def _warn(self, what: str, instead: str) -> None:
        warn_once(
            f"{what}: in a pipeline of {self._microbatches} micro-batches it sees one micro-batch after the other, as in "
            f"gradient accumulation, and not the whole batch. Use {instead} where that matters."
        )

    def _is_counted(self, first: int | None, second: int | None, third: int) -> bool:
        """Whether a number grew by the same multiple of the micro-batches in both steps."""
        if first is None or second is None or second == first:
            return False
        return third - second == second - first and (second - first) % self._microbatches == 0

    def _counters(self) -> _Counters:
        return {
            (name, key): value
            for name, module in self._modules()
            for key, value in vars(module).items()
            if type(value) is int
        }

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for stage in self._stages:
            for module, name in every_module(stage).items():
                yield name, module
