"""Mixed precision where FSDP2 is not there to cast: autocast."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def check_autocast(model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Raise ValueError where autocast cannot make `model` compute in `param_dtype`, as FSDP2's cast could.

    Autocast lowers to bfloat16 or float16 and nothing else; it would leave the model as it is, silently.
    """
    if param_dtype in (None, torch.bfloat16, torch.float16):
        return
    stored = {p.dtype for p in model.parameters() if p.is_floating_point()} - {param_dtype}
    if param_dtype is not torch.float32 or stored:
        raise ValueError(
            f"param_dtype is {param_dtype}, and without FSDP2 the model computes under autocast, which lowers float32 to "
            f"bfloat16 or float16 only; parameters are {', '.join(sorted(map(str, stored))) or param_dtype}. Leave "
            f"param_dtype out and convert the model first: model.to({param_dtype})."
        )


def autocast_forward(
    model: nn.Module, device_type: str, param_dtype: torch.dtype | None, output_dtype: torch.dtype | None
) -> None:
    """Run ``model.forward`` under autocast to `param_dtype` and cast its floating-point outputs to `output_dtype`.

    Changes `model` in place; parameters keep their dtype. Does nothing where both dtypes are None. Ops that autocast
    keeps in float32 (softmax, losses, most norms) stay there: this is more precise than FSDP2's cast of everything.
    """
    lowers = param_dtype is not None and param_dtype is not torch.float32
    if not lowers and output_dtype is None:
        return
    # The plain function where there is one, and bound again below, so that copy.deepcopy binds a copy's forward to it.
    inner = getattr(model.forward, "__func__", None) or _ignoring_self(model.forward)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=param_dtype if lowers else None, enabled=lowers):
            output = inner(self, *args, **kwargs)
        return output if output_dtype is None else _cast(output, output_dtype)

    model.forward = types.MethodType(forward, model)


def _ignoring_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that somebody set on the instance as a bare function, callable as a method."""
    return functools.wraps(function)(lambda self, *args, **kwargs: function(*args, **kwargs))


def _cast(output: Any, dtype: torch.dtype) -> Any:
    """`output` with every floating-point tensor in it as `dtype`; dictionaries (ModelOutput too) are changed in place."""
    if isinstance(output, torch.Tensor):
        return output.to(dtype) if output.is_floating_point() else output
    if isinstance(output, dict):
        for key in list(output):
            output[key] = _cast(output[key], dtype)
        return output
    if isinstance(output, tuple | list):
        items = [_cast(item, dtype) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output
