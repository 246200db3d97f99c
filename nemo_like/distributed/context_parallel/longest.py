"""Rotary embeddings whose frequencies follow the longest position of their call (longrope, dynamic).

A rank's part has a longest position of its own, and that of padding is longer than any of the sequence. So what makes such
embeddings is given this rank's positions, none beyond the longest of the whole sequence, and that one behind them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.distributed.context_parallel.parts import CURRENT, StackCall
from nemo_like.layers.structure import class_of
from nemo_like.transformers_compat import rope_follows_length

_POSITIONS = "position_ids"


def reads_the_longest(module: nn.Module) -> bool:
    """Whether `module` makes something of positions alone, and reads the longest of them."""
    forward = inspect.unwrap(class_of(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or _POSITIONS not in code.co_varnames or any(True for _ in module.parameters()):
        return False
    return rope_follows_length(module) or not {"max", "amax"}.isdisjoint(code.co_names)


class LongestPosition:
    """The hooks of a module for which `reads_the_longest` holds."""

    def __init__(self, module: nn.Module) -> None:
        self._names = tuple(inspect.signature(class_of(module).forward).parameters)[1:]
        self._tokens: list[int | None] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pre-hook."""
        call, given = CURRENT.get(), dict(zip(self._names, args)) | kwargs
        positions = given.get(_POSITIONS)
        if call is None or call.parts.idle or not isinstance(positions, Tensor):
            self._tokens.append(None)
            return None
        self._tokens.append(positions.shape[-1])
        return (), given | {_POSITIONS: _with_longest(positions, call)}

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook, also after an exception."""
        tokens = self._tokens.pop() if self._tokens else None
        if tokens is None or output is None:
            return None

        def own(made: Any) -> Any:
            if isinstance(made, tuple):
                return tuple(map(own, made))
            if not isinstance(made, Tensor) or made.ndim < 2 or made.shape[-2] != tokens + 1:
                raise NotImplementedError(
                    f"cp gives {type(module).__name__} the longest position of the whole sequence behind the {tokens} of a "
                    f"part, and what it makes of them ({_shape(made)}) has no dim for it before its last. Use cp=1."
                )
            return made.narrow(-2, 0, tokens)

        return own(output)


def _with_longest(positions: Tensor, call: StackCall) -> Tensor:
    if isinstance(call.longest, Tensor):
        longest = call.longest.to(positions)
    else:
        longest = torch.full((), call.longest, dtype=positions.dtype, device=positions.device)
    return torch.cat([positions.minimum(longest), longest.expand(*positions.shape[:-1], 1)], -1)


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
