"""Frozen linears with weights of 4 bits, for adapters on them (QLoRA, arXiv 2305.14314), under FSDP2.

The operators are those of bitsandbytes (NF4 in blocks of 64 weights), which run on CPU and CUDA and work on plain tensors.
Its own parameter class is not used: FSDP2 would shard the weights and leave their scales behind, and casts what it gathers
to the dtype to compute in. Here a row of a weight, scales included, is one row of bytes that *look* like numbers of that
very dtype: FSDP2 cuts between rows, gathers without casting, and a row is whole wherever it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like._util.extras import require
from nemo_like._util.log import warn_once
from nemo_like.distributed.weights.slots import copy_whole
from nemo_like.distributed.weights.sources import Source
from nemo_like.layers import find_layers

BLOCK = 64
"""Weights that share a scale."""
_SCALE_BYTES = 4


def row_bytes(in_features: int) -> int:
    """Bytes of one row of a weight: half a byte a weight, and a float32 scale a block."""
    return in_features // 2 + in_features // BLOCK * _SCALE_BYTES


def pack_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight`, (out, in) of any float dtype, in 4 bits: (out, `row_bytes` / bytes of `dtype`) of `dtype`, of no numeric
    meaning."""
    rows, columns = weight.shape
    codes, scales = torch.ops.bitsandbytes.quantize_4bit(weight.float().contiguous(), BLOCK, "nf4", torch.uint8)
    scales = scales.float().view(rows, columns // BLOCK).view(torch.uint8)
    return torch.cat([codes.view(rows, columns // 2), scales], 1).view(dtype)


def unpack_rows(packed: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight, (out, in) of `dtype`, of what `pack_rows` gave."""
    codes = packed.view(torch.uint8)
    half, rows = in_features // 2, len(packed)
    scales = codes[:, half:].contiguous().view(torch.float32).flatten()
    flat = codes[:, :half].reshape(-1, 1)
    weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(flat, scales, BLOCK, "nf4", [rows, in_features], dtype)
    return weight


class PackedLinear(nn.Module):
    """A frozen `nn.Linear` whose weight has 4.5 bits a number. Built empty, on the meta device."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        columns = row_bytes(self.in_features) // dtype.itemsize
        empty = torch.empty(self.out_features, columns, dtype=dtype, device="meta")
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        y: Tensor = _Matmul.apply(x.to(self.weight.dtype), self.weight, self.in_features)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits=4"


class _Matmul(torch.autograd.Function):
    """``x @ weight.T`` that keeps the packed weight for backward, where it is unpacked again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, in_features: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.in_features = in_features
        return F.linear(x, unpack_rows(packed, in_features, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (packed,) = ctx.saved_tensors
        (grad,) = grads
        return grad @ unpack_rows(packed, ctx.in_features, grad.dtype), None, None


def quantise_layers(model: nn.Module, dtype: torch.dtype) -> int:
    """Put a `PackedLinear` in the place of each frozen linear in the repeated layers of `model`, on the meta device; how
    many. `dtype`: what is computed in.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    require("bitsandbytes", "qlora", "for --qlora")
    count, odd = 0, []
    for layer in find_layers(model):
        for name, module in list(layer.module.named_modules()):
            for child_name, child in list(module.named_children()):
                if not isinstance(child, nn.Linear) or child.weight.requires_grad:
                    continue
                if child.in_features % BLOCK:
                    odd.append(f"{layer.fqn}.{name}.{child_name} ({child.in_features})")
                    continue
                setattr(module, child_name, PackedLinear(child, dtype))
                count += 1
    if odd:
        warn_once(
            f"--qlora: {len(odd)} linears keep {dtype} weights, since their inputs are not a multiple of {BLOCK}, such as "
            f"{odd[0]}."
        )
    if not count:
        raise ValueError(f"--qlora: no linear of the layers can have 4 bits; inputs must be a multiple of {BLOCK}.")
    return count


class FourBitSource:
    """Whole weights as another source has them, in 4 bits for some of the names: those of a model's `PackedLinear`."""

    def __init__(self, source: Source, packed: Mapping[str, tuple[torch.Size, torch.dtype]]):
        self.label = source.label
        self._source, self._packed = source, packed
        self.shapes = {name: packed[name][0] if name in packed else shape for name, shape in source.shapes.items()}

    def get(self, name: str) -> Tensor:
        whole = self._source.get(name)
        return pack_rows(whole, self._packed[name][1]) if name in self._packed else whole

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        self._source.fill({name: target for name, target in targets.items() if name not in self._packed})
        for name, target in targets.items():
            if name in self._packed:
                whole = self._source.get(name).to(target.device)
                copy_whole(target, pack_rows(whole, self._packed[name][1]))


def packed_weights(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the global shape and the dtype of each weight of a `PackedLinear`, by name."""
    return {
        f"{name}.weight": (module.weight.shape, module.weight.dtype)
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear)
    }
