"""Follow the storages that are alive while real code runs on fake tensors, and what each is: one rank's allocator."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from nemo_like._util.tensors import is_wrapped, tensors_in
from nemo_like.activation_checkpointing.ops import draws
from nemo_like.planning.trace.meter import TracedBytes
from nemo_like.torch_compat import autograd_node, next_sequence_number, sequence_number, unseen

PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER = "parameters", "gathered", "gradients", "optimizer"
ACTIVATIONS, AROUND, OTHER = "activations", "outside of layers", "other"
PARTS = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, AROUND, OTHER)
"""``gathered``: what FSDP2 makes in order to gather parameters. ``gradients``: also what it makes to reduce them.
``optimizer``: state, and temporaries of its step. ``outside of layers``: embedding, masks, norm, head and loss."""
_OUTSIDE = " outside of layers"
_FSDP = "torch.distributed.fsdp"
_RESIZE = "resize_"


class StepMoment(NamedTuple):
    """A stretch of a step."""

    where: str
    between: tuple[str, str] = ("", "")
    """Outside of layers: what ran before, and what runs next."""
    microbatch: int = 0


@dataclass(frozen=True)
class Level:
    """The most bytes that are alive in a moment."""

    total: int
    op: str
    """Operator that made the last storage."""
    parts: Counter[str]


@dataclass(eq=False)
class Storage:
    """One storage that was made."""

    part: str
    position: int = -1
    """Number of the parameter for which an operator of the optimizer over all parameters made it; -1: none."""


@dataclass(frozen=True)
class Event:
    """A change of the bytes that are alive."""

    storage: Storage
    size: int
    where: str
    op: str


class StorageLedger(TracedBytes):
    """Ledger of all storages that are made inside it: what their bytes are, and where in the step they are made.

    What FSDP2 frees and allocates again through `UntypedStorage.resize_` is followed.

    Enter it around everything that runs, outside of the fake mode, so that it sees operators first. Storages that come
    in from outside count nothing, but for those that `own` was called with.

    Args:
        on_cpu: the device is the CPU, whose collectives are gloo's, and which has the states of its generator.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        super().__init__()
        self.events: list[Event] = []
        """Changes since `begin`."""
        self.phase = OTHER
        """``forward`` | ``backward`` | ``optimizer step``: where the loop is."""
        self.on_cpu, self.steps = on_cpu, 0
        self._storages: dict[int, Storage] = {}
        self._before: dict[int, int] = {}
        self._layers: list[str] = []
        """The layers whose forward runs, the innermost last."""
        self._layer = ""
        """The layer that ran last, in forward or backward; empty: outside the layers."""
        self._marks: tuple[list[int], list[str]] = ([], [])
        """Numbers from which on autograd's nodes belong to a layer, and names of these layers; ``""``: none."""
        self.running: tuple[str, str, str] | None = None
        """Place, product and name of the running operator; None: none runs."""
        self._position = -1
        """Position of what is counted among what the operator returned."""
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
        """Forget what happened so far, but for what is alive."""
        self._before, self.events = dict(self.sizes), []
        self.steps += 1
        self._marks = ([], [])

    def parts_before(self) -> Counter[str]:
        """Return the bytes alive when the step begins, by what they are."""
        return self._parts(self._before)

    def parts_of(self, tensors: Iterable[torch.Tensor]) -> Counter[str]:
        """Return the bytes of these `tensors` that were alive when the step began, by what they are."""
        return self._parts({self.number(tensor) for tensor in tensors} & self._before.keys())

    def _parts(self, numbers: Iterable[int]) -> Counter[str]:
        parts: Counter[str] = Counter()
        for number in numbers:
            parts[self._storages[number].part] += self._before[number]
        return parts

    def levels(
        self, inserted: Mapping[int, Counter[str]] | None = None, times: Mapping[int, int] | None = None
    ) -> dict[StepMoment, Level]:
        """Return the most bytes alive in each moment of the step, in order.

        Args:
            inserted: bytes that are alive from an event on, by its number, though nothing of this run made them.
            times: how often what the optimizer makes for a parameter is counted, by the parameter's number; default: once.
        """
        inserted, times = inserted or {}, times or {}
        now = self.parts_before()
        now.update(inserted.get(-1, Counter()))
        total = sum(now.values())
        stretches = [("start of the step", Level(total, "", Counter(now)))]
        for number, event in enumerate(self.events):
            if number in inserted:
                now.update(inserted[number])
                total += sum(inserted[number].values())
            size = event.size * times.get(event.storage.position, 1)
            now[event.storage.part] += size
            total += size
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

        handles = []
        for name, layer in layers.items():
            handles.append(layer.register_forward_pre_hook(enter(name), prepend=True))
            # A region that is recomputed ends by an exception where nothing more is needed.
            handles.append(layer.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

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
        if self.running[1] is GRADIENTS:
            self._become_gradients((args, kwargs))
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

    def count(self, tensor: torch.Tensor, position: int = -1) -> int:
        """Count a storage as `LiveBytes` does."""
        self._position = position
        return super().count(tensor)

    def changed(self, number: int, size: int) -> None:
        """Note a change as `LiveBytes` does, with where it is."""
        where, part, op = (*self.place(), "") if self.running is None else self.running
        more = size - self.sizes.get(number, 0)
        if number not in self._storages:
            position = self._position if part == OPTIMIZER else -1
            self._storages[number] = Storage(
                part if part in (PARAMETERS, OPTIMIZER) else _part_of_fsdp() or part, position
            )
        super().changed(number, size)
        self.events.append(Event(self._storages[number], more, where, op if more > 0 or op == _RESIZE else ""))

    def _become_gradients(self, value: Any) -> None:
        for tensor in tensors_in(value):
            known = self._storages.get(0 if tensor.is_meta else self.number(tensor))
            if known is not None and known.part in (ACTIVATIONS, AROUND):
                known.part = GRADIENTS

    def place(self) -> tuple[str, str]:
        """Return where the step is, and what is made there."""
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
    """Return what FSDP2 makes, where its own code runs; empty: it does not run."""
    frame = inspect.currentframe()
    inside = False
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_FSDP):
            inside = True
            if "reduce" in frame.f_code.co_name:
                return GRADIENTS
        elif inside:
            return GATHERED
        frame = frame.f_back
    return GATHERED if inside else ""


def _copied_by_gloo(func: Any, args: tuple) -> int:
    """Return the bytes of gloo's own copies within a collective."""
    name = func._schema.name
    if name == "c10d::_allgather_base_":
        return args[0].nbytes
    if name == "c10d::_reduce_scatter_base_":
        return args[1].nbytes
    return 0
