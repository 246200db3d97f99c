"""A recorded step compared with the planned one: the same parts, block by block."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self

from torch import nn

from nemo_like._util.table import grouped, totals
from nemo_like._util.words import MIB, write_bytes
from nemo_like.activation_checkpointing.plan import STAYING, Part
from nemo_like.explaining.explanation import PlanComparison
from nemo_like.explaining.messages import ModelSizes, OutOfMemory, Reading, readings
from nemo_like.explaining.parts import MemoryKind, StepParts, bytes_of, first_of_sizes, round_up, rounded
from nemo_like.explaining.snapshot import BEFORE, Block
from nemo_like.explaining.stacks import Phase
from nemo_like.explaining.unexpected import Cure, strongest
from nemo_like.job import Job
from nemo_like.options import OPTIMIZERS, parse_ac
from nemo_like.planning.advise import Change, changes
from nemo_like.planning.memory_model.storages import Label
from nemo_like.planning.model.traced import MODES
from nemo_like.planning.planner import choices_under
from nemo_like.planning.predict import step_of, tokens_of
from nemo_like.planning.predictions.rank import fullest_rank, parts_at_peak, peak_of, rank_peak
from nemo_like.planning.predictions.reserved import StepLogs, outside_of
from nemo_like.planning.query import Choices, PlanQuery
from nemo_like.planning.report import Step, row_of
from nemo_like.transformers_compat import text_config

# Parts that a plan and a recording are compared by. Between the kinds of one, the two draw the line differently.
GROUPS: Mapping[str, tuple[MemoryKind, ...]] = {
    "weights": (MemoryKind.WEIGHTS, MemoryKind.MORE_WEIGHTS),
    "gradients": (MemoryKind.GRADIENTS, MemoryKind.OLD_GRADIENTS),
    "optimizer state": (MemoryKind.STATE,),
    "optimizer step's temporaries": (MemoryKind.STEP, MemoryKind.CLIPPING),
    "activations": (MemoryKind.ACTIVATIONS, MemoryKind.OF_FORWARD, MemoryKind.LOSS),
    "backward's temporaries": (MemoryKind.OF_BACKWARD, MemoryKind.RECOMPUTED),
    "gathered weights and communication": (MemoryKind.COMMUNICATION,),
    "not planned": (MemoryKind.SAVED_STATE, MemoryKind.SCRIPT, MemoryKind.WORKSPACE, MemoryKind.OLD),
}
_KINDS = dict.fromkeys(STAYING, MemoryKind.WEIGHTS) | {
    Part.OPTIMIZER_STATE: MemoryKind.STATE,
    Part.OPTIMIZER_STEP: MemoryKind.STEP,
    Part.GRADIENTS: MemoryKind.GRADIENTS,
    Part.GATHERED_LAYERS: MemoryKind.COMMUNICATION,
    Part.GATHERED_ROOT: MemoryKind.COMMUNICATION,
    Part.REDUCE_BUFFERS: MemoryKind.COMMUNICATION,
    Part.RECEIVE_BUFFERS: MemoryKind.COMMUNICATION,
    Part.SENT_TENSORS: MemoryKind.COMMUNICATION,
}
# Kinds of other parts, by the phase that made them.
_OTHER_KINDS = {
    Phase.FORWARD: MemoryKind.ACTIVATIONS,
    Phase.BACKWARD: MemoryKind.OF_BACKWARD,
    Phase.OPTIMIZER: MemoryKind.STEP,
}
_GROUP_OF = {kind: group for group, kinds in GROUPS.items() for kind in kinds}
_LAYER = re.compile(r"(?:forward|backward) of layer (\d+)")
# Share of the plan's weights that must be found in a recording, by size, for the two to be compared.
_WEIGHTS_MATCH = 0.95
_AS_HIGH = 0.005  # Share below the planned peak within which moments are as high.
# Widths of a number of a weight, in half bits: of a 4-bit weight's scales, 4, 8, 16 and 32 bits.
_HALF_BITS = (1, 8, 16, 32, 64)
_MESSAGE_ALIKE = 0.1  # Share by which a message's bytes may differ from the planned peak.
_LAYERS_ALIKE = 0.02  # Share by which a layer may differ from its plan and not be named.


@dataclass(frozen=True)
class Compared:
    """A tensor of the planned step, or a block of the recorded one, as the two are compared."""

    size: int
    kind: MemoryKind
    layer: int | None  # The layer in whose forward or backward it was made.


class PlannedStep:
    """A step after the first, on the rank with the highest peak: its tensors, each with its part and its layer."""

    def __init__(self, query: PlanQuery, choices: Choices) -> None:
        rank = fullest_rank(query, choices)
        self.peak, logs = rank_peak(query, rank, choices), StepLogs(query, rank, choices)
        self._before, self.events = logs.between, logs.later
        sizes = self._before | {event.storage: event.size for event in self.events if event.size > 0}
        self.blocks = {number: _compared(size, logs.labels[number]) for number, size in sizes.items()}

    def alive_like(self, recorded: Mapping[str, int], phase: Phase | None) -> list[Compared]:
        """Return the tensors at the highest moment of a phase (None: of the step), in the order in which they were made.

        Of moments that are as high but for half a percent, the one whose parts are most like the `recorded` bytes.
        """
        now = _by_group(self.blocks[number] for number in self._before)
        moments: list[tuple[int, int, int]] = []
        for at, event in enumerate(self.events):
            now[_GROUP_OF[self.blocks[event.storage].kind]] += event.size
            if phase in (None, _phase(event.where)):
                off = sum(abs(recorded.get(group, 0) - now[group]) for group in GROUPS)
                moments.append((now.total(), -off, at))
        most = max(moments, default=(0, 0, -1))[0]
        _, _, highest = max((each for each in moments if each[0] >= most * (1 - _AS_HIGH)), key=lambda each: each[1])
        alive = Counter(self._before)
        for event in self.events[: highest + 1]:
            alive[event.storage] += event.size
        return [self.blocks[number] for number in sorted(+alive)]


def _compared(size: int, label: Label) -> Compared:
    layer = _LAYER.search(label.where)
    kind = _KINDS.get(label.part) or _OTHER_KINDS[_phase(label.where)]
    return Compared(size, kind, int(layer[1]) if layer else None)


@dataclass(frozen=True)
class PlannedJob:
    """A job that ran, as a plan sees it."""

    step: Step
    query: PlanQuery

    @classmethod
    def from_model(cls, model: nn.Module | str, job: Job, sample_input: Any) -> Self:
        """Trace a model for `job`, whose ``ac`` is the checkpointing that ran.

        Raises:
            ValueError: as `nemo_like.plan_for`; a model that is a name without a sample input has 4,096 tokens.
        """
        step, _ = step_of(model, job, sample_input=sample_input)
        return cls(step, step.query())

    def compare(self, blocks: Sequence[Block], parts: StepParts) -> tuple[StepParts, PlanComparison]:
        """Return `parts` with more names, and the peak with these `blocks` compared with the planned one."""
        parts, compared = compare(blocks, parts, PlannedStep(self.query, _choices(self.query)))
        return weights_by_model(blocks, parts, self.step.model), compared

    def compare_message(self, message: OutOfMemory) -> PlanComparison:
        """Return the planned peak next to the bytes of a message, which has those of a moment before the peak.

        It is refused if the two are over a tenth apart, and the planned peak does not explain why memory ran out.
        """
        peak, allocated = peak_of(self.query, _choices(self.query)), message.allocated_bytes
        needed = (allocated or 0) + (message.asked_bytes or 0)
        could_have = (allocated or 0) + (message.free_bytes or 0) + (message.unallocated_bytes or 0)
        apart = abs(peak.total - needed) > _MESSAGE_ALIKE * max(peak.total, needed)
        if allocated is None or not apart or peak.total > max(needed, could_have):
            return PlanComparison(peak.total, peak.at)
        refusal = (
            f"No changes are listed: tensors and request of the message are {write_bytes(needed)}, over a tenth apart from "
            f"the plan's {write_bytes(peak.total)}. Give the --model, --ac and options that ran, or a snapshot."
        )
        return PlanComparison(peak.total, peak.at, refusal=refusal)

    def cures(self, peak: int) -> list[Cure]:
        """Return the changes that lower the peak, the strongest first; each lowers `peak` by as much as the planned
        one."""
        now = self.peak(self.query)
        changed = self._changed(changes(self.query.job))
        return strongest((Cure(words, peak - now + self.peak(query)) for words, query in changed), peak)

    def readings_of(self, message: OutOfMemory) -> list[Reading]:
        """Return the tensors of the model that may have been requested; none where its config does not state all sizes."""
        config: Any = text_config(getattr(self.step.model, "config", None))
        heads = getattr(config, "num_attention_heads", None)
        sizes: list[Any] = [getattr(config, name, None) for name in ("vocab_size", "hidden_size", "intermediate_size")]
        if not heads or None in sizes:
            return []
        vocabulary, hidden, intermediate = sizes
        return readings(
            message,
            ModelSizes(
                vocabulary,
                hidden,
                intermediate,
                heads,
                getattr(config, "num_key_value_heads", None) or heads,
                getattr(config, "head_dim", None) or hidden // heads,
                tokens_of(self.step.input[0]),
            ),
        )

    def need(self, query: PlanQuery) -> int:
        """Return the bytes of the GPU that a step takes: reserved, and outside of torch's allocator."""
        limit = query.device.memory_bytes
        return row_of("", query, _choices(query), limit).need.bytes + outside_of(query.job, query.device).total

    @staticmethod
    def peak(query: PlanQuery) -> int:
        """Return the bytes of tensors at the peak."""
        return peak_of(query, _choices(query)).total

    def parts(self) -> dict[str, int]:
        """Return the bytes of the planned peak by part, the largest first."""
        choices = _choices(self.query)
        parts = parts_at_peak(self.query, fullest_rank(self.query, choices), choices)
        return dict(Counter(parts).most_common())

    def deviations(self) -> Iterator[tuple[str, int]]:
        """Yield the jobs that may have run instead, by one change each, with the bytes of the GPU that they take."""
        job, step = self.query.job, self.query.job.step
        tried = [
            *(Change(f"ac={mode!r}", job.change(ac=mode)) for mode in MODES if parse_ac(mode) != job.ac),
            *(Change(f"precision={word!r}", job.change(precision=word)) for word in (None, "bf16")),
            *(Change(f"loss={word!r}", job.change(loss=word)) for word in ("model", "chunked")),
            *(Change(f"optimizer={name!r}", job.change(step=replace(step, optimizer=name))) for name in OPTIMIZERS),
            *(Change(f"strategy={name!r}", job.change(strategy=name)) for name in ("ddp", "fsdp2") if job.ranks > 1),
            Change("zero_grad(set_to_none=False)", job.change(step=replace(step, zero_grad="zero"))),
            Change("the output kept", job.change(step=replace(step, keeps_output=True))),
        ]
        others = self._changed(change for change in tried if change.job != job)
        yield from ((words, self.need(query)) for words, query in others)
        larger = [("twice the micro-batch", 2, 1), ("twice the sequence", 1, 2)] if self.step.seq_len else []
        for words, batch, length in larger:
            with suppress(ValueError, NotImplementedError):  # more positions than the model has
                query = self.step.query(batch=batch * self.step.batch, seq_len=length * self.step.seq_len)
                yield words, self.need(query)

    def _changed(self, tried: Iterable[Change]) -> Iterator[tuple[str, PlanQuery]]:
        for change in tried:
            with suppress(ValueError, NotImplementedError):  # a rule of the job, or a part that is not planned
                query = self.query.changed(change.job)
                if query is not None:
                    yield change.words, query


def _choices(query: PlanQuery) -> Choices:
    choices = choices_under(query)
    if choices is None:
        raise ValueError(f"ac={query.job.ac} is not planned. Give none, full, selective or a budget.")
    return choices


# Phases of a recording that a plan has, too, as the plan has them.
_PHASES = {
    Phase.FORWARD: Phase.FORWARD,
    Phase.LOSS: Phase.FORWARD,
    Phase.BACKWARD: Phase.BACKWARD,
    Phase.RECOMPUTATION: Phase.BACKWARD,
    Phase.OPTIMIZER: Phase.OPTIMIZER,
}


def _phase(stretch: str) -> Phase:
    return next((phase for phase in (Phase.BACKWARD, Phase.OPTIMIZER) if phase in stretch), Phase.FORWARD)


def weights_by_model(blocks: Iterable[Block], parts: StepParts, model: nn.Module) -> StepParts:
    """Return `parts` with the blocks named that were there before the recording and have the size of a weight of `model`.

    A quantised model has weights of several widths, and of 4 bits one float32 for each 64 numbers (QLoRA, arXiv:2305.14314).
    """
    silent = [block for block in blocks if parts.named[block].kind is MemoryKind.OLD and block.born == BEFORE]
    sizes = Counter(map(rounded, silent))
    numbers = [tensor.numel() for tensor in (*model.parameters(), *model.buffers())]
    of_widths = [Counter(round_up(number * bits // 16) for number in numbers) for bits in _HALF_BITS]
    left: Counter[int] = Counter()
    for wanted in sorted(of_widths, key=lambda wanted: bytes_of(wanted & sizes), reverse=True):
        left = (left + wanted) & sizes
    weights = first_of_sizes(sorted(silent, key=lambda block: block.died is not None), left)
    named = {block: replace(parts.named[block], kind=MemoryKind.WEIGHTS) for block in weights}
    return replace(parts, named=parts.named | named)


def compare(blocks: Sequence[Block], parts: StepParts, planned: PlannedStep) -> tuple[StepParts, PlanComparison]:
    """Compare a recorded peak with the planned one; also return `parts` with names by it for blocks without a stack.

    Args:
        blocks: those at the recorded peak.
    """
    at, total = planned.peak.at, planned.peak.total
    weights = Counter(round_up(each.size) for each in planned.blocks.values() if each.kind is MemoryKind.WEIGHTS)
    has, wants = bytes_of(weights & Counter(map(rounded, blocks))), bytes_of(weights)
    if has < _WEIGHTS_MATCH * wants:
        return parts, PlanComparison(
            total,
            at,
            refusal=f"Not compared with the plan: blocks of the recording have the sizes of {write_bytes(has)} of its "
            f"{write_bytes(wants)} of weights. Give the --model, --dtype, --precision and --gpus that ran.",
        )
    last = max(blocks, key=lambda block: block.born)
    tensors = planned.alive_like(_by_group(_recorded(blocks, parts)), _PHASES.get(parts.named[last].phase))
    parts = _named_alike(blocks, parts, tensors)
    recorded = _recorded(blocks, parts)
    real, plan = _by_group(recorded), _by_group(tensors)
    compared = {group: (real[group], plan[group]) for group in GROUPS if real[group] or plan[group]}
    return parts, PlanComparison(total, at, compared, tuple(_layers(recorded, tensors)))


def _recorded(blocks: Iterable[Block], parts: StepParts) -> list[Compared]:
    return [Compared(block.size, parts.named[block].kind, parts.named[block].layer) for block in blocks]


def _by_group(tensors: Iterable[Compared]) -> Counter[str]:
    return totals((_GROUP_OF[tensor.kind], tensor.size) for tensor in tensors)


def _activations_by_layer(tensors: Iterable[Compared]) -> Counter[int]:
    activations = (tensor for tensor in tensors if tensor.kind is MemoryKind.ACTIVATIONS)
    return totals((tensor.layer, tensor.size) for tensor in activations if tensor.layer is not None)


def _named_alike(blocks: Iterable[Block], parts: StepParts, tensors: Iterable[Compared]) -> StepParts:
    """Return `parts` with the blocks named whose stack tells nothing: by a tensor of the size, in the same order."""
    waiting = grouped((round_up(each.size), each) for each in tensors)
    named = dict(parts.named)
    for block in sorted(blocks, key=lambda block: block.born):
        same, known = waiting.get(rounded(block)), named[block]
        if known.kind is MemoryKind.OLD and same:
            each = same.pop(0)
            named[block] = replace(known, kind=each.kind, layer=each.layer)
        elif same:
            same.remove(next((each for each in same if each.kind is known.kind), same[0]))
    return replace(parts, named=named)


def _layers(recorded: Iterable[Compared], planned: Iterable[Compared]) -> Iterator[str]:
    """Yield a line for each group of neighbouring layers whose activations differ from their plan alike."""
    real, plan = _activations_by_layer(recorded), _activations_by_layer(planned)
    if not real or max(real) != max(plan, default=-1):
        return  # layers of the recording are not known, or they are others
    off = ((real[layer] - plan[layer], layer) for layer in range(max(real) + 1))
    different = [(size, layer) for size, layer in off if abs(size) > _LAYERS_ALIKE * plan[layer]]
    for size, group in groupby(different, key=lambda pair: round(pair[0] / MIB)):
        numbers = [layer for _, layer in group]
        which = f"Layer {numbers[0]}" if len(numbers) == 1 else f"Layers {numbers[0]} to {numbers[-1]}"
        yield f"{which}: {size:+,} MiB each more than planned."
