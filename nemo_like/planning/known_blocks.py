"""What was found of blocks by running them on fake tensors, for planners of several stages or shapes that have the same."""

from __future__ import annotations

from typing import Any

from nemo_like.planning.block import Choice
from nemo_like.planning.kinds import Kind
from nemo_like.planning.outer import OuterMemory
from nemo_like.planning.program.records import BlockEvents


class KnownBlocks:
    """Memories by the number of a block, its choice, and how its step is run."""

    def __init__(self) -> None:
        self.whole: dict[tuple[int, Choice, bool, bool], BlockEvents] = {}
        self.halves: dict[tuple[int, Choice, bool, bool, bool], BlockEvents] = {}
        self.trained: dict[Any, frozenset[str]] = {}
        """Of a model, by the names of its parameters and which of them require gradients: those that get one in a step."""
        self._numbers: dict[Any, int] = {}

    def number(self, index: int, kind: Kind, outer: OuterMemory) -> int:
        """Of `kind`, which is number `index` of its model: equal for equal blocks whose outputs get equal gradients."""
        key = (kind.key, outer.used[index], tuple(sorted(outer.layouts[index].items())))
        return self._numbers.setdefault(key, len(self._numbers))
