"""What torch's functional collectives make of a tensor, on fake tensors: nothing is sent."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from nemo_like._util.op_lookup import find_op

_GROUP = "planned"


def summed(x: Tensor) -> Tensor:
    """The sum of all ranks' `x`."""
    return _sent("all_reduce", x, "sum")


def gathered(x: Tensor, ranks: int, dim: int) -> Tensor:
    """All ranks' `x`, put together along `dim`: they arrive along the first dimension."""
    whole = _sent("all_gather_into_tensor", x, ranks)
    return whole if dim == 0 else torch.cat(whole.chunk(ranks, 0), dim)


def scattered(x: Tensor, ranks: int, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of all ranks' `x`: it is sent along the first dimension."""
    ordered = x if dim == 0 else torch.cat(x.chunk(ranks, dim), 0)
    return _sent("reduce_scatter_tensor", ordered, "sum", ranks)


def _sent(name: str, x: Tensor, *how: object) -> Tensor:
    op = find_op(f"_c10d_functional.{name}.default")
    if op is None:
        raise RuntimeError(
            f"This torch {torch.__version__} has no collective {name!r} to plan tensor parallelism with."
        )
    return cast("Tensor", op(x, *how, _GROUP))
