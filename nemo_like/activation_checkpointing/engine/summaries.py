"""A tensor as a few float64 numbers: enough to tell that another one differs, without holding either.

Each element is multiplied by a fixed sign, which depends on its position, and the products are summed. Between two
tensors such a signed sum differs by about the Euclidean norm of their difference, however many elements there are:
another dropout mask moves it by a good part of the tensor's norm, rounding by some 1e-7 of it. A plain sum would
mostly cancel, and would not see elements that changed places. (The idea is that of Alon, Matias and Szegedy's sketch
of the second moment, STOC 1996.)
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from nemo_like.torch_compat import sparse_parts

_COLUMNS, _ROWS = 1024, 2048
_PIECE = _COLUMNS * _ROWS
"""Elements that are looked at together: up to four float64 copies of them, 64 MiB, beside the tensor itself."""
_NAN, _INF = 1.0, 2.0
"""What stands for a value that is not finite in the signed sum of those."""


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """(2, _ROWS) of 1 and -1, without a structure that a tensor could share."""
    bits = random.Random(1996)
    signs = [[1.0 - 2.0 * bits.getrandbits(1) for _ in range(_ROWS)] for _ in range(2)]
    return torch.tensor(signs, dtype=torch.float64, device=device)


def summaries(tensor: Tensor) -> list[Tensor]:
    """One summary, (5,) in float64 on the tensor's own device, for each plain tensor that `tensor` is made of.

    Its numbers: two signed sums and the sum of squares of the finite elements; how many are not finite; the signed sum
    of those. Waits for no device. A DTensor is this rank's part of it; a sparse tensor is its indices and values.
    Empty where there are no numbers: no elements, a meta tensor, a type that does not tell what it is made of.
    """
    return [_summary(part) for part in _plain_parts(tensor) if part.numel() > 0]


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
                if isinstance(part, Tensor):  # a DTensor names its mesh beside them
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


def _summary(tensor: Tensor) -> Tensor:
    total: Tensor | None = None
    for number, piece in enumerate(_pieces(tensor)):
        found = _of_piece(piece.reshape(-1), number)
        total = found if total is None else total + found
    assert total is not None  # an empty tensor has no summary
    return total


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor` in pieces of at most _PIECE elements, cut by its shape alone: strides may differ in replay."""
    if tensor.numel() <= _PIECE:
        yield tensor
        return
    inner = tensor.numel() // tensor.shape[0]
    for part in tensor.split(max(1, _PIECE // inner)):
        yield from _pieces(part[0] if part.shape[0] == 1 else part)


def _of_piece(flat: Tensor, number: int) -> Tensor:
    values = flat.to(torch.float64).contiguous()  # (n,)
    odd = values.new_zeros(2)
    square = values.dot(values)
    # On a CPU the answer is at hand; elsewhere asking for it would make the host wait.
    if flat.is_floating_point() and not (flat.device.type == "cpu" and math.isfinite(square.item())):
        finite = values.isfinite()
        codes = values.nan_to_num(_NAN, _INF, -_INF).masked_fill_(finite, 0.0)
        values = values.where(finite, 0.0)
        square = values.dot(values)
        odd = torch.stack([(~finite).sum(dtype=torch.float64), _signed_sums(codes)[0]])
    sums = _signed_sums(values) * _signs(values.device)[:, number % _ROWS]
    return torch.cat([sums, square.reshape(1), odd])


def _signed_sums(values: Tensor) -> Tensor:
    """(n,) to (2,). An element's sign is that of its column times that of its row, in rows of _COLUMNS elements."""
    signs = _signs(values.device)
    rows = values.numel() // _COLUMNS
    head, tail = values[: rows * _COLUMNS].view(rows, _COLUMNS), values[rows * _COLUMNS :]
    sums = ((head @ signs[:, :_COLUMNS].T) * signs[:, :rows].T).sum(0)  # (rows, 2) to (2,)
    if tail.numel() > 0:
        sums = sums + (signs[:, : tail.numel()] @ tail) * signs[:, rows % _ROWS]
    return sums
