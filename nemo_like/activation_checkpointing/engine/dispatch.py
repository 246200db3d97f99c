"""The two dispatch modes of a region: one decides and saves in forward, the other puts back in recomputation.

Both look at tracked operators only. Other operators of a region (profiler ranges, FSDP's copies and all-gathers,
metadata calls) pass through uncounted, so they may differ between forward and recomputation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_like._util.log import warn_once
from nemo_like._util.op_lookup import Op
from nemo_like._util.rng import rng_state, set_rng_state
from nemo_like._util.tensors import SEQUENCES, is_wrapped, storages, tensors_in, versions
from nemo_like.activation_checkpointing import names, ops
from nemo_like.activation_checkpointing.engine.handles import (
    Kept,
    OnHost,
    Placeholder,
    RegionError,
    beside_placeholders,
    decision_of,
    from_host,
    map_output,
    on_host,
    placeholder,
    private_copy,
)
from nemo_like.activation_checkpointing.engine.inputs import SavedInputs
from nemo_like.activation_checkpointing.engine.liveness import Liveness, storage_of
from nemo_like.activation_checkpointing.engine.random_state import Generators, Learned
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, SKIP, Decision, Policy
from nemo_like.activation_checkpointing.transfer import Transfer
from nemo_like.torch_compat import DispatchMode, direct_call, local_part

TRACKED, COPY, MUTABLE, RANDOM, PASS = 1, 2, 3, 4, 0  # RANDOM: tracked, and draws random numbers.
_RECORDED, _LET_PASS = frozenset({TRACKED, RANDOM}), frozenset({PASS, MUTABLE})


class Kinds(dict[int, tuple[int, Callable[..., Any]]]):
    """``id(operator)`` → how the modes treat it, and a function that calls it; filled when an operator is first seen.

    One per tracked set. By id, because hashing an operator runs Python code and this is looked up on every call. `_seen`
    keeps the operators alive, so that no id is used twice.
    """

    def __init__(self, tracked: frozenset[Op] | None) -> None:
        super().__init__()
        # Functions that call the operators that are let pass.
        self.passing: dict[int, Callable[..., Any]] = {}
        self._tracked = tracked
        self._seen: list[Op] = []

    def of(self, op: Op) -> tuple[int, Callable[..., Any]]:
        """Return the way to treat `op`, and the function that calls it."""
        if id(op) in self:
            return self[id(op)]
        facts = ops.facts(op)
        if facts.mutating:
            kind = MUTABLE
        elif facts.tracked if self._tracked is None else op in self._tracked:
            kind = RANDOM if facts.random else TRACKED
        else:
            kind = COPY if self._tracked is not None and op in ops.COPY_OPS else PASS
        self._seen.append(op)
        self[id(op)] = entry = kind, direct_call(op)
        if kind == PASS:
            self.passing[id(op)] = entry[1]
        return entry


_kinds: dict[Any, Kinds] = {}
# By id of a policy: asking for its operators, and hashing them, takes longer than a small operator.
_kinds_of: dict[int, tuple[weakref.ref[Policy], Kinds]] = {}


def kinds_for(policy: Policy) -> Kinds:
    """The shared `Kinds` of all policies that track the same operators."""
    cached = _kinds_of.get(id(policy))
    if cached is not None and cached[0]() is policy:
        return cached[1]
    tracked = policy.tracked_ops()
    key = None if tracked is None else frozenset(tracked)
    if key not in _kinds:
        _kinds[key] = Kinds(key)
    for number in [number for number, (reference, _) in _kinds_of.items() if reference() is None]:
        del _kinds_of[number]
    stays = not getattr(policy, "learns", False)  # One that learns changes its operators: asked each time.
    if stays and bool(getattr(type(policy), "__weakrefoffset__", 0)):  # else a class with slots of its own: the same
        _kinds_of[id(policy)] = weakref.ref(policy), _kinds[key]
    return _kinds[key]


class _Mode(DispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled piece inside a region is one operator to us, as it is to PyTorch's own contexts."""
        return True


@dataclass(slots=True, eq=False)
class _Made:
    """An output without its first tensor, whose memory is to go unless it gets a name; a view with a name has it again."""

    entry: Kept
    rest: Any  # The other tensors of the output; None: it is one tensor.
    shape: tuple[Any, ...]  # Shape, strides and offset of the first tensor, on this rank.
    version: int
    whole: tuple[Any, ...] | None  # Of a DTensor, how it is spread.

    @classmethod
    def of(cls, entry: Kept, out: Any) -> _Made | None:
        """Note an output; None: it is of no kind that gets names."""
        first: Any = out[0] if isinstance(out, SEQUENCES) and out else out
        if not isinstance(first, Tensor) or (is_wrapped([type(first)]) and not isinstance(first, DTensor)):
            return None  # a number; a tensor in a format of its own
        if storage_of(first) is None:
            return None
        local = local_part(first)
        whole = None
        if isinstance(first, DTensor):
            whole = first.device_mesh, first.placements, first.shape, first.stride()
        shape = local.shape, local.stride(), local.storage_offset()
        return cls(entry, None if first is out else type(out)(out[1:]), shape, local._version, whole)

    def output(self, view: Tensor) -> Any:
        """Return the output again, of a tensor with its memory; None: that was written since."""
        local = local_part(view).detach()
        if local._version != self.version:
            return None
        first = local.as_strided(*self.shape)
        if self.whole is not None:
            mesh, placements, shape, stride = self.whole
            first = DTensor.from_local(first, mesh, placements, run_check=False, shape=shape, stride=stride)
        return first if self.rest is None else type(self.rest)((first, *self.rest))


class ForwardMode(_Mode):
    """Calls the policy for each tracked call, and saves the outputs that it chooses."""

    def __init__(
        self, kinds: Kinds, decide: Any, packs: list[Any], transfer: Transfer, name: str, keeps_rng: bool = True
    ) -> None:
        super().__init__()
        self.kinds = kinds
        self.passing = kinds.passing.get
        self.decide = decide
        self.needs_call = getattr(decide, "needs_call", False)
        self.packs = packs
        self.transfer = transfer
        self.region_name = name
        self.kept: list[Kept] = []
        self.counts: dict[int, int] = {}
        self.paused = False
        self.keeps_rng = keeps_rng
        self.generators: Generators | None = None
        self.inputs: SavedInputs | None = None
        self.decide_named: Callable[[str, Op | None], Decision | None] | None = getattr(decide, "named", None)
        self.liveness = Liveness() if getattr(decide, "learns", False) else None
        if self.decide_named is not None:  # else it costs each region of the other policies
            # Outputs that may get a name, by the storage of the first tensor.
            self.made: weakref.WeakKeyDictionary[Any, _Made] = weakref.WeakKeyDictionary()
            self._hearing = names.heard_by(self)

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self.passing(id(func))  # most of them are, and this is the cost of checkpointing small layers
        if not kwargs:
            return self.look_at(func, args, {}) if call is None else call(*args)
        if self.generators is not None and kwargs.get("generator") is not None:
            self.generators.note(kwargs["generator"])
        return self.look_at(func, args, kwargs) if call is None else call(*args, **kwargs)

    def look_at(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator that is tracked, writes, or may copy to the host."""
        kind, call = self.kinds.get(id(func)) or self.kinds.of(func)
        if kind == MUTABLE and not self.paused:
            self.before_change(func, args, kwargs)
        out = call(*args, **kwargs)
        if kind in _LET_PASS or self.paused or (kind == COPY and not ops.is_device_to_host_copy(func, args, kwargs)):
            if self.liveness is not None and kind == MUTABLE and not self.paused:
                self.liveness.ran(func, None, args, kwargs, out)
            return out
        entry = self.keep(func, out, kind, args, kwargs)
        if self.decide_named is not None:
            self.note(func, entry, args, kwargs, out)
        if kind == RANDOM and entry.decision is not RECOMPUTE and ops.draws(func, args, kwargs):
            if entry.decision is SKIP:
                entry.recompute()
                warn_once(
                    f"Region {self.region_name!r}: the plan skips {func}, and this call draws random numbers (dropout in "
                    "attention): it is computed again. A plan made with this model in training mode knows that.",
                    key=f"skipped call of {func} draws",  # once, not for each layer
                )
            elif self.keeps_rng:  # recomputation won't draw these numbers, and later calls must get the same ones
                entry.rng_after = rng_state(kwargs.get("generator"))
        return out

    def keep(self, func: Op, out: Any, kind: int, args: object, kwargs: object) -> Kept:
        """Take a decision on `out` and carry it out."""
        counts, number = self.counts, id(func)
        index = counts.get(number, 0)
        counts[number] = index + 1
        if kind == COPY:
            decision = SAVE
        elif self.needs_call:
            decision = self.decide(func, index, args, kwargs or {}, out)
        else:
            decision = self.decide(func, index)
        entry = Kept(func, decision, len(self.packs))
        self.kept.append(entry)
        if decision is SKIP:
            entry.value = map_output(placeholder, out)
            if not tensors_in(out):
                raise RegionError(f"Region {self.region_name!r}: {func} returns no tensor and can't be skipped.")
        elif decision is not RECOMPUTE:
            self.hold(entry, out)
        return entry

    def hold(self, entry: Kept, out: Any) -> None:
        """Keep `out`, the output of the call of `entry`, where its decision has it."""
        if entry.decision is SAVE:
            entry.value = out
            # gloo writes a collective's output, and counts that, when it is waited for: see `cut_kept`.
            entry.version = None if ops.facts(entry.op).collective else versions(out)
        else:
            entry.value = map_output(lambda t: OnHost(self.transfer.to_host(t)), out)
            entry.version = frozenset(key for tensor in tensors_in(out) for key in storages(tensor))

    def note(self, func: Op, entry: Kept, args: Any, kwargs: Any, out: Any) -> None:
        """Note an output, which may get a name after this, and the operands that have one."""
        if self.liveness is not None:
            self.liveness.ran(func, entry, args, kwargs, out)
        # A call that draws is made again, in order: whether later ones drew is not known when its output gets a name.
        if entry.decision in (RECOMPUTE, SKIP) and not ops.draws(func, args, kwargs) and (made := _Made.of(entry, out)):
            self.made[storage_of(tensors_in(out)[0])] = made
        for tensor, label in names.operands_of(func, self.counts[id(func)] - 1, args):
            self.named(tensor, label)

    def named(self, tensor: Tensor, label: str) -> None:
        """`tensor` has a name: if the policy keeps that, keep the output of the call that made it."""
        if self.paused or self.decide_named is None or not isinstance(tensor, Tensor):
            return
        storage = storage_of(tensor)
        made = None if storage is None else self.made.get(storage)
        decision = self.decide_named(label, None if made is None else made.entry.op)
        if decision is None or made is None or made.entry.decision not in (RECOMPUTE, SKIP):
            return
        self.paused = True  # A copy to the host is not an operator of the forward.
        if (out := made.output(tensor)) is not None:
            made.entry.decision, made.entry.label = decision, label
            self.hold(made.entry, out)
        self.paused = False

    def __enter__(self) -> Any:
        if self.decide_named is not None:
            self._hearing.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.decide_named is not None:
            self._hearing.__exit__(*error)

    def finish(self) -> None:
        """Call at the end of forward: where it did not fit the decisions, recompute the outputs that were to be
        skipped, and those of the operators that did not fit."""
        if self.liveness is not None:
            self.decide.settle(*self.liveness.left_out(len(self.packs)))
        finish = getattr(self.decide, "finish", None)
        misfit = None if finish is None else finish()
        if misfit is not None:
            for entry in self.kept:
                if entry.decision is SKIP or entry.op in misfit.ops:
                    entry.recompute()
            say_misfit(self.region_name, misfit.reason)

    def before_change(self, func: Op, args: Any, kwargs: Any) -> None:
        """`func` is about to write: give whatever is saved of the written storages a copy of its own."""
        if self.inputs is not None:
            self.inputs.before_change(func, args, kwargs)
        if not self.kept:
            return
        written = {key for tensor in ops.written_tensors(func, args, kwargs) for key in storages(tensor)}
        for entry in self.kept:
            if entry.decision is HOST:
                before_change = getattr(self.transfer, "before_change", None)
                if before_change is not None and entry.version & written:
                    for item in on_host(entry.value):
                        before_change(item.handle)
            elif (
                entry.decision is SAVE
                and not entry.private
                and any(storages(tensor) & written for tensor in tensors_in(entry.value))
            ):
                entry.value = map_output(private_copy, entry.value)
                entry.version = versions(entry.value)
                entry.private = True


class ReplayMode(_Mode):
    """Puts saved outputs in the place of the calls that made them, in forward's order."""

    def __init__(self, kinds: Kinds, kept: list[Kept], values: list[Any], name: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.kept = kept
        self.values = values
        self.region_name = name
        self.position = 0
        self.finished_at: int | None = None
        self.skips = SKIP in map(decision_of, kept)
        self.passing = ({} if self.skips else kinds.passing).get  # one that is let pass may be given a placeholder

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self.passing(id(func))
        if call is not None:
            return call(*args, **kwargs) if kwargs else call(*args)
        kind, call = self.kinds.get(id(func)) or self.kinds.of(func)
        if kind in _RECORDED or (kind == COPY and ops.is_device_to_host_copy(func, args, kwargs)):
            entry, value = self.next(func)
            if entry.decision is not RECOMPUTE:
                return value
        if self.skips:
            return self.run_beside_placeholders(func, kind, args, kwargs or {})
        return call(*args, **kwargs) if kwargs else call(*args)

    def next(self, func: Op) -> tuple[Kept, Any]:
        """The forward's record of this call, and its output where saved (handed out once)."""
        position = self.position
        self.position = position + 1
        if self.finished_at is not None:
            return _AFTER_THE_END, None
        if position >= len(self.kept) or self.kept[position].op is not func:
            wanted = self.kept[position].op if position < len(self.kept) else "nothing more"
            raise RegionError(
                f"Region {self.region_name!r}: recomputation and forward disagree. As tracked call {position}, forward ran "
                f"{wanted}, recomputation runs {func}. Something in the region "
                "depends on state that changed since (a cache, a counter, a global switch). Keep that state out of the "
                "region, or register it with nemo_like.activation_checkpointing.engine.global_state.register."
            )
        value = self.values[position]
        self.values[position] = None
        entry = self.kept[position]
        if entry.rng_after is not None:
            set_rng_state(entry.rng_after)
        if entry.decision is SKIP:
            value = map_output(placeholder, value)
        elif entry.decision is HOST:
            value = from_host(value)
        return entry, value

    def finish(self) -> None:
        """Backward has the tensors it needs; whatever still runs is computed, for its side effects only."""
        self.finished_at = self.position
        self.values = []

    def run_beside_placeholders(self, func: Op, kind: int, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `func`; where it reads a placeholder, give a placeholder for its output or raise."""
        if not any(isinstance(tensor, Placeholder) for tensor in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        reason = None
        if ops.draws(func, args, kwargs):
            reason = "it draws random numbers, and later ones would change"
        elif kind == MUTABLE and not all(
            isinstance(tensor, Placeholder) for tensor in ops.written_tensors(func, args, kwargs)
        ):
            reason = "it would write into a tensor that exists"
        elif ops.facts(func).collective:
            reason = "it is a collective, which every rank must join with data"
        if reason is not None:
            self.raise_skipped(func, reason)
        try:
            return beside_placeholders(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            self.raise_skipped(func, f"it needs the data ({error})", error)

    def skipped_so_far(self) -> str:
        """The operators in whose place a placeholder was handed out; empty: none yet."""
        return ", ".join(sorted({str(entry.op) for entry in self.kept[: self.position] if entry.decision is SKIP}))

    def raise_skipped(self, func: Op, reason: str, cause: Exception | None = None) -> None:
        raise RegionError(
            f"Region {self.region_name!r}: the plan skips {self.skipped_so_far()}, and {func} needs a result of it: "
            f"{reason}. Take the SKIP out of the plan (RECOMPUTE or SAVE), or keep the inputs of {func}."
        ) from cause


def say_misfit(region: str, reason: str) -> None:
    """Once for all regions: a batch of another kind is met by each layer in turn, and may come again."""
    warn_once(
        f"Region {region!r} runs other operators than its plan was made for ({reason}), as where a mask, or none, sends "
        "attention another way. In such calls, operators that do not fit are computed again: gradients are the same, "
        "backward takes longer. Plan with a sample_input that is like most batches of the run.",
        key="misfit",
    )


_AFTER_THE_END = Kept(None, RECOMPUTE, 0)


# Looks at the operators of a forward that no other mode sees: the generators of random numbers that they are given, and
# writes into the region's inputs, as Mixtral's router makes with ``router_jitter_noise``.
#
# Recomputation needs such an input as it was. It is copied just before the operator that writes into it, so that a
# forward which changes nothing pays nothing, but for a look at every operator in the first call of each module.


class _Look(_Mode):
    def __init__(self, generators: Generators | None, inputs: SavedInputs | None, learned: Learned) -> None:
        super().__init__()
        self.generators, self.inputs, self.learned, self.given = generators, inputs, learned, False

    def __torch_dispatch__(self, func: Op, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if self.generators is not None and kwargs and kwargs.get("generator") is not None:
            self.given = self.generators.note(kwargs["generator"]) or self.given
        if self.inputs is not None and ops.facts(func).mutating:
            self.inputs.before_change(func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        learned = self.learned
        if error[0] is None and learned.gives_generators is None:
            learned.gives_generators = self.given
        if error[0] is None and self.inputs is not None and not learned.writes_inputs:
            learned.writes_inputs = self.inputs.changed


class _PassBy(_Mode):
    def __torch_dispatch__(self, func: Op, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def look_on(
    mode: ForwardMode | None, generators: Generators | None, inputs: SavedInputs | None, learned: Learned
) -> tuple[AbstractContextManager[Any] | None, Callable[[], AbstractContextManager[Any]]]:
    """Return a context for a forward, and a function that makes the like of it for its recomputation. None: no need.

    Within the first, `generators` note those that operators are given, and `inputs` keep tensors that are about to
    change. `mode`, where the region has one, looks at every operator anyway, and is made to tell them. The second is
    there because some operators (the CTC loss, and any that calls `areAnyTensorSubclassLike` in C++) run other kernels
    under any mode.
    """
    if mode is not None:
        mode.generators, mode.inputs = generators, inputs
        return None, nullcontext
    generators = None if learned.gives_generators is False else generators
    inputs = None if learned.writes_inputs is False else inputs
    if generators is None and inputs is None:
        return None, nullcontext
    return _Look(generators, inputs, learned), _PassBy
