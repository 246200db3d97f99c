"""Looking up the rows that one rank holds of an embedding that is cut by rows (the vocabulary).

torch's `RowwiseParallel` makes the gradient of the whole table on every rank, of which each then takes its part. Here a
rank makes that of its own rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial


def looks_up_own_rows(module: nn.Module) -> bool:
    """Return whether `look_up_own_rows` knows what the forward of `module` does. It must be that of
    `torch.nn.Embedding` itself, with a dense gradient, and without ``max_norm``, which changes rows in forward."""
    plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return plain and not module.sparse and module.max_norm is None


def look_up_own_rows(module: nn.Module) -> None:
    """Let the forward of `module`, whose weight is a DTensor cut on dim 0 over a mesh of one axis, look up this rank's rows
    itself: its output is then a partial sum, as torch's. Of modules that are not known (`looks_up_own_rows`), nothing."""
    if looks_up_own_rows(module):
        assert isinstance(module, nn.Embedding)
        module.forward = _Lookup(module)  # type: ignore[method-assign]


def own_rows(weight: Tensor, ids: Tensor, first: int, padding_idx: int | None = None, by_count: bool = False) -> Tensor:
    """The rows of `ids` in a part of a table, and zeros where another part has them.

    Args:
        weight: (rows, D), the part.
        ids: any shape (...), numbers of rows of the whole table.
        first: the number of the part's first row.
        padding_idx: the id that gives no gradient, as in `torch.nn.Embedding`.
        by_count: divide the gradient of a row by how often it is taken (``scale_grad_by_freq``).

    Returns:
        (..., D)
    """
    return _OwnRows.apply(weight, ids, first, padding_idx, by_count)


class _Lookup:
    """The forward of an embedding that is cut by rows; ids as a DTensor that every rank has whole."""

    def __init__(self, module: nn.Embedding) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        module, ids = self.module, input.to_local() if isinstance(input, DTensor) else input
        weight = module.weight
        assert isinstance(weight, DTensor)
        mesh, part = weight.device_mesh, weight.to_local()
        first = mesh.get_local_rank() * part.shape[0]  # the ranks divide the rows
        rows = own_rows(part, ids, first, module.padding_idx, module.scale_grad_by_freq)
        return DTensor.from_local(rows, mesh, [Partial()], run_check=False)


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, first: int, padding_idx: int | None, by_count: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.options = first, len(weight), padding_idx, by_count
        places, others = _places(ids, first, len(weight))
        rows = F.embedding(places.masked_fill_(others, 0), weight)
        return rows.masked_fill_(others[..., None], 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        (ids,) = ctx.saved_tensors
        first, count, padding_idx, by_count = ctx.options
        places, others = _places(ids, first, count)
        if padding_idx is not None:
            others |= ids == padding_idx
        # Tokens of other ranks have a row of their own, behind this rank's, that nothing is added to.
        places.masked_fill_(others, count)
        grads = torch.ops.aten.embedding_dense_backward(grad, places, count + 1, count, by_count)
        return grads[:count], None, None, None, None


def _places(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return where the rows of `ids` are in a part, and which of them are not."""
    places = ids - first
    return places, (places < 0) | (places >= count)
