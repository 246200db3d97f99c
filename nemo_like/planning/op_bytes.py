"""The bytes that one op moves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nemo_like.activation_checkpointing.ops import facts
from nemo_like.torch_compat import OpOverload


def moved_bytes(op: OpOverload, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Bytes read and written by a kernel that touches each input and output once; 0 for an allocation or a view."""
    if facts(op).free:
        return 0
    return sum(_touched(t) for t in inputs) + sum(_touched(t) for t in outputs)


def _touched(tensor: torch.Tensor) -> int:
    """Elements at distinct addresses: an expanded dim is read once."""
    distinct = math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride != 0)
    return distinct * tensor.element_size() if tensor.numel() else 0
