"""Find memory at the peak that should not be there: each cause with its bytes, and the peak without it, exactly."""

from bisect import bisect, bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from nemo_like._util.table import byte_word, grouped
from nemo_like.explaining.parts import BACK, MemoryKind, Named, StepParts, bytes_of, rounded, sizes_in_a_step
from nemo_like.explaining.snapshot import BEFORE, Block, Gone, MemoryTimeline, SegmentAt
from nemo_like.explaining.stacks import Phase, phase_of, place_of, text_of
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.memory_model.allocator import CachingAllocator, DeviceMemoryError, MemoryBlock

_LEAST = 0.005  # Share of the peak below which a cause is left out.
_FREE = 0.10  # Share of reserved bytes that must be free to be called fragmentation.
# Share of a step's gradients that two moments have at least, also where frozen or sharded weights make the two unlike.
_TWO = 1.5
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


OF_RESERVED = {"idle streams", "fragmentation"}
"""Kinds of causes that take reserved bytes, not those of tensors."""


@dataclass(frozen=True)
class Unexpected:
    """Memory that should not be there."""

    kind: str
    size: int  # Bytes by which the peak is lower without it, by the allocator run over the recording.
    # Active bytes of the peak without it; of `OF_RESERVED`, the most reserved bytes.
    peak_after: int
    words: str  # The cause, in words.
    change: str = ""  # The line to write, or the setting.

    def to_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {"kind": self.kind, "bytes": self.size, "peak_after": self.peak_after, "words": self.words}


def unexpected_at_peak(timeline: MemoryTimeline, parts: StepParts) -> list[Unexpected]:
    """Return the causes of memory that should not be alive at the peak, the largest first; none if nothing was recorded."""
    if not timeline.recorded:
        return []
    causes = [_cause(timeline, parts, *each) for each in _left_behind(timeline, parts)]
    causes += [_idle_streams(timeline), _fragments(timeline)]
    least = _LEAST * timeline.active[timeline.peak_at + 1]
    return sorted((each for each in causes if each and each.size >= least), key=lambda each: -each.size)


def _cause(
    timeline: MemoryTimeline, parts: StepParts, kind: str, blocks: Iterable[Gone], words: str, change: str = ""
) -> Unexpected | None:
    """Return a cause, with the bytes by which the peak is lower without its blocks; None: less than half of theirs."""
    gone = [span for span in blocks if parts.named[span.block].kind is not MemoryKind.WORKSPACE]
    peak, claimed = timeline.active[timeline.peak_at + 1], sum(span.at(timeline.peak_at) for span in gone)
    after = timeline.peak_without(gone) if claimed else peak
    return Unexpected(kind, peak - after, after, words, change) if claimed and 2 * (peak - after) >= claimed else None


class _Steps:
    """The recorded steps: where the forward and the backward of each begin, and the updates of the optimizer."""

    def __init__(self, timeline: MemoryTimeline, parts: StepParts) -> None:
        self.end, self.begins, self.turns = len(timeline.trace), dict[int, int](), dict[int, int]()
        self.updates = list[int]()
        self._order = list[tuple[int, Phase]]()
        for block, named in sorted(parts.named.items(), key=lambda pair: pair[0].born):
            if block.born == BEFORE:
                continue
            self._order.append((block.born, named.phase))
            if named.phase is Phase.FORWARD:
                self.begins.setdefault(named.step, block.born)
            elif named.phase in BACK:
                self.turns.setdefault(named.step, block.born)
            elif named.phase is Phase.OPTIMIZER:
                self.updates.append(block.born)

    def turn(self, step: int) -> int:
        """Return the event at which the backward of a step begins; the last one: it was not recorded."""
        return self.turns.get(step, self.end)

    def freed_by(self, block: Block) -> Phase:
        """Return the phase that freed a block: by its stack, else by the allocation before."""
        if block.freed:
            return phase_of(block.freed, recorded=True)
        number = bisect(self._order, block.died, key=lambda pair: pair[0])
        return self._order[number - 1][1] if number else Phase.UNKNOWN

    def updated(self, first: int, last: int) -> bool:
        """Return whether the optimizer made an update between two events."""
        return bisect(self.updates, first) < bisect_left(self.updates, last)


def _left_behind(
    timeline: MemoryTimeline, parts: StepParts
) -> Iterator[tuple[str, Iterable[Gone], str, str] | tuple[str, Iterable[Gone], str]]:
    """Yield the causes that are known by their blocks, as `_cause` takes them."""
    steps = _Steps(timeline, parts)
    outlive = {  # blocks that are there when the next forward begins, with their names and that event
        block: (named, steps.begins[named.step + 1])
        for block, named in parts.named.items()
        if named.step + 1 in steps.begins and block.outlives(steps.begins[named.step + 1])
    }
    yield from _gradients(parts, steps, outlive)
    of_steps = {block: since for block, (named, since) in outlive.items() if named.step > BEFORE}
    outputs = _outputs(parts, steps, of_steps)
    largest = max(outputs, key=lambda block: block.size, default=None)
    place = "" if largest is None else place_of(largest.frames)
    yield (
        "outputs of an earlier step",
        [Gone(block, of_steps[block]) for block in outputs],
        f"tensors of an earlier forward are still referenced, most of them from {place or 'an unknown place'}",
        "del outputs, loss   behind   optimizer.step(); keep loss.item() or loss.detach()",
    )
    yield (
        "a further copy of weights",
        [Gone(block) for block, named in parts.named.items() if named.kind is MemoryKind.MORE_WEIGHTS],
        "blocks of the sizes of all weights are there once more: a second model, or an average of weights",
    )
    yield (
        "frees that wait for streams",
        [Gone(block, block.asked) for block in timeline.blocks if block.asked is not None],
        "they were freed, and wait for another stream that used them (record_stream)",
    )
    yield (
        "made while saving",
        [Gone(b) for b, named in parts.named.items() if named.kind is not MemoryKind.WEIGHTS and _saves(b)],
        "state_dict() has made it, for a checkpoint, and it is still there",
        "nemo_like.distributed.get_model_state(model, full=True), which gathers into CPU memory",
    )
    at_peak = [b for b in timeline.alive(timeline.peak_at) if b in of_steps and parts.named[b].kind in _LEFT]
    for place, blocks in grouped((place_of(block.frames), block) for block in at_peak).items():
        if len({parts.named[block].step for block in blocks}) >= _STEPS:
            born = [block.born for block in blocks]
            which = "step" if steps.updated(min(born), max(born)) else "micro-batch"
            yield (
                "growth",
                [Gone(block, of_steps[block]) for block in blocks],
                f"each {which} leaves some behind, made at {place}",
            )


def _gradients(
    parts: StepParts, steps: _Steps, outlive: Mapping[Block, tuple[Named, int]]
) -> Iterator[tuple[str, Iterable[Gone], str, str]]:
    """Yield the gradients that a forward found, and no backward added to.

    They are freed before that backward; or the optimizer has used them, and they stay for all of the recording. Of those
    from before it only their stacks are known, not whether micro-batches add up in them.
    """
    freed, kept, older = list[Gone](), list[Gone](), list[Gone]()
    states = {rounded(block) for block, named in parts.named.items() if named.kind is MemoryKind.STATE}
    after_updates = [step for step, begin in steps.begins.items() if steps.updated(steps.turn(step - 1), begin)]
    for block, (named, since) in outlive.items():
        turn = steps.turn(named.step + 1)
        if named.kind not in (MemoryKind.GRADIENTS, MemoryKind.OLD_GRADIENTS):
            continue
        if block.died is not None and block.died <= turn:
            freed.append(Gone(block, since))
        elif named.step > BEFORE and block.died is None and rounded(block) in states:
            kept += [Gone(block, steps.begins[step], steps.turn(step)) for step in after_updates if step > named.step]
        elif named.step == BEFORE and block.frames and turn == steps.end:
            older.append(Gone(block, since))
    kind = "gradients of the last step"
    yield (
        kind,
        freed,
        "last step's gradients lie under the forward, since zero_grad() comes after it",
        "optimizer.zero_grad()   before   model(...)",
    )
    yield (
        kind,
        kept,
        "last step's gradients lie under the forward, since zero_grad() only fills them with zeros",
        "optimizer.zero_grad(set_to_none=True)   before   model(...)",
    )
    yield (
        kind,
        older,
        "gradients from before the recording lie under the forward, which only accumulation over micro-batches requires",
        "optimizer.zero_grad()   before   model(...)",
    )


def _outputs(parts: StepParts, steps: _Steps, of_steps: Mapping[Block, int]) -> list[Block]:
    """Return the tensors of an earlier forward that the script still held: those of several steps, or up to the next one.

    A backward frees its own step's, as a pipeline's micro-batches take turns; a module replaces its state in forward; a
    table that the first step made stays, once.
    """
    outputs = (b for b in of_steps if parts.named[b].kind in _FORWARD and b.born < steps.turn(parts.named[b].step))
    places = grouped((place_of(block.frames), block) for block in outputs)
    several = {place for place, blocks in places.items() if len({parts.named[block].step for block in blocks}) > 1}

    def held(place: str, block: Block) -> bool:
        if block.died is not None and steps.freed_by(block) in {Phase.FORWARD, *BACK}:
            return False
        up_to_next = steps.begins.get(parts.named[block].step + 2, steps.end)
        return place in several or (block.died is not None and block.died <= up_to_next)

    return [block for place, blocks in places.items() for block in blocks if held(place, block)]


def _saves(block: Block) -> bool:
    """Return whether ``state_dict()`` has made it: a gathered or copied weight, or a state of an optimizer's empty step."""
    names = (text_of(frame, "name") for frame in block.frames)
    return any(("state_dict" in name and "load" not in name) or name == "_init_optim_state" for name in names)


def _idle_streams(timeline: MemoryTimeline) -> Unexpected | None:
    """Return the free segments of streams that allocate no longer, which serve no other stream; None: there are none."""
    at, last, used = timeline.most_reserved_at, dict[int, int](), dict[int, int]()
    for number, event in enumerate(timeline.trace):
        if event["action"] in ("alloc", "free_completed"):
            used[event.get("stream", 0)] = number
            if event["action"] == "alloc":
                last[event.get("stream", 0)] = number
    idle = {stream for stream, number in last.items() if number < min(at, _IDLE * len(timeline.trace))}
    if not idle or len(idle) == len(last):  # where none allocates, the recording goes on behind the last step
        return None
    free = [segment.size for segment in timeline.segments_at(at) if segment.stream in idle and not segment.blocks]
    since = max(used[stream] for stream in idle)
    after = max([*timeline.reserved[: since + 1], *(size - sum(free) for size in timeline.reserved[since + 1 :])])
    if after >= timeline.reserved[at + 1]:
        return None
    streams = "a stream" if len(idle) == 1 else f"{len(idle)} streams"
    return Unexpected(
        "idle streams",
        timeline.reserved[at + 1] - after,
        after,
        f"it is free in segments of {streams} that no longer allocate",
        "torch.cuda.empty_cache()   once, behind the work on that stream",
    )


def _fragments(timeline: MemoryTimeline) -> Unexpected | None:
    """Return the bytes that growing segments would not reserve; None: less than half of those free, or few were."""
    at = timeline.most_reserved_at
    reserved, active = timeline.reserved[at + 1], timeline.active[at + 1]
    if timeline.expandable or reserved - active <= _FREE * reserved:
        return None
    failed = timeline.out_of_memory or {}
    after = reserved_if_expandable(timeline, reserved + int(failed.get("device_free", 0)))
    # Free bytes from before the recording may be a cache of a larger peak.
    after = reserved if after is None else max(after, timeline.reserved[0], active)
    if 2 * (reserved - after) < reserved - active:
        return None
    segments = timeline.segments_at(at)
    words = (
        f"when {byte_word(reserved)} were reserved, {byte_word(active)} were in use, in {len(segments):,} segments"
        f"{_pins(segments)}"
    )
    return Unexpected("fragmentation", reserved - after, after, words, EXPANDABLE)


def _pins(segments: Iterable[SegmentAt]) -> str:
    """Return, in words, the place of the blocks that hold most of the segments that are half empty or more; empty: none."""
    held: dict[str, int] = defaultdict(int)
    for segment in segments:
        if segment.blocks and 2 * sum(block.size for block in segment.blocks) <= segment.size:
            held[place_of(segment.blocks[0].frames)] += segment.size
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
    if less := [Gone(replace(block, size=3 * block.size // 4)) for block in _moments(parts)]:
        tried.append(Cure("optimizer='adamw-8bit': float32 state in 8 bits", timeline.peak_without(less)))
    return strongest(tried, timeline.active[timeline.peak_at + 1])


def strongest(tried: Iterable[Cure], peak: int) -> list[Cure]:
    """Return those that save a hundredth of `peak` or more, the strongest first."""
    enough = (cure for cure in tried if cure.peak_after <= (1 - _SAVES) * peak)
    return sorted(enough, key=lambda cure: (cure.peak_after, cure.change))


def _moments(parts: StepParts) -> list[Block]:
    """Return the state of an optimizer with two moments for each weight, in more than 8 bits; empty: it has others."""
    state = [block for block, named in parts.named.items() if named.kind is MemoryKind.STATE]
    gradients = bytes_of(sizes_in_a_step(parts.named, MemoryKind.GRADIENTS))
    return state if sum(block.size for block in state) >= _TWO * gradients else []


def _recomputed(timeline: MemoryTimeline, parts: StepParts) -> Iterator[Cure]:
    """Recompute layers: their activations are gone from the end of their forward to their backward, but for one each.

    The last tensor of a layer stays: it is the input of the next one. Tensors that recomputing makes and frees again at
    once are not counted. Where backward was not recorded, they are gone up to the end.
    """
    layers = grouped(
        ((named.step, named.layer), block)
        for block, named in parts.named.items()
        if named.kind is MemoryKind.ACTIVATIONS and named.layer is not None and block.born > BEFORE
    )
    gone = list[Gone]()
    for blocks in layers.values():
        last = max(blocks, key=lambda block: block.born)
        again = min((block.died for block in blocks if block is not last and block.died is not None), default=None)
        until = None if again is None else max(last.born, again - 1)
        gone += [Gone(block, last.born, until) for block in blocks if block is not last]
    if gone:
        unit = "each call" if parts.of_calls else "layers"
        yield Cure(f"ac='full': {unit} recomputed", timeline.peak_without(gone))


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
