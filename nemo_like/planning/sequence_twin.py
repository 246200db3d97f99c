"""Sequence parallelism on the twin of one tensor-parallel rank: residuals cut along the sequence, on fake tensors.

What `nemo_like.distributed.tensor.apply` installs, with collectives of which nothing is sent: a stack of layers is given
this rank's part of the sequence, attention and MLP the whole of it, and a rowwise sum goes out cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.distributed.tensor.apply import SequencePlaces, on_first_tensor
from nemo_like.planning.planned_collectives import gathered, scattered

_SEQUENCE = 1
"""The dimension of (B, S, D)."""


def cut_sequences(twin: nn.Module, places: SequencePlaces, tp: int) -> None:
    """Cut the residual stream of `twin` where `places` say, which are those of the model that it is a twin of."""
    model = _LayersInModel(twin)
    for name in places.first:
        model.before(twin.get_submodule(name), on_first_tensor(lambda x: _PlannedCut.apply(x, tp)))
    for name in places.last:
        model.after(twin.get_submodule(name), lambda x: PlannedWhole.apply(x, tp, False))
    for name, keep in places.owners.items():
        twin.get_submodule(name).register_forward_pre_hook(
            on_first_tensor(functools.partial(_whole, ranks=tp, terms=keep)), with_kwargs=True
        )


def _whole(x: Tensor, ranks: int, terms: bool) -> Tensor:
    return PlannedWhole.apply(x, ranks, terms)


class _LayersInModel:
    """Hooks of layers that act while the whole model runs: a planner runs layers by themselves, too."""

    def __init__(self, model: nn.Module) -> None:
        self.depth = 0
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        self.depth += 1

    def _leave(self, *_: Any) -> None:
        self.depth -= 1

    def __deepcopy__(self, memo: dict[int, Any]) -> _LayersInModel:
        return self

    def before(self, layer: nn.Module, change: Callable[..., Any]) -> None:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            return change(module, args, kwargs) if self.depth else None

        layer.register_forward_pre_hook(hook, with_kwargs=True)

    def after(self, layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            if not self.depth:
                return None
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        layer.register_forward_hook(hook)


class _PlannedCut(torch.autograd.Function):
    """(B, S, D) that all ranks have, to this rank's (B, S / ranks, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.chunk(ranks, _SEQUENCE)[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.ranks, _SEQUENCE), None


class PlannedWhole(torch.autograd.Function):
    """(B, S / ranks, D) of each rank, to (B, S, D) on all. `terms`: each rank's gradient is one of a sum; else all have the
    same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, terms: bool) -> Tensor:
        ctx.ranks, ctx.terms = ranks, terms
        return gathered(x, ranks, _SEQUENCE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        own = scattered(grad, ctx.ranks, _SEQUENCE) if ctx.terms else grad.chunk(ctx.ranks, _SEQUENCE)[0].clone()
        return own, None, None


class PlannedCutSum(torch.autograd.Function):
    """A term of a sum, (B, S, D), to this rank's part of the sum, (B, S / ranks, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return scattered(x, ranks, _SEQUENCE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.ranks, _SEQUENCE), None
