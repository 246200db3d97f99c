"""Torch's attention function, and learned positions that are counted from zero inside."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like.distributed.context_parallel.attention import plain_attention
from nemo_like.distributed.context_parallel.parts import CURRENT, Parts
from nemo_like.layers.structure import class_of
from nemo_like.torch_compat import is_fake


class AttentionHooks:
    """`scaled_dot_product_attention` is another function while the model runs; a replay gets the one of its forward."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._attend = parts, plain_attention(parts)
        self._before: list[Any] = []

    def before(self, module: nn.Module, args: Any) -> None:
        self._before.append(F.scaled_dot_product_attention)
        if not self._parts.idle:
            F.scaled_dot_product_attention = self._attend

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._before:
            F.scaled_dot_product_attention = self._before.pop()


class PositionHook:
    """A forward pre-hook of an `nn.Embedding`: ``arange(T)``, with which models look positions up, becomes this rank's."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        call = CURRENT.get()
        if call is None or not args or not isinstance(args[0], Tensor):
            return None
        index: Tensor = args[0]
        length = index.shape[-1] if index.ndim else 0
        if index.numel() != length or is_fake(index) or not torch.equal(
            index.reshape(-1), torch.arange(length, device=index.device, dtype=index.dtype)
        ):  # fmt: skip
            return None
        return (
            self._parts.positions(length * self._parts.ranks, index.device).view_as(index).to(index.dtype),
            *args[1:],
        )


def takes_positions(module: nn.Module) -> bool:
    """Whether `module` is a table of positions that counts them where it is given none (BART and its kin)."""
    return isinstance(module, nn.Embedding) and "position_ids" in inspect.signature(class_of(module).forward).parameters


class GivenPositions:
    """A forward pre-hook of a table for which `takes_positions` holds: it is given this rank's."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if CURRENT.get() is None or self._parts.idle or not args or not isinstance(args[0], Tensor) or args[0].ndim < 2:
            return None
        whole = args[0].shape[1] * self._parts.ranks
        return args, kwargs | {"position_ids": self._parts.positions(whole, args[0].device)}
