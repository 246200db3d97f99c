"""What a model does around its layers: embedding, position tables, norm, head and loss, as a curve of live bytes.

The model runs forward and backward on fake tensors with every layer replaced by a stand-in that hands on tensors of the
right shape and keeps nothing. Between two layers only two numbers count: the peak, and what is left.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from nemo_like.losses.model_loss import chunked_calls
from nemo_like.model_copy import leaves_of, with_state
from nemo_like.module_tree import bare
from nemo_like.options import ChunkedLoss, StepSpec
from nemo_like.planning.block_memory import with_gradients
from nemo_like.planning.capture import replaced_forwards
from nemo_like.planning.devices import Device
from nemo_like.planning.fake import cache_off
from nemo_like.planning.gradient_sums import SumsInPlace
from nemo_like.planning.halves_memory import backward_of_inputs
from nemo_like.planning.kinds import ModelTrace
from nemo_like.planning.layer_stubs import LayerStub, stand_in
from nemo_like.planning.meter import LiveBytes
from nemo_like.planning.reasons import without_values
from nemo_like.planning.recorded import record_again
from nemo_like.planning.program.records import BackwardCall, ForwardCall, OuterEvents
from nemo_like.planning.step_loss import loss_of
from nemo_like.planning.step_time import OpSeconds
from nemo_like.planning.vocabulary_loss import VocabularyParallelLoss
from nemo_like.tensors import Place, by_argument, tensors_in


@dataclass(frozen=True)
class Stretch:
    """The time between two layers."""

    peak: int
    """Most bytes alive during it."""
    left: int
    """Bytes alive at its end, when the next layer is called: its inputs, or the gradients of its outputs, among them."""
    twice: tuple[tuple[int, int], ...] = ()
    """Inputs of layer calls (the call's position, bytes) that are alive whether the layer holds them or not."""


@dataclass(frozen=True)
class OuterMemory:
    """A step of everything but the layers. Parameters and the step's input are not counted."""

    forward: tuple[Stretch, ...]
    """Before each layer call; one entry per call."""
    head: Stretch
    """From the last layer's forward to the model's output: norm, head, and the loss where the model computes it."""
    middle: Stretch
    """From the loss to the last layer's backward: the head's."""
    backward: tuple[Stretch, ...]
    """Between the layers' backwards, from the last layer to the first; one less than there are calls."""
    tail: Stretch
    """After the first layer's backward."""
    param_grads: dict[str, int]
    """Gradients of outer parameters by name, bytes; they are alive from `middle` on (before, where backward adds to
    gradients that were there: then the stretches do not count them)."""
    used: tuple[frozenset[int], ...]
    """For each kind of layer, the positions of those tensors of its output that get a gradient."""
    layouts: tuple[dict[int, tuple[int, ...]], ...] = ()
    """For each kind of layer, the strides of those of these gradients that are not in rows, by position: the layer's
    backward copies them, as a rule."""
    kept: int = 0
    """What stays of the model's output till the next one is there: in all stretches of backward, and in forward."""
    whole_logits: tuple[str, ...] = ()
    """Why logits were whole, where a chunked loss was asked for; empty: they were not."""
    own_loss: bool = False
    """Whether the model computes the loss."""
    in_chunks: bool = False
    """Whether the head made its gradients in forward, so that its backward begins with that of the loss."""
    seconds: float = 0.0
    """Its forward and backward by the device's roofline; 0 where no device was given."""
    loss: Stretch = Stretch(0, 0)
    """From the model's output to the loss, where the model does not compute it."""
    idle: frozenset[int] = frozenset()
    """Layer calls that have no backward: what they return is not in the loss, or nothing before them trains."""
    dropped: frozenset[int] = frozenset()
    """Of those, the ones that hold nothing when backward begins: nobody has what they returned any more."""
    events: OuterEvents = field(default_factory=OuterEvents)
    """What it allocates and frees, in order."""
    kinds: Mapping[str, float] = field(default_factory=dict)
    """`seconds` by `nemo_like.planning.step_time.kernel_kind`."""
    weights: Stretch | None = None
    """Where a pipeline's schedule cuts backward in two, its second half, after `tail`."""

    def counted_once(self, inputs: Sequence[int]) -> OuterMemory:
        """The same without what layers hold too; `inputs`: how much each call holds of its inputs, bytes."""

        def one(stretch: Stretch) -> Stretch:
            less = sum(min(size, inputs[position]) for position, size in stretch.twice)
            return Stretch(stretch.peak - less, stretch.left - less)

        return replace(
            self, forward=tuple(map(one, self.forward)), head=one(self.head), middle=one(self.middle), loss=one(self.loss),
            backward=tuple(map(one, self.backward)), tail=one(self.tail),
        )  # fmt: skip


def outer_memory(
    model: nn.Module, layers: Sequence[Any], traced: ModelTrace, step: StepSpec = StepSpec(),
    chunks: ChunkedLoss | None = None, *, accumulate: bool = False, device: Device | None = None, halves: bool = False,
    regions: bool = True, split_loss: bool = False,
) -> OuterMemory:  # fmt: skip
    """Run the model's step around its layers on fake tensors and watch its memory.

    Args:
        model, layers, traced: what runs, and how it was traced.
        step: the loss of the loop, and whether it keeps the output.
        chunks: compute the loss that the model computes in such chunks.
        accumulate: parameters have gradients before, which are not counted, and backward adds to them.
        device: whose roofline times it.
        halves: cut backward in two, as some schedules of pipelines do.
        regions: whether layers are checkpointed; without, they hold those of their shared inputs that autograd keeps.
        split_loss: the logits are one rank's part, by vocabulary, and the loss is that of all ranks' parts.

    Raises:
        ValueError: its step depends on values, so that it cannot be planned.
    """
    timer = None if device is None else OpSeconds(device)
    state = leaves_of(traced.state)
    leaves = list(dict.fromkeys(state.values()))
    before = with_gradients(leaves, traced.run) if accumulate else []
    meter = LiveBytes([*leaves, *before, *tensors_in((traced.args, traced.kwargs))])
    forward: list[Stretch] = []
    backward: list[tuple[int, Stretch]] = []
    used: list[set[int]] = [set() for _ in traced.kinds]
    layouts: list[dict[int, tuple[int, ...]]] = [{} for _ in traced.kinds]
    inputs: list[list[weakref.ref[Any]]] = []
    alive: dict[int, weakref.ref[LayerStub]] = {}
    calls: list[ForwardCall] = []
    backs: list[BackwardCall] = []

    def twice(calls: int) -> tuple[tuple[int, int], ...]:
        """Which inputs of the first `calls` layer calls are alive, though stand-ins hold none."""
        alive = (
            (i, sum(s.nbytes() for ref in own if (s := ref()) is not None)) for i, own in enumerate(inputs[:calls])
        )
        return tuple((i, size) for i, size in alive if size)

    def stub(layer: Any, _: Callable) -> Callable:
        def standing_in(*args: Any, **kwargs: Any) -> Any:
            assert len(forward) < len(traced.calls), "a layer runs that did not run when it was traced"
            number = traced.calls[len(forward)].kind
            kind = traced.kinds[number]
            forward.append(Stretch(meter.lap(), meter.live, twice(len(forward))))
            own = {place: t for place, t in by_argument(args, kwargs).items() if place not in kind.shared_at}
            given = map(torch.Tensor.untyped_storage, own.values())
            inputs.append([weakref.ref(s) for s in {id(s): s for s in given}.values()])
            numbers, at = {place: meter.number(t) for place, t in own.items()}, len(meter.log)
            del own
            lap = functools.partial(_lap, meter, backward, backs, twice, len(forward))
            output, records, standing = stand_in(kind, args, kwargs, lap, used[number], layouts[number], regions)
            if standing is not None:
                alive[len(forward) - 1] = standing
            made = {i: meter.number(t) for i, t in enumerate(tensors_in(output)) if i not in kind.passed}
            calls.append(ForwardCall(at, len(meter.log), numbers, made))
            record_again(bare(layer.module), records)
            return output

        return standing_in

    nothing: list[str] = []
    in_chunks: AbstractContextManager[list[str]]
    in_chunks = nullcontext(nothing) if chunks is None else chunked_calls(model, chunks)
    with (
        without_values(f"{type(model).__name__} cannot be planned: its step around the layers", model),
        with_state(model, state), cache_off(model),
        in_chunks as whole_logits, traced.run, meter, SumsInPlace(), timer or nullcontext(),
        replaced_forwards(layers, stub), VocabularyParallelLoss() if split_loss else nullcontext(),
    ):  # fmt: skip
        with traced.run.casting():
            output = model(*traced.args, **traced.kwargs)
        head, forward_end = Stretch(meter.lap(), meter.live, twice(len(forward))), len(meter.log)
        loss = loss_of(output, step.loss_fn)
        own_loss = any(loss is t for t in tensors_in(output))
        scored = Stretch(meter.lap(), meter.live, twice(len(forward)))
        if not step.keeps_output:
            output = None
        gone = {i for i, ref in alive.items() if ref() is None}
        rest = None if halves else loss.backward()
        if halves:
            rest = backward_of_inputs([loss], None, _given(traced), leaves)
        tail, backward_end = Stretch(meter.lap(), meter.live), len(meter.log)
        if rest is not None:
            rest()
        weights, weights_end = Stretch(meter.lap(), meter.live) if halves else None, len(meter.log)
        last, returned = meter.live, () if output is None else tuple(map(meter.number, tensors_in(output)))
        input_grads = tuple(meter.number(t.grad) for t in _given(traced) if t.grad is not None)
        output = None
        kept = last - meter.live
        for tensor in _given(traced):
            tensor.grad = None
    named = {t: name for name, t in reversed(state.items())}  # a tied one by its first name
    grads = {name: t.grad.untyped_storage().nbytes() for t, name in named.items() if t.grad is not None}
    numbers = {name: meter.number(t.grad) for t, name in named.items() if t.grad is not None}
    events = OuterEvents(tuple(meter.log), tuple(calls), forward_end, tuple(backs), backward_end, weights_end, numbers, returned, input_grads)
    before_each = _before_each(backward, len(forward), tail)
    idle = frozenset(range(len(forward))) - {i for i, _ in backward}
    whole = tuple(whole_logits)
    return OuterMemory(
        tuple(forward), head, before_each[0] if before_each else tail, tuple(before_each[1:]), tail, grads,
        tuple(map(frozenset, used)), tuple(layouts), kept, whole, own_loss, chunks is not None and not whole,
        0.0 if timer is None else timer.seconds, scored, idle, idle & gone, events,
        {} if timer is None else dict(timer.kinds), weights,
    )  # fmt: skip


def _given(traced: ModelTrace) -> list[torch.Tensor]:
    """Those tensors of the model's input that get a gradient: the hidden states that a pipeline's stage is sent."""
    return [t for t in tensors_in((traced.args, traced.kwargs)) if t.requires_grad]


def _before_each(backward: Sequence[tuple[int, Stretch]], count: int, tail: Stretch) -> list[Stretch]:
    """The stretch before each of `count` layer calls' backward, from the last call to the first.

    A call without backward takes no time in it: the stretch of the next one that has is its own, and at its end nothing is
    left to do before that one.
    """
    if sorted(backward, key=lambda lap: -lap[0]) != list(backward):  # not in the order of forward: as they came
        return [stretch for _, stretch in backward] + [tail] * (count - len(backward))
    found, coming, begun = [], list(backward), False
    for i in reversed(range(count)):
        if not coming:
            found.append(tail)
            continue
        at, stretch = coming[0]
        found.append(replace(stretch, peak=stretch.left) if begun else stretch)
        begun = at != i
        if not begun:
            coming.pop(0)
    return found


def _lap(
    meter: LiveBytes, laps: list[tuple[int, Stretch]], backs: list[BackwardCall], twice: Callable[[int], tuple], calls: int,
    grads: Mapping[int, torch.Tensor],
) -> Callable[[Mapping[Place, torch.Tensor]], None]:  # fmt: skip
    """The backward of a stand-in begins; what is returned is to be called when it has made its gradients."""
    laps.append((calls - 1, Stretch(meter.lap(), meter.live, twice(calls))))
    at, numbers = len(meter.log), {position: meter.number(grad) for position, grad in grads.items()}

    def done(made: Mapping[Place, torch.Tensor]) -> None:
        own = {place: meter.number(grad) for place, grad in made.items()}
        backs.append(BackwardCall(calls - 1, at, len(meter.log), numbers, own))

    return done
