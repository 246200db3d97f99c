"""Log the allocations of a model outside its layers: embedding, position tables, norm, head and loss.

The model runs forward and backward on fake tensors. Every layer is replaced by a stand-in, which passes on tensors of the
right shape and saves nothing.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nemo_like._util.tensors import Place, by_argument, map_tensors, tensors_in
from nemo_like.distributed.tensor.apply import edges
from nemo_like.fake.model_copy import leaves_of, with_state
from nemo_like.fake.reasons import in_a_line, without_values
from nemo_like.fake.run import cache_off, replaced_forwards
from nemo_like.losses.model_loss import chunked_calls
from nemo_like.options import ChunkedLoss, StepSpec
from nemo_like.options.optimizers import UpdateInBackward
from nemo_like.planning.roofline import OpWork
from nemo_like.planning.trace.kinds import BlockKind, ModelTrace, record_again
from nemo_like.planning.trace.layer_memory import SumsInPlace, TracedBytes, backward_of_inputs, with_gradients
from nemo_like.planning.trace.records import BackwardCall, ForwardCall, OuterEvents
from nemo_like.torch_compat import under_loss_parallel


def outer_memory(
    model: nn.Module,
    layers: Sequence[Any],
    traced: ModelTrace,
    step: StepSpec = StepSpec(),
    chunks: ChunkedLoss | None = None,
    *,
    accumulate: bool | UpdateInBackward = False,
    halves: bool = False,
    held: Sequence[frozenset[Place]] | None = None,
    split_loss: bool = False,
) -> OuterEvents:
    """Run the model's step outside its layers on fake tensors and watch its memory.

    Args:
        model, layers, traced: the model, its layers, and their trace.
        step: the loss of the loop, and whether it keeps the output.
        chunks: compute the loss that the model computes in such chunks.
        accumulate: as for `nemo_like.planning.trace.layer_memory.block_memory`.
        halves: cut backward in two, as some schedules of pipelines do.
        held: places of the shared inputs that each kind of layer holds; None: all, as where layers are checkpointed.
        split_loss: the logits are one rank's part, by vocabulary, and the loss is that of all ranks' parts.

    Raises:
        ValueError: its step depends on values, so that it cannot be planned.
    """
    timer = OpWork()
    state = leaves_of(traced.state)
    leaves = list(dict.fromkeys(state.values()))
    before = with_gradients(leaves, traced.run, accumulate, in_layer=False) if accumulate else []
    meter = TracedBytes([*leaves, *before, *tensors_in((traced.args, traced.kwargs))])
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
            kwargs = kind.call_of(layer.inner, kwargs)
            input_numbers = {
                place: meter.number(t) for place, t in by_argument(args, kwargs).items() if place not in kind.shared_at
            }
            at = len(meter.log)
            call = LayerStub(position, meter, backs, used[number], layouts[number])
            output, records, trains = stand_in(
                kind, args, kwargs, call, frozenset(kind.shared_at) if held is None else held[number]
            )
            if trains:
                alive[position] = weakref.ref(call)
            output_numbers = {i: meter.number(t) for i, t in enumerate(tensors_in(output)) if i not in kind.passed}
            calls.append(ForwardCall(at, len(meter.log), input_numbers, output_numbers))
            record_again(layer.inner, records)
            return kind.put(layer.inner, output)

        return standing_in

    ends = _Ends(meter)
    in_chunks: AbstractContextManager[list[str]]
    in_chunks = nullcontext([]) if chunks is None else chunked_calls(model, chunks)
    with (
        without_values(f"{type(model).__name__} cannot be planned: its step around the layers", model),
        with_state(model, state),
        cache_off(model),
        in_chunks as whole_logits,
        traced.run,
        meter,
        SumsInPlace(),
        timer,
        replaced_forwards(layers, stub),
        under_loss_parallel(split_loss),
        edges(model),
        ends.watching(model) if chunks is None else nullcontext(),
    ):
        with traced.run.casting():
            output = model(*traced.args, **traced.kwargs)
        forward_end = len(meter.log)
        ends.returned([""], output)
        frozen = not _given(traced) and not any(p.requires_grad for p in model.parameters())
        # A stage of a pipeline that trains nothing brings a function, which gives a gradient all the same.
        loss = None if frozen and step.loss_fn is None else loss_of(output, step.loss_fn)
        if loss is None or not loss.requires_grad:
            reason = "no parameter trains" if frozen else "its loss has no gradient"
            raise ValueError(
                f"{type(model).__name__} cannot be planned: {reason}. Set requires_grad of parameters to train before "
                "the plan is made. Where nothing trains, nothing is saved: use ac='none'."
            )
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
    # In the order of the parameters: FSDP2 reduces them so, and holds the last gradient until then.
    grads = {name: t.grad for name, t in state.items() if named[t] == name and t.grad is not None}
    numbers = {name: meter.number(grad) for name, grad in grads.items()}
    whole = tuple(whole_logits)
    return OuterEvents(
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
        meter.makers,
        halves,
        used=tuple(map(frozenset, used)),
        layouts=tuple(layouts),
        whole_logits=whole,
        own_loss=own_loss,
        in_chunks=chunks is not None and not whole,
        work=tuple(timer.work),
        dropped=frozenset(gone - {back.layer for back in backs}),
    )


class _Ends:
    """Positions in the log where modules return, and where the gradients of their outputs are there."""

    def __init__(self, meter: TracedBytes) -> None:
        self.meter = meter
        self.returns: dict[str, int] = {}
        self.goes_back: dict[str, int] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch all modules of `model` that have parameters of their own."""
        with ExitStack() as stack:
            for prefix, module in model.named_modules():
                before = f"{prefix}." if prefix else ""
                if names := [f"{before}{name}" for name, _ in module.named_parameters(recurse=False)]:
                    hook = functools.partial(self.returned, names)
                    stack.callback(module.register_forward_hook(hook).remove)
            yield

    def returned(self, names: Sequence[str], *call: Any) -> None:
        """Note that a module with these parameters has returned the last part of its `call`."""
        self.returns.update(dict.fromkeys(names, len(self.meter.log)))
        for tensor in tensors_in(call[-1]):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._back, names))

    def _back(self, names: Sequence[str], grad: torch.Tensor) -> None:
        for name in names:
            self.goes_back.setdefault(name, len(self.meter.log))


def _given(traced: ModelTrace) -> list[torch.Tensor]:
    """Return the tensors of the model's input that get a gradient: the hidden states that a pipeline's stage is sent."""
    return [t for t in tensors_in((traced.args, traced.kwargs)) if t.requires_grad]


@dataclass(eq=False)
class LayerStub:
    """One call of a stand-in."""

    position: int
    meter: TracedBytes
    backs: list[BackwardCall]  # Receives its backward, when it has run.
    used: set[int]
    layouts: dict[int, tuple[int, ...]]  # Strides of the gradients that it gets, where they are not in rows.
    places: list[int] = field(default_factory=list)  # Positions of its tensors in the layer's output.
    inputs: list[Place] = field(default_factory=list)  # Places in its call of the inputs that get a gradient.
    # Tensors that the layer shares with others, and holds till its backward.
    held: list[torch.Tensor] = field(default_factory=list)


class _StubbedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: LayerStub, like: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.layouts = [(t.shape, t.dtype) for t in inputs]
        return tuple(torch.empty_like(t) for t in like)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call, begin = ctx.call, len(ctx.call.meter.log)
        received = {place: grad for place, grad in zip(call.places, grads) if grad is not None}
        numbers = {place: call.meter.number(grad) for place, grad in received.items()}
        call.used.update(received)
        call.layouts.update(
            (place, grad.stride())
            for place, grad in received.items()
            if not grad.is_contiguous() and 0 not in grad.stride()
        )
        call.held.clear()
        input_grads = [torch.empty(shape, dtype=dtype) for shape, dtype in ctx.layouts]  # in rows, as kernels make them
        of_inputs = {place: call.meter.number(grad) for place, grad in zip(call.inputs, input_grads)}
        call.backs.append(BackwardCall(call.position, begin, len(call.meter.log), numbers, of_inputs))
        return None, None, *input_grads


def stand_in(
    kind: BlockKind, args: tuple, kwargs: dict[str, Any], call: LayerStub, held: frozenset[Place]
) -> tuple[Any, Any, bool]:
    """Return the output of a layer that is not run, its records for recorders, and whether it has a backward.

    Args:
        kind, args, kwargs: the layer, and how it is called.
        call: is completed; the backward holds it.
        held: places of the shared inputs that it holds.
    """
    tensors = by_argument(args, kwargs)
    outputs = tensors_in(kind.output)
    call.places = [place for place in range(len(outputs)) if place not in kind.passed]
    wanted = [outputs[place] for place in call.places] + tensors_in(kind.records)
    call.inputs = [place for place, t in tensors.items() if t.requires_grad]
    inputs = [tensors[place] for place in call.inputs]
    if not inputs and any(t.requires_grad for t in wanted):
        inputs = [torch.zeros((), requires_grad=True)]  # the layer's own parameters train, its input does not
    if inputs:
        call.held = [tensor for place, tensor in tensors.items() if place in held]
        replacements = iter(_StubbedLayer.apply(call, wanted, *inputs))
    else:
        replacements = map(torch.empty_like, wanted)
    output = kind.output_with(lambda _: next(replacements), args, kwargs)
    return output, map_tensors(lambda _: next(replacements), kind.records), bool(inputs)


def loss_of(output: Any, loss_fn: Callable[[Any], torch.Tensor] | None = None) -> torch.Tensor:
    """Return the number to run backward from: ``loss_fn(output)``, else a ``loss`` in the output, else a cross entropy.

    The cross entropy is of the first tensor that has a gradient. It is in float32 and shifted by one token, as most loops
    outside of a model compute it, and holds no less than others do.
    """
    if loss_fn is not None:
        return _told_loss(output, loss_fn)
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    first = next((t for t in tensors_in(output) if t.requires_grad), None)
    if first is None:
        raise ValueError("The model's output has no loss and no tensor with a gradient; give StepSpec(loss_fn=...).")
    if first.dim() < 2:
        return first.float().sum()
    scores = (first[:, :-1] if first.dim() > 2 and first.shape[1] > 1 else first).float()
    labels = torch.zeros(scores.shape[:-1].numel(), dtype=torch.long, device=scores.device)
    return nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels)


def _told_loss(output: Any, loss_fn: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    with without_values(
        "StepSpec.loss_fn cannot be planned for: it",
        otherwise=lambda error: (
            f"StepSpec.loss_fn failed on the model's output ({type(output).__name__}, without values, on the CPU): "
            f"{in_a_line(error)}. It is called with the output alone; labels it uses must be on the CPU."
        ),
    ):
        loss = loss_fn(output)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise ValueError(f"StepSpec.loss_fn returned {loss!r}; it must return one number.")
    return loss
