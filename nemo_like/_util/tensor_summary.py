"""A tensor as three numbers: enough to tell that another one differs, without holding either.

Rows and columns are summed, each sum gets a fixed sign, which depends on its position, and these are summed. Between two
tensors such a signed sum differs by about the Euclidean norm of their difference, however many elements there are: another
dropout mask moves it by a good part of the tensor's norm, rounding by some 1e-7 of it. A plain sum would mostly cancel, and
would not see rows, or columns, that changed places. (The idea is that of Alon, Matias and Szegedy's sketch of the second
moment, STOC 1996.)

A tensor of real numbers is read three times, by reductions that make no copy in a wider type: a GPU does that for float32
and for 16 bits into float32.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from nemo_like.torch_compat import sparse_parts

_PIECE = 2**22  # Elements of another type that are looked at together: a float64 copy of them takes 32 MiB.
# Elements of which a copy is made to mark values that are not finite; of more, only that there are such values is
# seen.
_COPIED = 2**26
_COLUMNS, _SIGNS = 1024, 2**20
# In the place of values that are not finite, so that the norm stays one, and other places are seen.
_NAN, _INF = 1.0, 2.0


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype, size: int) -> Tensor:
    """(size,) of 1 and -1, without a structure that a tensor could share."""
    drawn = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(1996))
    return (2.0 * drawn - 1.0).to(device, dtype)


def summary(tensor: Tensor) -> Tensor | None:
    """Return signed sums of rows and of columns, and the norm: (3,) in float32, or in float64.

    It is on the tensor's own device, and waits for none. A DTensor is this rank's part of it; a sparse tensor is its indices
    and values. None where there are no numbers: no elements, a meta tensor, a type that hides its inner tensors.
    """
    pieces = [piece for part in _plain_parts(tensor) if part.numel() > 0 for piece in _pieces(part)]
    numbers = [_of_piece(piece) for piece in pieces]
    if len(numbers) < 2:
        return numbers[0] if numbers else None
    stacked = torch.stack(numbers).double()
    signed = stacked[:, :2] * _signs_of(stacked[:, 0])[:, None]
    return torch.cat([signed.sum(0), stacked[:, 2:].square().sum(0).sqrt()])


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


_PACKED = {torch.float4_e2m1fn_x2}  # Two numbers in one byte, and no conversion.
_SUMMED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor` as matrices, by its shape alone: strides may differ in recomputation."""
    if tensor.dtype not in _SUMMED and tensor.numel() > _PIECE:
        for part in tensor.reshape(-1).split(_PIECE):
            yield from _pieces(part)
    elif tensor.ndim > 1 and tensor.numel() // tensor.shape[-1] <= _SIGNS >= tensor.shape[-1]:
        yield tensor
    elif tensor.numel() <= _SIGNS:
        yield tensor.reshape(-1, 1)
    else:
        flat = tensor.reshape(-1)
        rows = tensor.numel() // _COLUMNS
        yield flat[: rows * _COLUMNS].view(rows, _COLUMNS)
        if rows * _COLUMNS < tensor.numel():
            yield flat[rows * _COLUMNS :][:, None]


def _of_piece(values: Tensor) -> Tensor:
    """(..., rows, columns) to (3,)."""
    values = values if values.dtype in _SUMMED else values.to(torch.float64)
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    with torch.autocast(values.device.type, enabled=False):
        if values.numel() <= _COPIED:
            values = values.nan_to_num(_NAN, _INF, -_INF)
        sums = values.sum(-1, dtype=wide), values.sum(tuple(range(values.ndim - 1)), dtype=wide)
        signed = [torch.dot(each, _signs_of(each)) for each in (sums[0].reshape(-1), sums[1])]
        return torch.stack([*signed, torch.linalg.vector_norm(values, dtype=wide)])


def _signs_of(sums: Tensor) -> Tensor:
    """Return as many signs as there are sums."""
    size = 1 << max(0, sums.numel() - 1).bit_length()
    return _signs(sums.device, sums.dtype, size)[: sums.numel()]
