"""Weights and products in fewer bits: float8, and frozen weights in 4 bits as QLoRA has them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nemo_like._util.extras import require
from nemo_like._util.module_tree import bare
from nemo_like.job import Job
from nemo_like.planning.devices import Device
from nemo_like.precision import check_float8, float8_linears

BLOCK, NESTED_BLOCK = 64, 256
_TABLES = 16 + 256 + 1
"""Float32 values that each layer has besides its scales."""


class FourBitLinear(nn.Module):
    """A linear layer whose weight takes as many bytes as in 4 bits. Its values mean nothing.

    Args:
        linear: the layer whose shape and bias it has.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        device, scales = linear.weight.device, -(-linear.weight.numel() // BLOCK)

        def frozen(size: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(size, dtype=dtype, device=device), requires_grad=False)

        self.weight = frozen(-(-linear.weight.numel() // 2), torch.uint8)
        self.scales = frozen(scales, torch.uint8)
        self.nested = frozen(-(-scales // NESTED_BLOCK) + _TABLES, torch.float32)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        shape = (self.out_features, self.in_features)
        return _Product.apply(input, self.weight, self.bias, shape).clone()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return nn.functional.linear(input, _whole(packed, shape, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return grads[0] @ _whole(packed, ctx.shape, grads[0].dtype), None, None, None


def _whole(packed: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return packed.new_zeros(shape, dtype=dtype)


def with_four_bit_weights(model: nn.Module) -> nn.Module:
    """Return a copy of `model` whose frozen linear layers have their weights in 4 bits; its head stays as it is.

    Parameters and values of all else are shared with `model`, so that it may be on the meta device or have weights.

    Raises:
        ValueError: no linear layer is frozen.
    """
    memo = {id(t): t for t in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, memo)
    head_of: Any = getattr(copied, "get_output_embeddings", lambda: None)
    head = head_of()
    frozen = [
        (parent, name, child)
        for parent in copied.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not head and not child.weight.requires_grad
    ]
    if not frozen:
        raise ValueError(
            f"{type(model).__name__} has no frozen linear layer to keep in 4 bits: those weights get no gradients. Put "
            "adapters next to them first (peft.get_peft_model), or freeze them."
        )
    for parent, name, child in frozen:
        setattr(parent, name, FourBitLinear(child))
    return copied


def with_adapters(model: nn.Module, rank: int, frozen: torch.dtype | None = None) -> nn.Module:
    """Add adapters of `rank` to all linear layers of `model` but the head, by peft; all else no longer trains.

    Args:
        model: changed in place, as peft does.
        rank: rank of the adapters, >= 1.
        frozen: dtype of what does not train; None: as it is.

    Raises:
        ValueError: `rank` is below 1. MissingExtraError: peft is not installed.
    """
    if rank < 1:
        raise ValueError(f"The rank of the adapters is {rank}; it must be >= 1.")
    peft = require("peft", "finetune", "to put adapters into a model")
    setattr(model, "name_or_path", getattr(model, "name_or_path", ""))  # noqa: B010 - peft reads it
    config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = peft.get_peft_model(model, config)
    for param in adapted.parameters():
        if frozen is not None and not param.requires_grad and param.is_floating_point():
            param.data = param.data.to(frozen)
    return adapted


__all__ = ["FourBitLinear", "with_adapters", "with_four_bit_weights"]


_LEAST = (8, 9)
"""Compute capability of the first GPUs that multiply in float8."""


def check_float8_plan(job: Job, device: Device) -> None:
    """Raise where layers multiply in float8, and no plan is made of that.

    Raises:
        ValueError: float8 together with what is not planned with it, or a GPU that does not multiply in it.
        MissingExtraError: torchao is not installed.
    """
    word = job.precision.matmuls
    if word is None:
        return
    if word == "fp8-gather" and job.fsdp is not None:
        raise ValueError(
            "precision is 'fp8-gather': the bytes of weights that FSDP2 gathers in float8 are not known, so no plan is "
            "made. Use precision='fp8', or a mode such as ac='selective'."
        )
    if device.cuda is not None and device.cuda < _LEAST:
        raise ValueError(
            f"precision is {word!r}, and {device.name} has compute capability {device.cuda[0]}.{device.cuda[1]}; products "
            f"in float8 need {_LEAST[0]}.{_LEAST[1]}. Use precision='bf16'."
        )
    check_float8(word)


def convert(layers: Sequence[Any], job: Job, device: Device) -> None:
    """Replace the linears in `layers` of a copy, as `nemo_like.parallelize` does in the model itself: before it is cut."""
    if job.precision.matmuls is not None:
        modules = [bare(layer.module) for layer in layers]
        float8_linears(modules, job.precision.matmuls, device.kind, sharded=job.fsdp is not None)


def of_layers(device: Device, job: Job) -> Device:
    """Return `device` at the rates of the layers' operators.

    All of their matrix products count at the rate of float8, also those of the few linears that it does not fit. Where no
    rate of float8 is known (a CPU emulates it), they count at that of bfloat16.
    """
    if job.precision.matmuls is None or "float8" not in device.matmul_flops:
        return device
    return replace(device, matmul_flops={**device.matmul_flops, "half": device.matmul_flops["float8"]})
