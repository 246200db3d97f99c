"""Explanation of a snapshot, in words and as JSON."""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_like._util.table import ByteUnit, Column, Table
from nemo_like.explaining.parts import Kind, Parts, parts_of
from nemo_like.explaining.snapshot import BEFORE, Block, SnapshotError, Timeline, read_snapshot, timelines
from nemo_like.explaining.stacks import Sources, operator_of, place_of
from nemo_like.explaining.unexpected import Unexpected, unexpected_at_peak

_MIB = 2**20
_PLACES = 3
"""Places in the source that are named for each part."""
_ALIKE = 0.02
"""Share by which layers may differ and are called alike."""


@dataclass(frozen=True)
class Row:
    """A part of the peak, or a place within one."""

    what: str
    size: int
    blocks: int
    where: str = ""


@dataclass(frozen=True)
class FailedRequest:
    """The request that failed."""

    device: int
    where: str
    asked_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Explanation:
    """The parts of a device's memory at its peak; `explain` makes it."""

    device: int
    peak_bytes: int
    """Bytes in blocks at the peak, as the allocator counts them."""
    reserved_bytes: int
    """Most bytes that the allocator had reserved."""
    named_bytes: int
    """Bytes at the peak of which the part is known."""
    where: str
    """Phase, operator and place of the last allocation before the peak."""
    parts: Mapping[str, int]
    """Bytes at the peak by part, the largest first."""
    layers: tuple[int, ...] = ()
    """Bytes at the peak of each layer; empty where layers are not known."""
    rows: tuple[Row, ...] = ()
    unexpected: tuple[Unexpected, ...] = ()
    out_of_memory: FailedRequest | None = None
    notes: tuple[str, ...] = ()
    """Doubts about the file, a line each."""
    cures: tuple[tuple[str, int], ...] = ()
    """Changes that lower the peak, each with the bytes of the peak after it."""

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON; bytes are whole numbers."""
        failed = self.out_of_memory
        return {
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "named_bytes": self.named_bytes,
            "where": self.where,
            "parts": dict(self.parts),
            "layers": [{"index": index, "bytes": size} for index, size in enumerate(self.layers)],
            "unexpected": [each.to_dict() for each in self.unexpected],
            "cures": [{"change": change, "peak_after": size} for change, size in self.cures],
            "oom": None if failed is None else asdict(failed),
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain(source: str | Path | Mapping[str, Any], *, device: int | None = None) -> Explanation:
    """Return the parts of a GPU's memory at the peak of a recorded run, and those that should not have been there.

    Args:
        source: the path of a snapshot (``torch.cuda.memory._dump_snapshot``), also gzipped, or the dict of ``_snapshot()``.
        device: the number of the GPU; None: the one with the highest peak.

    Raises:
        SnapshotError: the file is not a snapshot, or of another device.
        OSError: it cannot be read.
    """
    devices = {each.device: each for each in timelines(read_snapshot(source))}
    if not devices or device not in (None, *devices):
        has = (
            f"it has {', '.join(f'device {number}' for number in devices)}"
            if devices
            else "it has no memory of any device"
        )
        raise SnapshotError(f"There is nothing to explain: {has}.")
    timeline = max(devices.values(), key=lambda each: max(each.active)) if device is None else devices[device]
    return explained(timeline)


def explained(timeline: Timeline) -> Explanation:
    """Return the explanation of a device's timeline."""
    parts, sources, at = parts_of(timeline), Sources(), timeline.peak_at
    alive = timeline.alive(at)
    sizes = Counter[Kind]()
    for block in alive:
        sizes[parts.named[block].kind] += block.size
    notes = list(timeline.notes)
    if not any(block.born > BEFORE for block in timeline.blocks):
        notes.append("No allocation was recorded: this is what was there when it was written. Record with")
        notes.append("torch.cuda.memory._record_memory_history() before the first step.")
    peak, layers = timeline.active[at + 1], _by_layer(parts, alive)
    failed = timeline.out_of_memory
    return Explanation(
        device=timeline.device,
        peak_bytes=peak,
        reserved_bytes=max(timeline.reserved),
        named_bytes=peak - sizes[Kind.OLD],
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
    count = parts.layer_count
    sizes = Counter[int]()
    for block in alive:
        if (layer := parts.named[block].layer) is not None:
            sizes[layer] += block.size
    return tuple(sizes[layer] for layer in range(count)) if count and sizes else ()


def _rows(
    parts: Parts, sources: Sources, alive: Iterable[Block], sizes: Counter[Kind], layers: Sequence[int]
) -> Iterable[Row]:
    places_of: dict[Kind, dict[str, list[Block]]] = defaultdict(lambda: defaultdict(list))
    for block in alive:
        places_of[parts.named[block].kind][_stack_words(block.frames, sources)].append(block)
    for kind, size in sizes.most_common():
        where, places = "", places_of[kind]
        if kind is Kind.ACTIVATIONS and layers:
            alike = max(layers) - min(layers) <= _ALIKE * max(layers)
            words = "all alike" if alike else f"{min(layers) / _MIB:,.0f} to {max(layers) / _MIB:,.0f} MiB"
            where = f"{len(layers)} layers of {sum(layers) / len(layers) / _MIB:,.0f} MiB, {words}"
        elif len(places) == 1:
            where = next(iter(places))
        yield Row(kind.value, size, sum(map(len, places.values())), where)
        ranked = sorted(places.items(), key=lambda pair: -sum(block.size for block in pair[1]))
        if len(places) > 1:
            for place, own in ranked[:_PLACES]:
                if place:
                    yield Row(f"  {place}", sum(block.size for block in own), len(own))


def _word(size: int) -> str:
    return ByteUnit.of([size]).word(size)


def _lines(explanation: Explanation) -> Iterable[str]:
    if explanation.out_of_memory is not None:
        failed = explanation.out_of_memory
        yield f"Out of memory: {_word(failed.asked_bytes)} asked, {_word(failed.free_bytes)} free, in {failed.where}."
    yield f"Peak {_word(explanation.peak_bytes)} ({_word(explanation.reserved_bytes)} reserved), in {explanation.where}."
    for each in explanation.unexpected:
        yield f"{_word(each.size)} should not be there: {each.words}."
        if each.change:
            yield f"Paste:  {each.change}   (peak {_word(each.peak_after)})"
    yield ""
    columns = Column("what", left=True), Column("MiB"), Column("blocks"), Column("where", left=True)
    rows = ((row.what[:40], f"{row.size / _MIB:,.0f}", f"{row.blocks:,}", row.where) for row in explanation.rows)
    yield Table(columns, tuple(rows)).text()
    if explanation.named_bytes < explanation.peak_bytes:
        yield f"{explanation.named_bytes / max(1, explanation.peak_bytes):.1%} of the bytes have a name."
    yield from explanation.notes
