"""All layers of a model as one choice: groups of layers that may choose alike, and the best mixes over all groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from nemo_like.planning import solver
from nemo_like.planning.block import BlockProblem, Choice, best_of

_FINER = 6
"""How many budgets are solved for between two neighbouring choices, where a mix stands on them."""
_AROUND = 100
"""How many choices on either side of those that a mix uses are looked at again, where all are known."""


@dataclass(frozen=True)
class ChoiceGroup:
    """Layers of one kind that have the same choices."""

    kind: int
    choices: tuple[Choice, ...]
    """Ascending in held bytes, descending in replay time."""
    calls: tuple[tuple[int, ...], ...]
    """For each layer, the positions of its calls: several for a looped one."""

    @property
    def looped(self) -> bool:
        """Some layer is called more than once: then all get one choice, since a layer has one table."""
        return any(len(calls) > 1 for calls in self.calls)

    @property
    def numbers(self) -> tuple[list[tuple[int, float]], int]:
        """Bytes and seconds of the choices, and how many of them are to be made."""
        times = sum(map(len, self.calls)) if self.looped else 1
        points = [(c.held_bytes * times, c.replay_seconds * times) for c in self.choices]
        return points, 1 if self.looped else len(self.calls)


@dataclass(frozen=True)
class Stack:
    """Every group, and what they can do together."""

    groups: tuple[ChoiceGroup, ...]

    @cached_property
    def mixes(self) -> tuple[solver.Mix, ...]:
        """Best mixes of choices over all layers, ascending in held bytes, descending in replay time."""
        return solver.combine([group.numbers for group in self.groups])

    def gap(self, mix: solver.Mix) -> float:
        """Proven bound on the seconds that a better mix of the same bytes could save; 0: none could."""
        bound = solver.combine_bound([group.numbers for group in self.groups], mix.bytes)
        return max(0.0, mix.cost - bound) if bound is not None else 0.0

    def assignment(self, mix: solver.Mix) -> list[Choice]:
        """A choice for each call. Within a kind, the layers that hold more come later: backward frees them first."""
        chosen: dict[int, Choice] = {}
        for group, counts in zip(self.groups, mix.counts):
            ordered = [c for c, n in zip(group.choices, counts) for _ in range(n)]  # choices ascend in held bytes
            for index, calls in enumerate(group.calls):
                chosen |= dict.fromkeys(calls, ordered[0] if group.looped else ordered[index])
        return [chosen[position] for position in range(len(chosen))]

    def finer(self, mix: solver.Mix, problems: Sequence[BlockProblem], *, skip: bool, host: int) -> Stack:
        """The same stack with more choices around those that `mix` uses.

        Of many choices, `mixes` looks at some; and where a frontier is solved at some budgets only, whoever asks for bytes
        between two of them would get the lower.
        """
        groups = []
        for group, counts in zip(self.groups, mix.counts):
            used = [index for index, count in enumerate(counts) if count]
            if problems[group.kind].every(skip) is not None:
                near = {i for u in used for i in range(max(0, u - _AROUND), u + _AROUND + 1)}
                groups.append(replace(group, choices=tuple(c for i, c in enumerate(group.choices) if i in near)))
                continue
            low, high = max(0, used[0] - 1), min(len(group.choices) - 1, used[-1] + 1)
            held = [choice.held_bytes for choice in group.choices[low : high + 1]]
            budgets = [
                lower + (upper - lower) * step // (_FINER + 1)
                for lower, upper in pairwise(held)
                for step in range(1, _FINER + 1)
            ]
            added = problems[group.kind].at_budgets(budgets, host=host)
            groups.append(replace(group, choices=best_of([*group.choices, *added])))
        return Stack(tuple(groups))
