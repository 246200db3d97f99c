"""Memory that a kernel takes and gives back within one op, where it is known to be large.

Of convolutions, what is predicted is what oneDNN (the CPU's kernels) takes in float32: input, weight and output in
blocks of 16 channels. cuDNN chooses its algorithm by the device, and converts layouts as well: there it is a margin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from nemo_like.op_lookup import argument, find_op

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default
_FLASH = find_op("aten._scaled_dot_product_flash_attention_for_cpu.default")
_FLASH_BACKWARD = find_op("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
_BLOCK = 16
_WIDEST = 14
"""A wider kernel than that runs as a matrix product over a picture's patches."""


def scratch_bytes(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    """The most that `func` holds beyond its inputs and its output `out`, bytes; 0 where nothing is known."""
    if func is _FORWARD:
        image, weight = args[0], args[1]
        groups = argument(func, args, dict(kwargs), "groups")
        return _copies(image, weight) + (
            0 if _plain(func, args, kwargs, weight) else _forward(image, weight, out, groups)
        )
    if func is _BACKWARD:
        grad, image, weight = args[0], args[1], args[2]
        if _plain(func, args, kwargs, weight):
            return _copies(image, weight, grad)
        wanted = argument(func, args, dict(kwargs), "output_mask")
        groups = argument(func, args, dict(kwargs), "groups")
        strided = max(argument(func, args, dict(kwargs), "stride")) > 1
        by_weight = _weight_backward(image, weight, grad, groups) if wanted[1] else 0
        by_input = _input_backward(image, weight, grad, groups, strided) if wanted[0] else 0
        return _copies(image, weight, grad) + max(by_weight, by_input)
    if func is _FLASH:
        return _attention_blocks(args[0], args[1], forward=True)
    if func is _FLASH_BACKWARD:
        return _attention_blocks(args[1], args[2], forward=False)
    if getattr(func, "namespace", "") == "nemo_like" and isinstance(out, torch.Tensor):  # not the routing of experts
        return _sequence_scratch(func, args[0], out)
    if (
        func is _SAFE_SOFTMAX
    ):  # which scores are -inf, and which rows are so throughout: attention without a fused kernel
        return out.numel() + out.numel() // max(1, out.shape[-1])
    return 0


def _sequence_scratch(func: Any, sent: torch.Tensor, out: Any) -> int:
    """What the operators of context parallelism send from and receive into; other operators of ours: nothing."""
    if not isinstance(out, torch.Tensor):
        return 0
    copied = 0 if sent.is_contiguous() else sent.nbytes
    return {
        "nemo_like::gather_sequence": copied + out.nbytes,
        "nemo_like::scatter_sequence": sent.nbytes + out.nbytes,
        "nemo_like::heads_for_sequence": 2 * sent.nbytes,
        "nemo_like::sequence_for_heads": 2 * sent.nbytes,
    }.get(func.name(), 0)


def _attention_blocks(query: torch.Tensor, key: torch.Tensor, *, forward: bool) -> int:
    """The CPU's kernel keeps scores of a block of queries and keys for each thread, in float32; seen in torch 2.13."""
    rows, width = query.shape[2], query.shape[3]
    block = 256 if rows >= 768 else 64 if rows >= 192 else 32
    scores = block * min(512, key.shape[2])
    return 4 * torch.get_num_threads() * (scores + block * (width + 2) if forward else 2 * scores)


def _copies(image: torch.Tensor, weight: torch.Tensor, *more: torch.Tensor) -> int:
    """What is not in the order of the kernel, rows or channels last, is copied first."""
    last = any(_channels_last(t) and not t.is_contiguous() for t in (image, weight))
    return sum(t.nbytes for t in (image, *more) if not (_channels_last(t) if last else t.is_contiguous()))


def _channels_last(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _plain(func: Any, args: tuple, kwargs: Mapping[str, Any], weight: torch.Tensor) -> bool:
    """A matrix product in all but name, which needs no other layout."""
    stride, padding = (argument(func, args, dict(kwargs), name) for name in ("stride", "padding"))
    return math.prod(weight.shape[2:]) == 1 and max(stride) == 1 and max(padding) == 0


def _blocked(tensor: torch.Tensor, dim: int) -> int:
    """Bytes of `tensor` with its channels (`dim`) in whole blocks."""
    channels = tensor.shape[dim]
    return tensor.nbytes // max(1, channels) * (-(-channels // _BLOCK) * _BLOCK)


def _input(image: torch.Tensor, groups: int) -> int:
    """An image of few channels is read as it is, unless each is convolved by itself."""
    return _blocked(image, 1) if image.shape[1] >= _BLOCK or groups == image.shape[1] > 1 else 0


def _weight(image: torch.Tensor, weight: torch.Tensor, groups: int) -> int:
    size = _blocked(weight, 0)
    inner = weight.shape[1]
    return size // inner * (-(-inner // _BLOCK) * _BLOCK) if groups == 1 and image.shape[1] >= _BLOCK else size


def _forward(image: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: int) -> int:
    made = _blocked(out, 1)
    return max(
        _input(image, groups) + _weight(image, weight, groups) + made - out.nbytes + _picked(image, weight, out), made
    )


def _weight_backward(image: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, groups: int) -> int:
    if max(weight.shape[2:]) > _WIDEST:
        return _patches(image, weight, grad) // groups + 4 * weight.nbytes
    if weight.shape[1] == 1 and groups == image.shape[1] and _channels_last(image) and not image.is_contiguous():
        return _BLOCK * _BLOCK * weight.nbytes  # a depthwise weight as whole blocks of both its channels
    blocks = _blocked(grad, 1) + _input(image, groups) + _weight(image, weight, groups)
    return blocks - weight.nbytes + _picked(image, weight, grad)


def _patches(image: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> int:
    """One picture, as the rows of a matrix product."""
    return image.shape[1] * math.prod(weight.shape[2:]) * math.prod(grad.shape[2:]) * image.element_size()


def _picked(image: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> int:
    """What a stride leaves of a picture, before a product with a kernel of one element."""
    return _patches(image, weight, grad) if math.prod(weight.shape[2:]) == 1 else 0


def _input_backward(image: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, groups: int, strided: bool) -> int:
    made, outputs = _blocked(image, 1), image.nbytes + weight.nbytes
    first = _blocked(grad, 1) + _weight(image, weight, groups) + made
    return max(first, (3 if strided else 2) * made) - outputs
