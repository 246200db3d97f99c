"""Find the part of a step, the layer and the step of each block of memory, by stacks, order and lifetimes alone.

A block has the part of the phase that made it, and of how long it lived: a block that backward makes and leaves is a
gradient, one that the optimizer makes and leaves is its state. Of a layer are the blocks that come from one place in
the source as often in a forward as there are layers, or calls of one module: layers have weights of their own. A block
from before the recording has a part by evidence alone: its own stack, the one that freed it, or sizes equal to those of
gradients or states.
"""

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby, pairwise

from nemo_like._util.table import grouped, totals
from nemo_like.explaining.snapshot import BEFORE, Block, MemoryTimeline
from nemo_like.explaining.stacks import CUBLAS_WORKSPACE, Phase, in_workspace, phase_of, signature, text_of


class MemoryKind(StrEnum):
    """A part of a step's memory."""

    WEIGHTS = "weights"
    MORE_WEIGHTS = "a further copy of weights"
    GRADIENTS = "gradients"
    OLD_GRADIENTS = "last step's gradients"
    STATE = "optimizer state"
    STEP = "optimizer step's temporaries"
    ACTIVATIONS = "activations"
    RECOMPUTED = "recomputed activations"
    OF_FORWARD = "forward's temporaries"
    OF_BACKWARD = "backward's temporaries"
    LOSS = "loss"
    CLIPPING = "gradient clipping"
    COMMUNICATION = "gathered weights and communication"
    SAVED_STATE = "saving or loading"
    SCRIPT = "made by the script"
    WORKSPACE = "workspaces of libraries"
    OLD = "from before the recording"


_BY_PHASE = {
    Phase.BUILD: MemoryKind.WEIGHTS,
    Phase.LOSS: MemoryKind.LOSS,
    Phase.RECOMPUTATION: MemoryKind.RECOMPUTED,
    Phase.CLIPPING: MemoryKind.CLIPPING,
    Phase.FSDP: MemoryKind.COMMUNICATION,
    Phase.COLLECTIVE: MemoryKind.COMMUNICATION,
    Phase.STATE: MemoryKind.SAVED_STATE,
    Phase.SCRIPT: MemoryKind.SCRIPT,
    Phase.UNKNOWN: MemoryKind.OLD,
}
# Phases that alternate within a backward.
BACK = {Phase.BACKWARD, Phase.RECOMPUTATION, Phase.FSDP, Phase.COLLECTIVE}
Mark = tuple[tuple[str, int], ...]  # Files and lines of a stack, the outermost first.
_ROUND = 512  # Bytes to which the allocator rounds.
# Share of recorded gradients, or states, whose sizes must be found among the blocks from before, to name those by
# them.
_ALIKE = 0.8


@dataclass(frozen=True)
class Named:
    """A block's part, phase, step and layer."""

    kind: MemoryKind
    phase: Phase
    step: int = BEFORE  # The forward that it belongs to, from 0; `BEFORE`: none that was recorded.
    layer: int | None = None  # The layer in whose forward, or recomputation, it was made.


@dataclass(frozen=True)
class StepParts:
    """The parts of all blocks of a timeline."""

    named: dict[Block, Named]
    layer_count: int | None  # The layers that most forwards agree on; None: they are known of no forward.
    of_calls: bool = False  # The layers are calls of the same weights, as the steps of a recurrent network are.


def parts_of(timeline: MemoryTimeline) -> StepParts:
    """Return the part, layer and step of each block."""
    allocations = sorted((block for block in timeline.blocks if block.born > BEFORE), key=lambda block: block.born)
    recorded = any(block.frames for block in allocations)
    phases, marks, workspaces = _read_stacks(allocations, recorded)
    ends = _stretches(allocations, phases, len(timeline.trace))
    steps = _steps(phases)
    layer_of, layer_count = _layers(allocations, phases, steps, marks)
    named = {
        block: Named(
            MemoryKind.WORKSPACE if _is_workspace(block, workspace) else _kind(block, phase, ends[number]),
            phase,
            steps[number],
            layer_of.get(number),
        )
        for number, (block, phase, workspace) in enumerate(zip(allocations, phases, workspaces))
    }
    old = [block for block in timeline.blocks if block.born == BEFORE]
    named |= {block: _of_before(block, recorded) for block in old}
    named |= {block: replace(named[block], kind=kind) for block, kind in _by_size(old, named).items()}
    named |= {block: replace(named[block], kind=MemoryKind.MORE_WEIGHTS) for block in _further_copies(named)}
    return StepParts(named, layer_count, layer_count is not None and not _own_weights(named, layer_count))


def _own_weights(named: dict[Block, Named], count: int) -> bool:
    """Return whether `count` layers have weights of their own: gradients or weights of one size are there for each.

    The least block is of biases and numbers, which tell nothing.
    """
    staying = {MemoryKind.WEIGHTS, MemoryKind.OLD, MemoryKind.OLD_GRADIENTS}
    weights = Counter(rounded(block) for block, each in named.items() if each.kind in staying)
    of_each = weights | sizes_in_a_step(named, MemoryKind.GRADIENTS)
    return any(times >= count for size, times in of_each.items() if size > _ROUND)


def _read_stacks(allocations: Iterable[Block], recorded: bool) -> tuple[list[Phase], list[Mark], list[bool | None]]:
    """Return the phases, the marks, and whether they are of workspaces, of the stacks.

    A file has each frame once, and each of its stacks many times.
    """
    keys = [(tuple(map(id, block.frames)), block.frames) for block in allocations]
    stacks = {
        key: (phase_of(frames, recorded=recorded), signature(frames), in_workspace(frames))
        for key, frames in dict(keys).items()
    }
    read = [stacks[key] for key, _ in keys]
    return [phase for phase, *_ in read], [mark for _, mark, _ in read], [workspace for *_, workspace in read]


def _is_workspace(block: Block, by_stack: bool | None) -> bool:
    """Return whether a block is a workspace: by its stack, or by cuBLAS' size, which no tensor has (65 x 128 KiB)."""
    return block.requested == CUBLAS_WORKSPACE if by_stack is None else by_stack


def _stretches(allocations: Sequence[Block], phases: Sequence[Phase], events: int) -> list[int]:
    """Return for each allocation the event at which its phase ends."""
    together = groupby(zip(allocations, phases), key=lambda pair: Phase.BACKWARD if pair[1] in BACK else pair[1])
    stretches = [[block for block, _ in stretch] for _, stretch in together]
    ends = [*(stretch[0].born for stretch in stretches[1:]), events]
    return [end for stretch, end in zip(stretches, ends) for _ in stretch]


def _steps(phases: Iterable[Phase]) -> list[int]:
    """Return the forward that each allocation belongs to: one begins where forward follows backward or the optimizer."""
    steps, step, forward = list[int](), BEFORE, False
    for phase in phases:
        if phase is Phase.FORWARD and not forward:
            step, forward = step + 1, True
        elif phase in (Phase.BACKWARD, Phase.OPTIMIZER, Phase.RECOMPUTATION, Phase.CLIPPING):
            forward = False
        steps.append(step)
    return steps


def _kind(block: Block, phase: Phase, end: int) -> MemoryKind:
    """Return the part of a block that `phase`, which ends at event `end`, has made."""
    stays = block.outlives(end)
    if phase is Phase.OPTIMIZER:
        return MemoryKind.STATE if stays else MemoryKind.STEP
    if phase is Phase.BACKWARD:
        return MemoryKind.GRADIENTS if stays else MemoryKind.OF_BACKWARD
    if phase is Phase.FORWARD:
        # Blocks for backward live until then; one freed in the first half of the rest of forward was passing.
        short = block.died is not None and block.died - block.born < 0.5 * max(1, end - block.born)
        return MemoryKind.OF_FORWARD if short else MemoryKind.ACTIVATIONS
    return _BY_PHASE[phase]


# --- layers -----------------------------------------------------------------------------------------------------------


def _layers(
    allocations: Sequence[Block], phases: Sequence[Phase], steps: Sequence[int], marks: Sequence[Mark]
) -> tuple[dict[int, int], int | None]:
    """Return the layer of each allocation that has one, and `StepParts.layer_count`.

    A forward that began again without a backward has none: where one ends and the next begins is not recorded.
    """
    passes = grouped(
        ((phase, step), (mark, number))
        for number, (block, phase, step, mark) in enumerate(zip(allocations, phases, steps, marks))
        if phase in (Phase.FORWARD, Phase.RECOMPUTATION) and block.frames
    )
    layer_of, forwards = dict[int, int](), Counter[int]()  # forwards by their number of layers
    for (phase, _), places in passes.items():
        by_mark = grouped(places)
        count = _count(by_mark.values(), allocations)
        if count is None or (phase is Phase.FORWARD and _begins_again(count, by_mark, allocations)):
            continue
        if phase is Phase.FORWARD:
            forwards[count] += 1
        layer_of |= {
            number: k * count // len(numbers)
            for numbers in by_mark.values()
            if len(numbers) % count == 0
            for k, number in enumerate(numbers)
        }
    return layer_of, max(forwards, key=forwards.__getitem__, default=None)


def _begins_again(count: int, marks: Mapping[Mark, list[int]], allocations: Sequence[Block]) -> bool:
    """Return whether a forward began several times: its first place occurs more than once, not for the layers' sake.

    A model may begin with its first layer. Then backward frees the layers' blocks of one place in the reverse order.

    marks: the numbers of the forward's allocations by place, in the order of their first ones.
    """
    times = len(next(iter(marks.values())))
    if times == 1 or times != count:
        return times > 1

    def reversed_by_backward(numbers: Sequence[int]) -> bool:
        died = [allocations[number].died for number in numbers]
        return all(one is not None and other is not None and one > other for one, other in pairwise(died))

    return not any(len(numbers) == count and reversed_by_backward(numbers) for numbers in marks.values())


def _count(places: Iterable[Sequence[int]], allocations: Sequence[Block]) -> int | None:
    """Return how many layers there are: the number of times that most bytes' places occur.

    A place that occurs so often several times in a layer counts a little less. There is none where such places make less
    than half of the bytes: compiled code has a line of its own for each layer.
    """
    weight = totals((len(numbers), allocations[number].size) for numbers in places for number in numbers)

    def share(count: int) -> float:
        several = sum(size * (1.0 if times == count else 0.8) for times, size in weight.items() if times % count == 0)
        return several * (1 - 1 / count)

    best = max(weight, key=lambda count: (share(count), count), default=1)
    inside = sum(size for times, size in weight.items() if times % best == 0)
    return best if best > 1 and 2 * inside >= weight.total() else None


# --- blocks from before the recording -----------------------------------------------------------------------------------


def _of_before(block: Block, recorded: bool) -> Named:
    phase = phase_of(block.frames, recorded=recorded) if block.frames else Phase.UNKNOWN
    if _is_zeroed(block):
        return Named(MemoryKind.OLD_GRADIENTS, phase)
    if _is_workspace(block, in_workspace(block.frames)):
        return Named(MemoryKind.WORKSPACE, phase)
    kinds = {
        Phase.OPTIMIZER: MemoryKind.STATE,
        Phase.FORWARD: MemoryKind.ACTIVATIONS,
        Phase.BACKWARD: MemoryKind.GRADIENTS,
    }
    return Named(kinds.get(phase) or _BY_PHASE[phase], phase)


def _is_zeroed(block: Block) -> bool:
    return any(text_of(frame, "name") == "zero_grad" for frame in block.freed)


def _by_size(old: Iterable[Block], named: dict[Block, Named]) -> dict[Block, MemoryKind]:
    """Return which blocks without a stack are weights, states or a further copy, by the sizes that a step has recorded.

    Each weight has a gradient of its size, and as a rule two states. Without as many gradients or states that have a stack
    none is named: how often sizes occur does not tell weights from states. A further copy has all sizes once more, and
    stays: blocks that a step frees may be gradients.
    """
    silent = [block for block in old if named[block].kind is MemoryKind.OLD]
    sizes = Counter(map(rounded, silent))
    gradients, states = (sizes_in_a_step(named, kind) for kind in (MemoryKind.GRADIENTS, MemoryKind.STATE))
    wanted = gradients if 3 * bytes_of(gradients) >= bytes_of(states) else states
    if not wanted or bytes_of(sizes & wanted) < _ALIKE * bytes_of(wanted):
        return {}
    if wanted is states:  # two for each weight, if all large sizes come in pairs
        pairs = all(times % 2 == 0 for size, times in states.items() if size > 1 << 16)
        wanted = Counter({size: max(1, times // (1 + pairs)) for size, times in states.items()})
    ordered = sorted(silent, key=lambda block: (block.died is not None, block.address))
    with_states = Counter({size: 3 * times for size, times in wanted.items()})
    kinds = dict.fromkeys(first_of_sizes(ordered, with_states), MemoryKind.STATE)
    kinds |= dict.fromkeys(first_of_sizes(ordered, wanted), MemoryKind.WEIGHTS)
    others = [block for block in ordered if block not in kinds and wanted[rounded(block)] and block.died is None]
    # More of them are layers that do not train.
    whole = Counter(map(rounded, others)) == wanted
    return kinds | dict.fromkeys(others if whole else (), MemoryKind.MORE_WEIGHTS)


def first_of_sizes(blocks: Iterable[Block], wanted: Counter[int]) -> Iterator[Block]:
    """Yield of the blocks of each size as many as are wanted of it, the first ones; sizes are those of `rounded`."""
    missing = Counter(wanted)
    for block in blocks:
        if missing[rounded(block)] > 0:
            missing[rounded(block)] -= 1
            yield block


def sizes_in_a_step(named: dict[Block, Named], kind: MemoryKind) -> Counter[int]:
    """Return how often each size occurs among one step's blocks of a kind, at most."""
    steps = grouped((each.step, rounded(block)) for block, each in named.items() if each.kind is kind)
    return functools.reduce(operator.or_, map(Counter, steps.values()), Counter[int]())


def _further_copies(named: dict[Block, Named]) -> Iterator[Block]:
    """Yield the weights beyond those that train, if all of these are there once or twice more, as are all others.

    Weights that train have gradients in a step, or two states: of two models that take turns, each has states. The least
    blocks tell nothing: counters of steps are as small. Of layers that do not train there are as a rule other numbers.
    """
    gradients = sizes_in_a_step(named, MemoryKind.GRADIENTS)
    states = Counter(rounded(block) for block, each in named.items() if each.kind is MemoryKind.STATE)
    weights = [block for block, each in named.items() if each.kind is MemoryKind.WEIGHTS and block.born > BEFORE]
    there = Counter(size for size in map(rounded, weights) if size > _ROUND)
    trained = {size: max(times, states[size] // 2) for size, times in gradients.items() if size > _ROUND}

    def has(copies: int) -> bool:
        return all(
            times == copies * trained[size] if size in trained else times % copies == 0 for size, times in there.items()
        )

    if not trained or not trained.keys() <= there.keys() or not (has(2) or has(3)):
        return
    weights.sort(key=lambda block: block.born)
    first = set(first_of_sizes(weights, gradients | Counter(trained)))
    yield from (block for block in weights if gradients[rounded(block)] and block not in first)


def rounded(block: Block) -> int:
    """Return the bytes that the allocator takes for a block."""
    return round_up(block.requested)


def round_up(size: int) -> int:
    """Return the bytes that the allocator takes for `size`."""
    return max(_ROUND, -(-size // _ROUND) * _ROUND)


def bytes_of(sizes: Counter[int]) -> int:
    """Return the bytes of so many blocks of each size."""
    return sum(size * times for size, times in sizes.items())
