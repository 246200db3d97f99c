"""What a model does around its layers: embedding, position tables, norm, head and loss, as a curve of live bytes.

The model runs forward and backward on fake tensors with every layer replaced by a stand-in that hands on tensors of the
right shape and keeps nothing. Between two layers only two numbers count: the peak, and what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_like.module_tree import bare
from nemo_like.planning.capture import ModelTrace, replaced_forwards
from nemo_like.planning.fake import cache_off
from nemo_like.planning.meter import LiveBytes
from nemo_like.planning.recorded import record_again
from nemo_like.tensors import tensors_in
from nemo_like.torch_compat import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Stretch:
    """The time between two layers."""

    peak: int
    """Most bytes alive during it."""
    left: int
    """Bytes alive at its end, when the next layer is called: its inputs, or the gradients of its outputs, among them."""


@dataclass(frozen=True)
class OuterMemory:
    """A step of everything but the layers. Parameters and the step's input are not counted."""

    forward: tuple[Stretch, ...]
    """Before each layer call; one entry per call."""
    head: Stretch
    """From the last layer's forward to the model's output: norm, head, and the loss where the model computes it."""
    middle: Stretch
    """From there to the last layer's backward: the loss where the model does not compute it, and the head's backward."""
    backward: tuple[Stretch, ...]
    """Between the layers' backwards, from the last layer to the first; one less than there are calls."""
    tail: Stretch
    """After the first layer's backward."""
    param_grads: dict[str, int]
    """Gradients of outer parameters by name, bytes; they are alive from `middle` on."""


def loss_of(output: Any, loss_fn: Callable[[Any], torch.Tensor] | None = None) -> torch.Tensor:
    """The number to run backward from: ``loss_fn(output)``, else a ``loss`` in the output, else the sum of its first
    tensor that has a gradient."""
    if loss_fn is not None:
        return loss_fn(output)
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    first = next((t for t in tensors_in(output) if t.requires_grad), None)
    if first is None:
        raise ValueError("The model's output has no loss and no tensor with a gradient; give a loss_fn.")
    return first.float().sum()


def outer_memory(
    model: nn.Module, layers: Sequence[Any], traced: ModelTrace, loss_fn: Callable[[Any], torch.Tensor] | None = None
) -> OuterMemory:
    """Run the model's step around its layers on fake tensors and watch its memory."""
    state = {
        name: t.detach().requires_grad_(t.requires_grad) if isinstance(t, nn.Parameter) else t
        for name, t in _untied(traced.state).items()
    }
    meter = LiveBytes([*state.values(), *tensors_in((traced.args, traced.kwargs))])
    forward: list[Stretch] = []
    backward: list[Stretch] = []
    kinds = {id(call.module): call.kind for call in traced.calls}

    def stub(layer: Any, _: Callable) -> Callable:
        kind = traced.kinds[kinds[id(bare(layer.module))]] if id(bare(layer.module)) in kinds else None

        def standing_in(*args: Any, **kwargs: Any) -> Any:
            assert kind is not None, "a layer runs that did not run when it was traced"
            forward.append(Stretch(meter.lap(), meter.live))
            output, records = _stand_in((kind.output, kind.records), (args, kwargs), meter, backward)
            record_again(bare(layer.module), records)
            return output

        return standing_in

    with cache_off(model), traced.run, meter, replaced_forwards(layers, stub):
        with traced.run.casting():
            output = torch.func.functional_call(model, state, traced.args, dict(traced.kwargs))
        head = Stretch(meter.lap(), meter.live)
        loss = loss_of(output, loss_fn)
        del output  # as a training loop should: the logits would stay through backward
        loss.backward()
        tail = Stretch(meter.lap(), meter.live)
    grads = {name: t.grad.untyped_storage().nbytes() for name, t in state.items() if t.grad is not None}
    if len(backward) != len(forward):  # layers without gradients: a frozen tower has no backward
        backward = backward + [Stretch(tail.peak, tail.left)] * (len(forward) - len(backward))
    return OuterMemory(tuple(forward), head, backward[0] if backward else tail, tuple(backward[1:]), tail, grads)


def _untied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One name per tensor: `functional_call` ties the others itself."""
    seen: set[int] = set()
    return {name: t for name, t in state.items() if not (id(t) in seen or seen.add(id(t)))}  # type: ignore[func-returns-value]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, meter: LiveBytes, laps: list[Stretch], like: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
        ctx.meter, ctx.laps = meter, laps
        ctx.layouts = [(t.shape, t.stride(), t.dtype) for t in inputs]
        return tuple(torch.empty_like(t) for t in like)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.laps.append(Stretch(ctx.meter.lap(), ctx.meter.live))
        made = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in ctx.layouts]
        return None, None, None, *made


def _stand_in(output: Any, call: Any, meter: LiveBytes, laps: list[Stretch]) -> Any:
    leaves, spec = tree_flatten(output)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    inputs = [t for t in tensors_in(call) if t.requires_grad]
    wanted = [leaves[i] for i in places]
    if not inputs and any(t.requires_grad for t in wanted):
        inputs = [torch.zeros((), requires_grad=True)]  # the layer's own parameters train, its input does not
    if inputs:
        made = _Layer.apply(meter, laps, wanted, *inputs)
    else:
        made = [torch.empty_like(t) for t in wanted]
    leaves = list(leaves)
    for i, tensor in zip(places, made):
        leaves[i] = tensor
    return tree_unflatten(leaves, spec)
