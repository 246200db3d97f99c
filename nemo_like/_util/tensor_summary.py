"""A tensor as three float64 numbers: enough to tell that another one differs, without holding either.

Each element is multiplied by a fixed sign, which depends on its position, and the products are summed. Between two
tensors such a signed sum differs by about the Euclidean norm of their difference, however many elements there are:
another dropout mask moves it by a good part of the tensor's norm, rounding by some 1e-7 of it. A plain sum would
mostly cancel, and would not see elements that changed places. (The idea is that of Alon, Matias and Szegedy's sketch
of the second moment, STOC 1996.)
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from nemo_like.torch_compat import sparse_parts

_COLUMNS, _ROWS = 1024, 2048
_PIECE = _COLUMNS * _ROWS
"""Elements that are looked at together: three float64 copies of them, 48 MiB, in addition to the tensor itself."""
_NAN, _INF = 1.0, 2.0
"""In the place of values that are not finite, so that the norm stays one, and other places are seen."""


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """(_ROWS,) of 1 and -1, without a structure that a tensor could share."""
    bits = random.Random(1996)
    return torch.tensor([1.0 - 2.0 * bits.getrandbits(1) for _ in range(_ROWS)], dtype=torch.float64, device=device)


def summary(tensor: Tensor) -> Tensor | None:
    """Return a signed sum, the sum of squares, and the number of elements that are not finite: (3,) in float64.

    It is on the tensor's own device, and waits for none. A DTensor is this rank's part of it; a sparse tensor is its indices
    and values. None where there are no numbers: no elements, a meta tensor, a type that does not tell what it is made of.
    """
    pieces = [piece for part in _plain_parts(tensor) if part.numel() > 0 for piece in _pieces(part)]
    total: Tensor | None = None
    for number, piece in enumerate(pieces):
        numbers = _of_piece(piece.reshape(-1), number)
        total = numbers if total is None else total + numbers
    return total


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    kind = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        wait = getattr(tensor, "trigger_wait", None)  # the output of a collective that is still under way
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if wait is not None:
            yield from _plain_parts(wait())
        elif flatten is not None:
            parts = (getattr(tensor, name) for name in flatten()[0])
            for part in parts:
                if isinstance(part, Tensor):  # a DTensor names its mesh together with them
                    yield from _plain_parts(part)
    elif tensor.is_meta:
        return
    elif tensor.layout is torch.strided:
        yield _real(tensor)
    elif tensor.is_mkldnn:
        yield tensor.to_dense()
    else:
        for part in sparse_parts(tensor):
            yield _real(part)


def _real(tensor: Tensor) -> Tensor:
    """`tensor` in a dtype that converts to float64."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.int_repr()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype in _PACKED:
        return tensor.view(torch.uint8)
    # Apple's GPUs have no float64.
    return tensor.cpu() if tensor.device.type == "mps" else tensor


_PACKED = {torch.float4_e2m1fn_x2}
"""Two numbers in one byte, and no conversion."""


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor` in pieces of at most _PIECE elements, cut by its shape alone: strides may differ in recomputation."""
    if tensor.numel() <= _PIECE:
        yield tensor
        return
    inner = tensor.numel() // tensor.shape[0]
    for part in tensor.split(max(1, _PIECE // inner)):
        yield from _pieces(part[0] if part.shape[0] == 1 else part)


def _of_piece(flat: Tensor, number: int) -> Tensor:
    """(n,) to (3,). An element's sign is that of its column times that of its row, in rows of _COLUMNS elements."""
    values = flat.to(torch.float64).contiguous()
    odd = values.isfinite().logical_not_().sum(dtype=torch.float64)
    values = values.nan_to_num(_NAN, _INF, -_INF)
    signs = _signs(values.device)
    rows = values.numel() // _COLUMNS
    head, tail = values[: rows * _COLUMNS].view(rows, _COLUMNS), values[rows * _COLUMNS :]
    # Element by element and not by a matmul, which autocast would run in fewer bits.
    signed = ((head * signs[:_COLUMNS]).sum(1) * signs[:rows]).sum()
    signed = signed + (tail * signs[: tail.numel()]).sum() * signs[rows % _ROWS]
    return torch.stack([signed * signs[number % _ROWS], values.square().sum(), odd])
