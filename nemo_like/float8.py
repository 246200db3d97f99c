"""Matmuls of the layers' linears in float8, by torchao: what ``precision="fp8"`` adds to bfloat16."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like.extras import require
from nemo_like.log import say_once
from nemo_like.options import Precision

_RECIPES = {"fp8": "tensorwise", "fp8-rowwise": "rowwise", "fp8-gather": "tensorwise"}


def check_float8(matmuls: str | None) -> None:
    """Raise MissingExtraError where they are asked for and torchao is not installed."""
    if matmuls is not None:
        require("torchao.float8", "fp8", f"for precision={matmuls!r}")


def effective_matmuls(precision: Precision, *, sharded: bool) -> str | None:
    """`precision.matmuls`, or ``"fp8"`` for ``"fp8-gather"`` where FSDP2 shards nothing, so that nothing is gathered."""
    return "fp8" if precision.matmuls == "fp8-gather" and not sharded else precision.matmuls


def float8_linears(layers: Sequence[nn.Module], matmuls: str, device_type: str, *, sharded: bool = False) -> None:
    """Replace the linears in `layers` by torchao's, which multiply in float8 with scales of each call's own.

    In place: parameters keep their names, and stay the same unless they are to be gathered in float8. Linears with a side
    that is no multiple of 16, which the kernels need, stay as they are.

    Args:
        layers: what repeats; embedding and head are left alone.
        matmuls: ``"fp8"``, one scale per tensor, ``"fp8-rowwise"``, one per row, or ``"fp8-gather"``, as ``"fp8"`` with
            weights that FSDP2 gathers in float8.
        device_type: where the model will run. Without a GPU float8 is emulated: the numbers, not the speed.
        sharded: FSDP2 will shard the layers; elsewhere nothing is gathered, and ``"fp8-gather"`` is ``"fp8"``.
    """
    float8: Any = require("torchao.float8", "fp8", f"for precision={matmuls!r}")
    config = float8.Float8LinearConfig.from_recipe_name(_RECIPES[matmuls])
    if device_type != "cuda":
        config = dataclasses.replace(config, emulate=True)
    if matmuls == "fp8-gather" and sharded:
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
    elif matmuls == "fp8-gather":
        say_once("precision='fp8-gather' was asked for; nothing is sharded, so nothing is gathered: as 'fp8'.")

    def fits(module: nn.Module, name: str) -> bool:
        sides = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
        return all(side % 16 == 0 for side in sides)

    for layer in layers:
        float8.convert_to_float8_training(layer, config=config, module_filter_fn=fits)


def scale_before_forward(model: nn.Module) -> None:
    """Have `model`, sharded, compute the scales of all weights that are gathered in float8 at the start of each forward,
    in one collective; else each gather would be one more. A backward gathers with its forward's scales."""
    fsdp: Any = require("torchao.float8", "fp8", "for precision='fp8-gather'")
    model.register_forward_pre_hook(
        lambda module, _: fsdp.precompute_float8_dynamic_scale_for_fsdp(module), prepend=True
    )


def without_float8(tensor: Tensor) -> Tensor:
    """A shard as it is stored, without the class that has FSDP2 gather it in float8; the same memory."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else None
    if not isinstance(tensor, DTensor) or not type(local).__module__.startswith("torchao.float8"):
        return tensor
    stored = getattr(local, local.__tensor_flatten__()[0][0])  # the weight; beside it there may be its scale
    return DTensor.from_local(
        stored, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
