"""Seconds and bytes of every layout by a formula, from one trace of the model: it ranks layouts, of which few are planned.

The trace is of one micro-batch, in the smallest `tp` and `cp` that the pins allow; experts that are split have a trace of
their own. Of each kind of layer it has the operators. For
another number of tokens, or another share of the weights, they are scaled (`scaled`): a token has its share of FLOPs and
bytes, and tensor parallelism splits the product of whole hidden states, till the next product. The planner's own rates
then time them. `seconds` adds the collectives that computing does not hide, the bubble, the optimizer and the host;
`bytes` the tensors that a rank stores, saves, gathers and reduces at the two points where steps peak. Both take all
layouts at once.

How far off they are is measured by the plans of the layouts that are looked at (`nemo_like.planning.fit.search`).
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from nemo_like.options import FSDP2, ChunkedLoss, PipelineParallel, parse_bytes
from nemo_like.options.optimizers import OPTIMIZER_OBJECTS
from nemo_like.options.parallel import in_stage, moves_state, unit_reshards
from nemo_like.options.pipelining import SCHEDULE_OBJECTS
from nemo_like.planning import roofline
from nemo_like.planning.fit.layouts import Layout
from nemo_like.planning.memory_model.storages import Bytes
from nemo_like.planning.model.capture import routing_of
from nemo_like.planning.predictions.rank import RankSteps, rank_peak
from nemo_like.planning.predictions.reserved import verdict, workspaces_of
from nemo_like.planning.predictions.seconds import KERNELS_PER_PARAMETER, action_seconds, timeline
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.roofline import host_seconds
from nemo_like.planning.selection.layer import BlockProblem, BlockSeconds, Choice
from nemo_like.planning.trace.block import OpRecord
from nemo_like.torch_compat import local_part

# Modes from the fastest, which saves most, to the one that saves least.
BY_SPEED = ("none", "selective", "full")
# Columns of a product below which tensor parallelism leaves it whole, as the scores of a router.
_NARROW = 512
_HEAD, _LAYER, _STEP = "head", "layer", "step"
_OF_HEAD = ("forward of the head", "loss", "backward of the head")
# Tensors of one chunk's logits that exist at a time: logits, their probabilities, their gradients.
_CHUNKS = 3


class Places(Bytes):
    """The parts of the highest point in each kind of stretch: head and loss, a layer's backward, the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.highest: dict[str, dict[str, int]] = {}

    def mark(self, where: str) -> None:
        self.keep()
        super().mark(where)

    def keep(self) -> None:
        """Note the stretch that ends."""
        if self.best_total >= 0:
            kind = _HEAD if self.where in _OF_HEAD else _STEP if self.where == "optimizer step" else _LAYER
            if sum(self.highest.get(kind, {}).values()) < self.best_total:
                self.highest[kind] = {part: size for part, size in self.best.items() if size}
        self.best_total = -1


# Parts of a result that a rank of tensor parallelism has: hidden states, which sequence parallelism cuts; the whole;
# its columns.
CUT, WHOLE, SPLIT = "cut", "whole", "split"


def places_of(ops: Sequence[OpRecord], whole: Collection[int] = ()) -> list[str]:
    """Return, for each operator, the part of its result that a rank of tensor parallelism has.

    A product of whole hidden states is split by its columns, and one of split ones sums its parts up, so that its
    result is whole again (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3). Others follow their inputs.
    whole: elements of the weights that every rank has, as of DeepSeek's attention; all of a sequence passes their products.
    """
    places: list[str] = []
    for op in ops:
        read = {places[number] for number in op.reads}
        if not op.flops or facts(op.op).attention:
            place = SPLIT if SPLIT in read else WHOLE if read == {WHOLE} else CUT
        elif any(size // (2 if op.half else 4) in whole for _, size in op.outer):
            place = WHOLE
        else:
            narrow = not op.shapes or op.shapes[0][-1] < _NARROW
            place = CUT if narrow or SPLIT in read else SPLIT
        places.append(place)
    return places


@dataclass(frozen=True)
class Share:
    """Shares of a rank in the traced micro-batch and its weights."""

    tokens: float  # Tokens, as a multiple.
    split: float  # Share of the tensors that tensor parallelism splits.
    whole: float  # Share of the other tensors: less than 1 where sequences are cut.


def scaled(problem: BlockProblem, share: Share, whole: Collection[int] = ()) -> BlockProblem:
    """Return a layer's trace as it would be for another share of the tokens and of the weights; `whole`: see `places_of`."""
    trace = problem.trace
    shares, made = {SPLIT: share.split, WHOLE: 1.0, CUT: share.whole}, list[OpRecord]()
    for op, place in zip(trace.ops, places_of(trace.ops, whole)):
        part = shares[place]
        known, flops, moved, shapes = facts(op.op), op.flops, op.moved, op.shapes
        if flops and not known.attention:
            by = 1.0 if place == WHOLE or shapes[0][-1] < _NARROW else share.split
            rows = max(1, math.prod(shapes[0][:-1]))
            weight = min(moved, flops // (2 * rows) * (2 if op.half else 4))
            flops, moved = int(flops * share.tokens * by), int((moved - weight) * share.tokens * part + weight * by)
            columns = max(1, round(shapes[0][-1] * (share.split if place == SPLIT else 1.0)))
            shapes = ((max(1, round(rows * share.tokens)), columns),)
        else:
            by = 1.0 if place == WHOLE else share.split
            flops, moved = int(flops * share.tokens * by), int(moved * share.tokens * part)
        size = int(op.bytes * share.tokens * part)
        made.append(replace(op, flops=flops, moved=moved, shapes=shapes, bytes=size))
    before, after = (sum(op.bytes for op in every if op.needed) for every in (trace.ops, made))
    kept = int(trace.kept_input_bytes * share.tokens * share.whole)
    inside = (trace.none_bytes - trace.kept_input_bytes) * (after / before if before else 1.0)
    return BlockProblem(
        replace(
            trace,
            ops=tuple(made),
            input_bytes=int(trace.input_bytes * share.tokens * share.whole),
            kept_input_bytes=kept,
            none_bytes=kept + int(inside),
        ),
        problem.device,
    )


class Local(NamedTuple):
    """One kind of layer on one rank, by mode: seconds of its kernels, bytes that it saves, bytes that it sends."""

    forward: float
    backward: float
    replay: tuple[float, ...]
    held: tuple[float, ...]  # Bytes saved for backward.
    inputs: float  # Bytes of these that ``offload="boundary"`` moves.
    made: float  # Bytes of all that a forward makes.
    summed: float  # Bytes of one sum of tensor parallelism.
    gathered: float  # Bytes of keys and values that a forward gathers.
    again: float  # Bytes of these that backward gathers once more.
    exchanged: float
    launching: tuple[float, ...]  # Seconds of the host, without FSDP2.


class Estimate(NamedTuple):
    """Seconds of a step and bytes that a rank needs, each by layout, way and mode."""

    seconds: Tensor
    bytes: Tensor
    host: Tensor  # Bytes in CPU memory, by layout and way.


@dataclass(frozen=True)
class Way:
    """Options that change no size, in the words of `Layout`, but for the mode."""

    loss: str = "model"
    offload: str = "none"
    fsdp: FSDP2 = FSDP2()
    sync: str = "every"


class Formula:
    """The formula for one model, by the trace of one layout."""

    def __init__(self, query: PlanQuery, layout: Layout, seq_len: int) -> None:
        """Read the trace of `query`; `layout`: the sizes that it was traced in, in one stage."""
        self.query, self.base = query, layout
        self.stage, self.device = query.stages[0], query.device
        self.part = self.stage.part
        chosen = Counter((call.kind, call.fqn in self.part.chosen) for call in self.part.traced.calls)
        self.groups = sorted(chosen.items())
        self.layers = sum(chosen.values())
        self.shapes: dict[Any, list[Local]] = {}
        self._wires: dict[Any, tuple[float, float]] = {}
        self._rows: dict[int, float] = {}
        self._halfway: dict[int, list[float]] = {}
        self.saved_share: dict[tuple[int, bool], list[float]] = {}
        self.places: dict[tuple[str, str], dict[str, dict[str, int]]] = {}
        self.outer: dict[str, float] = {}
        # Bytes that the allocator reserves above the peak: for each byte that comes and goes, and those of libraries.
        self.excess, self.workspaces = 0.0, 0
        head = find_head(self.part.model)
        weights = 0 if head is None else sum(local_part(p).numel() for p in head.parameters())
        # Bytes of a chunked loss that do not grow with the tokens: gradients of the head, and a chunk.
        self.fixed_in_chunks = 4 * weights + _CHUNKS * parse_bytes(str(ChunkedLoss.chunk_bytes))
        self.whole, self.split_shares = _tensor_parallel(query)
        self.measure("model", query)

    def under(self, job: Job) -> Formula:
        """Return the formula for another optimizer or compiler, which changes no operator that was traced."""
        other = copy.copy(self)
        other.query, other.shapes = self.query.under(job), {}
        other.stage = other.query.stages[0]
        if job.partitioner != self.query.job.partitioner:
            other.places, other.outer, other.saved_share, other.excess = {}, {}, {}, 0.0
            other.measure("model", other.query)
        return other

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
        for mode in BY_SPEED:
            storages = Places()
            steps = RankSteps(query, 0, query.uniform(mode), storages)
            steps.begin_later()
            steps.run()
            storages.keep()
            self.places[mode, loss] = storages.highest
        if self.device.cuda is None or self.excess:
            return
        # The bytes reserved above the peak are more or less a share of the tensors that come and go in a step.
        mode = BY_SPEED[-1]
        choices = query.uniform(mode)
        peak = max(self.places[mode, loss].values(), key=lambda parts: sum(parts.values()))
        whole = rank_peak(query, 0, choices)
        moving = sum(size for part, size in peak.items() if part not in (*STAYING, Part.SAVED_ACTIVATIONS))
        need = verdict(query, choices, {0: whole}, self.device.memory_bytes)
        self.workspaces = sum(workspaces_of(self.device.cuda))
        self.excess = max(0, need.bytes - whole.total - self.workspaces) / max(1, moving)

    # --- one local shape ------------------------------------------------------------------------------------------

    def share(self, layout: Layout) -> Share:
        """Return the share of a rank of `layout` in the traced micro-batch."""
        base = self.base
        tokens = layout.micro_batch / base.micro_batch * base.cp / layout.cp
        cut, before = (each.tp if each.sequence_parallel else 1 for each in (layout, base))
        return Share(tokens, base.tp / layout.tp, before / cut)

    def local(self, layout: Layout) -> list[Local]:
        """Return each kind of layer as one rank of `layout` runs it."""
        key = (layout.tp, layout.cp, layout.ep > 1, layout.micro_batch, layout.sequence_parallel, layout.cp_method)
        if key not in self.shapes:
            share = self.share(layout)
            kinds = dict.fromkeys(kind for (kind, _), _ in self.groups)
            problems = {kind: scaled(self.part.problems[kind], share, self.whole[kind]) for kind in kinds}
            self.shapes[key] = [
                self._kind(kind, chosen, problems[kind], layout, share) for (kind, chosen), _ in self.groups
            ]
        return self.shapes[key]

    def _kind(self, kind: int, chosen: bool, problem: BlockProblem, layout: Layout, share: Share) -> Local:
        compiled = self.query.job.compile is not None
        block, traced = BlockSeconds.from_problem(problem, compiled=compiled), self.part.problems[kind]
        choices = [self._choice(kind, mode if chosen else "none", problem) for mode in BY_SPEED]
        hidden = traced.trace.input_bytes * share.tokens * (self.base.tp if self.base.sequence_parallel else 1)
        rows = layout.micro_batch / self.base.micro_batch
        gathered, again = block.sequence_bytes, block.gathered_again
        if layout.cp > 1 and self.base.cp == 1:
            keys = sum(max(0, op.moved - 2 * op.bytes) for op in traced.trace.ops if facts(op.op).attention)
            gathered = int(keys * rows * share.split)
            again = gathered if layout.cp_method == "all_gather" else 0
        exchanged = sum(op.moved // 2 for op in traced.trace.ops if facts(op.op).exchange)
        launching = [
            host_seconds(
                block.launched,
                choice.label,
                units=0,
                split_products=block.products if layout.tp > 1 else 0,
                sequence_parallel=layout.sequence_parallel,
            )
            for choice in choices
        ]
        return Local(
            block.forward,
            block.backward,
            tuple(block.replay(choice, problem.reachable) for choice in choices),
            tuple(choice.held_bytes * share for choice, share in zip(choices, self._saved_shares(kind, chosen))),
            problem.trace.input_bytes,
            sum(op.bytes for op in problem.records),
            hidden,
            gathered,
            again,
            exchanged * share.tokens * share.split,
            tuple(seconds * (self.device.kind != "cpu") for seconds in launching),
        )

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

    def _saved_shares(self, kind: int, chosen: bool) -> list[float]:
        """Return, for each mode, the bytes that a compiled layer saves, as a share of those of an eager one."""
        if self.query.job.partitioner is None:
            return [1.0] * len(BY_SPEED)
        if (kind, chosen) not in self.saved_share:
            shares = []
            for mode in BY_SPEED:
                eager = self._traced(kind, mode, chosen)
                events = self.part.memory(kind, eager, loss=self.stage.loss, compiler=self.query.job.partitioner)
                compiled = events.held + self.part.problems[kind].trace.input_bytes
                shares.append(compiled / max(1, eager.held_bytes))
            self.saved_share[kind, chosen] = shares
        return self.saved_share[kind, chosen]

    def halfway(self, number: int) -> list[float]:
        """Return the bytes that a layer holds between the halves of its backward, by mode, over its results'."""
        if number not in self._halfway:
            (kind, chosen), _ = self.groups[number]
            problem = self.part.problems[kind]
            of_forward = max(1, sum(op.bytes for op in problem.records))
            choices = [self._choice(kind, mode if chosen else "none", problem) for mode in BY_SPEED]
            self._halfway[number] = [
                self.part.memory(kind, choice, halves=True).between / of_forward for choice in choices
            ]
        return self._halfway[number]

    def _choice(self, kind: int, mode: str, problem: BlockProblem) -> Choice:
        if mode == "none" or not problem.trace.saves_something:
            return problem.none()
        traced = self._traced(kind, mode, chosen=True)
        return problem.choice(traced.decisions, traced.label)

    def _traced(self, kind: int, mode: str, chosen: bool) -> Choice:
        """Return the choice of a mode for a kind of layer as it was traced; `chosen`: of those in the job's scope."""
        calls = zip(self.part.traced.calls, self.part.uniform(mode))
        return next(choice for call, choice in calls if (call.kind, call.fqn in self.part.chosen) == (kind, chosen))

    # --- all layouts ----------------------------------------------------------------------------------------------

    def estimate(self, layouts: Sequence[Layout], ways: Sequence[Way]) -> Estimate:
        """Return seconds and bytes of all `layouts`, run in all `ways` under all modes."""
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


class _Columns:
    """Numbers of all layouts as columns (layouts, 1, 1), of ways as (1, ways, 1), of modes as (1, 1, modes)."""

    def __init__(self, formula: Formula, layouts: Sequence[Layout], ways: Sequence[Way]) -> None:
        self.formula, self.layouts, self.ways = formula, layouts, ways
        self.device = formula.device
        names = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp", "grad_accum")
        sizes = [self.column([getattr(layout, name) for layout in layouts]) for name in names]
        self.dp_replicate, self.dp_shard, self.tp, self.cp, self.ep, self.pp, self.grad_accum = sizes
        self.stages_per_rank = self.column([layout.stages_per_rank or 1 for layout in layouts])
        self.stages = self.pp * self.stages_per_rank
        self.staged = self.pp > 1
        self.shards = self.dp_shard * self.cp
        self.tokens = self.column([formula.share(layout).tokens for layout in layouts])
        self.chunked = self.row([way.loss == "chunked" for way in ways])
        self.moves = self.row([way.offload != "none" for way in ways])
        self.there = self.row([moves_state(way.fsdp, self.device.kind) for way in ways])
        # Weights stay gathered after forward.
        self.stays = self.row([not unit_reshards(way.fsdp, "layer") for way in ways]) | (
            self.row([not unit_reshards(in_stage(way.fsdp), "layer") for way in ways]) & self.staged
        )
        self.last = self.row([way.sync == "last" for way in ways])
        self.regions = torch.tensor([mode != "none" for mode in BY_SPEED]).view(1, 1, -1)
        self.again = torch.tensor([mode == "full" for mode in BY_SPEED]).view(1, 1, -1)
        locals_ = [formula.local(layout) for layout in layouts]
        reached = [formula.reached(layout.ep) / formula.reached(formula.base.ep) for layout in layouts]
        self.kinds = [self._of_kind(number, locals_) for number in range(len(formula.groups))]
        for kind in self.kinds:
            kind["exchanged"] = kind["exchanged"] * self.column(reached)
        cut = self.column([layout.tp if layout.sequence_parallel else 1 for layout in layouts])
        # 1 where a backward is cut in two.
        self.halves = self.column([layout.pp > 1 and layout.facts.splits_backward for layout in layouts])
        self.hidden = self.kinds[0]["summed"] / cut  # Bytes of hidden states that a stage sends.
        self._of_weights()

    def column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)

    def row(self, values: Sequence[bool]) -> Tensor:
        return torch.tensor(values).view(1, -1, 1)

    def wires(self, seconds: Any, groups: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        bytes_, starts = zip(*(self.formula.wire(seconds, *group) for group in groups))
        return self.column(bytes_), self.column(starts)

    def _of_kind(self, number: int, locals_: Sequence[list[Local]]) -> dict[str, Tensor]:
        every = [local[number] for local in locals_]
        columns = {
            name: self.column([getattr(local, name) for local in every])
            for name in ("forward", "backward", "inputs", "made", "summed", "gathered", "again", "exchanged")
        }
        for name in ("replay", "held", "launching"):
            values = torch.tensor([getattr(local, name) for local in every], dtype=torch.float64)
            columns[name] = values.unsqueeze(1)
        return columns | {"count": torch.tensor(float(self.formula.groups[number][1]), dtype=torch.float64)}

    def _of_weights(self) -> None:
        """Bytes of the weights of each kind of layer on one rank: gathered, reduced and stored, of experts apart."""
        formula, base = self.formula, self.formula.base
        stage, sharding = formula.stage, formula.stage.sharding
        split, spread = base.tp / self.tp, base.ep / self.ep
        stored = (base.dp_shard * base.cp * base.tp) / (self.shards * self.tp)
        # A stage has its share of the layers, and the first or the last one the modules around them.
        even = torch.ceil(formula.layers / self.stages) * self.stages_per_rank / formula.layers
        self.even = torch.where(self.staged, even, torch.ones_like(even))
        around = torch.where(self.staged, torch.full_like(even, 0.5), torch.ones_like(even))
        units = [*sharding.units, *sharding.experts.values()]
        ends = list(sharding.outside)

        def total(name: str, every: Sequence[Any]) -> float:
            return float(sum(getattr(unit, name) for unit in every))

        seen: dict[int, list[Any]] = {}
        for call, (unit, inner, _) in zip(formula.part.traced.calls, stage.units):
            seen.setdefault(call.kind, [each for each in (unit, inner) if each is not None])
        self.units = []
        for (kind, _), _ in formula.groups:
            every, share, sizes = seen[kind], formula.split_shares[kind], {}
            for name in ("gathered", "reduce_input", "whole_grad"):
                dense, experts = total(name, every[:1]), total(name, every[1:])
                sizes[name] = dense * (share * split + 1 - share), experts * spread
            shard = total("shard", every) + total("host_shard", every)
            grads = total("grad", every) + total("host_grad", every)
            self.units.append((sizes, shard * stored, grads * stored))
        self.ends = {name: total(name, ends) * split for name in ("gathered", "reduce_input", "whole_grad")}
        self.sharded = (self.shards * self.tp * self.dp_replicate > 1) if sharding.on else torch.zeros_like(self.tp) > 0
        layers = total("shard", units) + total("host_shard", units)
        outside = total("shard", ends) + total("host_shard", ends) + sharding.replicated
        self.parameters = stored * (layers * self.even + outside * around)
        trained = [*sharding.trained, *sharding.trained_on_host]
        inside = float(sum(param.size for param in trained if param.in_layer))
        every_trained = float(sum(param.size for param in trained))
        self.gradients = stored * (inside * self.even + (every_trained - inside) * around)
        state = stage.optimizer.state / max(1.0, every_trained) if not sharding.trained_on_host else 2.0
        self.state, self.trained = self.gradients * state, len(trained)
        self.temporaries = self.gradients * (stage.optimizer.step / max(1.0, every_trained))
        self.host_bytes = ((self.parameters + self.gradients + self.state) * self.there).squeeze(2)
        counted = [(float(count), sizes) for (_, count), (sizes, _, _) in zip(formula.groups, self.units)]
        gathered, whole = (sum(n * sum(sizes[name]) for n, sizes in counted) for name in ("gathered", "whole_grad"))
        self.all_gathered = gathered * self.even + self.ends["gathered"] * around
        self.all_grads = whole * self.even + self.ends["whole_grad"] * around
        # The weights gathered at a time are those of the largest layers.
        every_kind: list[Tensor] = [sizes["gathered"][0] + sizes["gathered"][1] for sizes, _, _ in self.units]
        largest = functools.reduce(torch.maximum, every_kind)
        before = max(total("gathered", every) for every in seen.values())
        self.unit_share = largest / before if before else torch.ones_like(self.tp)
        # Bytes of the gradients that the largest layer's backward makes, as traced.
        self.layer_grads = max(total("whole_grad", every) for every in seen.values())


def _tensor_parallel(query: PlanQuery) -> tuple[dict[int, set[int]], dict[int, float]]:
    """Return, for each kind of layer, the elements of weights that tensor parallelism leaves whole, and the share it splits.

    Experts that are split over ranks of their own are in neither.
    """
    part, given = query.stages[0].part, query.traced.given
    names: list[str] = []
    with suppress(ValueError):  # no plan, so that no layout has tp
        names = [f"{rule.fqn}.{rule.parameter or ''}" for rule in resolve_plan(given, query.job.tp.plan, 1)]
    apart = [f"{each.fqn}." for each in find_experts(given, query.job.ep.plan)] if query.job.ep.size > 1 else []
    whole, shares = dict[int, set[int]](), dict[int, float]()
    for call in part.traced.calls:
        if call.kind in whole:
            continue
        sizes: dict[bool, list[int]] = {True: [], False: []}
        for name, param in part.model.get_submodule(call.fqn).named_parameters(prefix=call.fqn):
            if not name.startswith(tuple(apart)):
                sizes[f"{name}.".startswith(tuple(names))].append(local_part(param).numel())
        whole[call.kind] = {*sizes[False]} - {*sizes[True]}
        shares[call.kind] = sum(sizes[True]) / max(1, sum(map(sum, sizes.values())))
    return whole, shares


def seconds_of(x: _Columns) -> Tensor:
    """Return the seconds of a step, by layout, way and mode.

    The parts are those of `nemo_like.planning.predictions.seconds`: kernels, collectives inside of layers, those of
    FSDP2 that computing does not hide, the host, the bubble, the optimizer.
    """
    formula, device = x.formula, x.device
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
    summed = reduced - 1
    split_experts, link = x.ep > 1, device.host_link

    def over_shards(whole: Tensor, experts: Tensor) -> Tensor:
        """Return the seconds of a gather, or a reduce-scatter; experts that are split are over ranks of their own."""
        apart = torch.where(split_experts, experts * apart_byte + apart_start, experts * shard_byte)
        return whole * shard_byte + shard_start + apart

    outer = formula.outer["model"] + x.chunked * (formula.outer.get("chunked", 0.0) - formula.outer["model"])
    outer = outer * x.tokens * (formula.base.tp / x.tp)
    computing, launching, late = outer, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    once = late  # of a pipeline, the gathers and reductions that its stages run once
    layers = torch.zeros(1, dtype=torch.float64)
    for kind, (sizes, shard, grads) in zip(x.kinds, x.units):
        count, forward, backward = kind["count"], kind["forward"], kind["backward"] + kind["replay"]
        sums = 2 * (kind["summed"] * sum_byte + sum_start) * (x.tp > 1)
        parts = (kind["gathered"] * part_byte + part_start) * (x.cp > 1)
        parts_again = (kind["again"] * part_byte + part_start) * (kind["again"] > 0) * (x.cp > 1)
        sent = (kind["exchanged"] * sent_byte + sent_start) * split_experts
        again = x.again * 1.0
        moved = kind["inputs"] * x.moves * x.regions
        copying = (moved / link - forward).clamp(min=0) + (moved / link - 2 * forward).clamp(min=0)
        inside = sums * (4 + again) + parts * (2 + again) + parts_again + sent * (2 + again) + copying
        layer = forward + backward + inside
        layers = layers + count * layer
        launch = kind["launching"] + x.sharded * (1 + split_experts) * _UNIT
        launching = launching + count * launch * (device.kind != "cpu")
        # FSDP2: a gather is hidden by the layer before, a reduction by the rest of the next one's backward.
        ahead = forward + 2 * sums + parts + sent
        behind = backward + (2 + again) * sums + (1 + again) * (parts + sent)
        fetched = over_shards(*sizes["gathered"])
        share = sum(sizes["reduce_input"]) / x.shards
        replicas = 2 * (share * copy_byte + copy_start) * (x.dp_replicate > 1)
        stored = over_shards(*sizes["reduce_input"]) + replicas
        fetch, store = x.there * shard / link, x.there * grads / link
        behind = (behind - moved / link * x.there).clamp(min=0)
        wait_forward = (fetch + fetched - ahead).clamp(min=0)
        wait_backward = (fetch + fetched - behind).clamp(min=0) * ~x.stays
        behind = torch.where(x.stays, behind, (behind - fetch - fetched).clamp(min=0))
        wait_reduce = (stored + store - behind).clamp(min=0)
        adding = x.there * 3 * grads / (device.host_bandwidth or link)
        summing = torch.where(adding > 0, adding + stored + store - wait_reduce, torch.zeros_like(adding))
        late = late + count * (turns * (wait_forward + wait_backward) + reduced * wait_reduce + summed * summing)
        once = once + count * (fetched + stored)
    gather_ends = x.ends["gathered"] * shard_byte + 2 * shard_start
    reduce_ends = x.ends["reduce_input"] * shard_byte + 2 * shard_start
    reduce_ends = reduce_ends + 2 * (x.ends["reduce_input"] / x.shards * copy_byte + copy_start) * (x.dp_replicate > 1)
    late = (late + turns * gather_ends + reduced * reduce_ends) * x.sharded
    once = (once * x.even + 0.5 * (gather_ends + reduce_ends)) * x.sharded
    computing = layers + outer
    waiting = (turns * (launching - computing)).clamp(min=0)
    in_one_stage = turns * computing + late + (waiting - late).clamp(min=0)
    # The busiest rank has whole layers. The modules around them are next to fewer, where the stages allow it.
    layer = layers / formula.layers
    most = torch.ceil(formula.layers / x.stages)
    beside = (outer / layer.clamp(min=1e-12) - (most * x.stages - formula.layers)).clamp(0, 1)
    busiest = torch.maximum(layer * (most * x.stages_per_rank + beside), computing / x.pp)
    replayed = sum(kind["count"] * kind["replay"] for kind in x.kinds)
    busiest = busiest + replayed / x.pp * x.halves  # each half of a backward that is cut recomputes
    busiest = torch.maximum(busiest, launching / x.pp)
    fill = _fills(x)
    sending = 2 * (x.stages - 1) * (x.hidden / device.network + device.hop_seconds)
    staged = turns * busiest + busiest * fill + sending + once
    passes = OPTIMIZER_OBJECTS[formula.query.job.step.optimizer]
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
    forward = sum(float(kind["count"]) * kind["forward"][0, 0, 0] for kind in x.kinds)
    replays = torch.stack([float(kind["count"]) * kind["replay"][0, 0] for kind in x.kinds]).sum(0)
    again = (replays / forward).tolist()
    rows = [
        [
            _fill(each.schedule, each.pp, each.stages_per_rank or 1, min(each.grad_accum, 2 * each.pp), share)
            for share in again
        ]
        for each in x.layouts
    ]
    return torch.tensor(rows, dtype=torch.float64).unsqueeze(1)


@functools.cache
def _fill(schedule: str | None, pp: int, per_rank: int, turns: int, again: float) -> float:
    if pp == 1 or schedule is None:
        return 0.0
    if not SCHEDULE_OBJECTS[schedule].splits_backward:
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
    formula, base = x.formula, x.formula.base
    saved = sum(kind["count"] * kind["held"] for kind in x.kinds)
    moved = sum(kind["count"] * kind["inputs"] for kind in x.kinds) * (1 - 1 / formula.layers)
    saved = saved - moved * x.moves * x.regions
    in_flight = [
        layout.facts.in_flight(layout.pp, layout.grad_accum, layout.stages_per_rank or 1) if layout.pp > 1 else 1.0
        for layout in x.layouts
    ]
    flight = x.column(in_flight)
    if bool(x.halves.any()):
        halfway = [torch.tensor(formula.halfway(number)).double() for number in range(len(x.kinds))]
        waits = torch.stack([kind["count"] * kind["made"] * share for kind, share in zip(x.kinds, halfway)]).sum(0)
        saved = torch.where(x.halves > 0, torch.maximum(saved, waits), saved)
    saved = torch.where(x.staged, saved * flight * x.even, saved)
    made = [sum(op.bytes for op in formula.part.problems[kind].records) for (kind, _), _ in formula.groups]
    largest = max(range(len(made)), key=made.__getitem__)
    running = x.kinds[largest]["made"] / max(1, made[largest])
    vocabulary = (
        torch.tensor([base.tp / lay.tp if lay.loss_parallel else 1.0 for lay in x.layouts]).view(-1, 1, 1).double()
    )
    # Whole gradients wait, where only the last micro-batch reduces; else this rank's share of them.
    grows = x.grad_accum > 1
    behind = not formula.query.job.step.in_backward  # else none are left for the optimizer
    here = x.gradients * behind * (grows | ~x.sharded) * ~x.there
    waiting = torch.where(x.staged | (x.last & grows), x.all_grads, here)
    static = formula.workspaces + (x.parameters + x.state) * ~x.there + x.all_gathered * (x.stays & x.sharded)
    most: list[Tensor] = []
    for mode in BY_SPEED:
        points, at = [], len(most)
        for loss, where in (("model", ~x.chunked), ("chunked", x.chunked)):
            if (mode, loss) not in formula.places:
                continue
            places = formula.places[mode, loss]
            tops = []
            for place in (_HEAD, _LAYER):
                parts = places.get(place, {})
                wide = sum(parts.get(part, 0) for part in OF_HEAD)
                if loss == "chunked":
                    fixed = min(wide, formula.fixed_in_chunks)
                    head = fixed + (wide - fixed) * x.tokens
                else:
                    head = wide * x.tokens * vocabulary
                at_work = parts.get(Part.RUNNING_LAYER, 0)
                layer = torch.maximum(running * at_work, x.unit_share * min(at_work, x.layer_grads))
                units = parts.get(Part.GATHERED_LAYERS, 0) * x.unit_share * x.sharded * ~x.stays
                root = parts.get(Part.GATHERED_ROOT, 0) * (base.tp / x.tp) * x.sharded
                buffers = parts.get(Part.REDUCE_BUFFERS, 0) * x.unit_share * x.sharded
                moving = head + layer + units + root + buffers
                tops.append(static + waiting + saved[..., at : at + 1] + moving * (1 + formula.excess))
            step = static + (x.gradients + x.temporaries) * behind * ~x.there
            top = torch.maximum(torch.maximum(*tops), step)
            points.append(torch.where(where, top, torch.zeros_like(top)))
        most.append(torch.stack(points).sum(0))
    total = torch.cat([each.expand(len(x.layouts), len(x.ways), 1) for each in most], dim=2)
    # Stages have a receive buffer for each micro-batch, both ways, and most schedules keep the tensors that were sent.
    keeps = x.column([1 if layout.facts.frees_sent else 2 for layout in x.layouts])
    return total + torch.where(
        x.staged, 2 * x.hidden * x.grad_accum * x.stages_per_rank * keeps, torch.zeros_like(keeps)
    )


_UNIT = host_seconds(0, "none", units=1, split_products=0)  # Seconds of the host for a unit of FSDP2.
