"""Memory that a kernel takes and gives back within one op, where it is known to be large.

For convolutions, the prediction is what oneDNN (the CPU's kernels) takes in float32: input, weight and output in blocks of
16 channels. cuDNN chooses its algorithm by the device, and converts layouts as well: there the prediction is a margin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from nemo_like._util.op_lookup import argument, find_op
from nemo_like.activation_checkpointing.ops import facts

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default
_FLASH = find_op("aten._scaled_dot_product_flash_attention_for_cpu.default")
_FLASH_BACKWARD = find_op("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
_SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)
_BLOCK = 16
_WIDEST = 14
"""Width above which a kernel runs as a matrix product over a picture's patches."""


def scratch_bytes(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the most bytes that `func` holds beyond its inputs and its output `out`; 0 where nothing is known."""
    if func is _FORWARD:
        return _of_forward(func, args, kwargs, out)
    if func is _BACKWARD:
        return _of_backward(func, args, kwargs)
    if func is _FLASH:
        return _attention_blocks(args[0], args[1], forward=True)
    if func is _FLASH_BACKWARD:
        return _attention_blocks(args[1], args[2], forward=False)
    if func in _SUMS and out.dtype != args[0].dtype and not args[0].is_floating_point():  # counts of a mask
        return args[0].numel() * out.element_size()
    if (rule := facts(func).scratch) is not None:
        return rule(args[0], out)
    if (
        func is _SAFE_SOFTMAX
    ):  # which scores are -inf, and which rows are so throughout: attention without a fused kernel
        return out.numel() + out.numel() // max(1, out.shape[-1])
    return 0


def _of_forward(func: Any, args: tuple, kwargs: Mapping[str, Any], out: torch.Tensor) -> int:
    image, weight = args[0], args[1]
    groups = argument(func, args, dict(kwargs), "groups")
    if _plain(func, args, kwargs, weight):
        return _copies(image, weight) if groups == 1 else max(_copies(image, weight), out.nbytes)
    if _in_channels_last(image, weight):
        sums = 0 if _depthwise(weight, groups) else _sums(0)
        return _copies(image, weight) + _weight_copy(weight, groups) + _blocked(weight, 0) + sums
    return _copies(image, weight) + _forward(image, weight, out, groups)


def _of_backward(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> int:
    grad, image, weight = args[0], args[1], args[2]
    wanted = argument(func, args, dict(kwargs), "output_mask")
    groups = argument(func, args, dict(kwargs), "groups")
    if _plain(func, args, kwargs, weight):
        if groups == 1:
            return _copies(image, weight, grad)
        one = (image.nbytes + grad.nbytes) // groups
        return max(_copies(image, weight, grad), one, image.nbytes if wanted[0] else 0)
    strided = max(argument(func, args, dict(kwargs), "stride")) > 1
    if _in_channels_last(image, weight):
        padding = max(argument(func, args, dict(kwargs), "padding"))
        by_weight = _weight_backward_last(image, weight, grad, groups, padding) if wanted[1] else 0
        by_input = _input_backward_last(weight, grad, groups, strided) if wanted[0] else 0
    else:
        by_weight = _weight_backward(image, weight, grad, groups) if wanted[1] else 0
        by_input = _input_backward(image, weight, grad, groups, strided) if wanted[0] else 0
    by_input -= weight.nbytes if wanted[1] else 0  # made after it
    return _copies(image, weight, grad) + max(by_weight, by_input)


def _attention_blocks(query: torch.Tensor, key: torch.Tensor, *, forward: bool) -> int:
    """Return the bytes of the scores that the CPU's kernel keeps of a block of queries and keys for each thread.

    They are in float32; seen in torch 2.13.
    """
    rows, width = query.shape[2], query.shape[3]
    block = 256 if rows >= 768 else 64 if rows >= 192 else 32
    scores = block * min(512, key.shape[2])
    return 4 * torch.get_num_threads() * (scores + block * (width + 2) if forward else 2 * scores)


def _copies(image: torch.Tensor, weight: torch.Tensor, *more: torch.Tensor) -> int:
    """Return the bytes of what is copied first: what is not in the order of the kernel, rows or channels last."""
    last = any(_channels_last(t) and not t.is_contiguous() for t in (image, weight))
    return sum(t.nbytes for t in (image, *more) if not (_channels_last(t) if last else t.is_contiguous()))


def _channels_last(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _plain(func: Any, args: tuple, kwargs: Mapping[str, Any], weight: torch.Tensor) -> bool:
    """Return whether this is a matrix product in all but name, which requires no other layout.

    Of groups, there is one each, and these are joined.
    """
    stride, padding = (argument(func, args, dict(kwargs), name) for name in ("stride", "padding"))
    return math.prod(weight.shape[2:]) == 1 and max(stride) == 1 and max(padding) == 0


def _blocked(tensor: torch.Tensor, dim: int, block: int = _BLOCK) -> int:
    """Return the bytes of `tensor` with its channels (`dim`) in whole blocks."""
    channels = tensor.shape[dim]
    return tensor.nbytes // max(1, channels) * (-(-channels // block) * block)


def _input(image: torch.Tensor, groups: int) -> int:
    """Return the bytes of the input in blocks; 0: few channels are read as they are, unless each is convolved by itself."""
    return _blocked(image, 1) if image.shape[1] >= _BLOCK or groups == image.shape[1] > 1 else 0


def _weight(image: torch.Tensor, weight: torch.Tensor, groups: int) -> int:
    size = _blocked(weight, 0)
    inner = weight.shape[1]
    return size // inner * (-(-inner // _BLOCK) * _BLOCK) if groups == 1 and image.shape[1] >= _BLOCK else size


def _forward(image: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: int) -> int:
    blocked = _blocked(out, 1)
    return max(
        _input(image, groups) + _weight(image, weight, groups) + blocked - out.nbytes + _picked(image, weight, out),
        blocked,
    )


def _weight_backward(image: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, groups: int) -> int:
    if max(weight.shape[2:]) > _WIDEST:
        return _patches(image, weight, grad) // groups + 4 * weight.nbytes
    if _depthwise(weight, groups) and max(weight.shape[2:]) != 3:  # channel by channel
        return weight.nbytes + (2 * _patches(image, weight, grad) + image.nbytes + grad.nbytes) // groups
    blocks = _blocked(grad, 1) + _input(image, groups) + _weight(image, weight, groups)
    return max(blocks - weight.nbytes + _picked(image, weight, grad), _weight(image, weight, groups))


def _in_channels_last(image: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether kernels read the image as it is, a pixel's channels side by side, and put nothing of it into blocks."""
    return any(_channels_last(t) and not t.is_contiguous() for t in (image, weight))


def _depthwise(weight: torch.Tensor, groups: int) -> bool:
    return weight.shape[1] == 1 and weight.shape[0] == groups


def _weight_copy(weight: torch.Tensor, groups: int) -> int:
    """Return the bytes of the weight with its channels last, where that is another order."""
    same = _depthwise(weight, groups) or math.prod(weight.shape[2:]) == 1 or _channels_last(weight)
    return 0 if same else weight.nbytes


def _sums(columns: int) -> int:
    """Return the bytes that all threads add up in, for so many columns of a matrix product."""
    return torch.get_num_threads() * (8344 + (12160 + 1024 * columns if columns else 0))


def _weight_backward_last(
    image: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, groups: int, padding: int
) -> int:
    if _depthwise(weight, groups):
        # A kernel of its own for 3 x 3 on all but the smallest pictures; else whole blocks of both of its channels.
        direct = max(weight.shape[2:]) == 3 and min(grad.shape[2:]) > 2 * padding
        return weight.nbytes + _blocked(weight, 0) if direct else (_BLOCK * _BLOCK + 1) * weight.nbytes
    if max(weight.shape[2:]) > _WIDEST:
        return _weight_copy(weight, groups) + _weight_backward(image, weight, grad, groups)
    return _weight_copy(weight, groups) + weight.nbytes + _weight(image, weight, groups) + _picked(image, weight, grad)


def _input_backward_last(weight: torch.Tensor, grad: torch.Tensor, groups: int, strided: bool) -> int:
    if _depthwise(weight, groups):
        return _blocked(weight, 0)
    columns = -(-grad.shape[1] // _BLOCK) * _BLOCK if strided else 0
    wide = 2 * _BLOCK if weight.shape[1] > _BLOCK else _BLOCK
    return _weight_copy(weight, groups) + _blocked(weight, 1, wide) + _sums(columns)


def _patches(image: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> int:
    """Return the bytes of one picture, as the rows of a matrix product."""
    return image.shape[1] * math.prod(weight.shape[2:]) * math.prod(grad.shape[2:]) * image.element_size()


def _picked(image: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> int:
    """Return the bytes that a stride leaves of a picture, before a product with a kernel of one element."""
    return _patches(image, weight, grad) if math.prod(weight.shape[2:]) == 1 else 0


def _input_backward(image: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, groups: int, strided: bool) -> int:
    blocked_image = _blocked(image, 1)
    if strided and groups > 1:
        return blocked_image
    if strided:
        product = grad.nbytes + _blocked(weight, 1) + _sums(-(-grad.shape[1] // _BLOCK) * _BLOCK)
        return max(2 * image.nbytes, product)
    inner = weight.shape[1]
    padded = -(-inner // _BLOCK) * _BLOCK if groups == 1 else inner
    return _blocked(grad, 1) + _blocked(weight, 0) // inner * padded + blocked_image - image.nbytes
