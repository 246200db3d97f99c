"""What stands for a layer while the model around its layers runs: its shapes, and nothing that it would hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_like.planning.kinds import Kind, by_argument
from nemo_like.tensors import map_tensors, tensors_in


@dataclass(eq=False)
class LayerStub:
    """One call of a stand-in."""

    lap: Callable[[Sequence[torch.Tensor | None]], Callable[[], None]]
    """To be called when its backward begins, with its gradients; what it returns, when that has made others."""
    used: set[int]
    layouts: dict[int, tuple[int, ...]]
    """Strides of the gradients that it gets, where they are not in rows."""
    places: list[int]
    """Where in the layer's output its tensors stand."""
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
        done = call.lap(grads)
        call.used.update(place for place, grad in zip(call.places, grads) if grad is not None)
        call.layouts.update(
            (place, grad.stride())
            for place, grad in zip(call.places, grads)
            if grad is not None and not grad.is_contiguous() and 0 not in grad.stride()
        )
        call.held.clear()
        made = [torch.empty(shape, dtype=dtype) for shape, dtype in ctx.layouts]  # in rows, as kernels make them
        done()
        return None, None, *made


def stand_in(
    kind: Kind,
    args: tuple,
    kwargs: dict[str, Any],
    lap: Callable[[Sequence[torch.Tensor | None]], Callable[[], None]],
    used: set[int],
    layouts: dict[int, tuple[int, ...]],
    regions: bool = True,
) -> tuple[Any, Any, weakref.ref[LayerStub] | None]:
    """The output of a layer that is not run, what recorders in it would have seen, and what its backward will hold.

    regions: whether it is checkpointed, so that it holds all that it is called with.
    """
    places_held = kind.shared_at if regions else kind.kept_at
    given = tensors_in((args, kwargs))
    outputs = tensors_in(kind.output)
    places = [place for place in range(len(outputs)) if place not in kind.passed]
    wanted = [outputs[place] for place in places] + tensors_in(kind.records)
    inputs = [t for t in given if t.requires_grad]
    if not inputs and any(t.requires_grad for t in wanted):
        inputs = [torch.zeros((), requires_grad=True)]  # the layer's own parameters train, its input does not
    if inputs:
        held = [tensor for place, tensor in by_argument(args, kwargs).items() if place in places_held]
        call = LayerStub(lap, used, layouts, places, held)
        standing = weakref.ref(call)
        made = iter(_StubbedLayer.apply(call, wanted, *inputs))
    else:
        made, standing = map(torch.empty_like, wanted), None
    output = kind.output_with(lambda _: next(made), args, kwargs)
    return output, map_tensors(lambda _: next(made), kind.records), standing
