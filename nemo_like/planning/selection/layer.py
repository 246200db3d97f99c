"""One block's ways to run: its trace as a choice problem, the frontier from "none" to "full", and seconds and sent bytes.

Backward of attention is two and a half times a forward (five matmuls for two); of a matmul, one matmul for each input that
needs a gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from nemo_like._util.op_lookup import Op
from nemo_like._util.table import grouped
from nemo_like.activation_checkpointing.names import NamedPolicy
from nemo_like.activation_checkpointing.ops import exchange_routing_ops, facts, routing_ops
from nemo_like.activation_checkpointing.policy import HOST, SAVE, Policy
from nemo_like.options.names import NO_NAMES, NamedList
from nemo_like.planning.devices import Device
from nemo_like.planning.roofline import (
    exposed_seconds,
    is_sequence_op,
    kernel_kind,
    kernel_seconds,
    op_seconds,
    product_seconds,
)
from nemo_like.planning.selection import solver
from nemo_like.planning.sharding import UnitBytes
from nemo_like.planning.trace.block import BlockTrace, OpRecord

STATISTICS = "statistics"  # The name of small tensors, which all plans keep.


@dataclass(frozen=True)
class Choice:
    """One way to run one block."""

    label: str  # ``none`` (no region), ``full`` (keep inputs only) or ``plan``.
    # Held on the device from its forward to its backward: its inputs where it keeps them, and tensors saved inside.
    held_bytes: int
    host_bytes: int  # Held in CPU memory meanwhile.
    recompute_flops: int
    recompute_seconds: float  # Replay, and transfers that computing does not hide.
    # For a region, ``save`` | ``recompute`` | ``skip`` | ``host`` for each op of `BlockProblem.records`.
    decisions: tuple[str, ...] = ()
    names: NamedList | None = field(
        default=None, compare=False
    )  # The list that it follows; None: it has another origin.
    # Calls of regions inside of the block, of which `decisions` has the words; empty: the block is the region, or none.
    inside: tuple[RegionChoice, ...] = ()
    around: BlockTrace | None = field(default=None, compare=False)  # With `inside`: the trace of the block with them.

    @property
    def mode(self) -> str:
        """Its label, as the host runs it: ``full`` also where all regions inside of it keep their inputs alone."""
        return "full" if self.inside and all(region.choice.is_full for region in self.inside) else self.label

    @property
    def told(self) -> tuple[object, ...]:
        """All that decides the tensors of a step under it: of each of its regions, whether it is full, and its decisions."""
        regions = tuple((region.path, region.choice.is_full, region.choice.decisions) for region in self.inside)
        return regions or (self.is_full, self.decisions)

    @property
    def is_full(self) -> bool:
        """Return whether it is ``ac="full"`` itself, and not only a choice that came from it."""
        return self.label == "full" and set(self.decisions) <= {"recompute", "save"}


@dataclass(frozen=True)
class RegionChoice:
    """One call of a region inside of a block."""

    path: str  # Of its module in the block.
    choice: Choice
    problem: BlockProblem = field(compare=False)

    @property
    def rows(self) -> dict[str, list[str]]:
        """Its decision table in JSON values, for a table that is not strict; empty: it keeps its inputs alone."""
        if self.choice.is_full or not self.choice.decisions:  # without decisions it runs no operator again
            return {}
        return self.problem.rows(self.choice, one_attention=True)


@dataclass(frozen=True)
class BlockProblem:
    """A block's trace on a device, as numbers for the solver."""

    trace: BlockTrace
    device: Device

    @cached_property
    def records(self) -> tuple[OpRecord, ...]:
        """The ops that compute something: no views."""
        return tuple(op for op in self.trace.ops if not op.view)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each of `records`, by the roofline."""
        return tuple(op_seconds(op, self.device) for op in self.records)

    @cached_property
    def numbers_of_ops(self) -> dict[int, int]:
        """Number among `records` of each operator of the trace that is one."""
        return {i: k for k, i in enumerate(i for i, op in enumerate(self.trace.ops) if not op.view)}

    @property
    def forward_seconds(self) -> float:
        """Seconds of one forward pass."""
        return sum(self.seconds)

    @property
    def reachable(self) -> int:
        """Number of `records` that a recomputation runs before its early stop."""
        return sum(1 for i in self.numbers_of_ops if i < self.trace.last_pack)

    def ops(self, by: str = "seconds") -> tuple[solver.Op, ...]:
        """Return the solver's operators, whose cost is ``"seconds"`` or ``"flops"`` of recomputation."""
        reachable = self.reachable
        costs = self.seconds if by == "seconds" else [float(record.flops) for record in self.records]
        return tuple(
            solver.Op(
                bytes=record.bytes,
                cost=costs[k] if k < reachable else 0.0,
                reads=tuple(self.numbers_of_ops[i] for i in record.reads if i in self.numbers_of_ops),
                # A rank without rows may run other ops than were traced, and then recomputes those it was to skip: a
                # collective must be run by all or by none.
                needed=(record.needed or facts(record.op).collective) and k < reachable,
                keepable=record.bytes > 0 and not record.changed and facts(record.op).tracked,
                forced=self._forced(record) if k < reachable else None,
            )
            for k, record in enumerate(self.records)
        )

    def _forced(self, record: OpRecord) -> str | None:
        op_facts = facts(record.op)
        if op_facts.pinned or record.op in self._routing:
            return "save"
        if (op_facts.random and not op_facts.attention) or not op_facts.tracked or record.steers:
            return "replay"  # random numbers are drawn again in order; in-place ops run again, as statistics are
        return None

    def none(self) -> Choice:
        """Return the choice without a region: autograd saves its tensors, and nothing is recomputed."""
        return Choice("none", self.trace.none_bytes, 0, 0, 0.0, names=NamedList(recompute=()))

    def choice(self, words: Sequence[str], label: str = "plan", names: NamedList | None = None) -> Choice:
        """Return the choice that does this with each operator: ``save``, ``skip``, ``recompute`` or ``host``.

        Of copies to the host and back, only the part that computing does not hide costs time (`exposed_seconds`).
        """
        reachable = self.reachable
        # Behind the early stop nothing runs, so there is nothing to decide.
        words = tuple(word if k < reachable else "recompute" for k, word in enumerate(words))
        run = [k for k, word in enumerate(words) if word == "recompute" and k < reachable]
        saved, moved = (
            sum(self.records[k].bytes for k, word in enumerate(words) if word == place) for place in ("save", "host")
        )
        exposed = exposed_seconds(moved, self.forward_seconds, self.device) if moved else 0.0
        return Choice(
            label,
            self.trace.input_bytes + saved,
            moved,
            sum(self.records[k].flops for k in run),
            sum(self.seconds[k] for k in run) + exposed,
            words,
            names,
        )

    def by_names(self, names: NamedList, *, skip: bool = True) -> Choice:
        """Return the choice that a list of names makes; `skip`: recomputation leaves out the ops that nothing reads."""
        if not self.trace.saves_something or names.recompute == ():
            return self.none()
        if not names.names:
            return self.full()
        policy, ops = NamedPolicy(names), self.ops()
        decisions = [policy.of_op(record.op, record.names) for record in self.records]
        stay = [
            op.forced == "save" or (op.forced is None and op.keepable and decision in (SAVE, HOST))
            for op, decision in zip(ops, decisions)
        ]
        left_out = solver.closure_replay(ops, sum(1 << k for k, stays in enumerate(stay) if stays))[1] if skip else 0
        return self.choice(
            [
                ("host" if decision is HOST else "save") if stays else "skip" if left_out >> k & 1 else "recompute"
                for k, (stays, decision) in enumerate(zip(stay, decisions))
            ],
            names=replace(names, layers=()),  # which layers have it, a plan tells
        )

    def in_regions(self, around: BlockTrace, names: NamedList, *, skip: bool = True) -> Choice:
        """Return the choice of a list that has modules as regions.

        Args:
            around: the trace of the block with these regions.
            names, skip: as for `by_names`.

        Raises:
            ValueError: calls of one module keep other tensors each.
        """
        inner = replace(names, recompute=None, layers=())
        every = [(region, BlockProblem(region.trace, self.device)) for region in around.regions]
        choices = [RegionChoice(region.path, problem.by_names(inner, skip=skip), problem) for region, problem in every]
        return self._together(around, choices, names)

    def _together(self, around: BlockTrace, choices: Sequence[RegionChoice], names: NamedList) -> Choice:
        tables = {choice.path: choice.rows for choice in choices}
        if wrong := [choice.path for choice in choices if choice.rows != tables[choice.path]]:
            raise ValueError(
                f"ac recomputes {wrong[0]!r}, which a layer calls more than once, and keeps other tensors in each call: no "
                "plan is made of that. Leave that module out of recompute, or the names in it out of save and offload."
            )
        words, size = {}, around.none_bytes
        for traced, region in zip(around.regions, choices):
            for i, k in region.problem.numbers_of_ops.items() if region.choice.decisions else ():
                if k < region.problem.reachable:
                    word, record = region.choice.decisions[k], around.ops[traced.at + i]
                    words[traced.at + i] = word
                    if word == "save" and record.needed:  # by autograd outside, too: there is one of it
                        size -= record.bytes
        # Nothing behind a region's early stop is run again, and nothing outside of regions.
        problem = BlockProblem(replace(around, input_bytes=size, last_pack=len(around.ops)), self.device)
        choice = problem.choice([words.get(i, "none") for i in problem.numbers_of_ops], names=replace(names, layers=()))
        return replace(choice, inside=tuple(choices), around=around)

    def without_skips(self, choice: Choice) -> Choice:
        """Return the choice with the ops recomputed that it leaves out."""
        if choice.around is not None and choice.names is not None:
            inside = [replace(region, choice=region.problem.without_skips(region.choice)) for region in choice.inside]
            return self._together(choice.around, inside, choice.names)
        words = ["recompute" if word == "skip" else word for word in choice.decisions]
        return self.choice(words, choice.label, choice.names)

    def full(self) -> Choice:
        """Return the choice that keeps only the inputs, and the routing of rows to experts of other ranks
        (`KeepRouting`). Nothing holds less: a plan must keep more, such as a number that was read from the device."""
        if not self.trace.saves_something:
            return self.none()
        words = ["save" if record.op in self._routing else "recompute" for record in self.records]
        return self.choice(words, "full", NamedList())

    @cached_property
    def _routing(self) -> frozenset[Op]:
        """Ops whose results the engine keeps in every mode (`KeepRouting`); none where its experts are on one rank."""
        return routing_ops() if self._splits_experts else frozenset()

    @cached_property
    def _splits_experts(self) -> bool:
        """True if its experts are on several ranks."""
        return any(record.op in exchange_routing_ops() for record in self.records)

    def compiles(self, choice: Choice) -> bool:
        """Return whether a compiler takes the block under a choice: Dynamo traces a region that keeps some of its tensors
        whole or not at all, and leaves split experts to eager code."""
        return not (choice.decisions and not choice.is_full and self._splits_experts)

    @cached_property
    def titles(self) -> dict[int, str]:
        """The first name that each of the ops has to itself, by their numbers; those without one are not kept by a plan."""
        reached = self.records[: self.reachable]
        counts = Counter(name for record in reached for name in record.names)
        singles = ((k, next((name for name in r.names if counts[name] == 1), None)) for k, r in enumerate(reached))
        return {k: name for k, name in singles if name is not None}

    def frontier(self, *, skip: bool = True, host: int = 0, fixed: NamedList = NO_NAMES) -> tuple[Choice, ...]:
        """Ways to run the block, each best for its bytes: ascending in held bytes, descending in seconds.

        "none" is among them unless a region does better for fewer bytes; the first is "full". All others are lists of names
        (`by_names`), with "statistics" in each.

        Args:
            skip: let recomputation leave ops out.
            host: also offer to keep outputs in CPU memory, over the device's link: up to so many bytes.
            fixed: names that every choice keeps.
        """
        always, titles = NamedPolicy(replace(fixed, save=(*fixed.save, STATISTICS))), self.titles
        ops = [
            replace(op, forced="save" if op.forced is None and op.keepable else op.forced)
            if always.of_op(record.op, record.names) in (SAVE, HOST)
            else replace(op, keepable=op.keepable and k in titles)
            for k, (op, record) in enumerate(zip(self.ops(), self.records))
        ]
        points = solver.closure_every(ops if skip else solver.without_skips(ops))
        lists = [
            [titles[k] for k in range(len(ops)) if point.keep >> k & 1 and ops[k].forced is None]
            for point in solver.thin_points(points)
        ]
        choices = [self.by_names(replace(fixed, save=(*fixed.save, *names, STATISTICS)), skip=skip) for names in lists]
        moved = [
            self.by_names(replace(fixed, save=(*fixed.save, STATISTICS), offload=(*fixed.offload, *names)), skip=skip)
            for names in (lists if host else ())
            if names
        ]
        every = [*choices, *(choice for choice in moved if choice.host_bytes <= host), self.none()]
        every += [] if fixed.names else [self.full()]
        ascending = sorted(every, key=attrgetter("held_bytes", "recompute_seconds", "host_bytes"))
        return tuple(solver.non_dominated(ascending, attrgetter("recompute_seconds")))

    def rows(self, choice: Choice, *, one_attention: bool = False) -> dict[str, list[str]]:
        """A region's choice as a decision table in JSON values: op name → decision of each invocation.

        Ops that are recomputed throughout are left out, except those that the engine never replays. `one_attention`: all
        attention kernels share the row of the first, for a table that is not strict.
        """
        kernel = next((r.op for r in self.records if facts(r.op).attention), None) if one_attention else None
        ops = (kernel if kernel is not None and facts(r.op).attention else r.op for r in self.records)
        rows: dict[str, list[str]] = {}
        for op, row in grouped(zip(ops, choice.decisions, strict=True)).items():
            if facts(op).pinned:
                rows[str(op)] = ["host" if word == "host" else "save" for word in row]
            elif any(word != "recompute" for word in row) and facts(op).tracked:
                rows[str(op)] = row
        return rows


@dataclass(frozen=True)
class ChoiceGroup:
    """Layers of one kind that have the same choices."""

    kind: int
    choices: tuple[Choice, ...]  # Ascending in held bytes, descending in replay time.
    # For each layer, the positions of its calls: several for a looped one.
    calls: tuple[tuple[int, ...], ...]

    @property
    def looped(self) -> bool:
        """Some layer is called more than once: then all get one choice, since a layer has one table."""
        return any(len(calls) > 1 for calls in self.calls)

    @property
    def numbers(self) -> tuple[list[tuple[int, float]], int]:
        """Bytes and seconds of the choices, and how many of them are to be made."""
        times = sum(map(len, self.calls)) if self.looped else 1
        points = [(c.held_bytes * times, c.recompute_seconds * times) for c in self.choices]
        return points, 1 if self.looped else len(self.calls)


@dataclass(frozen=True)
class Stack:
    """Every group, and the mixes of their choices."""

    groups: tuple[ChoiceGroup, ...]

    @cached_property
    def mixes(self) -> tuple[solver.Mix, ...]:
        """Best mixes of choices over all layers, ascending in held bytes, descending in replay time."""
        return solver.path([group.numbers for group in self.groups])

    def assignment(self, mix: solver.Mix) -> list[Choice]:
        """Return a choice for each call. Within a kind, layers that save more come later: backward frees them first."""
        chosen: dict[int, Choice] = {}
        for group, counts in zip(self.groups, mix.counts):
            ordered = [c for c, n in zip(group.choices, counts) for _ in range(n)]  # choices ascend in held bytes
            for index, calls in enumerate(group.calls):
                chosen |= dict.fromkeys(calls, ordered[0] if group.looped else ordered[index])
        return [chosen[position] for position in range(len(chosen))]


def decided(problem: BlockProblem, policy: Policy, label: str) -> Choice:
    """Return the choice that `policy` makes."""
    if not problem.trace.saves_something:
        return problem.none()
    tracked, decide = policy.tracked_ops() or (), policy.start()
    words = [decide(record.op, record.nth).value if record.op in tracked else "recompute" for record in problem.records]
    return problem.choice(words, label)


# Backward as a multiple of forward: of attention, and of operators that are neither that nor a matrix product.
ATTENTION_BACKWARD, OTHER_BACKWARD = 2.5, 2.0


def backward_times(op: OpRecord, device: Device) -> float:
    """Return the seconds of an operator's backward, as a multiple of its forward: a matrix product has one more product for
    each input that needs a gradient."""
    if not op.grads:
        return 0.0
    if facts(op.op).attention:
        forward, backward = device.attention_speed(op.op, half=op.half)
        rate = device.flops_of(op.op, half=op.half) / forward * backward
        parts: tuple[float, ...] = (ATTENTION_BACKWARD * op.flops / rate,)
    elif op.flops:
        parts = product_seconds(op, device)[1 : 1 + op.grads]
    else:
        return OTHER_BACKWARD
    least = max(op.moved / device.bandwidth, device.launch_seconds)
    return sum(max(part, least) for part in parts) / kernel_seconds(op, device)


_GATHER, _SCATTER = "_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor"
_NOT_OF_SEQUENCES = ("nemo_like::route", "nemo_like::rows_of_all")


def _whole(gather: OpRecord) -> int:
    """Return the bytes that a gather makes; a trace has none of a tensor in float8, which has one for each value."""
    return gather.bytes or sum(map(math.prod, gather.shapes))


def _summed(records: Sequence[OpRecord], hidden: int) -> int:
    """Return the bytes that ranks of ``tp`` sum up in a forward, behind attention and behind the FFN.

    A gather, or a reduce-scatter, takes half the time of a sum. `hidden`: bytes of the hidden states, as of each of the two
    sums that the trace does not have: that of experts that are split inside is in place.
    """
    sums = [op.bytes for op in records if op.op.name() == "_c10d_functional::all_reduce"]
    gathered = (_GATHER, "nemo_like::rows_of_all")
    sums += [_whole(op) // 2 for op in records if op.op.name() in gathered]
    # A rank gives the whole tensor that is reduced and scattered, and gets its part.
    sums += [(op.moved - op.bytes) // 2 for op in records if op.op.name() == _SCATTER]
    return sum(sums) + max(0, 2 - len(sums)) * hidden


def _pieces(records: Sequence[OpRecord], kernels: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Return whole bytes of each gather and reduce-scatter of sequences, and the seconds of the matmuls that it can run
    together with: those that read the gathered tensor, up to attention, the next collective or the last product of an
    MLP, or the one that makes the scattered tensor."""
    last = max((k for k, op in enumerate(records) if op.flops and not facts(op.op).attention), default=0)
    pieces = []
    for k, op in enumerate(records):
        gathers = op.op.name() == _GATHER
        if not gathers and op.op.name() != _SCATTER:
            continue
        beside = 0.0
        for i in range(k + 1, len(records)) if gathers else range(k - 1, -1, -1):
            other = facts(records[i].op)
            if other.attention or other.collective or (gathers and i == last):
                break
            if records[i].flops:
                beside += kernels[i]
                if not gathers:
                    break
        pieces.append((_whole(op) if gathers else op.moved - op.bytes, beside))
    return tuple(pieces)


def eager_experts(ops: Sequence[OpRecord]) -> range:
    """Return the positions of the operators of experts on several ranks, which run eagerly in a compiled layer: from their
    routing to the sum of their results."""
    routing = exchange_routing_ops()
    ends = [at for at, op in enumerate(ops) if op.op in routing or op.op.name() == _SUM_OF_EXPERTS]
    return range(ends[0], ends[-1] + 1) if any(ops[at].op in routing for at in ends) else range(0)


_SUM_OF_EXPERTS = "aten::_embedding_bag_forward_only"  # `nemo_like.distributed.expert.exchange` adds rows with it


def fused(ops: Sequence[OpRecord]) -> tuple[OpRecord, ...]:
    """The operators of a trace as a compiler fuses them, where no matrix product, attention or collective stands between
    two.

    Values computed twice are computed once. A value goes to memory where something outside of its row reads it, or
    backward; a row reads each value once. Operators of `eager_experts` are as they were.
    """
    row, rows, first, eager = 0, list[int](), list[int](), eager_experts(ops)
    for place, op in enumerate(ops):
        heavy = bool(op.flops or facts(op.op).attention or place in eager) or facts(op.op).collective
        rows.append(row + heavy)
        row += 2 * heavy
        first.append(place if op.twin is None or heavy else first[op.twin])
    reads = [
        {first[number] for number in (*op.reads, *op.values) if first[place] == place} for place, op in enumerate(ops)
    ]
    outside = {number for place in range(len(ops)) for number in reads[place] if rows[number] != rows[place]}
    for place in reversed(range(len(ops))):
        if place in outside and not ops[place].moved:  # the same values under another name
            outside |= reads[place]
    read, needed = set[int]().union(*reads), {first[place] for place, op in enumerate(ops) if op.needed}
    made, known, seen = list[OpRecord](), set[tuple[int, int]](), set[tuple[int, int]]()
    for place, op in enumerate(ops):
        if rows[place] % 2 or not op.moved:
            made.append(op)
            continue
        if first[place] != place:
            made.append(replace(op, moved=0))
            continue
        here = {number for number in reads[place] if rows[number] == rows[place] or (rows[place], number) in known}
        known |= {(rows[place], number) for number in reads[place]}
        again = sum(ops[number].bytes for number in here)
        again += sum(size for number, size in op.outer if (rows[place], number) in seen)
        seen |= {(rows[place], number) for number, _ in op.outer}
        incoming = max(0, op.moved - op.bytes - again)
        leaves = place in needed or place in outside or place not in read
        made.append(replace(op, moved=incoming + (op.bytes if leaves else 0)))
    return tuple(made)


@dataclass(frozen=True)
class BlockSeconds:
    """One kind of layer in one local shape: seconds of its kernels, and bytes that it sends."""

    kernels: tuple[float, ...]  # Seconds of each of `BlockProblem.records`, forward.
    forward: float
    backward: float
    sequence_bytes: int  # Gathered over ``cp`` in a forward.
    gathered_again: int  # Bytes of these that backward gathers once more.
    expert_bytes: int  # Sent by all-to-all over ``ep`` in a forward.
    # Bytes of one sum of tensor parallelism: the mean of that behind attention and that behind the FFN.
    # Without such a sum in the trace, those of the hidden states; half of them for tensors that are only gathered, as
    # rows of experts.
    boundary_bytes: int
    # Kind of each of `kernels`: ``launch`` where its launch takes longer, else its `kernel_kind`.
    kinds: tuple[str, ...] = ()
    backward_times: tuple[float, ...] = ()  # For each of `kernels`, its backward as a multiple of it.
    # Operators of a forward that the host launches one by one, views included: of a compiled layer `eager_experts`.
    launched: int = 0
    products: int = 0  # Matrix products among these.
    # Bytes of each collective of sequence parallelism in a forward, and seconds of matmuls that it can run beside.
    pieces: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_problem(cls, problem: BlockProblem, *, compiled: bool = False) -> BlockSeconds:
        """Return the seconds of a traced block at the rates of its device.

        compiled: operators between matrix products are `fused`.
        """
        records, device, launched = problem.records, problem.device, problem.trace.ops
        if compiled:
            records = tuple(op for op in fused(problem.trace.ops) if not op.view)
            launched = tuple(launched[at] for at in eager_experts(launched))
        kernels = tuple(kernel_seconds(op, device) for op in records)
        times = tuple(backward_times(op, device) for op in records)
        back = sum(seconds * more for seconds, more in zip(kernels, times))
        again = sum(op.gathered for op in records)
        return cls(
            kernels,
            sum(kernels),
            back if problem.trace.saves_something else 0.0,
            sum(op.bytes for op in records if is_sequence_op(op) and op.op.name() not in _NOT_OF_SEQUENCES) + again,
            again,
            sum(op.moved // 2 for op in records if facts(op.op).exchange),
            _summed(records, problem.trace.input_bytes) // 2,
            tuple(
                "launch" if seconds == device.launch_seconds else kernel_kind(op.op, op.flops)
                for seconds, op in zip(kernels, records)
            ),
            times,
            len(launched),
            sum(bool(op.flops) and not facts(op.op).attention for op in launched),
            _pieces(records, kernels),
        )

    def replay(self, choice: Choice, reachable: int) -> float:
        """Kernels that backward runs again."""
        return sum(
            s
            for k, (s, word) in enumerate(zip(self.kernels, choice.decisions))
            if word == "recompute" and k < reachable
        )


class Collectives(NamedTuple):
    """Collectives inside of a layer."""

    sums: bool  # Of tensor parallelism.
    gathers: bool  # Of keys and values.
    exchanges: bool  # Of rows of experts.

    @classmethod
    def again(cls, choice: Choice, problem: BlockProblem) -> Collectives:
        """Return those of which some are run again under a choice."""
        decided = zip(problem.records[: problem.reachable], choice.decisions)
        again = [record for record, word in decided if word == "recompute" and facts(record.op).collective]
        kinds = [
            "exchange" if facts(r.op).exchange else "gather" if r.gathered or is_sequence_op(r) else "sum"
            for r in again
        ]
        return cls("sum" in kinds, "gather" in kinds, "exchange" in kinds)


@dataclass(frozen=True)
class LayerRun:
    """Equal calls of layers in one step."""

    count: int
    block: BlockSeconds
    replay: float  # Seconds of kernels.
    again: Collectives  # Collectives inside that are run again.
    unit: UnitBytes | None
    experts: UnitBytes | None = None
    copies: float = 0.0  # Seconds of copies of activations to the host that computing does not hide.
    moved: int = 0  # Bytes of activations that go to the host, and back beside backward.
    kind: int = 0  # The number of the kind of layer among those that were traced.
    choice: Choice | None = None
