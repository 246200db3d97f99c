"""What stands for the output of a skipped call in a replay: shape, strides, dtype and device of a tensor, no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.tensors import map_tensors, tensors_in
from nemo_like.torch_compat import shape_only


class Placeholder(Tensor):
    """Answers what can be asked of a tensor without its numbers.

    So ``x.to(placeholder.dtype)``, ``x.type_as(placeholder)`` and ``torch.ones(..., device=placeholder.device)`` give what
    they gave in forward. Whatever computes with it is answered by the replay's dispatch mode.
    """

    __torch_function__ = nn.Parameter.__torch_function__  # PyTorch's own: functions are not overridden

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} was given a tensor that the plan skips, outside of the replay that skips it")


def placeholder(like: Tensor, device: torch.device | None = None) -> Placeholder:
    """One with the layout of `like`, on `device` (default: that of `like`)."""
    made: Placeholder = shape_only(Placeholder, tuple(like.shape), like.dtype, device or like.device, like.stride())
    return made


def beside_placeholders(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """What `func` returns, as placeholders, from the shapes of its arguments alone.

    A placeholder that `func` writes into is returned itself.
    """
    shapes: dict[int, Tensor] = {}
    given: dict[int, Placeholder] = {}

    def shape_of(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in shapes:
            shapes[id(tensor)] = made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            if isinstance(tensor, Placeholder):
                given[id(made)] = tensor
        return shapes[id(tensor)]

    first = next(t for t in tensors_in((args, kwargs)) if isinstance(t, Placeholder))
    device = kwargs.get("device")
    target = first.device if device is None else torch.device(device)
    if device is not None:
        kwargs = kwargs | {"device": torch.device("meta")}
    made = func(*map_tensors(shape_of, args), **map_tensors(shape_of, kwargs))
    return map_tensors(lambda t: given[id(t)] if id(t) in given else placeholder(t, target), made)
