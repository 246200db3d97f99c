"""Which kernel CUDA gives attention to, and what `scaled_dot_product_attention` runs around it, on CPU tensors.

The rules are those of PyTorch's ``sdp_utils.cpp`` (releases 2.13 to 2.15) for dense tensors on NVIDIA GPUs from compute
capability 8.0 on. Switches (`torch.nn.attention.sdpa_kernel`) count as they stand when attention is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_like.torch_compat import SWITCH_READERS, sdp_priority

FLASH, EFFICIENT, MATH, CUDNN = "flash", "mem_efficient", "math", "cudnn"
_NUMBERS = {1: FLASH, 2: EFFICIENT, 0: MATH, 3: CUDNN}
"""Of `torch.nn.attention.SDPBackend`."""
_DEFAULT = (FLASH, EFFICIENT, MATH, CUDNN)
_HALF = (torch.float16, torch.bfloat16)
_CUDNN_FIRST = 91500
"""From the release of cuDNN after this one on, PyTorch asks it first on Hopper and Blackwell."""
_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
_EFFICIENT_GROUPS = (2, 15)
"""The first release known to give grouped queries to the memory-efficient kernel."""


@dataclass(frozen=True)
class Call:
    """One call of `scaled_dot_product_attention`. Query, key, value ``(B, H, S, D)``."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """Whether a backward will follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


def backend(call: Call, capability: tuple[int, int]) -> str:
    """``"flash"``, ``"mem_efficient"``, ``"cudnn"`` or ``"math"``: what a GPU of this compute capability would take."""
    able = {FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn, MATH: lambda *_: True}
    for name in _order(capability):
        if SWITCH_READERS[name]() and able[name](call, capability):
            return name
    raise RuntimeError(
        "No attention kernel that is switched on takes this call on CUDA (see torch.nn.attention.sdpa_kernel); switch on "
        "one more, the math kernel for example."
    )


def attend(call: Call, capability: tuple[int, int]) -> Tensor:
    """The output ``(B, H, S, D_v)``, computed by the operators that CUDA would run."""
    name = backend(call, capability)
    mask = call.mask
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.scalar_tensor(0.0, dtype=call.query.dtype, device=mask.device)
        mask = torch.where(mask.logical_not(), float("-inf"), zero)
    rest = dict(scale=call.scale)
    if name == FLASH:
        padded = [_padded(t) for t in call.tensors]
        rest["scale"] = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            *padded, call.dropout_p, call.is_causal, False, **rest
        )[0]
        return out if out.shape[-1] == call.query.shape[-1] else out[..., : call.query.shape[-1]]
    if name == EFFICIENT:
        if mask is not None:
            shape = (*call.query.shape[:3], call.key.shape[2])
            mask = (mask if _rows_aligned(mask) else _padded_rows(mask)).expand(shape)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            *call.tensors, mask, call.trains, call.dropout_p, call.is_causal, **rest
        )[0]
    if name == CUDNN:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            *call.tensors, mask, call.trains, call.dropout_p, call.is_causal, False, **rest
        )[0]
    if call.dropout_p > 0:
        return _unfused(call, mask)
    groups: dict[str, Any] = {"enable_gqa": True} if call.enable_gqa else {}
    return torch.ops.aten._scaled_dot_product_attention_math(
        *call.tensors, mask, 0.0, call.is_causal, None, **rest, **groups
    )[0]


def _unfused(call: Call, mask: Tensor | None) -> Tensor:
    """As PyTorch's math kernel; its dropout is to be seen from Python, for on CUDA that is a kernel of its own."""
    dtype = call.query.dtype
    raised = dtype in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    query, key, value = (t.float() if raised else t for t in call.tensors)
    factor = (query.shape[-1] ** -0.5 if call.scale is None else call.scale) ** 0.5
    if call.is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = torch.where(mask.logical_not(), float("-inf"), torch.scalar_tensor(0.0, dtype=query.dtype))
    query = query * factor
    if call.enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    scores = scores if mask is None else scores + mask
    weights = torch.dropout(torch.ops.aten._safe_softmax(scores, -1), call.dropout_p, True)
    return torch.matmul(weights, value).to(dtype)


def _order(capability: tuple[int, int]) -> tuple[str, ...]:
    order = tuple(_NUMBERS[number] for number in sdp_priority() if number in _NUMBERS)
    version = torch.backends.cudnn.version() if torch.version.cuda is not None else None
    # A torch without CUDA plans for one with it: the wheels bring a cuDNN that is asked first.
    prefers = capability[0] in (9, 10) and (version is None or version > _CUDNN_FIRST)
    return (CUDNN, FLASH, EFFICIENT, MATH) if prefers and order == _DEFAULT else order


def _fits_all(call: Call, *, groups: bool) -> bool:
    """What every fused kernel asks for."""
    query, key, value = call.tensors
    if not all(t.dim() == 4 and t.shape[2] > 0 and t.stride(-1) == 1 for t in call.tensors):
        return False
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if call.enable_gqa and groups:
        return key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    return query.shape[1] == key.shape[1] == value.shape[1]


def _flash(call: Call, capability: tuple[int, int]) -> bool:
    query, key, value = call.tensors
    head = query.shape[-1]
    if call.mask is not None or query.dtype not in _HALF or head > 256 or not head == key.shape[-1] == value.shape[-1]:
        return False
    if call.is_causal and query.shape[2] != key.shape[2]:
        return False
    small = (8, 6) <= capability <= (8, 9) or capability in ((12, 0), (12, 1))
    if small and call.trains and head > 192 and (call.dropout_p > 0 or head <= 224):
        return False
    return _fits_all(call, groups=True)


def _efficient(call: Call, capability: tuple[int, int]) -> bool:
    query, key, value = call.tensors
    if query.dtype not in (*_HALF, torch.float32):
        return False
    step = 16 // query.element_size()
    if query.shape[-1] != key.shape[-1] or query.shape[-1] % step or value.shape[-1] % step:
        return False
    return _fits_all(call, groups=_RELEASE >= _EFFICIENT_GROUPS)


def _cudnn(call: Call, capability: tuple[int, int]) -> bool:
    query, _, value = call.tensors
    heads = query.shape[-1], value.shape[-1]
    most = 192 if capability[0] in (9, 10) and heads == (192, 128) else 128
    if query.dtype not in _HALF or max(heads) > most or any(head % 8 for head in heads) or call.key.shape[2] == 1:
        return False
    if call.dropout_p * 16 != int(call.dropout_p * 16) or (call.dropout_p and query.shape[2] == 1):
        return False
    mask = call.mask
    if mask is not None and (mask.requires_grad or mask.dim() not in (2, 4)):
        return False
    return _fits_all(call, groups=True)


def _padded(tensor: Tensor) -> Tensor:
    """With the last dim in whole steps of 8, as the flash kernel reads it."""
    short = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, short)) if short else tensor


def _rows_aligned(mask: Tensor) -> bool:
    return mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])


def _padded_rows(mask: Tensor) -> Tensor:
    size = mask.shape[-1]
    return F.pad(mask, (0, 8 - size % 8))[..., :size]
