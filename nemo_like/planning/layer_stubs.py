"""What stands for a layer while the model around its layers runs: its shapes, and nothing that it would hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nemo_like._util.tensors import Place, by_argument, map_tensors, tensors_in
from nemo_like.planning.kinds import Kind

Lap = Callable[[Mapping[int, torch.Tensor]], Callable[[Mapping[Place, torch.Tensor]], None]]
"""To be called when a stand-in's backward begins, with its gradients by the position of the output; what it returns, with
those that it has made by the place of the input."""


@dataclass(eq=False)
class LayerStub:
    """One call of a stand-in."""

    lap: Lap
    used: set[int]
    layouts: dict[int, tuple[int, ...]]
    """Strides of the gradients that it gets, where they are not in rows."""
    places: list[int]
    """Where in the layer's output its tensors stand."""
    inputs: list[Place]
    """Where in its call those of its inputs stand that get a gradient."""
    held: list[torch.Tensor]
    """What the layer shares with others, and holds till its backward."""


class _StubbedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: LayerStub, like: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.layouts = [(t.shape, t.dtype) for t in inputs]
        return tuple(torch.empty_like(t) for t in like)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call = ctx.call
        done = call.lap({place: grad for place, grad in zip(call.places, grads) if grad is not None})
        call.used.update(place for place, grad in zip(call.places, grads) if grad is not None)
        call.layouts.update(
            (place, grad.stride())
            for place, grad in zip(call.places, grads)
            if grad is not None and not grad.is_contiguous() and 0 not in grad.stride()
        )
        call.held.clear()
        made = [torch.empty(shape, dtype=dtype) for shape, dtype in ctx.layouts]  # in rows, as kernels make them
        done(dict(zip(call.inputs, made)))
        return None, None, *made


def stand_in(
    kind: Kind,
    args: tuple,
    kwargs: dict[str, Any],
    lap: Lap,
    used: set[int],
    layouts: dict[int, tuple[int, ...]],
    regions: bool = True,
) -> tuple[Any, Any, weakref.ref[LayerStub] | None]:
    """The output of a layer that is not run, what recorders in it would have seen, and what its backward will hold.

    regions: whether it is checkpointed, so that it holds all that it is called with.
    """
    places_held = kind.shared_at if regions else kind.kept_at
    given = by_argument(args, kwargs)
    outputs = tensors_in(kind.output)
    places = [place for place in range(len(outputs)) if place not in kind.passed]
    wanted = [outputs[place] for place in places] + tensors_in(kind.records)
    places_in = [place for place, t in given.items() if t.requires_grad]
    inputs = [given[place] for place in places_in]
    if not inputs and any(t.requires_grad for t in wanted):
        inputs = [torch.zeros((), requires_grad=True)]  # the layer's own parameters train, its input does not
    if inputs:
        held = [tensor for place, tensor in given.items() if place in places_held]
        call = LayerStub(lap, used, layouts, places, places_in, held)
        standing = weakref.ref(call)
        made = iter(_StubbedLayer.apply(call, wanted, *inputs))
    else:
        made, standing = map(torch.empty_like, wanted), None
    output = kind.output_with(lambda _: next(made), args, kwargs)
    return output, map_tensors(lambda _: next(made), kind.records), standing
