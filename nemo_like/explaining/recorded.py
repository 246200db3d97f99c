"""Explanation of a recorded timeline: parts, layers and places at its peak."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nemo_like._util.words import MIB
from nemo_like.explaining.cures import cures_of
from nemo_like.explaining.explanation import Explanation, FailedRequest, Row
from nemo_like.explaining.parts import MemoryKind, Parts, parts_of
from nemo_like.explaining.snapshot import BEFORE, Block, Timeline
from nemo_like.explaining.stacks import Sources, operator_of, place_of
from nemo_like.explaining.unexpected import unexpected_at_peak

if TYPE_CHECKING:  # a plan takes torch, which a file alone does not
    from nemo_like.explaining.planned import PlannedJob

_PLACES = 3  # Places in the source that are named for each part.
_ALIKE = 0.02  # Share by which layers may differ and are called alike.


def explained(timeline: Timeline, planned: PlannedJob | None = None) -> Explanation:
    """Return the explanation of a device's timeline, compared with a plan where there is one."""
    parts, sources, at = parts_of(timeline), Sources(), timeline.peak_at
    alive = timeline.alive(at)
    comparison, peak = None, timeline.active[at + 1]
    if planned is not None:
        parts, comparison = planned.compare(alive, parts)
    if planned is None or comparison is None or comparison.refusal:
        cures = tuple(cures_of(timeline, parts))
    else:
        cures = tuple(planned.cures(peak))
    sizes = Counter[MemoryKind]()
    for block in alive:
        sizes[parts.named[block].kind] += block.size
    notes = list(timeline.notes)
    if not any(block.born > BEFORE for block in timeline.blocks):
        notes.append("No allocation was recorded: this is what was there when it was written. Record with")
        notes.append("torch.cuda.memory._record_memory_history() before the first step.")
    layers, failed = _by_layer(parts, alive), timeline.out_of_memory
    return Explanation(
        device=timeline.device,
        peak_bytes=peak,
        reserved_bytes=max(timeline.reserved),
        named_bytes=peak - sizes[MemoryKind.OLD],
        where=_where(timeline, parts, sources, at),
        parts={kind.value: size for kind, size in sizes.most_common()},
        layers=layers,
        rows=tuple(_rows(parts, sources, alive, sizes, layers)),
        unexpected=tuple(unexpected_at_peak(timeline, parts)),
        out_of_memory=None
        if failed is None
        else FailedRequest(
            timeline.device,
            _stack_words(failed.get("frames") or (), sources),
            failed["size"],
            failed.get("device_free", 0),
        ),
        notes=tuple(notes),
        cures=cures,
        comparison=comparison,
    )


def _where(timeline: Timeline, parts: Parts, sources: Sources, at: int) -> str:
    last = next((block for block in timeline.blocks if block.born == at), None)
    if last is None:
        return "before the recording" if at == BEFORE else "at the end of a free"
    return f"{parts.named[last].phase}, {_stack_words(last.frames, sources)}".rstrip(", ")


def _stack_words(frames: Any, sources: Sources) -> str:
    operator, place = operator_of(frames), place_of(frames, sources)
    return f"{operator} ({place})" if operator and place else operator or place


def _by_layer(parts: Parts, alive: Iterable[Block]) -> tuple[int, ...]:
    sizes = Counter[int]()
    for block in alive:
        if (layer := parts.named[block].layer) is not None:
            sizes[layer] += block.size
    count = parts.layer_count or max(sizes, default=-1) + 1  # by the plan, where stacks do not tell
    return tuple(sizes[layer] for layer in range(count)) if sizes else ()


def _rows(
    parts: Parts, sources: Sources, alive: Iterable[Block], sizes: Counter[MemoryKind], layers: Sequence[int]
) -> Iterable[Row]:
    places_of: dict[MemoryKind, dict[str, list[Block]]] = defaultdict(lambda: defaultdict(list))
    for block in alive:
        places_of[parts.named[block].kind][_stack_words(block.frames, sources)].append(block)
    for kind, size in sizes.most_common():
        where, places = "", places_of[kind]
        if kind is MemoryKind.ACTIVATIONS and layers:
            alike = max(layers) - min(layers) <= _ALIKE * max(layers)
            words = "all alike" if alike else f"{min(layers) / MIB:,.0f} to {max(layers) / MIB:,.0f} MiB"
            where = f"{len(layers)} layers of {sum(layers) / len(layers) / MIB:,.0f} MiB, {words}"
        elif len(places) == 1:
            where = next(iter(places))
        yield Row(kind.value, size, sum(map(len, places.values())), where)
        ranked = sorted(places.items(), key=lambda pair: -sum(block.size for block in pair[1]))
        if len(places) > 1:
            for place, blocks in ranked[:_PLACES]:
                if place:
                    yield Row(f"  {place}", sum(block.size for block in blocks), len(blocks))
