"""Seconds and bytes of every layout by a formula, from one trace of the model: it ranks layouts, of which few are planned.

The trace is of one micro-batch, in the smallest `tp` and `cp` that the pins allow; experts that are split have a trace of
their own. A rank of another layout computes as much as its share of the tokens and of the weights (`grow`), at the rates of
the trace. `seconds` adds the collectives that computing does not hide, the bubble, the optimizer and the host;
`bytes` the tensors that a rank stores, saves, gathers and reduces at the two points where steps peak. Both take all
layouts at once.

How far off they are is measured by the plans of the layouts that are looked at (`nemo_like.planning.fit.search`).
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_like.activation_checkpointing.ops import facts
from nemo_like.activation_checkpointing.plan import OF_HEAD, STAYING, Part
from nemo_like.distributed.expert.split_experts import experts_per_token, find_experts
from nemo_like.distributed.pipeline.schedules import actions_of
from nemo_like.distributed.tensor.plan import resolve_plan
from nemo_like.fake.run import ranks_reached
from nemo_like.job import Job
from nemo_like.losses.model_loss import find_head
from nemo_like.options import CONTEXT_METHODS, ChunkedLoss, PipelineParallel, parse_bytes
from nemo_like.options.optimizers import OPTIMIZERS
from nemo_like.options.parallel import in_stage, moves_state, unit_reshards
from nemo_like.options.pipelining import SCHEDULES
from nemo_like.planning import roofline
from nemo_like.planning.fit.layouts import Layout
from nemo_like.planning.memory_model.storages import Event, Events, labels_after, part_bytes
from nemo_like.planning.model.capture import routing_of
from nemo_like.planning.predictions.rank import later_step, rank_peak
from nemo_like.planning.predictions.reserved import verdict, workspaces_of
from nemo_like.planning.predictions.seconds import KERNELS_PER_PARAMETER, action_seconds, timeline
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.roofline import host_seconds
from nemo_like.planning.selection.layer import BlockSeconds, fused
from nemo_like.planning.trace.block import OpRecord
from nemo_like.torch_compat import local_part

_NARROW = 512  # Columns of a product below which tensor parallelism leaves it whole.
_HEAD, _LAYER, _END, _STEP = "head", "layer", "end", "step"
_KINDS = dict.fromkeys(("forward of the head", "loss", "backward of the head"), _HEAD) | {
    "after layer 0, backward": _END,  # of the embedding
    "end of backward": _END,
    "optimizer step": _STEP,
}
# Tensors of one chunk's logits that exist at a time: logits, their probabilities, their gradients.
_CHUNKS = 3


def highest_places(events: Sequence[Event]) -> dict[str, dict[str, int]]:
    """Return the parts of the highest point in each kind of stretch: head and loss, layers, the embedding's backward, the
    optimizer's step."""
    highest: dict[str, tuple[int, int]] = {}
    for at, level in enumerate(itertools.accumulate(event.size for event in events)):
        kind = _KINDS.get(events[at].where, _LAYER)
        if events[at].size > 0 and level > highest.get(kind, (0, 0))[0]:
            highest[kind] = level, at
    return {kind: part_bytes(labels_after(events[: at + 1])) for kind, (_, at) in highest.items()}


# Parts of a result that a rank of tensor parallelism has: hidden states, which sequence parallelism cuts; the whole;
# its columns.
SPLIT, CUT, WHOLE = 0, 1, 2


def places_of(ops: Sequence[OpRecord], whole: Collection[int] = ()) -> list[int]:
    """Return, for each operator, the part of its result that a rank of tensor parallelism has.

    A product of whole hidden states is split by its columns, and one of split ones sums its parts up, so that its
    result is whole again (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3). Others follow their inputs.
    whole: elements of the weights that every rank has, as of DeepSeek's attention; all of a sequence passes their products.
    """
    places: list[int] = []
    for op in ops:
        read = {places[number] for number in op.reads}
        if not op.flops or facts(op.op).attention:
            place = SPLIT if SPLIT in read else WHOLE if read == {WHOLE} else CUT
        elif any(size // (2 if op.half else 4) in whole for _, size in op.outer):
            place = WHOLE
        else:
            place = CUT if _is_narrow(op) or SPLIT in read else SPLIT
        places.append(place)
    return places


def _is_narrow(op: OpRecord) -> bool:
    """Return whether tensor parallelism leaves a product whole, as the scores of a router."""
    return not op.shapes or op.shapes[0][-1] < _NARROW


class Estimate(NamedTuple):
    """Seconds of a step and bytes that a rank needs, each by layout, way and mode."""

    seconds: Tensor
    bytes: Tensor
    host: Tensor  # Bytes in CPU memory, by layout and way.


class Formula:
    """The formula for one model, by the trace of one layout."""

    def __init__(self, query: PlanQuery, layout: Layout, between: str = "selective") -> None:
        """Read a trace.

        Args:
            query: the traced job.
            layout: the sizes that it was traced in, in one stage.
            between: the mode between none and full checkpointing: ``selective``, or lists of names as a word.
        """
        # Modes from the fastest, which saves most, to the one that saves least.
        self.modes = ("none", between, "full")
        self.query, self.base = query, layout
        self.stage, self.device = query.stages[0], query.device
        self.part = self.stage.part
        self.layers = len(self.part.traced.calls)
        self._wires: dict[Any, tuple[float, float]] = {}
        self._rows: dict[int, float] = {}
        self.places: dict[tuple[str, str], dict[str, dict[str, int]]] = {}
        self.outer: dict[str, float] = {}
        # Bytes that the allocator reserves above the peak: for each byte that comes and goes, and those of libraries.
        self.excess, self.workspaces = 0.0, 0
        head = find_head(self.part.model)
        weights = 0 if head is None else sum(local_part(p).numel() for p in head.parameters())
        # Bytes of a chunked loss that do not grow with the tokens: gradients of the head, and a chunk.
        self.fixed_in_chunks = 4 * weights + _CHUNKS * parse_bytes(str(ChunkedLoss.chunk_bytes))
        self.whole, self.split_share = _tensor_parallel(query)
        self.measure_layers()
        self.measure("model", query)

    def under(self, job: Job) -> Formula:
        """Return the formula for another optimizer or compiler, which changes no operator that was traced."""
        other = copy.copy(self)
        other.query = self.query.under(job)
        other.stage = other.query.stages[0]
        other.measure_layers()
        if job.partitioner != self.query.job.partitioner:
            other.places, other.outer, other.excess = {}, {}, 0.0
            other.measure("model", other.query)
        return other

    def measure_layers(self) -> None:
        """Note seconds and bytes of all layers as they were traced, and those that depend on the mode, by mode.

        By mode: ``held``: bytes that are saved for backward, of which ``offload="boundary"`` moves the ``inputs``;
        ``launching``: seconds of the host without FSDP2, see `_LAUNCHING`. In `sums`: ``keys``: bytes of attention's keys
        and values.
        """
        job, part, rows = self.query.job, self.part, list[tuple[float, ...]]()
        sums: dict[str, float] = dict.fromkeys(_SUMS, 0.0)
        self.saved = [0.0, 0.0, 0.0]  # Bytes that layers may save, by place.
        by_mode = {name: torch.zeros(len(self.modes), dtype=torch.float64) for name in _BY_MODE}
        choices = [self.stage.uniform(mode) for mode in self.modes]
        groups = Counter((call.kind, *each) for call, *each in zip(part.traced.calls, *choices))
        for (kind, *chosen), count in groups.items():
            problem = part.problems[kind]
            ops = problem.trace.ops
            places = places_of(ops, self.whole[kind])
            trains = problem.trace.saves_something
            compiles = [job.compile is not None and problem.compiles(choice) for choice in chosen]
            blocks = {way: BlockSeconds.from_problem(problem, compiled=way) for way in {any(compiles), *compiles}}
            block = blocks[any(compiles)]
            for compiled, seconds_of_way in blocks.items():
                is_usual = compiled == any(compiles)
                records = [pair for pair in zip(fused(ops) if compiled else ops, places) if not pair[0].view]
                for at, (op, place) in enumerate(records):
                    if op.flops and not facts(op.op).attention:
                        place = WHOLE if place == WHOLE or _is_narrow(op) else SPLIT
                    times = 1 + seconds_of_way.backward_times[at] * trains
                    # A mode that leaves the layers eager adds their operators, and takes the compiled ones away.
                    added = [
                        times * (not is_usual)
                        + (choice.decisions[at : at + 1] == ("recompute",) and at < problem.reachable)
                        if way == compiled
                        else -times * is_usual
                        for choice, way in zip(chosen, compiles)
                    ]
                    often = (1, times - 1, *added) if is_usual else (0, 0, *added)
                    rows.append((seconds_of_way.kernels[at], place, *(count * number for number in often)))
            for op, place in zip(ops, places):
                self.saved[place] += count * op.bytes * op.needed
            sums["inputs"] += count * problem.trace.input_bytes
            sums["gathered"] += count * block.sequence_bytes
            sums["gathered again"] += count * block.gathered_again
            sums["keys"] += count * sum(max(0, op.moved - 2 * op.bytes) for op in ops if facts(op.op).attention)
            sums["exchanged"] += count * block.expert_bytes
            for at, choice in enumerate(chosen):
                held_bytes = choice.held_bytes
                if job.partitioner is not None:
                    events = part.memory(kind, choice, loss=self.stage.loss, compiler=job.partitioner)
                    held_bytes = events.held + problem.trace.input_bytes
                by_mode["held"][at] += count * held_bytes
                for name, split, cut in _LAUNCHING:
                    way = blocks[compiles[at]]
                    products = way.products * split
                    seconds = host_seconds(
                        way.launched, choice.mode, units=0, split_products=products, sequence_parallel=cut
                    )
                    by_mode[name][at] += count * seconds * (self.device.kind != "cpu")
        self.kernels = torch.tensor(rows, dtype=torch.float64)
        self.sums, self.by_mode = sums, by_mode

    def can_chunk(self) -> bool:
        """Return whether the loss can be computed in chunks; the chunks are then known to `seconds` and `bytes`."""
        if "chunked" not in self.outer and self.part.can_chunk():
            other = self.query.changed(self.query.job.change(loss="chunked"))
            assert other is not None
            self.measure("chunked", other)
        return "chunked" in self.outer

    def measure(self, loss: str, query: PlanQuery) -> None:
        """Note the highest points of a step with a kind of loss, and the bytes that are reserved above them."""
        self.outer[loss] = query.stages[0].outside().seconds
        for mode in self.modes:
            self.places[mode, loss] = highest_places(later_step(query, 0, query.uniform(mode), Events()).log)
        if self.device.cuda is None or self.excess:
            return
        # The bytes reserved above the peak are more or less a share of the tensors that come and go in a step.
        mode = self.modes[-1]
        choices = query.uniform(mode)
        peak = max(self.places[mode, loss].values(), key=lambda parts: sum(parts.values()))
        whole = rank_peak(query, 0, choices)
        moving = sum(size for part, size in peak.items() if part not in (*STAYING, Part.SAVED_ACTIVATIONS))
        need = verdict(query, choices, {0: whole}, self.device.memory_bytes)
        self.workspaces = sum(workspaces_of(self.device.cuda))
        self.excess = max(0, need.bytes - whole.total - self.workspaces) / max(1, moving)

    @functools.cached_property
    def between_halves(self) -> Tensor:
        """Bytes that all layers hold between the halves of their backward, by mode."""
        calls, part = self.part.traced.calls, self.part
        sizes = [
            sum(
                count * part.memory(kind, choice, halves=True).between
                for (kind, choice), count in Counter(
                    (call.kind, choice) for call, choice in zip(calls, self.stage.uniform(mode))
                ).items()
            )
            for mode in self.modes
        ]
        return torch.tensor(sizes, dtype=torch.float64)

    def reached(self, ep: int) -> float:
        """Return the rows that a token makes for exchanges among `ep` ranks."""
        if ep not in self._rows:
            model, job = self.query.traced.given, self.query.job
            routing = routing_of(model, replace(job, ep=replace(job.ep, size=ep)))
            self._rows[ep] = 1.0
            if routing is not None:
                count = find_experts(model, job.ep.plan)[0].count
                self._rows[ep] = sum(ranks_reached(experts_per_token(model) or 1, count, routing))
        return self._rows[ep]

    def estimate(self, layouts: Sequence[Layout], ways: Sequence[Layout]) -> Estimate:
        """Return seconds and bytes of all `layouts`, run in all `ways` under all modes.

        ways: the options that change no size: loss, offloading, those of FSDP2, and when gradients are reduced.
        """
        columns = _Columns(self, layouts, ways)
        return Estimate(seconds_of(columns), bytes_of(columns), columns.host_bytes)

    def wire(self, seconds: Any, ranks: int, inner: int) -> tuple[float, float]:
        """Return a collective's seconds for each byte, and in any case: the planner's rate is the line through two sizes."""
        key = (seconds, ranks, inner)
        if key not in self._wires:
            group = roofline.group_of(ranks, inner, self.device.gpus_per_node)
            small, large = (seconds(size, group, self.device) for size in (1 << 10, 1 << 40))
            byte = (large - small) / ((1 << 40) - (1 << 10))
            self._wires[key] = byte, small - byte * (1 << 10)
        return self._wires[key]


_SUMS = (
    "inputs",
    "gathered",
    "gathered again",
    "keys",
    "exchanged",
)
# Seconds of the host: alone, with products that tensor parallelism splits, and with sequences that it cuts, too.
_LAUNCHING = (("launching", False, False), ("launching split", True, False), ("launching cut", True, True))
_BY_MODE = ("held", *(name for name, _, _ in _LAUNCHING))


class _Columns:
    """Numbers of all layouts as columns (layouts, 1, 1), of ways as (1, ways, 1), of modes as (1, 1, modes)."""

    def __init__(self, formula: Formula, layouts: Sequence[Layout], ways: Sequence[Layout]) -> None:
        self.formula, self.layouts, self.ways = formula, layouts, ways
        self.device, base = formula.device, formula.base
        names = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp", "grad_accum")
        sizes = [self.column([getattr(layout, name) for layout in layouts]) for name in names]
        self.dp_replicate, self.dp_shard, self.tp, self.cp, self.ep, self.pp, self.grad_accum = sizes
        self.stages_per_rank = self.column([layout.stages_per_rank or 1 for layout in layouts])
        self.stages = self.pp * self.stages_per_rank
        self.staged = self.pp > 1
        self.shards = self.dp_shard * self.cp
        self.chunked = self.row([way.loss == "chunked" for way in ways])
        self.moves = self.row([way.offload != "none" for way in ways])
        self.there = self.row([moves_state(way.fsdp, self.device.kind) for way in ways])
        # Weights stay gathered after forward.
        self.stays = self.row([not unit_reshards(way.fsdp, "layer") for way in ways]) | (
            self.row([not unit_reshards(in_stage(way.fsdp), "layer") for way in ways]) & self.staged
        )
        self.last = self.row([way.sync == "last" for way in ways])
        self.regions = torch.tensor([mode != "none" for mode in formula.modes]).view(1, 1, -1)
        self.again = torch.tensor([mode == "full" for mode in formula.modes]).view(1, 1, -1)
        # 1 where a backward is cut in two.
        self.halves = self.column([layout.pp > 1 and layout.facts.splits_backward for layout in layouts])
        # Sequences and tokens of a rank, its computing and its hidden states, as multiples of those that were traced.
        rows = self.column([layout.micro_batch / base.micro_batch for layout in layouts])
        self.tokens = rows * base.cp / self.cp
        self.split = base.tp / self.tp
        self.grow = self.tokens * self.split
        self.cut = self.column([layout.tp if layout.sequence_parallel else 1 for layout in layouts])
        before = base.tp if base.sequence_parallel else 1
        self.inputs = formula.sums["inputs"] * self.tokens * before / self.cut
        # By place; without cut sequences, each rank of tensor parallelism has whole hidden states, and works on them.
        self.scales = self.grow, self.tokens * before / self.cut, self.tokens
        inside = (formula.by_mode["held"] - formula.sums["inputs"]).clamp(min=0)
        saved = zip(formula.saved, self.scales)
        self.of_layer = sum((size * scale for size, scale in saved), self.column([0.0])) / max(1.0, sum(formula.saved))
        self.held = self.inputs + inside * self.of_layer
        self.summed = formula.sums["inputs"] * self.tokens * before
        self.hidden = self.inputs / formula.layers  # Bytes of hidden states that a stage sends.
        gathered, again = formula.sums["gathered"], formula.sums["gathered again"]
        if base.cp == 1:
            gathered = again = formula.sums["keys"]
        self.gathered = gathered * rows * self.split
        methods = self.column([CONTEXT_METHODS[layout.cp_method].gathers_again for layout in layouts])
        self.gathered_again = again * rows * self.split * (methods if base.cp == 1 else 1)
        reached = [formula.reached(layout.ep) / formula.reached(base.ep) for layout in layouts]
        self.exchanged = formula.sums["exchanged"] * self.grow * self.column(reached)
        self._of_weights()

    def column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)

    def row(self, values: Sequence[bool]) -> Tensor:
        return torch.tensor(values).view(1, -1, 1)

    def wires(self, seconds: Any, groups: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        bytes_, starts = zip(*(self.formula.wire(seconds, *group) for group in groups))
        return self.column(bytes_), self.column(starts)

    def _of_weights(self) -> None:
        """Bytes of the weights on one rank: gathered, reduced and stored, of split experts apart."""
        formula, base = self.formula, self.formula.base
        stage, sharding = formula.stage, formula.stage.sharding
        spread = base.ep / self.ep
        stored = (base.dp_shard * base.cp * base.tp) / (self.shards * self.tp)
        # A stage has its share of the layers, and the first or the last one the modules around them.
        even = torch.ceil(formula.layers / self.stages) * self.stages_per_rank / formula.layers
        self.even = torch.where(self.staged, even, torch.ones_like(even))
        around = torch.where(self.staged, torch.full_like(even, 0.5), torch.ones_like(even))
        dense, experts, ends = sharding.units, tuple(sharding.experts.values()), tuple(sharding.outside)

        def total(every: Sequence[Any], *names: str) -> float:
            return float(sum(getattr(unit, name) for unit in every for name in names))

        names = ("gathered", "reduce_input", "whole_grad")
        split = formula.split_share * self.split + 1 - formula.split_share
        self.units = {name: (total(dense, name) * split, total(experts, name) * spread) for name in names}
        self.all_units = {name: shared + split for name, (shared, split) in self.units.items()}
        self.ends = {name: total(ends, name) * self.split for name in names}
        self.sharded = (self.shards * self.tp * self.dp_replicate > 1) if sharding.on else torch.zeros_like(self.tp) > 0
        inside = total([*dense, *experts], "shard", "host_shard") * stored
        self.parameters = inside * self.even
        self.parameters = self.parameters + stored * (total(ends, "shard", "host_shard") + sharding.replicated) * around
        self.stored_in_layers = inside, total([*dense, *experts], "grad", "host_grad") * stored
        trained = [*sharding.trained, *sharding.trained_on_host]
        in_layers = float(sum(param.size for param in trained if param.in_layer))
        every_trained = float(sum(param.size for param in trained))
        self.gradients = stored * (in_layers * self.even + (every_trained - in_layers) * around)
        state = stage.optimizer.state / max(1.0, every_trained) if not sharding.trained_on_host else 2.0
        self.state, self.trained = self.gradients * state, len(trained)
        self.temporaries = self.gradients * (stage.optimizer.step / max(1.0, every_trained))
        self.host_bytes = ((self.parameters + self.gradients + self.state) * self.there).squeeze(2)
        self.all_gathered = self.all_units["gathered"] * self.even + self.ends["gathered"] * around
        self.all_grads = self.all_units["whole_grad"] * self.even + self.ends["whole_grad"] * around
        # The weights gathered at a time, and the gradients that a layer's backward makes, as a share of those traced.
        before = total([*dense, *experts], "gathered")
        self.unit_share = self.all_units["gathered"] / before if before else torch.ones_like(self.tp)
        self.layer_grads = total([*dense, *experts], "whole_grad") / formula.layers


def _tensor_parallel(query: PlanQuery) -> tuple[dict[int, set[int]], float]:
    """Return, for each kind of layer, the elements of weights that tensor parallelism leaves whole, and the share it splits.

    Experts that are split over ranks of their own are in neither.
    """
    part, given = query.stages[0].part, query.traced.given
    names: list[str] = []
    with suppress(ValueError):  # no plan, so that no layout has tp
        names = [f"{rule.fqn}.{rule.parameter or ''}" for rule in resolve_plan(given, query.job.tp.plan, 1)]
    apart = [f"{expert.fqn}." for expert in find_experts(given, query.job.ep.plan)] if query.job.ep.size > 1 else []
    whole, total = defaultdict[int, set[int]](set), [0, 0]
    for call in part.traced.calls:
        sizes: tuple[set[int], set[int]] = set(), set()
        for name, param in part.model.get_submodule(call.fqn).named_parameters(prefix=call.fqn):
            if not name.startswith(tuple(apart)):
                is_split = f"{name}.".startswith(tuple(names))
                sizes[is_split].add(local_part(param).numel())
                total[is_split] += local_part(param).numel()
        whole[call.kind] = sizes[False] - sizes[True]
    return whole, total[True] / max(1, sum(total))


def seconds_of(x: _Columns) -> Tensor:
    """Return the seconds of a step, by layout, way and mode.

    The parts are those of `nemo_like.planning.predictions.seconds`: kernels, collectives inside of layers, those of
    FSDP2 that computing does not hide, the host, the bubble, the optimizer. All of a micro-batch's layers are summed.
    """
    formula, device, count = x.formula, x.device, x.formula.layers
    by_mode = formula.by_mode
    inner = [layout.tp for layout in x.layouts]
    shards = [layout.dp_shard * layout.cp for layout in x.layouts]
    gather = roofline.gather_seconds
    shard_byte, shard_start = x.wires(gather, list(zip(shards, inner)))
    copies = [(layout.dp_replicate, s * t) for layout, s, t in zip(x.layouts, shards, inner)]
    copy_byte, copy_start = x.wires(gather, copies)
    apart = [(max(1, s * t // layout.ep), layout.ep) for layout, s, t in zip(x.layouts, shards, inner)]
    apart_byte, apart_start = x.wires(gather, apart)
    sum_byte, sum_start = x.wires(gather, [(t, 1) for t in inner])
    part_byte, part_start = x.wires(gather, [(layout.cp, t) for layout, t in zip(x.layouts, inner)])
    sent_byte, sent_start = x.wires(roofline.exchange_seconds, [(layout.ep, 1) for layout in x.layouts])
    turns = x.grad_accum
    reduced = torch.where(x.last, torch.ones_like(turns), turns)
    split_experts, link, again = x.ep > 1, device.host_link, x.again * 1.0

    def over_shards(whole: Tensor, experts: Tensor) -> Tensor:
        """Return the seconds of gathers, or of reduce-scatters; experts that are split are over ranks of their own."""
        apart = torch.where(split_experts, experts * apart_byte + count * apart_start, experts * shard_byte)
        return whole * shard_byte + count * shard_start + apart

    outer = formula.outer["model"] + x.chunked * (formula.outer.get("chunked", 0.0) - formula.outer["model"])
    outer = outer * x.grow
    # No kernel is faster than its launch.
    kernels, place, *often = formula.kernels.unbind(1)
    split, cut, whole = x.scales
    each = kernels * torch.where(place == SPLIT, split, torch.where(place == CUT, cut, whole))
    each = torch.maximum(each, kernels.clamp(max=device.launch_seconds))
    forward, backward, *replays = ((each * count).sum(2, keepdim=True) for count in often)
    replay = torch.cat(replays, 2)
    backward = backward + replay
    summed = 2 * (x.summed * sum_byte + count * sum_start) * (x.tp > 1)
    parts = (x.gathered * part_byte + count * part_start) * (x.cp > 1)
    parts_again = (x.gathered_again * part_byte + count * part_start) * (x.gathered_again > 0) * (x.cp > 1)
    sent = (x.exchanged * sent_byte + count * sent_start) * split_experts
    moved = x.inputs * x.moves * x.regions
    copying = (moved / link - forward).clamp(min=0) + (moved / link - 2 * forward).clamp(min=0)
    layers = (
        forward + backward + summed * (4 + again) + parts * (2 + again) + parts_again + sent * (2 + again) + copying
    )
    launching = torch.where(x.cut > 1, by_mode["launching cut"], by_mode["launching split"])
    launching = torch.where(x.tp > 1, launching, by_mode["launching"])
    launching = launching + count * x.sharded * (1 + split_experts) * _UNIT * (device.kind != "cpu")
    # FSDP2: a gather is hidden by the layer before, a reduction by the rest of the next one's backward.
    ahead = forward + 2 * summed + parts + sent
    behind = backward + (2 + again) * summed + (1 + again) * (parts + sent)
    fetched = over_shards(*x.units["gathered"])
    replicas = 2 * (x.all_units["reduce_input"] / x.shards * copy_byte + count * copy_start) * (x.dp_replicate > 1)
    stored = over_shards(*x.units["reduce_input"]) + replicas
    fetch, store = (x.there * size / link for size in x.stored_in_layers)
    behind = (behind - moved / link * x.there).clamp(min=0)
    wait_forward = (fetch + fetched - ahead).clamp(min=0)
    wait_backward = (fetch + fetched - behind).clamp(min=0) * ~x.stays
    behind = torch.where(x.stays, behind, (behind - fetch - fetched).clamp(min=0))
    wait_reduce = (stored + store - behind).clamp(min=0)
    adding = x.there * 3 * x.stored_in_layers[1] / (device.host_bandwidth or link)
    adding = torch.where(adding > 0, adding + stored + store - wait_reduce, torch.zeros_like(adding))
    gather_ends = x.ends["gathered"] * shard_byte + 2 * shard_start
    reduce_ends = x.ends["reduce_input"] * shard_byte + 2 * shard_start
    reduce_ends = reduce_ends + 2 * (x.ends["reduce_input"] / x.shards * copy_byte + copy_start) * (x.dp_replicate > 1)
    late = turns * (wait_forward + wait_backward + gather_ends) + reduced * (wait_reduce + reduce_ends)
    late = (late + (reduced - 1) * adding) * x.sharded
    once = ((fetched + stored) * x.even + 0.5 * (gather_ends + reduce_ends)) * x.sharded
    computing = layers + outer
    waiting = (turns * (launching - computing)).clamp(min=0)
    in_one_stage = turns * computing + late + (waiting - late).clamp(min=0)
    # The busiest rank has whole layers. The modules around them are next to fewer, where the stages allow it.
    layer = layers / formula.layers
    most = torch.ceil(formula.layers / x.stages)
    beside = (outer / layer.clamp(min=1e-12) - (most * x.stages - formula.layers)).clamp(0, 1)
    busiest = torch.maximum(layer * (most * x.stages_per_rank + beside), computing / x.pp)
    busiest = busiest + replay / x.pp * x.halves  # each half of a backward that is cut recomputes
    busiest = torch.maximum(busiest, launching / x.pp)
    sending = 2 * (x.stages - 1) * (x.hidden / device.network + device.hop_seconds)
    staged = turns * busiest + busiest * _fills(x) + sending + once
    passes = OPTIMIZERS[formula.query.job.step.optimizer]
    host_rate = device.host_bandwidth or link
    updating = x.gradients * torch.where(
        x.there,
        torch.tensor((passes.host_passes or passes.passes) / host_rate, dtype=torch.float64),
        torch.tensor(passes.passes / device.bandwidth, dtype=torch.float64),
    )
    loop = x.trained * KERNELS_PER_PARAMETER * device.launch_seconds * x.even
    return torch.where(x.staged, staged, in_one_stage) + torch.maximum(loop, updating)


def _fills(x: _Columns) -> Tensor:
    """Return the share of a micro-batch's forward and backward on one rank that is waited for at the ends of a step."""
    kernels, _, *often = x.formula.kernels.unbind(1)
    forward, _, *replays = (float(kernels @ count) for count in often)
    again = [replay / forward for replay in replays]
    rows = [
        [
            _fill(layout.schedule, layout.pp, layout.stages_per_rank or 1, min(layout.grad_accum, 2 * layout.pp), share)
            for share in again
        ]
        for layout in x.layouts
    ]
    return torch.tensor(rows, dtype=torch.float64).unsqueeze(1)


@functools.cache
def _fill(schedule: str | None, pp: int, per_rank: int, turns: int, again: float) -> float:
    if pp == 1 or schedule is None:
        return 0.0
    if not SCHEDULES[schedule].splits_backward:
        return (pp - 1) / per_rank
    # Of schedules with a backward in two halves, torch's order itself tells; the same for more than twice the ranks.
    pipeline = PipelineParallel(pp, schedule, turns, per_rank)
    seconds = action_seconds([{"forward": 1.0, "backward": 2.0, "replay": again}] * pipeline.stages)
    whole = timeline(actions_of(pipeline), seconds, pipeline.stages).seconds
    return whole / (per_rank * (3.0 + 2 * again)) - turns


def bytes_of(x: _Columns) -> Tensor:
    """Return the bytes that a rank needs, by layout, way and mode, with those reserved above the peak.

    The peak is the higher of two points, the loss and the backward of the last layer, where all layers' activations are
    saved. Parts that the trace has there are scaled as their tensors are.
    """
    formula = x.formula
    saved = x.held - x.inputs * (1 - 1 / formula.layers) * x.moves * x.regions
    in_flight = [
        layout.facts.in_flight(layout.pp, layout.grad_accum, layout.stages_per_rank or 1) if layout.pp > 1 else 1.0
        for layout in x.layouts
    ]
    flying = x.column(in_flight)
    saved = saved * x.even * flying
    if bool(x.halves.any()):
        waits = formula.between_halves * x.of_layer * x.even * flying
        saved = torch.where(x.halves > 0, torch.maximum(saved, waits), saved)
    vocabulary = torch.where(x.column([layout.loss_parallel for layout in x.layouts]) > 0, x.split, 1.0)
    # Whole gradients wait, where only the last micro-batch reduces; else this rank's share of them.
    grows = x.grad_accum > 1
    behind = not formula.query.job.step.in_backward  # else none are left for the optimizer
    here = x.gradients * behind * ~x.there
    whole = x.staged | (x.last & grows)
    static = formula.workspaces + (x.parameters + x.state) * ~x.there + x.all_gathered * (x.stays & x.sharded)
    step = static + (x.gradients + x.temporaries) * behind * ~x.there
    traced_grads = max(1, sum(unit.grad for unit in formula.stage.sharding.all))
    most: list[Tensor] = []
    for at, mode in enumerate(formula.modes):
        top = step
        for loss, where in (("model", ~x.chunked), ("chunked", x.chunked)):
            places = formula.places.get((mode, loss), {_HEAD: {}})
            for place in (_HEAD, _LAYER, _END):
                parts = places.get(place, {})
                wide = sum(parts.get(part, 0) for part in OF_HEAD)
                fixed = min(wide, formula.fixed_in_chunks) if loss == "chunked" else 0
                head = fixed + (wide - fixed) * x.tokens * (1.0 if fixed else vocabulary)
                at_work = parts.get(Part.RUNNING_LAYER, 0)
                layer = torch.maximum(x.of_layer * at_work, x.unit_share * min(at_work, x.layer_grads))
                units = parts.get(Part.GATHERED_LAYERS, 0) * ~x.stays + parts.get(Part.REDUCE_BUFFERS, 0)
                root = parts.get(Part.GATHERED_ROOT, 0) * x.split
                moving = head + layer + (units * x.unit_share + root) * x.sharded
                # One micro-batch has the gradients of the layers that went back, whose activations are gone.
                back = torch.where(grows, 1.0, parts.get(Part.GRADIENTS, 0) / traced_grads)
                waiting = torch.where(whole, x.all_grads, here * back)
                gone = 1 - parts.get(Part.SAVED_ACTIVATIONS, 0) / max(1, places[_HEAD].get(Part.SAVED_ACTIVATIONS, 0))
                remaining = saved[..., at : at + 1] * (1 - gone / flying)
                now = static + waiting + remaining + moving * (1 + formula.excess)
                top = torch.where(where, torch.maximum(top, now), top)
        most.append(top)
    total = torch.cat([each.expand(len(x.layouts), len(x.ways), 1) for each in most], dim=2)
    # Stages have a receive buffer for each micro-batch, both ways, and most schedules keep the tensors that were sent.
    keeps = x.column([1 if layout.facts.frees_sent else 2 for layout in x.layouts])
    return total + x.staged * 2 * x.hidden * x.grad_accum * x.stages_per_rank * keeps


_UNIT = host_seconds(0, "none", units=1, split_products=0)  # Seconds of the host for a unit of FSDP2.
