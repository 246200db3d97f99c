"""Shorten a model to fewer of its repeated layers, and derive the levels of the whole one's step from a step of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from nemo_like._util.tensors import tensors_in
from nemo_like.planning.memory_model.storage_ledger import Event, Level, StepMoment, StorageLedger
from nemo_like.planning.trace.kinds import BlockKind


@dataclass(frozen=True)
class Repeats:
    """A stretch of layers that is one period again and again, as in ``[dense] + 58 * [experts]``."""

    first: int
    """Number of its first layer."""
    period: int
    """Number of layers of one period."""
    count: int
    """Number of periods."""

    def left_out(self, kept: int) -> range:
        """Return the numbers of the layers to leave out for `kept` periods: those in the middle, one more behind."""
        ahead = (kept - 1) // 2
        return range(self.first + ahead * self.period, self.first + (self.count - kept + ahead) * self.period)

    def between(self, kept: int) -> tuple[range, range, range, range]:
        """Return the four periods around the gap, two in front and two behind, as numbers of layers of the whole model."""
        gap = self.left_out(kept)
        begins = (gap.start - 2 * self.period, gap.start - self.period, gap.stop, gap.stop + self.period)
        first, second, third, fourth = (range(at, at + self.period) for at in begins)
        return first, second, third, fourth


def repeats(kinds: Sequence[Hashable], kept: int) -> list[Repeats]:
    """Return the stretches of more than `kept` periods: the longest, and those in front of it and behind.

    >>> [(each.first, each.period, each.count) for each in repeats("abbbbbbbbcdcdcdcdcd", 4)]
    [(1, 1, 8), (9, 2, 5)]
    """
    longest = longest_repeats(kinds)
    if longest.count <= kept:
        return []
    end = longest.first + longest.period * longest.count
    behind = [replace(each, first=each.first + end) for each in repeats(kinds[end:], kept)]
    return [*repeats(kinds[: longest.first], kept), longest, *behind]


def longest_repeats(kinds: Sequence[Hashable]) -> Repeats:
    """Return the stretch with the most layers behind its first period; of several, the one with the shortest period."""
    best = Repeats(0, max(1, len(kinds)), 1 if kinds else 0)
    for period in range(1, len(kinds) // 2 + 1):
        begin = 0
        for at in range(period, len(kinds) + 1):
            if at == len(kinds) or kinds[at] != kinds[at - period]:
                candidate = Repeats(begin, period, (at - begin) // period)
                if (candidate.count - 1) * period > (best.count - 1) * best.period:
                    best = candidate
                begin = at - period + 1
    return best


@dataclass(frozen=True, eq=False)
class _Skipped:
    """A layer that is left out, with what it returns. Copies of a model share it: a copy of the fake tensors in `kind` has
    memory that was never allocated, and Python crashes when it is freed."""

    layer: nn.Module
    kind: BlockKind

    def __deepcopy__(self, memo: Any) -> _Skipped:
        return self


class SkippedLayer(nn.Module):
    """Stand-in for a layer that is left out: it returns the hidden states of its call, and has the layer's attributes.

    Args:
        layer: the layer whose place it takes.
        kind: what the layer returns.
    """

    def __init__(self, layer: nn.Module, kind: BlockKind) -> None:
        super().__init__()
        self.__dict__["_skipped"] = _Skipped(layer, kind)  # no module of the model any more

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_skipped"].layer, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first tensor of the call, in the form in which the layer returns hidden states."""
        hidden = tensors_in((args, kwargs))[0]
        kind: BlockKind = self.__dict__["_skipped"].kind
        return kind.output_with(lambda tensor: hidden, args, kwargs)


def leave_out(model: nn.Module, layers: Mapping[str, BlockKind]) -> None:
    """Put a `SkippedLayer` in the place of each of the `layers`, by their names, in `model` itself."""
    for name, kind in layers.items():
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent)._modules[child] = SkippedLayer(model.get_submodule(name), kind)


@dataclass(frozen=True)
class Stretch:
    """A stretch that a model was shortened in, with what a run of the short model knows about it."""

    missing: int
    """Number of periods that are left out."""
    around: tuple[tuple[str, ...], ...]
    """Names of the layers of the two periods in front of the gap, and of the two behind it."""
    base: Counter[str]
    """Bytes of one period's parameters, gradients and optimizer state when the step begins."""
    parameters: frozenset[int]
    """Numbers of one period's parameters in the optimizer."""


def whole_levels(ledger: StorageLedger, stretches: Sequence[Stretch]) -> dict[StepMoment, Level] | None:
    """Return the levels of a step of the whole model, from the events of a step of the short one.

    A period that is left out adds what its neighbours add. In forward this is the difference between the points where the
    period in front of the gap begins and where the one behind it does; backward is alike. Levels of what was left out are
    between those of the neighbours, so that none of them is the highest.

    Returns:
        None where the neighbours do not allocate and free the same, so that nothing is known.
    """
    inserted: dict[int, Counter[str]] = {-1: Counter()}
    times: dict[int, int] = {}
    passes = _passes(ledger.events)
    for stretch in stretches:
        inserted[-1].update(_times(stretch.base, stretch.missing))
        times |= dict.fromkeys(stretch.parameters, 1 + stretch.missing)
        for forward, backward in passes:
            _, before, behind, last = (forward.get(names[0]) for names in stretch.around)
            ends = [backward.get(names[-1]) for names in stretch.around]
            for begins in ((before, behind, last), (ends[2], ends[1], ends[0])):
                first, second, third = begins
                if first is None or second is None or third is None:
                    return None
                changes = [[(e.size, e.op) for e in ledger.events[a:b]] for a, b in ((first, second), (second, third))]
                if changes[0] != changes[1]:
                    return None
                added = inserted.setdefault(second, Counter())
                for event in ledger.events[first:second]:
                    added[event.storage.part] += event.size * stretch.missing
    return ledger.levels(inserted, times)


def _times(parts: Counter[str], count: int) -> Counter[str]:
    return Counter({part: count * size for part, size in parts.items()})


def _passes(events: Sequence[Event]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Return, for each micro-batch, at which event each layer's forward begins, and its backward."""
    passes: list[tuple[dict[str, int], dict[str, int]]] = [({}, {})]
    for number, event in enumerate(events):
        phase, _, layer = event.where.partition(" of ")
        if phase.startswith("forward") and passes[-1][1]:
            passes.append(({}, {}))
        if layer and phase in ("forward", "backward"):
            passes[-1][phase == "backward"].setdefault(layer, number)
    return passes
