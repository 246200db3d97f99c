"""One block's ways to run: its trace as a choice problem, and the frontier from "none" to "full" with its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter

from nemo_like._util.op_lookup import Op
from nemo_like.activation_checkpointing.ops import exchange_routing_ops, facts, routing_ops
from nemo_like.activation_checkpointing.policy import Decision, SelectivePolicy
from nemo_like.planning.devices import Device
from nemo_like.planning.roofline import exposed_seconds, op_seconds
from nemo_like.planning.selection import closure, solver
from nemo_like.planning.trace.block import BlockTrace, OpRecord

_MOST = 4096
"""Choices of one block that are looked at together."""


@dataclass(frozen=True)
class Choice:
    """One way to run one block."""

    label: str
    """``none`` (no region), ``full`` (keep inputs only) or ``plan``."""
    held_bytes: int
    """Held on the device from its forward to its backward: its inputs where it keeps them, and what it keeps inside."""
    host_bytes: int
    """Held in CPU memory meanwhile."""
    replay_flops: int
    replay_seconds: float
    """Replay, and transfers that computing does not hide."""
    decisions: tuple[str, ...] = ()
    """For a region, ``save`` | ``recompute`` | ``skip`` | ``host`` for each op of `BlockProblem.records`."""

    @property
    def is_full(self) -> bool:
        """Return whether it is ``ac="full"`` itself, and not only a choice that came from it."""
        return self.label == "full" and set(self.decisions) <= {"recompute", "save"}


@dataclass(frozen=True)
class BlockProblem:
    """A block's trace on a device, as numbers for the solver."""

    trace: BlockTrace
    device: Device
    measured: tuple[float, ...] | None = None
    """Measured seconds of each of `records`; None: the roofline of `device`."""
    records: tuple[OpRecord, ...] = field(init=False)
    """The ops that compute something: no views."""
    seconds: tuple[float, ...] = field(init=False)
    _index: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kept = [(i, op) for i, op in enumerate(self.trace.ops) if not op.view]
        object.__setattr__(self, "records", tuple(op for _, op in kept))
        roofline = tuple(op_seconds(op, self.device) for _, op in kept)
        object.__setattr__(self, "seconds", roofline if self.measured is None else self.measured)
        object.__setattr__(self, "_index", {i: k for k, (i, _) in enumerate(kept)})

    @property
    def forward_seconds(self) -> float:
        """Seconds of one forward pass."""
        return sum(self.seconds)

    @property
    def reachable(self) -> int:
        """Number of `records` that a recomputation runs before its early stop."""
        return sum(1 for i in self._index if i < self.trace.last_pack)

    def ops(self, by: str = "seconds") -> tuple[solver.Op, ...]:
        """Return the solver's operators, whose cost is ``"seconds"`` or ``"flops"`` of recomputation."""
        reachable = self.reachable
        made = []
        for k, record in enumerate(self.records):
            value = self.seconds[k] if by == "seconds" else float(record.flops)
            made.append(
                solver.Op(
                    bytes=record.bytes,
                    cost=value if k < reachable else 0.0,
                    reads=tuple(self._index[i] for i in record.reads if i in self._index),
                    # A rank without rows may run other ops than were traced, and then runs in replay what it was to skip:
                    # a collective must be run by all or by none.
                    needed=(record.needed or facts(record.op).collective) and k < reachable,
                    keepable=_keepable(record),
                    forced=("save" if record.op in self._routing else _forced(record)) if k < reachable else None,
                )
            )
        return tuple(made)

    def none(self) -> Choice:
        """Outside of any region: autograd keeps what it keeps, and nothing is replayed."""
        return Choice("none", self.trace.none_bytes, 0, 0, 0.0)

    def choice(self, point: solver.Point, label: str = "plan") -> Choice:
        """Return a solver's point as a choice: its bytes with the inputs, its recomputation in FLOPs and seconds."""
        reachable = self.reachable
        words = tuple(  # behind the early stop nothing runs, so there is nothing to decide
            word if k < reachable else "recompute" for k, word in enumerate(point.decisions(len(self.records)))
        )
        run = [k for k, word in enumerate(words) if word == "recompute" and k < reachable]
        held = sum(self.records[k].bytes for k, word in enumerate(words) if word == "save")
        return Choice(
            label,
            self.trace.input_bytes + held,
            0,
            sum(self.records[k].flops for k in run),
            sum(self.seconds[k] for k in run),
            words,
        )

    def full(self) -> Choice:
        """Keep the inputs only, and what says which rows go to the experts of other ranks (`KeepRouting`). Nothing holds
        less: not even what a plan must keep, such as a number that was read from the device."""
        if not self.trace.saves_something:
            return self.none()
        kept = sum(1 << k for k, record in enumerate(self.records) if record.op in self._routing)
        return self.choice(solver.Point(0, 0.0, kept), "full")

    @cached_property
    def _routing(self) -> frozenset[Op]:
        """Ops whose results the engine keeps in every mode (`KeepRouting`); none where its experts are on one rank."""
        exchanges = any(record.op in exchange_routing_ops() for record in self.records)
        return routing_ops() if exchanges else frozenset()

    def frontier(self, *, skip: bool = True, host: int = 0) -> tuple[Choice, ...]:
        """Ways to run the block, each best for its bytes: ascending in held bytes, descending in seconds.

        "none" is among them unless a region does better for fewer bytes; the first is "full".

        Args:
            skip: let recomputation leave ops out.
            host: also offer to keep outputs in CPU memory, over the device's link: up to so many bytes.
        """
        points = self._with_skips if skip else self._without_skips
        return best_of([self.full(), *self._choices(solver.spread(points, _MOST), host), self.none()])

    @cached_property
    def _with_skips(self) -> tuple[solver.Point, ...]:
        return closure.closure_every(self.ops())

    @cached_property
    def _without_skips(self) -> tuple[solver.Point, ...]:
        return solver.linear_frontier(self.ops())

    def _choices(self, points: Iterable[solver.Point], host: int) -> list[Choice]:
        choices = [self.choice(point) for point in points]
        return (
            choices + [moved for moved in map(self.on_host, choices) if moved.host_bytes <= host] if host else choices
        )

    def on_host(self, choice: Choice) -> Choice:
        """`choice` with what it keeps inside moved to CPU memory and back.

        Only what computing does not hide of the copies costs time, see `exposed_seconds`.
        """
        moved = choice.held_bytes - self.trace.input_bytes
        exposed = exposed_seconds(moved, self.forward_seconds, self.device)
        words = tuple("host" if word == "save" else word for word in choice.decisions)
        return Choice(
            choice.label, self.trace.input_bytes, moved, choice.replay_flops, choice.replay_seconds + exposed, words
        )

    def rows(self, choice: Choice, *, one_attention: bool = False) -> dict[str, list[str]]:
        """A region's choice as a decision table in JSON values: op name → decision of each invocation.

        Ops that are recomputed throughout are left out, except those that the engine never replays. `one_attention`: all
        attention kernels share the row of the first, for a table that is not strict.
        """
        by_op: dict[Op, list[str]] = {}
        kernel = next((r.op for r in self.records if facts(r.op).attention), None) if one_attention else None
        for record, word in zip(self.records, choice.decisions, strict=True):
            op = kernel if kernel is not None and facts(record.op).attention else record.op
            by_op.setdefault(op, []).append(word)
        rows: dict[str, list[str]] = {}
        for op, row in by_op.items():
            if facts(op).pinned:
                rows[str(op)] = ["host" if word == "host" else "save" for word in row]
            elif any(word != "recompute" for word in row) and facts(op).tracked:
                rows[str(op)] = row
        return rows


def best_of(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the choices that no other beats in both saved bytes and seconds, ascending in bytes."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.held_bytes, c.replay_seconds, c.host_bytes)):
        if not kept or choice.replay_seconds < kept[-1].replay_seconds:
            kept.append(choice)
    return tuple(kept)


def _keepable(record: OpRecord) -> bool:
    return record.bytes > 0 and not record.changed and facts(record.op).tracked


def _forced(record: OpRecord) -> str | None:
    known = facts(record.op)
    if known.pinned:
        return "save"
    if (known.random and not known.attention) or not known.tracked or record.steers:
        return "replay"  # random numbers must be drawn again in order; in-place ops always run again, as statistics are
    return None


_FEW = 12
"""Choices of a layer of a pipeline."""
_AROUND = 100
"""Choices on either side of those that a mix uses that are looked at again."""


@dataclass(frozen=True)
class ChoiceGroup:
    """Layers of one kind that have the same choices."""

    kind: int
    choices: tuple[Choice, ...]
    """Ascending in held bytes, descending in replay time."""
    calls: tuple[tuple[int, ...], ...]
    """For each layer, the positions of its calls: several for a looped one."""

    @property
    def looped(self) -> bool:
        """Some layer is called more than once: then all get one choice, since a layer has one table."""
        return any(len(calls) > 1 for calls in self.calls)

    @property
    def numbers(self) -> tuple[list[tuple[int, float]], int]:
        """Bytes and seconds of the choices, and how many of them are to be made."""
        times = sum(map(len, self.calls)) if self.looped else 1
        points = [(c.held_bytes * times, c.replay_seconds * times) for c in self.choices]
        return points, 1 if self.looped else len(self.calls)


@dataclass(frozen=True)
class Stack:
    """Every group, and what they can do together."""

    groups: tuple[ChoiceGroup, ...]

    @cached_property
    def mixes(self) -> tuple[solver.Mix, ...]:
        """Best mixes of choices over all layers, ascending in held bytes, descending in replay time."""
        return solver.combine([group.numbers for group in self.groups])

    def gap(self, mix: solver.Mix) -> float:
        """Proven bound on the seconds that a better mix of the same bytes could save; 0: none could."""
        bound = solver.combine_bound([group.numbers for group in self.groups], mix.bytes)
        return max(0.0, mix.cost - bound) if bound is not None else 0.0

    def assignment(self, mix: solver.Mix) -> list[Choice]:
        """Return a choice for each call. Within a kind, layers that save more come later: backward frees them first."""
        chosen: dict[int, Choice] = {}
        for group, counts in zip(self.groups, mix.counts):
            ordered = [c for c, n in zip(group.choices, counts) for _ in range(n)]  # choices ascend in held bytes
            for index, calls in enumerate(group.calls):
                chosen |= dict.fromkeys(calls, ordered[0] if group.looped else ordered[index])
        return [chosen[position] for position in range(len(chosen))]

    def coarse(self) -> Stack:
        """The same stack with a dozen choices of each group, at even steps of saved bytes: fewer are run to be proved."""
        held = attrgetter("held_bytes")
        few = [tuple(solver.spread(group.choices, _FEW, held)) for group in self.groups]
        return Stack(tuple(replace(group, choices=choices) for group, choices in zip(self.groups, few)))

    def finer(self, mix: solver.Mix) -> Stack:
        """The same stack with only the choices around those that `mix` uses: of many choices, `mixes` looks at some."""
        groups = []
        for group, counts in zip(self.groups, mix.counts):
            used = [index for index, count in enumerate(counts) if count]
            near = {i for u in used for i in range(max(0, u - _AROUND), u + _AROUND + 1)}
            groups.append(replace(group, choices=tuple(c for i, c in enumerate(group.choices) if i in near)))
        return Stack(tuple(groups))


def as_choice(problem: BlockProblem, words: Sequence[str], label: str = "plan") -> Choice:
    """Return the choice that does this with each operator: ``save``, ``skip`` or ``recompute``."""
    keep = sum(1 << k for k, word in enumerate(words) if word == "save")
    skip = sum(1 << k for k, word in enumerate(words) if word == "skip")
    return replace(problem.choice(solver.Point(0, 0.0, keep, skip)), label=label)


def selective(problem: BlockProblem) -> Choice:
    if not problem.trace.saves_something:
        return problem.none()
    policy = SelectivePolicy()
    tracked, decide = policy.tracked_ops(), policy.start()
    words = []
    for k, record in enumerate(problem.records):
        word = decide(record.op, record.nth) if record.op in tracked else Decision.RECOMPUTE
        words.append("save" if word is Decision.SAVE and k < problem.reachable else "recompute")
    return as_choice(problem, words, "selective")
