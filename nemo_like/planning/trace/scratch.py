"""Memory that a kernel takes and gives back within one op, where it is known to be large.

Workspaces of convolutions are not counted: oneDNN and cuDNN choose their algorithms by the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nemo_like._util.op_lookup import find_op
from nemo_like.activation_checkpointing.ops import facts

_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default
_FLASH = find_op("aten._scaled_dot_product_flash_attention_for_cpu.default")
_FLASH_BACKWARD = find_op("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
_SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)


def scratch_bytes(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the most bytes that `func` holds beyond its inputs and its output `out`; 0 where nothing is known."""
    if func is _FLASH:
        return _attention_blocks(args[0], args[1], forward=True)
    if func is _FLASH_BACKWARD:
        return _attention_blocks(args[1], args[2], forward=False)
    if func in _SUMS and out.dtype != args[0].dtype and not args[0].is_floating_point():  # counts of a mask
        return args[0].numel() * out.element_size()
    if (rule := facts(func).scratch) is not None:
        return rule(args, out)
    if (
        func is _SAFE_SOFTMAX
    ):  # which scores are -inf, and which rows are so throughout: attention without a fused kernel
        return out.numel() + out.numel() // max(1, out.shape[-1])
    return 0


def _attention_blocks(query: torch.Tensor, key: torch.Tensor, *, forward: bool) -> int:
    """Return the bytes of the scores that the CPU's kernel keeps of a block of queries and keys for each thread.

    They are in float32; seen in torch 2.13.
    """
    rows, width = query.shape[2], query.shape[3]
    block = 256 if rows >= 768 else 64 if rows >= 192 else 32
    scores = block * min(512, key.shape[2])
    return 4 * torch.get_num_threads() * (scores + block * (width + 2) if forward else 2 * scores)
