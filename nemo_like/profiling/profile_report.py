"""Reports of a profile: rows per layer, totals, and the two ways to read them (table, JSON)."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from nemo_like._util.table import ByteUnit, Column, Fact, Table, paragraph, percent, three_digits

MB = 10**6


@dataclass(frozen=True)
class LayerProfile:
    """One layer, over all its calls in a step. Times are medians over the runs."""

    name: str
    """Its name (FQN) in the original model."""
    kind: str
    """Its class name."""
    calls: int
    """Number of times that a step calls it."""
    activation_bytes: int
    """Bytes it saves for backward: each storage once, at the layer that saves it first; parameters and buffers are not
    counted."""
    freed_bytes: int
    """Bytes that are no longer saved when this layer is recomputed from its inputs."""
    forward_ms: float
    """Milliseconds of its forward, the cost of recomputing it."""
    backward_ms: float
    """Milliseconds of its backward."""
    spread: float
    """(max - min) / median of these times, the larger."""


@dataclass(frozen=True)
class Moment:
    """A stretch of the training step and the most bytes alive in it when nothing is checkpointed.

    `calls_before` is how many layer calls are before it whose saved bytes are still alive: the bytes that recomputing
    those layers frees come off this peak.
    """

    calls_before: int
    peak: int


@dataclass(frozen=True)
class ProfiledCall:
    """One call of one layer, and the effects of recomputing it."""

    layer: int
    # Bytes that are not saved from forward to backward; negative where its inputs are larger than its saved tensors.
    freed: int
    cost: float  # Time that the recomputation takes, any unit.
    # The most bytes alive during the recomputation itself, before bytes freed by earlier layers come off.
    recompute_peak: int = 0


@dataclass(frozen=True)
class ProfileReport:
    """The measured cost of every layer of a model, most activation bytes first."""

    model: str
    """Class of the model."""
    device: str
    """Device that it ran on."""
    runs: int
    """Measured steps; times are medians."""
    layers: tuple[LayerProfile, ...]
    """Sorted by activation bytes, the largest first; equal ones in the model's order."""
    outside_bytes: int
    """Bytes saved outside every layer: embedding, head, loss."""
    peak_bytes: int
    """The most activation bytes alive at one time in a step: on CPU, storages that operators made; on CUDA, bytes that
    the allocator gave out. Parameters, gradients, buffers and inputs are not in it."""
    step_ms: float
    """Milliseconds of one forward and backward."""
    step_spread: float
    """(max - min) / median of `step_ms`."""
    moments: tuple[Moment, ...] = dataclasses.field(repr=False, default=())
    """The peak of every stretch of the step, from which predictions are made."""
    calls: tuple[ProfiledCall, ...] = dataclasses.field(repr=False, default=())
    """Every layer call in forward order; `ProfiledCall.layer` indexes `call_names`."""
    call_names: tuple[str, ...] = dataclasses.field(repr=False, default=())

    @property
    def total_activation_bytes(self) -> int:
        """Every byte saved for backward, each storage once."""
        return self.outside_bytes + sum(row.activation_bytes for row in self.layers)

    def __iter__(self) -> Iterator[LayerProfile]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> LayerProfile:
        for row in self.layers:
            if row.name == name:
                return row
        raise KeyError(f"No layer {name!r} in this profile; it has {', '.join(self.call_names)}.")

    def predict_peak_bytes(self, checkpointed: Collection[str]) -> int:
        """`peak_bytes` as it will be when the layers named are recomputed whole (save nothing but their inputs).

        Raises:
            KeyError: a name is not in the profile.
        """
        return predict_peak(self.moments, self.calls, {self.call_names.index(self[name].name) for name in checkpointed})

    def table(self, width: int | None = None) -> str:
        """Return it as text for a screen of `width` columns (None: as wide as it gets)."""
        unit = self.unit
        rows = (
            (
                Fact("", row.name, Column("layer", left=True, least=28)),
                Fact("", row.kind + (f" x{row.calls}" if row.calls > 1 else ""), Column("class", 3, left=True)),
                Fact("", row.activation_bytes, Column(f"saved {unit.name}"), unit.number),
                Fact("", row.freed_bytes, Column(f"freed {unit.name}", 1), unit.number),
                Fact("", row.forward_ms, Column("forward ms"), three_digits),
                Fact("", row.backward_ms, Column("backward ms"), three_digits),
                Fact("", row.spread, Column("spread", 2), percent),
            )
            for row in self.layers
        )
        peak, recomputed = unit.word(self.peak_bytes), unit.word(self.predict_peak_bytes(self.call_names))
        answer = f"Peak of activations: {peak}; with a recompute of every layer: {recomputed}."
        about = (
            f"{self.model} on {self.device}, {len(self.layers)} layers, median of {self.runs} runs. Saved for backward: "
            f"{unit.word(self.total_activation_bytes)}, {unit.word(self.outside_bytes)} of it outside the layers. "
            f"Step: {three_digits(self.step_ms)} ms (spread {percent(self.step_spread)}), of it layers forward "
            f"{three_digits(sum(row.forward_ms for row in self.layers))} ms, backward "
            f"{three_digits(sum(row.backward_ms for row in self.layers))} ms."
        )
        rendered = Table.of(rows).with_note(width=width)
        return f"{paragraph(answer, width)}\n{paragraph(about, width)}\n\n{rendered}"

    @property
    def unit(self) -> ByteUnit:
        """The unit in which its table has bytes."""
        return ByteUnit.for_sizes([self.peak_bytes, self.total_activation_bytes])

    def to_json(self) -> str:
        """Everything that was measured."""
        return json.dumps(dataclasses.asdict(self), indent=2)


# Layers to recompute for a peak in bytes. Pure functions over numbers; no tensors here.


def predict_peak(moments: Sequence[Moment], calls: Sequence[ProfiledCall], chosen: Collection[int]) -> int:
    """The peak of the step in bytes when the layers `chosen` are recomputed."""
    freed, peak = [0], 0
    for call in calls:
        if call.layer in chosen:
            peak = max(peak, call.recompute_peak - freed[-1])
        freed.append(freed[-1] + (call.freed if call.layer in chosen else 0))
    return max([peak, *(moment.peak - freed[moment.calls_before] for moment in moments)])


def enough_layers(moments: Sequence[Moment], calls: Sequence[ProfiledCall], budget: int) -> list[int] | None:
    """Return layers whose recomputation keeps the peak within `budget` bytes, in order; None where all together do not.

    Layers that free most bytes per unit of cost are taken first, until the peak is within the budget; then those that it
    is met without are left out, the costliest first. No layer of the result can be left out.
    """
    cost, freed = defaultdict[int, float](float), defaultdict[int, int](int)
    for call in calls:
        cost[call.layer] += call.cost
        freed[call.layer] += call.freed
    chosen: set[int] = set()
    for layer in sorted((layer for layer in freed if freed[layer] > 0), key=lambda layer: cost[layer] / freed[layer]):
        if predict_peak(moments, calls, chosen) <= budget:
            break
        chosen.add(layer)
    if predict_peak(moments, calls, chosen) > budget:
        return None
    for layer in sorted(chosen, key=lambda layer: -cost[layer]):
        if predict_peak(moments, calls, chosen - {layer}) <= budget:
            chosen.remove(layer)
    return sorted(chosen)
