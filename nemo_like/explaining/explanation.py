"""Explanation of a recorded peak, in words and as JSON."""

import html
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nemo_like._util.table import Column, Table, byte_word, paragraph
from nemo_like._util.words import MIB
from nemo_like.explaining.unexpected import OF_RESERVED, Cure, Unexpected

_WIDTH = 80


@dataclass(frozen=True)
class MemoryRow:
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
class PlanComparison:
    """A peak compared with the planned one."""

    peak_bytes: int  # Bytes of the planned peak.
    where: str  # Stretch of the step that has it.
    # Recorded and planned bytes by part, where the recorded peak is.
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    layers: tuple[str, ...] = ()  # Layers that differ from their plan, a line for each group of neighbours.
    refusal: str = ""  # The reason why nothing is compared.


@dataclass(frozen=True)
class Explanation:
    """The parts of a device's memory at its peak; `nemo_like.explain` makes it."""

    device: int
    """Number of the GPU."""
    peak_bytes: int
    """Bytes in blocks at the peak, as the allocator counts them."""
    reserved_bytes: int
    """Most bytes that the allocator had reserved."""
    named_bytes: int
    """Bytes at the peak of which the part is known."""
    where: str
    """Phase, operator and place of the last allocation before the peak; empty: nothing was recorded."""
    parts: Mapping[str, int]
    """Bytes at the peak by part, the largest first."""
    layers: tuple[int, ...] = ()
    """Bytes at the peak of each layer; empty where layers are not known."""
    layer_words: str = "layers"
    """``"layers"``, or ``"calls"``, which share their weights."""
    peaks: Mapping[str, int] = field(default_factory=dict)
    """Highest bytes within forward, backward, the optimizer's step and saving, as far as they were recorded."""
    in_use_then: int = 0
    """Bytes in blocks at the moment of `reserved_bytes`."""
    rows: tuple[MemoryRow, ...] = ()
    """The parts, and the places in the source that made most of each."""
    unexpected: tuple[Unexpected, ...] = ()
    """Memory that should not be there, the largest first."""
    out_of_memory: FailedRequest | None = None
    """The request that failed, where the recording has one."""
    notes: tuple[str, ...] = ()
    """Doubts about the file, a line each."""
    cures: tuple[Cure, ...] = ()
    """Changes that lower the peak, each with the bytes of the peak after it."""
    comparison: PlanComparison | None = None
    """The planned peak, where a model was given."""
    lines: tuple[str, ...] = ()
    """The answer for a message or a number of bytes, in place of where the peak is."""
    message: Mapping[str, Any] | None = None
    """Numbers of an out-of-memory message."""

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON; bytes are whole numbers."""
        return {
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "named_bytes": self.named_bytes,
            "where": self.where,
            "parts": dict(self.parts),
            "layers": [{"index": index, "bytes": size} for index, size in enumerate(self.layers)],
            "layer_words": self.layer_words,
            "peaks": dict(self.peaks),
            "in_use_then": self.in_use_then,
            "unexpected": [each.to_dict() for each in self.unexpected],
            "cures": [asdict(cure) for cure in self.cures],
            "oom": None if self.out_of_memory is None else asdict(self.out_of_memory),
            "plan": None if self.comparison is None else asdict(self.comparison),
            "message": self.message,
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _lines(explanation: Explanation) -> Iterable[str]:
    peak, comparison, failed = explanation.peak_bytes, explanation.comparison, explanation.out_of_memory
    yield from explanation.lines
    if explanation.lines and comparison is not None:  # of a message: its bytes are of a moment before the peak
        before = peak + (0 if failed is None else failed.asked_bytes)
        peak = comparison.peak_bytes
        to_come = "" if comparison.refusal or peak <= before else ", which was still to come"
        yield f"Plan {byte_word(peak)}, in {comparison.where}{to_come}."
    if failed is not None and not explanation.lines:
        free = byte_word(failed.free_bytes)
        yield f"Out of memory: {byte_word(failed.asked_bytes)} requested, {free} free, in {failed.where}."
    if not explanation.lines:
        yield from _peak_lines(explanation)
        if comparison is not None and not comparison.refusal:
            more = comparison.peak_bytes / max(1, peak) - 1
            yield f"Plan {byte_word(comparison.peak_bytes)} ({more:+.1%}), in {comparison.where}."
        for each in explanation.unexpected:
            yield paragraph(f"{byte_word(each.size)} should not be there: {each.words}.", _WIDTH)
            of_reserved = each.kind in OF_RESERVED
            before = explanation.reserved_bytes if of_reserved else peak
            if each.change:
                after = f"{byte_word(each.peak_after)} instead of {byte_word(before)}"
                yield f"Paste:  {each.change}   ({'reserved' if of_reserved else 'peak'} {after})"
    if explanation.rows:
        rows = ((row.what, _mib(row.size), f"{row.blocks:,}", row.where) for row in explanation.rows)
        yield _table("what", "MiB", "blocks", "where", rows=rows)
        if explanation.named_bytes < peak:
            yield f"{explanation.named_bytes / max(1, peak):.1%} of the bytes have a name."
    if comparison is not None:
        if comparison.parts:
            sizes = comparison.parts.items()
            rows = ((part, _mib(real), _mib(plan), _mib(real - plan)) for part, (real, plan) in sizes)
            yield _table("compared with the plan", "MiB", "planned", "more", rows=rows)
        yield from (*comparison.layers, *filter(None, [paragraph(comparison.refusal, _WIDTH)]))
    if explanation.cures:
        lower = ((cure.change, _mib(cure.peak_after - peak), _mib(cure.peak_after)) for cure in explanation.cures)
        yield _table("changes that lower the peak", "MiB", "peak", rows=lower)
    yield from explanation.notes


def _peak_lines(explanation: Explanation) -> Iterable[str]:
    """Yield the peak of tensors, the next ones, and the most reserved bytes, each of one moment."""
    peak, reserved = byte_word(explanation.peak_bytes), byte_word(explanation.reserved_bytes)
    if not explanation.where:
        yield "Nothing was recorded: the file has the blocks of the moment at which it was written. Record with"
        yield "torch.cuda.memory._record_memory_history() before the first step."
        yield f"In use {peak} of {reserved} reserved; {byte_word(explanation.reserved_bytes - explanation.peak_bytes)} free."
        return
    yield f"Peak {peak}, in {explanation.where}."
    others = [f"{name}: {byte_word(size)}" for name, size in list(explanation.peaks.items())[1:3]]
    if others:
        yield f"Then {', '.join(others)}."
    yield f"Reserved {reserved} at most, of which {byte_word(explanation.in_use_then)} were in use then."


def _table(*names: str, rows: Iterable[tuple[str, ...]]) -> str:
    columns = tuple(Column(name, left=name in (names[0], "where")) for name in names)
    return f"\n{Table(columns, tuple(rows)).text()}"


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f}"
