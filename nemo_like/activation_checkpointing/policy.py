"""Policies that decide which outputs survive inside a region: small objects with one hook to override.

A policy is started once per region call, and then decides once per invocation of a *tracked* operator. A region's
recomputation makes no new decisions: the engine repeats those that forward took.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from nemo_like._util.log import say_once
from nemo_like._util.op_lookup import Op, resolve_op, resolve_ops
from nemo_like._util.words import check_fields, setting
from nemo_like.activation_checkpointing import ops as table
from nemo_like.options import normalise


class Decision(enum.Enum):
    """The decision on one operator's output between forward and backward."""

    SAVE = "save"
    """Kept on the device; recomputation takes it instead of computing it."""
    RECOMPUTE = "recompute"
    """Dropped; recomputation computes it again."""
    SKIP = "skip"
    """Dropped, and recomputation puts a placeholder without numbers in its place: backward needs neither it nor tensors
    made of it."""
    HOST = "host"
    """Kept in CPU memory; recomputation takes it back to the device."""


SAVE, RECOMPUTE, SKIP, HOST = Decision.SAVE, Decision.RECOMPUTE, Decision.SKIP, Decision.HOST

# (operator, how many times it ran in this region before) → the decision for this output.
Decide = Callable[[Op, int], Decision]


class PlanMismatchError(RuntimeError):
    """A region did not run the operators that its decision table was made for."""


def parts_of(decide: Decide) -> dict[str, Any]:
    """Return the attributes of a decision function, for one around it."""
    every = ("needs_call", "finish", "named", "begin", "learns", "settle", "tell")
    return {name: getattr(decide, name) for name in every if hasattr(decide, name)}


@dataclass(frozen=True)
class Misfit:
    """Why the decisions of one region call can't all be followed, told at the end of its forward."""

    ops: frozenset[Op]  # The operators whose outputs are to be computed again, unless they must never be.
    reason: str


@runtime_checkable
class Policy(Protocol):
    """The methods and attributes that the engine needs of a policy."""

    keeps_nothing: bool
    """True: no operator's output is ever saved, and the engine need not look at operators at all."""

    def tracked_ops(self) -> Collection[Op] | None:
        """The operators that have a decision; None: every one that the table calls tracked (`ops.OpFacts.tracked`)."""

    def start(self) -> Decide:
        """A fresh decision function, for one region call.

        If it has an attribute ``finish``, the engine calls that at the end of the region's forward: it may raise, or
        return a `Misfit`. If it has a true attribute ``needs_call``, the engine calls it with ``(op, index, args, kwargs,
        output)``. `nemo_like.activation_checkpointing.names.NamedRun` has the others (`parts_of`).
        """


@dataclass(frozen=True)
class FullPolicy:
    """Save nothing but the region's inputs: recomputation computes everything again."""

    keeps_nothing = True

    def tracked_ops(self) -> Collection[Op]:
        """None are tracked."""
        return ()

    def start(self) -> Decide:
        """Recompute, whatever the operator."""
        return lambda op, index: RECOMPUTE


_logs_decisions = os.environ.get("NEMO_LIKE_LOG_SAVE_OPS", "0") not in ("", "0")


@dataclass(frozen=True, eq=False)
class SelectivePolicy:
    """Keep the outputs of expensive operators; of the plain matmuls, recompute every `every_nth_matmul`-th.

    The parity rule of this field (torchtitan, NeMo Automodel) is ``SelectivePolicy(every_nth_matmul=2)``, which is
    the default. Whatever a policy decides, the engine drops an output that no recomputation can reach (the last matmul of a
    block, as a rule). Override `get_save_ops` to change the set. With ``NEMO_LIKE_LOG_SAVE_OPS=1`` in the environment, each
    operator's decision is logged once: SAVE, RECOMPUTE or ALTERNATE.

    Raises:
        ValueError: `every_nth_matmul` is below 1; an unknown operator name.

    >>> import torch
    >>> decide = SelectivePolicy().start()
    >>> [decide(torch.ops.aten.mm.default, i).name for i in range(4)]
    ['SAVE', 'RECOMPUTE', 'SAVE', 'RECOMPUTE']
    """

    every_nth_matmul: int | None = setting(2, least=1)
    """Recompute each n-th plain matmul (`mm`, `linear`, grouped; one count for all). None: keep them all."""
    save_ops: Iterable[str | Op] | None = None
    """Operators or their names to keep instead of the default set. A name without an overload, such as ``"aten.max"``,
    means every overload that returns new tensors; so it does in `extra`, `drop` and a config's ``ops_to_save``."""
    extra: Iterable[str | Op] = ()
    """Operators or their names to keep besides."""
    drop: Iterable[str | Op] = ()
    """Operators or their names not to keep."""
    _kinds: dict[Op, bool] = field(init=False, repr=False, default_factory=dict)

    keeps_nothing, word = False, "selective"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("save_ops", "extra", "drop"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable | None):
                raise TypeError(
                    f"SelectivePolicy.{name} is {value!r}; it must be a list of operators or their names: [{value!r}]."
                )
            # Once and for all, if it is an iterator.
            object.__setattr__(self, name, None if value is None else tuple(value))
        ops = self.get_save_ops()
        refused = sorted(str(op) for op in ops if not table.facts(op).tracked)
        if refused:
            raise ValueError(
                f"SelectivePolicy can't keep {', '.join(refused)}: views and metadata cost nothing to recompute, and "
                "in-place and out= forms must run again. Take them out of the list."
            )
        counts = self.every_nth_matmul is not None
        self._kinds.update({op: counts and table.facts(op).alternates for op in ops})

    def __getstate__(self) -> dict[str, Any]:
        """Operators by name: they cannot be pickled themselves, and a model is saved and sent to ranks with its policy."""
        names = {
            name: tuple(str(op) for op in ops)
            for name in ("save_ops", "extra", "drop")
            if (ops := getattr(self, name)) is not None
        }
        return self.__dict__ | names | {"_kinds": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def get_save_ops(self) -> frozenset[Op]:
        """The operators to keep. The hook to override."""
        sets = {
            name: resolve_ops(getattr(self, name) or (), field=f"SelectivePolicy.{name}")
            for name in ("save_ops", "extra", "drop")
        }
        base = table.default_save_ops() if self.save_ops is None else sets["save_ops"]
        return (base | sets["extra"]) - sets["drop"]

    def tracked_ops(self) -> Collection[Op]:
        """The save set."""
        return self._kinds.keys()

    def start(self) -> Decide:
        """A decision function with its own count of matmuls."""
        kinds, every, matmuls = self._kinds, self.every_nth_matmul or 0, 0

        def decide(op: Op, index: int) -> Decision:
            nonlocal matmuls
            alternates = kinds.get(op)
            if alternates is None:
                return RECOMPUTE
            if not alternates:
                return SAVE
            matmuls += 1
            return RECOMPUTE if matmuls % every == 0 else SAVE

        def decide_and_log(op: Op, index: int) -> Decision:
            word = {None: "RECOMPUTE", False: "SAVE", True: "ALTERNATE"}[kinds.get(op)]
            say_once(f"selective checkpointing: {op}: {word}", key=f"save-ops:{op}")
            return decide(op, index)

        return decide_and_log if _logs_decisions else decide


def named_ops_policy(names: Sequence[str | Op]) -> SelectivePolicy:
    """The policy of ``ops_to_save``: exactly these operators are saved, without alternation."""
    return SelectivePolicy(every_nth_matmul=None, save_ops=tuple(names))


class DecisionTable:
    """A fixed decision for each invocation of each tracked operator, as made from a plan.

    `decisions` maps an operator (or its name) to one `Decision` per invocation in the region. Operators that must never
    be recomputed (`ops.pinned_ops`) are saved even where the table does not list them.

    `strict` (the default): a region that runs a listed operator more or fewer times raises `PlanMismatchError`, and a
    recomputation that needs a skipped output raises `RegionError`. Otherwise such a call, of another batch than the
    table was made for (its mask takes another branch), saves the outputs that still fit, skips nothing and recomputes
    the rest. That is logged once. The row of an attention kernel then counts for whichever kernel runs attention.

    Raises:
        ValueError: an unknown operator; one that can't be tracked; SKIP of an operator that always draws;
            anything but SAVE or HOST for one that must not be recomputed.

    >>> table = DecisionTable({"aten.mm.default": (SAVE, RECOMPUTE)})
    >>> DecisionTable.from_json(table.to_json()) == table
    True
    """

    keeps_nothing, word = False, "planned"

    def __init__(self, decisions: Mapping[Op | str, Sequence[Decision]], *, strict: bool = True) -> None:
        self.strict = strict
        self.decisions: dict[Op, tuple[Decision, ...]] = {}
        for name, row in decisions.items():
            ops = resolve_op(name)
            if len(ops) != 1:
                raise ValueError(
                    f"DecisionTable: {name!r} has {len(ops)} overloads; name one, such as '{name}.default'."
                )
            (op,) = ops
            self.decisions[op] = tuple(_as_decision(item) for item in row)
            _check_row(op, self.decisions[op])
        listed = [op for op in self.decisions if table.facts(op).attention]
        self._kernel = listed[0] if len(listed) == 1 and not strict else None
        # The attention kernels that the one row of attention is for, besides the listed one.
        other_kernels = table.attention_ops() if self._kernel is not None else frozenset()
        self._tracked = frozenset(self.decisions) | table.pinned_ops() | other_kernels
        self.moves = any(HOST in row for row in self.decisions.values())

    def tracked_ops(self) -> Collection[Op]:
        """The operators that have a row, and those that must never be recomputed."""
        return self._tracked

    def start(self) -> Decide:
        """A decision function that also checks, at the region's end, that every row was used up."""
        return _TableRun(self.decisions) if self.strict else _LenientRun(self.decisions, self._kernel)

    def to_json(self) -> dict[str, list[str]]:
        """Operator name → decisions, as plain JSON values."""
        return {str(op): [d.value for d in row] for op, row in sorted(self.decisions.items(), key=lambda p: str(p[0]))}

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[str]], strict: bool = True) -> DecisionTable:
        """The inverse of `to_json`."""
        return cls({name: [_as_decision(item) for item in row] for name, row in data.items()}, strict=strict)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_json, (self.to_json(), self.strict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecisionTable) and (self.decisions, self.strict) == (other.decisions, other.strict)

    def __hash__(self) -> int:
        return hash(tuple(sorted((str(op), row) for op, row in self.decisions.items())))

    def __repr__(self) -> str:
        return f"DecisionTable({self.to_json()}{'' if self.strict else ', strict=False'})"


def _as_decision(item: Decision | str) -> Decision:
    if isinstance(item, Decision):
        return item
    try:
        return Decision(normalise(item))
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{item!r} is not a decision; it must be one of {', '.join(d.value for d in Decision)}."
        ) from error


def _check_row(op: Op, row: tuple[Decision, ...]) -> None:
    op_facts = table.facts(op)
    if not op_facts.tracked:
        raise ValueError(f"DecisionTable lists {op}, a view, metadata or in-place operator: it always runs again.")
    if SKIP in row and op_facts.random and not op_facts.attention:  # whether attention draws, only its calls show
        raise ValueError(f"DecisionTable skips {op}, which draws random numbers: the later ones would change.")
    if SKIP in row and op_facts.exchange:
        raise ValueError(
            f"DecisionTable skips {op}, which all ranks send or none: a rank whose call fits the table less well than the "
            "others' would recompute it alone. Use SAVE, HOST or RECOMPUTE."
        )
    if op_facts.pinned and not set(row) <= {SAVE, HOST}:
        raise ValueError(
            f"DecisionTable does not keep {op}, which must not run twice (its second result may differ, or all ranks "
            "would have to join in): use SAVE or HOST."
        )


class _TableRun:
    """One region's walk through a `DecisionTable`."""

    def __init__(self, rows: Mapping[Op, tuple[Decision, ...]]) -> None:
        self._rows = rows
        self._counts: dict[Op, int] = {}

    def __call__(self, op: Op, index: int) -> Decision:
        row = self._rows.get(op)
        if row is None:
            return SAVE  # only operators that must not be recomputed are tracked without a row
        self._counts[op] = index + 1
        if index >= len(row):
            raise PlanMismatchError(
                f"{op} ran for the {index + 1}th time, and the decision table has {len(row)} entries for it: the table "
                "was made for another block or another input. Make the plan again for this one."
            )
        return row[index]

    def finish(self) -> Misfit | None:
        misfit = self.misfit()
        if misfit is not None:
            raise PlanMismatchError(
                f"{misfit.reason}: the table was made for another block or another input. Make the plan again for this one."
            )
        return None

    def misfit(self) -> Misfit | None:
        """The operators that ran more or fewer times than their rows state."""
        wrong = [op for op, row in self._rows.items() if self._counts.get(op, 0) != len(row)]
        if not wrong:
            return None
        op = wrong[0]
        return Misfit(
            frozenset(wrong),
            f"{op} ran {self._counts.get(op, 0)} times, and the decision table has {len(self._rows[op])} entries for it",
        )


class _LenientRun(_TableRun):
    """A walk that goes on where the rows do not fit, and tells at the end which ones did not."""

    def __init__(self, rows: Mapping[Op, tuple[Decision, ...]], kernel: Op | None) -> None:
        super().__init__(rows)
        self._kernel = kernel  # The attention kernel whose row counts for all of them.

    def __call__(self, op: Op, index: int) -> Decision:
        op_facts = table.facts(op)
        if op_facts.attention and self._kernel is not None:
            op, index = self._kernel, self._counts.get(self._kernel, 0)
        row = self._rows.get(op)
        if row is None:
            return SAVE
        self._counts[op] = index + 1
        if index >= len(row):
            return SAVE if op_facts.pinned else RECOMPUTE
        return row[index]

    def finish(self) -> Misfit | None:
        """The rows that did not fit, with all kernels of attention in the place of the listed one."""
        misfit = self.misfit()
        if misfit is None or self._kernel not in misfit.ops:
            return misfit
        return Misfit(misfit.ops | table.attention_ops(), misfit.reason)


# A policy function written for PyTorch's selective contexts, used as a policy of ours.

_MEANING = {
    "MUST_SAVE": SAVE,
    "PREFER_SAVE": SAVE,
    "MUST_RECOMPUTE": RECOMPUTE,
    "PREFER_RECOMPUTE": RECOMPUTE,
    "MUST_CPU_OFFLOAD": HOST,  # PyTorch's own eager contexts recompute here (pytorch#180874)
    "PREFER_CPU_OFFLOAD": HOST,
}


class TorchPolicy:
    """`policy_fn(context, op, *args, **kwargs) -> CheckpointPolicy | bool`, as PyTorch's selective contexts take it.

    It is called once per operator of forward, views and in-place forms excepted, and never in recomputation. The decision
    to offload is honoured. `make`, if true, means that `policy_fn` is a factory that makes a fresh function for each
    region: needed for functions that count.

    Raises:
        TypeError: `policy_fn` is not callable; in forward, if it returns anything else.
    """

    keeps_nothing = False

    def __init__(self, policy_fn: Callable[..., Any], make: bool = False) -> None:
        if not callable(policy_fn):
            raise TypeError(f"TorchPolicy needs a function (context, op, *args, **kwargs), not {policy_fn!r}.")
        self.policy_fn = policy_fn
        self.make = make

    def tracked_ops(self) -> None:
        """Every operator that can be tracked."""
        return

    def start(self) -> Callable[..., Decision]:
        """A decision function that hands each call on to the policy function."""
        policy_fn = self.policy_fn() if self.make else self.policy_fn

        def ask(op: Op, index: int, args: Any = (), kwargs: Any = None, output: Any = None) -> Decision:
            context = SelectiveCheckpointContext(is_recompute=False, op_output=output)
            answer = policy_fn(context, op, *args, **(kwargs or {}))
            if isinstance(answer, bool):
                return SAVE if answer else RECOMPUTE
            if isinstance(answer, CheckpointPolicy):
                return _MEANING[answer.name]
            raise TypeError(
                f"The policy function returned {answer!r} for {op}; it must return a CheckpointPolicy, or True to keep."
            )

        ask.needs_call = True  # type: ignore[attr-defined]
        return ask
