"""Adapters on frozen weights, products in float8, and the refusal of weights in 4 bits."""

from __future__ import annotations

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


def refuse_four_bits(model: nn.Module) -> None:
    """Raise where `model` has weights in 4 bits, of which no plan is made.

    Raises:
        ValueError: a parameter is a ``Params4bit`` of bitsandbytes; it names that.
    """
    packed = [name for name, parameter in model.named_parameters() if type(parameter).__name__ == "Params4bit"]
    if packed:
        raise ValueError(
            f"{packed[0]!r} has its weights in 4 bits (bitsandbytes' Params4bit), and no plan is made of those: their bytes "
            "are packed, with scales next to them. Use a mode without a plan, such as ac='full'."
        )


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
