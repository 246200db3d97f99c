"""Torch's attention function, and learned positions that are counted from zero inside."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like.distributed.context_parallel import layout
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


_TABLE = re.compile(r"position\w*embeddings?$", re.IGNORECASE)


def counts_along(module: nn.Module) -> bool:
    """Whether `module` makes the embeddings of positions, and counts these along its input where it is given none (BART,
    Marian, M2M-100)."""
    cls = class_of(module)
    return _TABLE.search(cls.__name__) is not None and cls.forward is not nn.Embedding.forward


class OwnPositions:
    """The hooks of a module for which `counts_along` holds, in a stack that takes no positions: it is given this rank's;
    where it takes none itself, it sees whole sequences, and its output is cut."""

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        self._parts = parts
        self._names = tuple(inspect.signature(class_of(module).forward).parameters)[1:]
        self._padded: list[int | None] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pre-hook."""
        call = CURRENT.get()
        self._padded.append(None)
        if call is None or self._parts.idle:
            return None
        given = dict(zip(self._names, args)) | kwargs
        padded = layout.padded_length(call.length, self._parts.ranks)
        if "position_ids" in self._names:
            device = next(module.parameters()).device
            return (), given | {"position_ids": self._parts.positions(padded, device)}
        self._padded[-1] = padded
        return (), {name: self._whole(value, padded) for name, value in given.items()}

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook, also after an exception."""
        padded = self._padded.pop() if self._padded else None
        if padded is None or not isinstance(output, Tensor):
            return None
        dim = output.ndim - 2
        if dim < 0 or output.shape[dim] != padded:
            raise NotImplementedError(
                f"cp gives {type(module).__name__} whole sequences of {padded} tokens to count positions in, and its output "
                f"{tuple(output.shape)} has no such dim before its last. Use cp=1."
            )
        return self._parts.cut(output, dim)

    def _whole(self, value: Any, padded: int) -> Any:
        part = padded // self._parts.ranks
        if isinstance(value, torch.Size) and len(value) > 1 and value[1] == part:
            return torch.Size((value[0], padded, *value[2:]))
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == part:
            return self._parts.gather(value.detach(), 1)
        return value
