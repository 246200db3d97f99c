"""Changes that lower a recorded peak, each with the peak after it, from the recording alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nemo_like.explaining.parts import MemoryKind, Parts
from nemo_like.explaining.snapshot import BEFORE, Block, Timeline
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.memory_model.allocator import CachingAllocator, DeviceMemoryError, MemoryBlock

_LEAST = 0.01  # Share of the peak that a change must save to be named.
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Cure:
    """A change, and the active bytes of the peak after it."""

    change: str
    peak_after: int


def cures_of(timeline: Timeline, parts: Parts) -> list[Cure]:
    """Return the changes that lower the peak by a hundredth or more, the strongest first."""
    peak = timeline.active[timeline.peak_at + 1]
    tried = [*_recomputed(timeline, parts), *_lighter_state(timeline, parts)]
    return sorted((each for each in tried if each.peak_after <= (1 - _LEAST) * peak), key=lambda each: each.peak_after)


def _recomputed(timeline: Timeline, parts: Parts) -> Iterator[Cure]:
    """Recompute layers: their activations are gone from the end of their forward to their backward, but for one each.

    What stays is the last tensor of a layer, which is the input of the next one. What recomputing makes and frees again at
    once is not counted.
    """
    layers: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block, each in parts.named.items():
        if each.kind is MemoryKind.ACTIVATIONS and each.layer is not None and block.born > BEFORE:
            layers[each.step, each.layer].append(block)
    gone: dict[Block, int] = {}
    back: dict[Block, int] = {}
    for blocks in layers.values():
        last = max(blocks, key=lambda block: block.born)
        again = min((block.died for block in blocks if block is not last and block.died is not None), default=None)
        for block in blocks:
            if block is not last and again is not None:
                gone[block], back[block] = last.born, max(last.born, again - 1)
    if gone:
        yield Cure("ac='full': layers recomputed", timeline.peak_without(gone, back))


def _lighter_state(timeline: Timeline, parts: Parts) -> Iterator[Cure]:
    """8-bit states have a quarter of the bytes of float32 ones."""
    states = [block for block, each in parts.named.items() if each.kind is MemoryKind.STATE]
    if states:
        less = {replace(block, size=3 * block.size // 4): BEFORE for block in states}
        yield Cure("optimizer='adamw-8bit': its state in 8 bits", timeline.peak_without(less))


def reserved_if_expandable(timeline: Timeline, memory: int) -> int | None:
    """Return what a GPU of so many bytes reserves for the recorded allocations in expandable segments; None: it runs out."""
    allocator = CachingAllocator(AllocatorConfig(expandable_segments=True), memory)
    at_event: list[list[tuple[bool, Block]]] = [[] for _ in range(len(timeline.trace) + 1)]
    for block in timeline.blocks:
        at_event[block.born + 1].append((True, block))
        if block.died is not None:
            at_event[block.died + 1].append((False, block))
    held: dict[Block, MemoryBlock] = {}
    try:
        for events in at_event:
            for is_made, block in sorted(events, key=lambda event: event[1].address):
                if is_made:
                    held[block] = allocator.allocate(max(1, block.requested), str(block.stream))
                else:
                    allocator.free(held.pop(block))
    except DeviceMemoryError:
        return None
    return allocator.peak_reserved
