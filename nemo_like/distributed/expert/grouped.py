"""The computation of experts, on rows that are sorted by expert and counted on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.torch_compat import grouped_mm
from nemo_like.transformers_compat import GATE

Compute = Callable[[Tensor, Sequence[int]], Tensor]
"""Rows (R, D), sorted by expert, and how many each expert has → (R, D)."""

_KNOWN = frozenset(("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"))


def is_understood(module: nn.Module) -> bool:
    """Return whether `module` is made as transformers makes experts, so that `fused_mlp` computes what its own forward
    does."""
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    if (
        _has_more_inside(module)
        or not names <= _KNOWN
        or "down_proj" not in names
        or ("gate_up_proj" in names) == ("up_proj" in names)
    ):
        return False
    return hasattr(module, "is_transposed") or zero_rows_stay_zero(module)


def zero_rows_stay_zero(module: nn.Module) -> bool:
    """Return whether `module` is a gated MLP without biases as in transformers' Llama 4, which gives 0 for a row of
    zeros.

    Such a module is called with a row for every expert and token, most of them zero, and needs none of these.
    """
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    activation = getattr(module, "act_fn", None)
    if names != {"gate_up_proj", "down_proj"} or not callable(activation) or hasattr(module, "is_transposed"):
        return False
    if _has_more_inside(module) or not type(module).forward.__module__.startswith("transformers."):
        return False  # names tell little of what a module that is not known computes
    up, down = (module.get_parameter(name).shape for name in ("gate_up_proj", "down_proj"))
    return up[1:] == (down[2], 2 * down[1]) and float(activation(torch.zeros(1))) == 0.0


def _has_more_inside(module: nn.Module) -> bool:
    """Return whether there is more in `module` than weights of its own and an activation, such as a norm or dropout."""
    others = any(name != "act_fn" for name, _ in module.named_children())
    return (
        others
        or any("." in name for name, _ in module.named_parameters())
        or any(buffer is not None for buffer in module._buffers.values())
    )


def expert_of_rows(ends: Tensor, rows: int) -> Tensor:
    """(R,) the expert of each row, from where the rows of each end; waits for nothing."""
    return torch.bucketize(torch.arange(rows, device=ends.device, dtype=ends.dtype), ends, right=True)


def fused_mlp(
    module: nn.Module, weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int], ends: Tensor
) -> Tensor:
    """The experts' MLPs: (R, D) → (R, D), every row by its expert.

    Args:
        module: for which `is_understood` holds.
        weights: its parameters, of this rank's experts.
        rows: sorted by expert. counts: rows of each expert, on the host; ends: where they end, int32 on the device.
    """
    transposed = getattr(module, "is_transposed", True)
    up = "gate_up_proj" if "gate_up_proj" in weights else "up_proj"
    # (experts, in, out), as a product of rows with it needs
    matrix: Callable[[str], Tensor] = lambda name: weights[name] if transposed else weights[name].transpose(1, 2)  # noqa: E731
    hidden = _plus_bias(grouped_mm(rows, matrix(up), counts, ends), weights.get(f"{up}_bias"), ends)
    hidden = _activated(module, hidden, gated=up == "gate_up_proj")
    return _plus_bias(grouped_mm(hidden, matrix("down_proj"), counts, ends), weights.get("down_proj_bias"), ends)


def _plus_bias(rows: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    if bias is None:
        return rows
    return rows + bias[expert_of_rows(ends, rows.shape[0])]


def _activated(module: Any, hidden: Tensor, gated: bool) -> Tensor:
    if not gated:
        return module.act_fn(hidden)
    own = getattr(module, GATE, None)  # what transformers lets a family override
    if own is not None:
        return own(hidden)
    gate, up = hidden.chunk(2, dim=-1)
    return up * module.act_fn(gate)
