"""The model as ``precision="fp8"`` makes it, to plan with: linears of its layers that multiply in float8 (torchao's)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nemo_like._util.module_tree import bare
from nemo_like.job import Job
from nemo_like.planning.devices import Device
from nemo_like.precision import check_float8, float8_linears

_LEAST = (8, 9)
"""Compute capability of the first GPUs that multiply in float8."""


def check_float8_plan(job: Job, device: Device) -> None:
    """Raise where layers multiply in float8, and no plan is made of that.

    Raises:
        ValueError: float8 beside what is not planned with it, or a GPU that does not multiply in it. MissingExtraError:
            torchao is not installed.
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
    """Replace the linears in `layers` of a copy, as `nemo_like.parallelize` does in the model itself."""
    if job.precision.matmuls is not None:
        modules = [bare(layer.module) for layer in layers]
        float8_linears(modules, job.precision.matmuls, device.kind, sharded=job.fsdp is not None)


def of_layers(device: Device, job: Job) -> Device:
    """`device` at the rates of the layers' operators: all of their matrix products count at float8's, those of the few
    linears too that it does not fit; at bfloat16's where no rate of float8 is known (a CPU emulates it)."""
    if job.precision.matmuls is None or "float8" not in device.matmul_flops:
        return device
    return replace(device, matmul_flops={**device.matmul_flops, "half": device.matmul_flops["float8"]})
