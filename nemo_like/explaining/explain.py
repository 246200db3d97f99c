"""`explain`: the parts of a GPU's memory, by a snapshot, a message or a number; compared with a model's plan."""

from __future__ import annotations

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like._util.table import byte_word, grouped, totals
from nemo_like._util.words import MIB
from nemo_like.explaining.explanation import Explanation, FailedRequest, MemoryRow
from nemo_like.explaining.messages import OutOfMemory, causes, read_message, words
from nemo_like.explaining.parts import MemoryKind, StepParts, parts_of
from nemo_like.explaining.snapshot import BEFORE, Block, MemoryTimeline, timelines
from nemo_like.explaining.snapshot_file import SnapshotError, read_snapshot
from nemo_like.explaining.stacks import Phase, operator_of, place_of
from nemo_like.explaining.unexpected import Cure, Unexpected, cures_of, unexpected_at_peak

if TYPE_CHECKING:
    from torch import nn

    from nemo_like.explaining.planned import PlannedJob
    from nemo_like.job import Job

# Bytes of a log, or characters of a text, that are looked through for a message, its last ones.
LONGEST = 64 << 20
_OUTSIDE = 1.5 * 2**30  # Bytes outside of torch's allocator that a process of one GPU has no use for.
_SAME = 0.03  # Share by which a change may miss the bytes that were measured, and be named as the reason.


def explain(
    source: str | Path | Mapping[str, Any] | int,
    *,
    model: nn.Module | str | None = None,
    job: Job | None = None,
    sample_input: Any = None,
    device: int | None = None,
    used: int | None = None,
) -> Explanation:
    """Return the parts of a GPU's memory at its peak, those that should not be there, and the changes that lower it.

    Args:
        source: the path of a snapshot (``torch.cuda.memory._dump_snapshot``), also gzipped, or of a log with an
            out-of-memory message; the dict of ``torch.cuda.memory._snapshot()``; the message itself; or the bytes that
            nvidia-smi shows, which take a model.
        model: a module on any device, ``meta`` included, or a name as for ``nemo-like plan --model``: the peak is then
            compared with the planned one.
        job: the job that ran (`nemo_like.Job.of`), with its ``ac`` and ``gpu``. Default: one GPU without checkpointing.
        sample_input: one micro-batch as the model is called with it.
        device: the number of the GPU; None: the one with the highest peak.
        used: bytes that nvidia-smi shows for the process that wrote the snapshot.

    Raises:
        SnapshotError: (a ValueError) the file is neither a snapshot nor a log with a message, or of another device.
        ValueError: a number of bytes without a model; as `nemo_like.plan_for`.
        OSError: the file cannot be read.
    """
    planned = None
    if model is not None:
        from nemo_like.explaining.planned import PlannedJob
        from nemo_like.job import Job

        planned = PlannedJob.from_model(model, Job.of(ac="none") if job is None else job, sample_input)
    elif job is not None or sample_input is not None:
        raise ValueError("job and sample_input are of a model. Give model=, too.")
    return explained_source(source, planned, device=device, used=used)


def explained_source(
    source: str | Path | Mapping[str, Any] | int,
    planned: PlannedJob | None = None,
    *,
    device: int | None = None,
    used: int | None = None,
) -> Explanation:
    """Return the explanation of `source`, compared with a plan where there is one; arguments as for `explain`."""
    if isinstance(source, int):
        if planned is None:
            raise ValueError(f"{source} is a number of bytes, which alone has no parts. Give model= and job=, too.")
        return _of_bytes(source, planned)
    if isinstance(source, str) and (message := read_message(source)) is not None:
        return explained_message(message, planned)
    try:
        snapshot = read_snapshot(source)
    except SnapshotError:
        message = None if isinstance(source, Mapping) else read_message(_end_of(Path(source)))
        if message is None:
            raise
        return explained_message(message, planned)
    explanation = _of_snapshot(snapshot, planned, device)
    return explanation if used is None else _with_outside(explanation, used)


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        # PowerShell's > writes UTF-16.
        encoding = "utf-16" if file.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8"
        file.seek(max(0, path.stat().st_size - LONGEST))
        return file.read(LONGEST).decode(encoding, errors="replace")


def _of_snapshot(snapshot: Mapping[str, Any], planned: PlannedJob | None, device: int | None) -> Explanation:
    devices = {each.device: each for each in timelines(snapshot)}
    if not devices or device not in (None, *devices):
        has = ", ".join(f"device {number}" for number in devices) or "no memory of any device"
        raise SnapshotError(f"There is nothing to explain: it has {has}.")
    timeline = max(devices.values(), key=lambda each: max(each.active)) if device is None else devices[device]
    return explained(timeline, planned)


def _with_outside(explanation: Explanation, used: int) -> Explanation:
    """Return it with the bytes of `used` beyond the allocator, where they are more than a context and NCCL take."""
    outside = used - explanation.reserved_bytes
    if outside < _OUTSIDE:
        return explanation
    outsider = Unexpected(
        "outside of the allocator",
        outside,
        explanation.peak_bytes,
        f"of {byte_word(used)} in use, so much is not torch's: the context, NCCL, or contexts of other ranks, which "
        "torch.cuda.set_device(local_rank) before the first CUDA call keeps away",
    )
    every = sorted((*explanation.unexpected, outsider), key=lambda each: -each.size)
    return replace(explanation, unexpected=tuple(every))


def explained_message(message: OutOfMemory, planned: PlannedJob | None = None) -> Explanation:
    """Return the explanation of an out-of-memory message, with the findings of a plan."""
    lines = words(message)
    peak, comparison, cures = message.allocated_bytes or 0, None, tuple[Cure, ...]()
    if planned is not None:
        lines += [f"It may have been {reading.words}." for reading in planned.readings_of(message)]
        comparison = planned.compare_message(message)
        cures = () if comparison.refusal else tuple(planned.cures(comparison.peak_bytes))
    sizes = {
        "tensors": message.allocated_bytes,
        "reserved, not used": message.unallocated_bytes,
        "other processes": message.elsewhere_bytes,
        "outside of the allocator": message.outside_bytes,
    }
    return Explanation(
        device=message.device or 0,
        peak_bytes=peak,
        reserved_bytes=message.reserved_bytes or peak,
        named_bytes=0,
        where="",
        parts={name: size for name, size in sizes.items() if size},
        unexpected=tuple(Unexpected(cause.kind, cause.size, peak, cause.words) for cause in causes(message)),
        out_of_memory=FailedRequest(message.device or 0, "", message.asked_bytes or 0, message.free_bytes or 0),
        cures=cures,
        comparison=comparison,
        lines=tuple(lines),
        message=asdict(message),
    )


def _of_bytes(used: int, planned: PlannedJob) -> Explanation:
    need, peak = planned.need(planned.query), planned.peak(planned.query)
    return Explanation(
        device=0,
        peak_bytes=peak,
        reserved_bytes=need,
        named_bytes=peak,
        where="the plan",
        parts=planned.parts(),
        cures=tuple(planned.cures(peak)),
        lines=tuple(_compared(used, need, planned)),
    )


def _compared(used: int, need: int, planned: PlannedJob) -> Iterator[str]:
    """Yield the lines that state which single change makes the plan take the `used` bytes."""
    yield f"In use {byte_word(used)}; the plan takes {byte_word(need)} of the GPU, {byte_word(used - need)} less."
    if abs(used - need) <= _SAME * used:
        yield "That is as planned."
        return
    tried = sorted((abs(size - used), size, change) for change, size in planned.deviations())
    reasons = [(change, size) for off, size, change in tried if off <= _SAME * used][:3]
    for change, size in reasons:
        yield f"With {change} it would be {byte_word(size)}: check that the job ran as planned."
    if not reasons:
        nearest = f" The nearest is {tried[0][2]}, {byte_word(tried[0][1])}." if tried else ""
        yield f"No single change of the job takes as much.{nearest} Record a snapshot for the parts."


# Explanation of a recorded timeline: parts, layers and places at its peak.

_SHORT = 40  # Characters of a place that has no line of its own.
_PLACES = 3  # Places in the source that are named for each part.
_ALIKE = 0.02  # Share by which layers may differ and are called alike.
_STRETCHES = {
    Phase.FORWARD: "forward",
    Phase.LOSS: "forward",
    Phase.BACKWARD: "backward",
    Phase.RECOMPUTATION: "backward",
    Phase.OPTIMIZER: "the optimizer's step",
    Phase.CLIPPING: "the optimizer's step",
    Phase.STATE: "saving or loading",
}


def explained(timeline: MemoryTimeline, planned: PlannedJob | None = None) -> Explanation:
    """Return the explanation of a device's timeline, compared with a plan where there is one."""
    parts, at = parts_of(timeline), timeline.peak_at
    alive, comparison, peak = timeline.alive(at), None, timeline.active[at + 1]
    if planned is not None:
        parts, comparison = planned.compare(alive, parts)
    compared = comparison is not None and not comparison.refusal
    cures = planned.cures(peak) if planned is not None and compared else cures_of(timeline, parts)
    sizes = totals((parts.named[block].kind, block.size) for block in alive)
    layers, failed = _by_layer(parts, alive), timeline.out_of_memory
    return Explanation(
        device=timeline.device,
        peak_bytes=peak,
        reserved_bytes=max(timeline.reserved),
        in_use_then=timeline.active[timeline.most_reserved_at + 1],
        named_bytes=peak - sizes[MemoryKind.OLD],
        where=_where(timeline, parts, at) if timeline.recorded else "",
        peaks=_peaks(timeline, parts) if timeline.recorded else {},
        parts={kind.value: size for kind, size in sizes.most_common()},
        layers=layers,
        layer_words=_layer_words(parts),
        rows=tuple(_rows(parts, alive, sizes, layers)),
        unexpected=tuple(unexpected_at_peak(timeline, parts)),
        out_of_memory=None
        if failed is None
        else FailedRequest(
            timeline.device,
            _stack_words(failed.get("frames") or ()),
            failed["size"],
            failed.get("device_free", 0),
        ),
        notes=tuple(timeline.notes),
        cures=tuple(cures),
        comparison=comparison,
    )


def _where(timeline: MemoryTimeline, parts: StepParts, at: int) -> str:
    last = next((block for block in timeline.blocks if block.born == at), None)
    if last is None:
        return "before the recording" if at == BEFORE else "at the end of a free"
    return f"{parts.named[last].phase}, {_stack_words(last.frames)}".rstrip(", ")


def _peaks(timeline: MemoryTimeline, parts: StepParts) -> dict[str, int]:
    """Return the highest bytes within each stretch of a step, the highest first."""
    begun = ((block.born, _STRETCHES.get(each.phase)) for block, each in parts.named.items() if block.born > BEFORE)
    starts, highest = sorted((event, name) for event, name in begun if name), dict[str, int]()
    for (since, name), (until, _) in pairwise([*starts, (len(timeline.trace), "")]):
        highest[name] = max(highest.get(name, 0), *timeline.active[since + 1 : until + 1])
    return dict(Counter(highest).most_common())


def _layer_words(parts: StepParts) -> str:
    return "calls" if parts.of_calls else "layers"


def _stack_words(frames: Any) -> str:
    operator, place = operator_of(frames), place_of(frames, with_class=True)
    return f"{operator} ({place})" if operator and place else operator or place


def _by_layer(parts: StepParts, alive: Iterable[Block]) -> tuple[int, ...]:
    of_blocks = ((parts.named[block].layer, block.size) for block in alive)
    sizes = totals((layer, size) for layer, size in of_blocks if layer is not None)
    count = parts.layer_count or max(sizes, default=-1) + 1  # by the plan, where stacks do not tell
    return tuple(sizes[layer] for layer in range(count)) if sizes else ()


def _rows(
    parts: StepParts, alive: Iterable[Block], sizes: Counter[MemoryKind], layers: Sequence[int]
) -> Iterable[MemoryRow]:
    of_kinds = grouped((parts.named[block].kind, (_stack_words(block.frames), block)) for block in alive)
    for kind, size in sizes.most_common():
        where, places = "", grouped(of_kinds[kind])
        if kind is MemoryKind.ACTIVATIONS and layers:
            alike = max(layers) - min(layers) <= _ALIKE * max(layers)
            words = "all alike" if alike else f"{min(layers) / MIB:,.0f} to {max(layers) / MIB:,.0f} MiB"
            where = f"{len(layers)} {_layer_words(parts)} of {sum(layers) / len(layers) / MIB:,.0f} MiB, {words}"
        elif len(places) == 1 and len(next(iter(places))) <= _SHORT:
            where = next(iter(places))
        yield MemoryRow(kind.value, size, sum(map(len, places.values())), where)
        if not where or len(places) > 1:
            ranked = sorted(places.items(), key=lambda pair: -sum(block.size for block in pair[1]))
            yield from (
                MemoryRow(f"  {place}", sum(block.size for block in blocks), len(blocks))
                for place, blocks in ranked[:_PLACES]
                if place
            )
