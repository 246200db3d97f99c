"""Find memory at the peak that should not be there: each cause with its bytes, and the peak without it, exactly."""

from bisect import bisect, bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_like._util.table import byte_word, grouped
from nemo_like.explaining.parts import MemoryKind, StepParts
from nemo_like.explaining.snapshot import BEFORE, Block, MemoryTimeline
from nemo_like.explaining.stacks import Phase, place_of, text_of
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.memory_model.allocator import CachingAllocator, DeviceMemoryError, MemoryBlock

_LEAST = 0.005  # Share of the peak below which a cause is left out.
_FREE = 0.10  # Share of reserved bytes that must be free to be called fragmentation.
_IDLE = 0.5  # A stream is idle that has allocated nothing in the second half of the recording.
_STEPS = 3  # Steps that must leave something behind, to be called growth.
_FORWARD = {MemoryKind.ACTIVATIONS, MemoryKind.LOSS, MemoryKind.OF_FORWARD}
# Parts of which a step should leave nothing behind.
_LEFT = {
    MemoryKind.SCRIPT,
    MemoryKind.OF_BACKWARD,
    MemoryKind.RECOMPUTED,
    MemoryKind.COMMUNICATION,
    MemoryKind.SAVED_STATE,
    MemoryKind.CLIPPING,
}


@dataclass(frozen=True)
class Unexpected:
    """Memory that should not be there."""

    kind: str
    size: int  # Bytes at the peak.
    # Active bytes of the peak without them; of fragmentation, reserved bytes after the change.
    peak_after: int
    words: str  # The cause, in words.
    change: str = ""  # The line to write, or the setting.

    def to_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {"kind": self.kind, "bytes": self.size, "peak_after": self.peak_after, "words": self.words}


def unexpected_at_peak(timeline: MemoryTimeline, parts: StepParts) -> list[Unexpected]:
    """Return the causes of memory that should not be alive at the peak, the largest first."""
    causes = [_cause(timeline, *each) for each in _left_behind(timeline, parts)]
    causes += [_idle_stream(timeline), _fragments(timeline)]
    least = _LEAST * timeline.active[timeline.peak_at + 1]
    return sorted((each for each in causes if each and each.size >= least), key=lambda each: -each.size)


def _cause(
    timeline: MemoryTimeline, kind: str, blocks: Mapping[Block, int], words: str, change: str = ""
) -> Unexpected | None:
    """Return a cause: `blocks` should be gone from an event on, each; None where none is there at the peak."""
    at = timeline.peak_at
    size = sum(b.size for b, since in blocks.items() if max(b.born, since) <= at and b.outlives(at))
    return Unexpected(kind, size, timeline.peak_without(blocks), words, change) if size else None


def _left_behind(timeline: MemoryTimeline, parts: StepParts) -> Iterator[tuple[str, dict[Block, int], str, str]]:
    """Yield the causes that are known by their blocks, as `_cause` takes them."""
    begins: dict[int, int] = {}  # By step, where its forward begins.
    for block, each in parts.named.items():
        if each.phase is Phase.FORWARD and block.born > BEFORE:
            begins[each.step] = min(block.born, begins.get(each.step, block.born))
    updates = sorted(block.born for block, each in parts.named.items() if each.phase is Phase.OPTIMIZER)
    outlive = {  # blocks that are there when the next forward begins, with their names and that event
        block: (each, begins[each.step + 1])
        for block, each in parts.named.items()
        if each.step + 1 in begins and block.outlives(begins[each.step + 1])
    }
    yield (
        "gradients of the last step",
        {
            block: since
            for block, (each, since) in outlive.items()
            if each.kind is MemoryKind.OLD_GRADIENTS
            or (each.kind is MemoryKind.GRADIENTS and _any_between(block.born, since, updates))  # they were used
        },
        "last step's gradients lie under the forward, since zero_grad() comes after it",
        "optimizer.zero_grad()   before   model(...)",
    )
    of_steps = {block: since for block, (each, since) in outlive.items() if each.step > BEFORE}
    outputs = {block: since for block, since in of_steps.items() if parts.named[block].kind in _FORWARD}
    largest = max(outputs, key=lambda block: block.size, default=None)
    place = "" if largest is None else place_of(largest.frames)
    yield (
        "outputs of an earlier step",
        outputs,
        f"tensors of an earlier forward are still referenced, most of them from {place or 'an unknown place'}",
        "del outputs, loss   behind   optimizer.step(); keep loss.item() or loss.detach()",
    )
    yield (
        "a further copy of weights",
        {block: BEFORE for block, each in parts.named.items() if each.kind is MemoryKind.MORE_WEIGHTS},
        "blocks of the sizes of all weights are there once more: a second model, or an average of weights",
        "",
    )
    yield (
        "frees that wait for streams",
        {block: block.asked for block in timeline.blocks if block.asked is not None and block.asked != block.died},
        "they were freed, and wait for another stream that used them (record_stream)",
        "",
    )
    alive = [block for block in timeline.alive(timeline.peak_at) if parts.named[block].kind is not MemoryKind.WEIGHTS]
    yield (
        "made while saving",
        {block: BEFORE for block in alive if _saves(block)},
        "state_dict() has made it, for a checkpoint, and it is still there",
        "nemo_like.distributed.get_model_state(model, full=True), which gathers into CPU memory",
    )
    leftovers = {block: since for block, since in of_steps.items() if parts.named[block].kind in _LEFT}
    for place, blocks in grouped((place_of(block.frames), block) for block in leftovers).items():
        if len({parts.named[block].step for block in blocks}) >= _STEPS:
            born = [block.born for block in blocks]
            which = "step" if _any_between(min(born), max(born), updates) else "micro-batch"
            yield (
                "growth",
                {block: leftovers[block] for block in blocks},
                f"each {which} leaves some behind, made at {place}",
                "",
            )


def _saves(block: Block) -> bool:
    """Return whether ``state_dict()`` has made it: a gathered or copied weight, or a state of an optimizer's empty step."""
    names = (text_of(frame, "name") for frame in block.frames)
    return any(("state_dict" in name and "load" not in name) or name == "_init_optim_state" for name in names)


def _idle_stream(timeline: MemoryTimeline) -> Unexpected | None:
    """Free bytes in segments of streams that allocate no longer, which serve no other stream."""
    allocations = (pair for pair in enumerate(timeline.trace) if pair[1]["action"] == "alloc")
    last = {event.get("stream", 0): number for number, event in allocations}
    idle = {stream for stream, number in last.items() if number < _IDLE * len(timeline.trace)}
    free = sum(
        segment["total_size"] - sum(block["size"] for block in segment["blocks"] if block["state"] != "inactive")
        for segment in timeline.segments
        if segment.get("stream", 0) in idle
    )
    if not free or len(idle) == len(last):  # where none allocates, the recording goes on behind the last step
        return None
    streams = "a stream" if len(idle) == 1 else f"{len(idle)} streams"
    return Unexpected(
        "idle streams",
        free,
        max(timeline.reserved) - free,
        f"it is free in segments of {streams} that no longer allocate",
        "torch.cuda.empty_cache()   once, behind the work on that stream",
    )


def _any_between(first: int, last: int, events: Sequence[int]) -> bool:
    """Return whether one of the `events`, which are in order, is between two others."""
    return bisect(events, first) < bisect_left(events, last)


def _fragments(timeline: MemoryTimeline) -> Unexpected | None:
    """Reserved bytes beyond the most that was ever active: pieces of segments that no request could use."""
    reserved, active = max(timeline.reserved), max(timeline.active)
    if reserved - active <= _FREE * reserved:
        return None
    whole, segments = byte_word(reserved), len(timeline.segments)
    words = f"of {whole} reserved, so much was free in {segments:,} segments at the peak{_pins(timeline)}"
    failed = timeline.out_of_memory or {}
    after = reserved_if_expandable(timeline, reserved + int(failed.get("device_free", 0)))
    if after is None or after > (1 - _LEAST) * reserved:
        return Unexpected("fragmentation", reserved - active, active, words)
    return Unexpected("fragmentation", reserved - active, after, words, EXPANDABLE)


def _pins(timeline: MemoryTimeline) -> str:
    """Return, in words, the place of the blocks that hold most of the segments that are half empty or more; empty: none."""
    held: dict[str, int] = defaultdict(int)
    for segment in timeline.segments:
        used = [block for block in segment["blocks"] if block["state"] != "inactive"]
        if used and 2 * sum(block["size"] for block in used) <= segment["total_size"]:
            largest = max(used, key=lambda block: block["size"])
            held[place_of(largest.get("frames") or ())] += segment["total_size"]
    place = max(held, key=lambda place: held[place], default="")
    return f"; segments stay for blocks of {place}" if place else ""


# Changes that lower a recorded peak, each with the peak after it, from the recording alone.

_SAVES = 0.01  # Share of the peak that a change must save to be named.
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Cure:
    """A change, and the active bytes of the peak after it."""

    change: str
    peak_after: int


def cures_of(timeline: MemoryTimeline, parts: StepParts) -> list[Cure]:
    """Return the changes that lower the peak by a hundredth or more, the strongest first."""
    tried = list(_recomputed(timeline, parts))
    # 8-bit states have a quarter of the bytes of float32 ones.
    states = [block for block, each in parts.named.items() if each.kind is MemoryKind.STATE]
    if less := {replace(block, size=3 * block.size // 4): BEFORE for block in states}:
        tried.append(Cure("optimizer='adamw-8bit': its state in 8 bits", timeline.peak_without(less)))
    return strongest(tried, timeline.active[timeline.peak_at + 1])


def strongest(tried: Iterable[Cure], peak: int) -> list[Cure]:
    """Return those that save a hundredth of `peak` or more, the strongest first."""
    enough = (cure for cure in tried if cure.peak_after <= (1 - _SAVES) * peak)
    return sorted(enough, key=lambda cure: (cure.peak_after, cure.change))


def _recomputed(timeline: MemoryTimeline, parts: StepParts) -> Iterator[Cure]:
    """Recompute layers: their activations are gone from the end of their forward to their backward, but for one each.

    The last tensor of a layer stays: it is the input of the next one. Tensors that recomputing makes and frees again at
    once are not counted.
    """
    layers = grouped(
        ((each.step, each.layer), block)
        for block, each in parts.named.items()
        if each.kind is MemoryKind.ACTIVATIONS and each.layer is not None and block.born > BEFORE
    )
    gone, back = dict[Block, int](), dict[Block, int]()
    for blocks in layers.values():
        last = max(blocks, key=lambda block: block.born)
        again = min((block.died for block in blocks if block is not last and block.died is not None), default=None)
        for block in blocks:
            if block is not last and again is not None:
                gone[block], back[block] = last.born, max(last.born, again - 1)
    if gone:
        yield Cure("ac='full': layers recomputed", timeline.peak_without(gone, back))


def reserved_if_expandable(timeline: MemoryTimeline, memory: int) -> int | None:
    """Return the bytes that a GPU with `memory` bytes reserves if its segments are expandable; None: it runs out."""
    allocator = CachingAllocator(AllocatorConfig(expandable_segments=True), memory)
    begun = [(block.born, block) for block in timeline.blocks]
    ended = [(block.died, block) for block in timeline.blocks if block.died is not None]
    held: dict[Block, MemoryBlock] = {}
    try:
        for number, block in sorted(begun + ended, key=lambda event: (event[0], event[1].address)):
            if number == block.born:
                held[block] = allocator.allocate(max(1, block.requested), str(block.stream))
            else:
                allocator.free(held.pop(block))
    except DeviceMemoryError:
        return None
    return allocator.peak_reserved
