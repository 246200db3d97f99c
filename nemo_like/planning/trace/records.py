"""Logs of allocations and frees of a block, or of the model outside its blocks, in runs on fake tensors."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from nemo_like._util.tensors import Place

# Entries in order: the number of a storage, and its bytes; 0 bytes: it is freed.
Log = tuple[tuple[int, int], ...]


class Fold(NamedTuple):
    """Result of a run of a log, in bytes above the level at its beginning."""

    peak: int
    net: int  # Bytes that the run adds, without exposed storages.
    made: tuple[tuple[int, int], ...]  # Exposed storages that it leaves: number and bytes.
    freed: tuple[int, ...]  # Numbers of exposed storages from before that it frees.
    late: tuple[int, ...]


class Recorded:
    """A log, of which some storages are exposed: others may hold them too, or have made them."""

    def __init__(
        self,
        entries: Log,
        exposed: frozenset[int],
        sizes: Mapping[int, int],
        late: frozenset[int] = frozenset(),
        makers: Mapping[int, Any] | None = None,
    ) -> None:
        """Keep a log.

        Args:
            entries: the log.
            exposed: numbers of storages that others may hold too, or have made.
            sizes: bytes of all storages, also of those that an earlier log made.
            late: numbers of exposed storages that are freed when it ends.
            makers: the operator that made each storage, where that is known.
        """
        self.entries, self.exposed, self.sizes, self.late, self.makers = entries, exposed, sizes, late, makers or {}
        # Each step runs a log many times. No `functools.cache` of a method, with which a log would hold itself.
        self._folds: dict[tuple[frozenset[int], frozenset[int]], Fold] = {}

    def fold(self, there: frozenset[int], alone: frozenset[int]) -> Fold:
        """Return the result of a run.

        Args:
            there: exposed storages that exist when it begins.
            alone: numbers out of `there` that have no other holder.
        """
        fold = self._folds.get((there, alone))
        if fold is None:
            fold = self._folds[there, alone] = self._fold(there, alone)
        return fold

    def _fold(self, there: frozenset[int], alone: frozenset[int]) -> Fold:
        level = peak = net = 0
        new: dict[int, int] = {}
        remaining, late = set(there), []
        for number, size in self.entries:
            if number not in self.exposed:
                change = size or -self.sizes[number]
                net += change
            elif size:
                if number in remaining or number in new:
                    continue
                new[number] = change = size
            elif number in self.late:
                late.append(number)
                continue
            elif number in new:
                change = -new.pop(number)
            elif number in remaining:
                remaining.remove(number)
                change = -self.sizes[number] if number in alone else 0
            else:
                continue
            level += change
            peak = max(peak, level)
        return Fold(peak, net, tuple(new.items()), tuple(n for n in there if n not in remaining), tuple(late))


class Running(NamedTuple):
    """Logs of one block."""

    forward: Recorded  # Log of its forward. The caller that runs it frees the output.
    # Log of its backward, or the first half of it, up to the end of the experts' backward.
    until_apart: Recorded
    rest: Recorded  # The entries of that log that follow.
    released: Recorded
    weights: Recorded  # Log of the second half of its backward.


@dataclass(frozen=True)
class BlockEvents:
    """Logs of one block under one choice. Its parameters and inputs are not in them."""

    forward: Log = ()  # Log of its forward. Its output is freed at the end, where autograd does not save it.
    backward: Log = ()
    outputs: tuple[int, ...] = ()  # Storage of each tensor that it returns; 0: one of its inputs.
    # Gradients that its backward receives, made at its beginning, by their position among `outputs`.
    output_grads: Mapping[int, int] = field(default_factory=dict)
    # Gradients of its inputs, alive at its end, by the place of the input in its call.
    input_grads: Mapping[Place, int] = field(default_factory=dict)
    # Gradients of its parameters by name, alive at its end, but for those that backward added to.
    param_grads: Mapping[str, int] = field(default_factory=dict)
    # Position in `backward` at which the experts' backward has ended, where they are an FSDP2 unit of their own.
    apart_end: int = 0
    # Entries when all layers have gone through the first half of backward, where a schedule cuts it in two.
    released: Log = ()
    # The second half of backward, which makes `param_grads`, where a pipeline's schedule cuts it in two.
    weights: Log = ()
    # Inputs that it saves, where a compiler decides that; None: those of the trace.
    kept_inputs: frozenset[Place] | None = None
    makers: Mapping[int, Any] = field(default_factory=dict)  # The operator that made each storage; none where compiled.

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of its storages."""
        return {number: size for log in (self.until(True), self.weights) for number, size in log if size}

    @cached_property
    def saved(self) -> list[int]:
        """Bytes of each storage that it saves from forward to backward, without its output, in the order of `forward`."""
        return [self.sizes[number] for number in sorted(_alive(self.forward) - set(self.outputs))]

    @property
    def held(self) -> int:
        """Bytes that it saves from forward to backward, without its output."""
        return sum(self.saved)

    @property
    def backward_peak(self) -> int:
        """Most bytes alive in its backward, or the first half of it, above those alive before its forward."""
        before = sum(self.sizes[number] for number in _alive(self.forward))
        changes = (size or -self.sizes[number] for number, size in self.backward)
        return max(itertools.accumulate(changes, initial=before))

    @property
    def between(self) -> int:
        """Bytes alive between the halves of its backward, but for gradients of its inputs."""
        return self.bytes_of(_alive(self.until(True)) - set(self.input_grads.values()))

    def bytes_of(self, numbers: Iterable[int]) -> int:
        """Return the bytes of the storages with these numbers."""
        return sum(self.sizes.get(number, 0) for number in set(numbers))

    def until(self, halfway: bool) -> Log:
        """Return the log of its forward, and (`halfway`) of the first half of its backward."""
        return self.forward + self.backward + self.released if halfway else self.forward

    @cached_property
    def running(self) -> Running:
        """Its logs, as a micro-batch runs them."""
        grads = (self.output_grads, self.input_grads, self.param_grads)
        exposed = frozenset().union(self.outputs, *(numbers.values() for numbers in grads)) - {0}
        before_end, after_end = self.backward[: self.apart_end], self.backward[self.apart_end :]
        rest = (before_end, after_end, self.released, self.weights)
        forward = Recorded(self.forward, exposed, self.sizes, frozenset(self.outputs) - {0}, self.makers)
        return Running(forward, *(Recorded(log, exposed, self.sizes, makers=self.makers) for log in rest))


def _alive(log: Log) -> set[int]:
    """Return the numbers of storages that are alive at the end of `log`."""
    return {number for number, size in log if size} - {number for number, size in log if not size}


@dataclass(frozen=True)
class ForwardCall:
    """Call of a stand-in for a layer. Between `begin` and `end` its outputs are made, in order."""

    begin: int  # Position in `OuterEvents.log`.
    end: int
    inputs: Mapping[Place, int]  # Storages of its inputs, by place.
    outputs: Mapping[int, int]  # Storages that it makes, by position.


@dataclass(frozen=True)
class BackwardCall:
    """Backward of a stand-in for a layer. Between `begin` and `end` the gradients of its inputs are made."""

    layer: int  # Position of its layer among all calls.
    begin: int
    end: int
    grads: Mapping[int, int]  # Gradients that it receives, by the position of the output.
    made: Mapping[Place, int]  # Storages that it makes, by the place of the input.


class Work(NamedTuple):
    """One operator, as far as its seconds depend on it."""

    op: Any
    half: bool  # True where it computes in a 16-bit floating-point type.
    flops: int
    moved: int  # Bytes its kernel reads and writes.
    times: float


@dataclass(frozen=True)
class OuterEvents:
    """Memory of a step of everything but the layers: the log of its allocations and frees, in order, and facts about it.

    Parameters and the step's input are not counted.
    """

    log: Log = ()
    calls: tuple[ForwardCall, ...] = ()
    forward_end: int = 0  # Position in `log` at which the model has returned.
    loss_end: int = 0  # Position at which the loss has been computed.
    backs: tuple[BackwardCall, ...] = ()
    backward_end: int = 0  # Position at which backward, or its first half, has ended.
    # Position at which the second half of backward has ended, where a schedule cuts it in two; else `backward_end`.
    weights_end: int = 0
    # Gradients of parameters by name, alive at the end.
    param_grads: Mapping[str, int] = field(default_factory=dict)
    # Position at which the module that has a parameter returned last, by name of the parameter.
    returns: Mapping[str, int] = field(default_factory=dict)
    # Position of the gradient of that module's output, by name of the parameter; ``""``: of the model's output.
    goes_back: Mapping[str, int] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()  # Storages of the model's output, if it is kept.
    input_grads: tuple[int, ...] = ()  # Storages of the gradients of the tensors that a pipeline stage received.
    makers: Mapping[int, Any] = field(default_factory=dict)  # The operator that made each storage.
    halves: bool = False  # True where backward was run in two halves.
    # For each kind of layer, the positions of those tensors of its output that get a gradient.
    used: tuple[frozenset[int], ...] = ()
    # For each kind of layer, the strides of those of these gradients that are not in rows, by position. As a rule,
    # the layer's backward copies them.
    layouts: tuple[dict[int, tuple[int, ...]], ...] = ()
    # Reasons why logits were whole, where a chunked loss was requested; empty: they were not.
    whole_logits: tuple[str, ...] = ()
    own_loss: bool = False  # True where the model computes the loss.
    # True where the head made its gradients in forward, so that its backward begins with that of the loss.
    in_chunks: bool = False
    work: tuple[Work, ...] = ()  # Its operators, but for views.
    # Seconds of `work` by the device's roofline (`nemo_like.planning.model.traced.TracedPart.outside`).
    seconds: float = 0.0
    # Layer calls that have no backward (their output is not in the loss, or nothing before them trains) and hold
    # nothing when backward begins: their output is not referenced any more.
    dropped: frozenset[int] = frozenset()
    # `seconds` by `nemo_like.planning.roofline.kernel_kind`.
    kinds: Mapping[str, float] = field(default_factory=dict)

    @property
    def kept_bytes(self) -> int:
        """Bytes of `outputs`."""
        sizes = dict(pair for pair in self.log if pair[1])
        return sum(sizes.get(number, 0) for number in set(self.outputs))
