"""Follow the storages that are alive while real code runs on fake tensors, each with its part: one rank's allocator.

That code may run a model with fewer of its repeated layers: the levels of a step of the whole one are derived from it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from nemo_like._util.code import callers
from nemo_like._util.tensors import is_wrapped, tensors_in
from nemo_like.activation_checkpointing.ops import draws
from nemo_like.planning.trace.kinds import BlockKind
from nemo_like.planning.trace.layer_memory import TracedBytes
from nemo_like.torch_compat import autograd_node, next_sequence_number, sequence_number, unseen

PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER = "parameters", "gathered", "gradients", "optimizer"
ACTIVATIONS, AROUND, OTHER = "activations", "outside of layers", "other"
# ``gathered``: tensors that FSDP2 makes to gather parameters. ``gradients``: also those that it makes to reduce them.
# ``optimizer``: state, and temporaries of its step. ``outside of layers``: embedding, masks, norm, head and loss.
PARTS = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, AROUND, OTHER)
_OUTSIDE = " outside of layers"
_FSDP = "torch.distributed.fsdp"
_RESIZE = "resize_"


class StepMoment(NamedTuple):
    """A stretch of a step."""

    where: str
    between: tuple[str, str] = ("", "")  # Outside of layers: the stretches before and after.
    microbatch: int = 0


@dataclass(frozen=True)
class Level:
    """The most bytes that are alive in a moment."""

    total: int
    op: str  # Operator that made the last storage.
    parts: Counter[str]

    def of_more(self, short: Level, longer: Level, missing: int) -> Level:
        """Return the level of a model with so many more periods, of which one makes the difference of two others."""
        parts = Counter(self.parts)
        for part in longer.parts.keys() | short.parts.keys():
            parts[part] += missing * (longer.parts[part] - short.parts[part])
        return Level(self.total + missing * (longer.total - short.total), self.op, parts)


@dataclass(eq=False)
class Storage:
    """One storage that was made."""

    part: str


@dataclass(frozen=True)
class LedgerEvent:
    """A change of the bytes that are alive."""

    storage: Storage
    size: int
    where: str
    op: str


class StorageLedger(TracedBytes):
    """Ledger of all storages that are made inside it: their bytes, parts, and places in the step.

    Storages that FSDP2 frees and allocates again through `UntypedStorage.resize_` are followed.

    Enter it around everything that runs, outside of the fake mode, so that it sees operators first. Storages that come
    in from outside count nothing, but for those that `own` was called with.

    Args:
        on_cpu: the device is the CPU, whose collectives are gloo's, and which has the states of its generator.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        super().__init__()
        self.events: list[LedgerEvent] = []  # Changes since `begin`.
        self.phase = OTHER  # ``forward`` | ``backward`` | ``optimizer step``: where the loop is.
        self.on_cpu, self.steps = on_cpu, 0
        self._storages: dict[int, Storage] = {}
        self._before: dict[int, int] = {}
        self._layers: list[str] = []  # The layers whose forward runs, the innermost last.
        self._layer = ""  # The layer that ran last, in forward or backward; empty: outside the layers.
        # Numbers from which on autograd's nodes belong to a layer, and names of these layers; ``""``: none.
        self._marks: tuple[list[int], list[str]] = ([], [])
        # Place, product and name of the running operator; None: none runs.
        self.running: tuple[str, str, str] | None = None
        self._originals: tuple[Callable[..., Any], Callable[..., Any]] = (
            torch.UntypedStorage.resize_,
            torch.get_rng_state,
        )

    def __enter__(self) -> Self:
        resize, state = self._originals
        ledger = self

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result, number = resize(storage, size), ledger.numbers.get(storage)
            if number and size != ledger.sizes.get(number, 0):
                ledger.running = (*ledger.place(), _RESIZE)
                ledger.changed(number, size)
                ledger.running = None
            return result

        def told_state() -> torch.Tensor:
            result: torch.Tensor = state()
            if ledger.on_cpu and ledger.steps > 1:  # of the first step, the engine goes on to know the last one
                ledger.running = (*ledger.place(), "get_rng_state")
                ledger.count(result)
                ledger.running = None
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        torch.get_rng_state = told_state
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_, torch.get_rng_state = self._originals  # type: ignore[method-assign]
        super().__exit__(*error)

    def own(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Count the storages of `tensors`, whatever made them, as this part."""
        for tensor in tensors:
            if not self.number(tensor):
                self.numbers.pop(tensor.untyped_storage(), None)
            self.running = "", part, ""
            self._storages.setdefault(self.count(tensor), Storage(part)).part = part
            self.running = None

    def disown(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of `tensors` no longer: they are on another device."""
        for tensor in tensors:
            number = self.number(tensor)
            self.numbers[tensor.untyped_storage()] = 0
            self.live -= self.sizes.pop(number, 0)

    def begin(self) -> None:
        """Forget all events so far, but for the storages that are alive."""
        self._before, self.events = dict(self.sizes), []
        self.steps += 1
        self._marks = ([], [])

    def levels(self) -> dict[StepMoment, Level]:
        """Return the most bytes alive in each moment of the step, in order."""
        now: Counter[str] = Counter()
        for number, size in self._before.items():
            now[self._storages[number].part] += size
        total = sum(now.values())
        stretches = [("start of the step", Level(total, "", Counter(now)))]
        for event in self.events:
            now[event.storage.part] += event.size
            total += event.size
            if event.where != stretches[-1][0]:
                stretches.append((event.where, Level(total, event.op, Counter(now))))
            elif total > stretches[-1][1].total:
                stretches[-1] = event.where, Level(total, event.op, Counter(now))
        highest: dict[StepMoment, Level] = {}
        microbatch, before = 0, ""
        for (where, level), (following, _) in zip(stretches, [*stretches[1:], ("", stretches[0][1])]):
            microbatch += where.startswith("forward") and before.startswith("backward")
            outside = where.endswith(_OUTSIDE)
            moment = StepMoment(where, (before, following) if outside else ("", ""), microbatch)
            if moment not in highest or level.total > highest[moment].total:
                highest[moment] = level
            before = where
        return highest

    @contextmanager
    def watching(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Note within the context when one of the `layers` runs; `layers`: by their names."""

        def enter(name: str) -> Callable[..., None]:
            def before(*_: Any) -> None:
                self._layers.append(name)
                self._mark(name)

            return before

        def leave(*_: Any) -> None:
            self._layers.pop()
            self._mark(self._layers[-1] if self._layers else "")

        with ExitStack() as stack:
            for name, layer in layers.items():
                stack.callback(layer.register_forward_pre_hook(enter(name), prepend=True).remove)
                # A region that is recomputed ends by an exception where nothing more is needed.
                stack.callback(layer.register_forward_hook(leave, always_call=True).remove)
            yield

    def _mark(self, layer: str) -> None:
        numbers, names = self._marks
        numbers.append(next_sequence_number())
        names.append(layer)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_wrapped(types):
            return NotImplemented
        self.running = (*self.place(), str(func))
        for tensor in tensors_in((args, kwargs)) if self.running[1] is GRADIENTS else ():
            stored = self._storages.get(0 if tensor.is_meta else self.number(tensor))
            if stored is not None and stored.part in (ACTIVATIONS, AROUND):
                stored.part = GRADIENTS
        if draws(func, args, dict(kwargs or {})):
            with unseen():
                torch.rand(())  # so that states of the generator differ where they would
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.running = None

    def scratch(self, func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
        """Return the bytes that an operator takes and gives back, gloo's own copies among them."""
        return super().scratch(func, args, kwargs, out) + (_copied_by_gloo(func, args) if self.on_cpu else 0)

    def changed(self, number: int, size: int) -> None:
        """Note a change as `LiveBytes` does, with where it is."""
        where, part, op = (*self.place(), "") if self.running is None else self.running
        more = size - self.sizes.get(number, 0)
        if number not in self._storages:
            self._storages[number] = Storage(part if part in (PARAMETERS, OPTIMIZER) else _part_of_fsdp() or part)
        super().changed(number, size)
        self.events.append(LedgerEvent(self._storages[number], more, where, op if more > 0 or op == _RESIZE else ""))

    def place(self) -> tuple[str, str]:
        """Return the place in the step, and the part of storages made there."""
        if self.phase == "optimizer step":
            return self.phase, OPTIMIZER
        node, accumulates = autograd_node(), False
        if self._layers or self.phase != "backward":
            self._layer = self._layers[-1] if self._layers else ""
        elif node is not None:
            accumulates = node.name().endswith("AccumulateGrad")  # its number is none of a forward
            if not accumulates:
                numbers, names = self._marks
                at = bisect_right(numbers, sequence_number(node)) - 1
                self._layer = names[at] if at >= 0 else ""
        where = f"{self.phase} of {self._layer}" if self._layer else self.phase + _OUTSIDE
        return where, GRADIENTS if accumulates else ACTIVATIONS if self._layer else AROUND


def _part_of_fsdp() -> str:
    """Return the part that FSDP2 allocates for, where its own code runs; empty: it does not run."""
    inside = False
    for frame in callers():
        if frame.f_globals.get("__name__", "").startswith(_FSDP):
            inside = True
            if "reduce" in frame.f_code.co_name:
                return GRADIENTS
        elif inside:
            return GATHERED
    return GATHERED if inside else ""


def _copied_by_gloo(func: Any, args: tuple) -> int:
    """Return the bytes of gloo's own copies within a collective."""
    # The argument that holds the parts of all ranks.
    whole = {"c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1}.get(func._schema.name)
    return 0 if whole is None else args[whole].nbytes


@dataclass(frozen=True)
class Repeats:
    """A stretch of layers that is one period again and again, as in ``[dense] + 58 * [experts]``."""

    first: int  # Number of its first layer.
    period: int  # Number of layers of one period.
    count: int

    def left_out(self, kept: int) -> range:
        """Return the numbers of the layers to leave out for `kept` periods: those in the middle, one more behind."""
        ahead = (kept - 1) // 2
        return range(self.first + ahead * self.period, self.first + (self.count - kept + ahead) * self.period)


def repeats(kinds: Sequence[Hashable], kept: int) -> list[Repeats]:
    """Return the stretches of more than `kept` periods: the longest, and those in front of it and behind.

    >>> [(each.first, each.period, each.count) for each in repeats("abbbbbbbbcdcdcdcdcd", 4)]
    [(1, 1, 8), (9, 2, 5)]
    """
    longest = longest_repeats(kinds)
    if longest.count <= kept:
        return []
    end = longest.first + longest.period * longest.count
    behind = [replace(repeat, first=repeat.first + end) for repeat in repeats(kinds[end:], kept)]
    return [*repeats(kinds[: longest.first], kept), longest, *behind]


def longest_repeats(kinds: Sequence[Hashable]) -> Repeats:
    """Return the stretch with the most layers behind its first period; of several, the one with the shortest period."""
    best = Repeats(0, max(1, len(kinds)), 1 if kinds else 0)
    for period in range(1, len(kinds) // 2 + 1):
        begin = 0
        for at in range(period, len(kinds) + 1):
            if at == len(kinds) or kinds[at] != kinds[at - period]:
                candidate = Repeats(begin, period, (at - begin) // period)
                if (candidate.count - 1) * period > (best.count - 1) * best.period:
                    best = candidate
                begin = at - period + 1
    return best


@dataclass(frozen=True, eq=False)
class _Skipped:
    """A layer that is left out, with its output. Copies of a model share it: a copy of the fake tensors in `kind` has
    memory that was never allocated, and Python crashes when it is freed."""

    layer: nn.Module
    kind: BlockKind

    def __deepcopy__(self, memo: Any) -> _Skipped:
        return self


class SkippedLayer(nn.Module):
    """Stand-in for a layer that is left out: it returns the hidden states of its call, and has the layer's attributes.

    Args:
        layer: the layer whose place it takes.
        kind: the layer's kind, with its output.
    """

    def __init__(self, layer: nn.Module, kind: BlockKind) -> None:
        super().__init__()
        self.__dict__["_skipped"] = _Skipped(layer, kind)  # no module of the model any more

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_skipped"].layer, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first tensor of the call, in the form in which the layer returns hidden states."""
        hidden = tensors_in((args, kwargs))[0]
        kind: BlockKind = self.__dict__["_skipped"].kind
        return kind.output_with(lambda tensor: hidden, args, kwargs)


def leave_out(model: nn.Module, layers: Mapping[str, BlockKind]) -> None:
    """Put a `SkippedLayer` in the place of each of the `layers`, by their names, in `model` itself."""
    for name, kind in layers.items():
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent)._modules[child] = SkippedLayer(model.get_submodule(name), kind)
