"""What a cut into stages must know of a model, and how its layers are dealt out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from nemo_like.options import PipelineParallel


class TensorForm(NamedTuple):
    """As much of a tensor as its receiver must know before."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StagesOfModel(Protocol):
    """What a `Pipeline` must know of the whole model."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names in the bare model, from the first stage's to the last one's."""

    @property
    def tied(self) -> tuple[str, ...]:
        """Parameters that the first and the last stage hold each a copy of."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """From another name, under which one of these stages may hold it, to that in `tied`."""

    def sent(self, stage: int, microbatch: Mapping[str, Any], rows: int, tokens: int) -> tuple[TensorForm, ...]:
        """What `stage` sends to the next one for such a microbatch.

        Args:
            stage: not the last one.
            microbatch: what the model is called with.
            rows, tokens: of it, on one rank of ``cp``.
        """

    def passing(self, layer: int) -> Callable[..., Any] | None:
        """What may stand in the place of a call of `layer`, and hands on its hidden states; None: it is not known."""


@dataclass(frozen=True)
class StageParts:
    """Which parameters run before, in and after the layers; all names are the bare model's."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """Both stages hold a tied parameter under the name in `tied`."""

    layers: tuple[str, ...]
    """In the order in which they run."""
    before: frozenset[str]
    """Parameters of the first stage: those used before the first layer, and those that are not used at all."""
    after: frozenset[str]
    """Parameters of the last stage."""
    tied: tuple[str, ...]
    """Parameters that are used before and after (a tied embedding): both stages hold them, and add up their gradients."""
    forms: tuple[int | None, ...]
    """What each layer returns: None for its hidden states, a number for a tuple of that length that begins with them."""
    inputs: tuple[int | str, ...]
    """Where each layer is given the hidden states: position or name of the argument."""
    hidden_width: tuple[int, ...]
    """Shape of the hidden states behind rows and tokens."""
    hidden_dtype: torch.dtype
    layer_flops: tuple[float, ...]
    """Of one forward of each layer, on the sample."""
    flops_before: float
    flops_after: float

    def sent(self, stage: int, microbatch: Mapping[str, Any], rows: int, tokens: int) -> tuple[TensorForm, ...]:
        """As `StagesOfModel.sent`: the hidden states, whatever the stage."""
        return (TensorForm((rows, tokens, *self.hidden_width), self.hidden_dtype),)

    def passing(self, layer: int) -> Callable[..., Any]:
        """As `StagesOfModel.passing`."""
        place = self.inputs[layer]
        return lambda *args, **kwargs: self.returned(layer, args[place] if isinstance(place, int) else kwargs[place])

    def returned(self, layer: int, hidden: Tensor) -> Any:
        """`hidden` as `layer` would return it."""
        form = self.forms[layer]
        return hidden if form is None else (hidden, *[None] * (form - 1))


@dataclass(frozen=True)
class StageSlice:
    """One stage of all."""

    index: int
    count: int
    layers: range
    """Which of the model's layers."""

    @property
    def is_first(self) -> bool:
        """Holds the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Holds norm, head and loss."""
        return self.index == self.count - 1


def deal(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """How many consecutive layers each stage gets, so that the dearest stage costs least; ties go to earlier stages.

    Every stage gets at least one layer. `first` and `last` are what the first and the last stage have besides.

    >>> deal([1.0] * 8, 2), deal([1.0] * 8, 4, last=2.0)
    ([4, 4], [3, 2, 2, 1])
    """
    count = len(costs)
    if stages > count:
        raise ValueError(f"{count} layers cannot be dealt out to {stages} stages: each needs one. Use fewer stages.")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    # best[s][n]: (the dearest of the first s stages, and the sum of squares) over the first n layers
    best: list[dict[int, tuple[tuple[float, float], list[int]]]] = [{0: ((0.0, 0.0), [])}]
    for stage in range(stages):
        row: dict[int, tuple[tuple[float, float], list[int]]] = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            for begin, ((dearest, squares), cuts) in best[-1].items():
                if begin >= end:
                    continue
                cost = cost_of(stage, begin, end)
                found = ((round(max(dearest, cost), 9), round(squares + cost * cost, 9)), [*cuts, end - begin])
                if end not in row or (found[0], [-n for n in found[1]]) < (row[end][0], [-n for n in row[end][1]]):
                    row[end] = found
        best.append(row)
    return best[-1][count][1]


@functools.lru_cache(maxsize=64)
def _dealt(costs: tuple[float, ...], stages: int, first: float, last: float) -> tuple[int, ...]:
    """A search asks for the same ones again and again."""
    return tuple(deal(costs, stages, first, last))


def counts_of(parts: StageParts, pp: PipelineParallel) -> list[int]:
    """How many layers each stage gets, as `PipelineParallel.balance` says.

    Raises:
        ValueError: counts that are not the model's, or more stages than layers.
    """
    if isinstance(pp.balance, tuple):
        if sum(pp.balance) != len(parts.layers):
            raise ValueError(
                f"PipelineParallel.balance is {list(pp.balance)}, {sum(pp.balance)} layers, and the model has "
                f"{len(parts.layers)}."
            )
        return list(pp.balance)
    try:
        return list(_dealt(parts.layer_flops, pp.stages, parts.flops_before, parts.flops_after))
    except ValueError as error:
        raise ValueError(f"pp is {pp.size} with {pp.stages_per_rank} stage(s) on each rank: {error}") from error


def slices(counts: Sequence[int]) -> list[StageSlice]:
    """The stages for so many layers each."""
    made, begin = [], 0
    for index, count in enumerate(counts):
        made.append(StageSlice(index, len(counts), range(begin, begin + count)))
        begin += count
    return made
