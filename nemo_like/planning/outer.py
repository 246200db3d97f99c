"""What a model does around its layers: embedding, position tables, norm, head and loss, as a log of allocations.

The model runs forward and backward on fake tensors with every layer replaced by a stand-in that hands on tensors of the
right shape and keeps nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nemo_like._util.module_tree import bare
from nemo_like._util.tensors import Place, by_argument, tensors_in
from nemo_like.distributed.tensor.apply import edges
from nemo_like.fake.model_copy import leaves_of, with_state
from nemo_like.fake.reasons import without_values
from nemo_like.fake.run import cache_off, replaced_forwards
from nemo_like.losses.model_loss import chunked_calls
from nemo_like.options import ChunkedLoss, StepSpec
from nemo_like.planning.block_memory import with_gradients
from nemo_like.planning.devices import Device
from nemo_like.planning.gradient_sums import SumsInPlace
from nemo_like.planning.halves_memory import backward_of_inputs
from nemo_like.planning.kinds import ModelTrace
from nemo_like.planning.layer_stubs import LayerStub, stand_in
from nemo_like.planning.meter import LiveBytes
from nemo_like.planning.program.records import BackwardCall, ForwardCall, OuterEvents
from nemo_like.planning.recorded import record_again
from nemo_like.planning.step_loss import loss_of
from nemo_like.planning.step_time import OpSeconds
from nemo_like.torch_compat import under_loss_parallel


@dataclass(frozen=True)
class OuterMemory:
    """A step of everything but the layers. Parameters and the step's input are not counted."""

    events: OuterEvents
    """What it allocates and frees, in order."""
    trained: frozenset[str]
    """Names of the parameters around the layers that get a gradient."""
    used: tuple[frozenset[int], ...]
    """For each kind of layer, the positions of those tensors of its output that get a gradient."""
    layouts: tuple[dict[int, tuple[int, ...]], ...] = ()
    """For each kind of layer, the strides of those of these gradients that are not in rows, by position: the layer's
    backward copies them, as a rule."""
    whole_logits: tuple[str, ...] = ()
    """Why logits were whole, where a chunked loss was asked for; empty: they were not."""
    own_loss: bool = False
    """Whether the model computes the loss."""
    in_chunks: bool = False
    """Whether the head made its gradients in forward, so that its backward begins with that of the loss."""
    seconds: float = 0.0
    """Its forward and backward by the device's roofline; 0 where no device was given."""
    idle: frozenset[int] = frozenset()
    """Layer calls that have no backward: what they return is not in the loss, or nothing before them trains."""
    dropped: frozenset[int] = frozenset()
    """Of those, the ones that hold nothing when backward begins: nobody has what they returned any more."""
    kinds: Mapping[str, float] = field(default_factory=dict)
    """`seconds` by `nemo_like.planning.step_time.kernel_kind`."""


def outer_memory(
    model: nn.Module,
    layers: Sequence[Any],
    traced: ModelTrace,
    step: StepSpec = StepSpec(),
    chunks: ChunkedLoss | None = None,
    *,
    accumulate: bool = False,
    device: Device | None = None,
    halves: bool = False,
    regions: bool = True,
    split_loss: bool = False,
) -> OuterMemory:
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
    used: list[set[int]] = [set() for _ in traced.kinds]
    layouts: list[dict[int, tuple[int, ...]]] = [{} for _ in traced.kinds]
    alive: dict[int, weakref.ref[LayerStub]] = {}
    calls: list[ForwardCall] = []
    backs: list[BackwardCall] = []

    def stub(layer: Any, _: Callable) -> Callable:
        def standing_in(*args: Any, **kwargs: Any) -> Any:
            position = len(calls)
            assert position < len(traced.calls), "a layer runs that did not run when it was traced"
            number = traced.calls[position].kind
            kind = traced.kinds[number]
            own = {
                place: meter.number(t) for place, t in by_argument(args, kwargs).items() if place not in kind.shared_at
            }
            at = len(meter.log)
            begin = functools.partial(_backward_begins, meter, backs, position)
            output, records, standing = stand_in(kind, args, kwargs, begin, used[number], layouts[number], regions)
            if standing is not None:
                alive[position] = standing
            made = {i: meter.number(t) for i, t in enumerate(tensors_in(output)) if i not in kind.passed}
            calls.append(ForwardCall(at, len(meter.log), own, made))
            record_again(bare(layer.module), records)
            return output

        return standing_in

    ends = _Ends(meter)
    nothing: list[str] = []
    in_chunks: AbstractContextManager[list[str]]
    in_chunks = nullcontext(nothing) if chunks is None else chunked_calls(model, chunks)
    with (
        without_values(f"{type(model).__name__} cannot be planned: its step around the layers", model),
        with_state(model, state),
        cache_off(model),
        in_chunks as whole_logits,
        traced.run,
        meter,
        SumsInPlace(),
        timer or nullcontext(),
        replaced_forwards(layers, stub),
        under_loss_parallel(split_loss),
        edges(model),
        ends.watching(model) if chunks is None else nullcontext(),
    ):
        with traced.run.casting():
            output = model(*traced.args, **traced.kwargs)
        forward_end = len(meter.log)
        ends.returned([""], output)
        loss = loss_of(output, step.loss_fn)
        own_loss, loss_end = any(loss is t for t in tensors_in(output)), len(meter.log)
        if not step.keeps_output:
            output = None
        gone = {i for i, ref in alive.items() if ref() is None}
        rest = None
        if not halves:
            loss.backward()
        else:
            rest = backward_of_inputs([loss], None, _given(traced), leaves)
        backward_end = len(meter.log)
        if rest is not None:
            rest()
        weights_end = len(meter.log)
        returned = () if output is None else tuple(map(meter.number, tensors_in(output)))
        input_grads = tuple(meter.number(t.grad) for t in _given(traced) if t.grad is not None)
        output = None
        for tensor in _given(traced):
            tensor.grad = None
    named = {t: name for name, t in reversed(state.items())}  # a tied one by its first name
    numbers = {name: meter.number(t.grad) for t, name in named.items() if t.grad is not None}
    events = OuterEvents(
        tuple(meter.log),
        tuple(calls),
        forward_end,
        loss_end,
        tuple(backs),
        backward_end,
        weights_end,
        numbers,
        ends.returns,
        ends.goes_back,
        returned,
        input_grads,
    )
    idle, whole = frozenset(range(len(calls))) - {back.layer for back in backs}, tuple(whole_logits)
    return OuterMemory(
        events,
        frozenset(numbers),
        tuple(map(frozenset, used)),
        tuple(layouts),
        whole,
        own_loss,
        chunks is not None and not whole,
        0.0 if timer is None else timer.seconds,
        idle,
        idle & gone,
        {} if timer is None else dict(timer.kinds),
    )


class _Ends:
    """Where modules return, and where the gradients of what they returned are there."""

    def __init__(self, meter: LiveBytes) -> None:
        self.meter = meter
        self.returns: dict[str, int] = {}
        self.goes_back: dict[str, int] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """All modules of `model` that have parameters of their own."""
        handles = []
        for prefix, module in model.named_modules():
            if names := [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False)]:
                hook = functools.partial(self._hook, names)
                handles.append(module.register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, names: Sequence[str], module: nn.Module, args: Any, output: Any) -> None:
        self.returned(names, output)

    def returned(self, names: Sequence[str], output: Any) -> None:
        """A module with these parameters has."""
        self.returns.update(dict.fromkeys(names, len(self.meter.log)))
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._back, names))

    def _back(self, names: Sequence[str], grad: torch.Tensor) -> None:
        for name in names:
            self.goes_back.setdefault(name, len(self.meter.log))


def _given(traced: ModelTrace) -> list[torch.Tensor]:
    """Those tensors of the model's input that get a gradient: the hidden states that a pipeline's stage is sent."""
    return [t for t in tensors_in((traced.args, traced.kwargs)) if t.requires_grad]


def _backward_begins(
    meter: LiveBytes, backs: list[BackwardCall], position: int, grads: Mapping[int, torch.Tensor]
) -> Callable[[Mapping[Place, torch.Tensor]], None]:
    """The backward of a stand-in begins; what is returned is to be called when it has made its gradients."""
    at, numbers = len(meter.log), {at: meter.number(grad) for at, grad in grads.items()}

    def done(made: Mapping[Place, torch.Tensor]) -> None:
        own = {place: meter.number(grad) for place, grad in made.items()}
        backs.append(BackwardCall(position, at, len(meter.log), numbers, own))

    return done
