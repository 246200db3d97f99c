"""Results of running parts of one model on fake tensors, for all traces of it that have the same parts."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from nemo_like.distributed.pipeline.cut import StageParts
from nemo_like.planning.model.outside import OuterMemory
from nemo_like.planning.program.records import BlockEvents
from nemo_like.planning.sharding import Sharding


class Known:
    """Results by what they depend on. `nemo_like.planning.model.traced.TracedPart` reads and fills them."""

    def __init__(self) -> None:
        self.blocks: dict[Hashable, BlockEvents] = {}
        """Allocations of a block, by its number, its choice, and how its step runs."""
        self.outside: dict[Hashable, OuterMemory] = {}
        """Memory outside the layers, by the loss, and how the step runs."""
        self.trained: dict[Hashable, frozenset[str]] = {}
        """Names of the parameters that get a gradient in a step, by all names and which of them require gradients."""
        self.shardings: dict[Hashable, Sharding] = {}
        """Bytes that one rank stores, by the weights and the ranks that share them."""
        self.decisions: dict[Hashable, list[tuple[str, ...]]] = {}
        """Decisions of the choices that a search mixes plans of, by kind of layer."""
        self.cut: StageParts | str | None = None
        """Parts before, in and after the layers; or the reason why the model cannot be cut."""
        self._numbers: dict[Any, int] = {}

    def number(self, key: Hashable) -> int:
        """Return a number for `key`, the same for equal ones, so that long keys are compared once."""
        return self._numbers.setdefault(key, len(self._numbers))
