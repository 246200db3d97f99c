"""A model with fewer of its repeated layers, and what a step of it says of the whole one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from nemo_like._util.tensors import tensors_in
from nemo_like.planning.kinds import Kind
from nemo_like.planning.storage_ledger import Level, StepMoment


@dataclass(frozen=True)
class Repeats:
    """A stretch of layers that is one period again and again, as in ``[dense] + 58 * [experts]``."""

    first: int
    """Where it begins."""
    period: int
    """Layers of one period."""
    count: int
    """Periods."""

    def without(self, kept: int) -> range:
        """Numbers of the layers to leave out for `kept` periods: those in the middle."""
        ahead = -(-kept // 2)
        return range(self.first + ahead * self.period, self.first + (self.count - kept + ahead) * self.period)


def longest_repeats(kinds: Sequence[Hashable]) -> Repeats:
    """The stretch with the most layers behind its first period; the one with the shortest period, if there are several."""
    best = Repeats(0, max(1, len(kinds)), 1 if kinds else 0)
    for period in range(1, len(kinds) // 2 + 1):
        begin = 0
        for at in range(period, len(kinds) + 1):
            if at == len(kinds) or kinds[at] != kinds[at - period]:
                found = Repeats(begin, period, (at - begin) // period)
                if (found.count - 1) * period > (best.count - 1) * best.period:
                    best = found
                begin = at - period + 1
    return best


@dataclass(frozen=True, eq=False)
class _Skipped:
    """A layer that is left out, with what it returns. Copies of a model share it: of the fake tensors in `kind`, a copy has
    memory that nobody made, and Python crashes when it is freed."""

    layer: nn.Module
    kind: Kind

    def __deepcopy__(self, memo: Any) -> _Skipped:
        return self


class SkippedLayer(nn.Module):
    """Stands for a layer that is left out: hands on the hidden states that it is called with, and has its attributes.

    Args:
        layer: whose place it takes.
        kind: what the layer returns.
    """

    def __init__(self, layer: nn.Module, kind: Kind) -> None:
        super().__init__()
        self.__dict__["_skipped"] = _Skipped(layer, kind)  # no module of the model any more

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_skipped"].layer, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first tensor that it is given, in the form in which the layer returns hidden states."""
        hidden = tensors_in((args, kwargs))[0]
        kind: Kind = self.__dict__["_skipped"].kind
        return kind.output_with(lambda tensor: hidden, args, kwargs)


def leave_out(model: nn.Module, layers: Mapping[str, Kind]) -> None:
    """Put a `SkippedLayer` in the place of each of the `layers`, by their names, in `model` itself."""
    for name, kind in layers.items():
        parent, _, own = name.rpartition(".")
        model.get_submodule(parent)._modules[own] = SkippedLayer(model.get_submodule(name), kind)


def grown(runs: Sequence[Mapping[StepMoment, Level]], times: int) -> dict[StepMoment, Level] | None:
    """What each moment of a step reaches with `times` more periods than in the first of three runs, of which each has one
    more than the one before. None: what they reach does not grow evenly, so that nothing is known.

    What is alive between the first layers and the last ones grows evenly from one end to the other, so that none of those
    that were left out is above both ends, of which each run has two periods or more. Where both ends meet, outside of
    layers, a moment has other neighbours in each run: it is left out, too.
    """
    first, second, third = runs
    found = {}
    for moment, level in first.items():
        if not (moment in second and moment in third):
            continue
        if third[moment].total - second[moment].total != second[moment].total - level.total:
            return None
        found[moment] = level.plus(second[moment].less(level), times)
    return found
