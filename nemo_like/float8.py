"""Matmuls of the layers' linears in float8, by torchao: what ``precision="fp8"`` adds to bfloat16."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from nemo_like.extras import require

_RECIPES = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}


def check_float8(matmuls: str | None) -> None:
    """Raise MissingExtraError where they are asked for and torchao is not installed."""
    if matmuls is not None:
        require("torchao.float8", "fp8", f"for precision={matmuls!r}")


def float8_linears(layers: Sequence[nn.Module], matmuls: str, device_type: str) -> None:
    """Replace the linears in `layers` by torchao's, which multiply in float8 with scales of each call's own.

    In place: parameters stay the same, and their names. Linears with a side that is no multiple of 16, which the kernels
    need, stay as they are.

    Args:
        layers: what repeats; embedding and head are left alone.
        matmuls: ``"fp8"``, one scale per tensor, or ``"fp8-rowwise"``, one per row.
        device_type: where the model will run. Without a GPU float8 is emulated: the numbers, not the speed.
    """
    float8: Any = require("torchao.float8", "fp8", f"for precision={matmuls!r}")
    config = float8.Float8LinearConfig.from_recipe_name(_RECIPES[matmuls])
    if device_type != "cuda":
        config = dataclasses.replace(config, emulate=True)

    def fits(module: nn.Module, name: str) -> bool:
        sides = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
        return all(side % 16 == 0 for side in sides)

    for layer in layers:
        float8.convert_to_float8_training(layer, config=config, module_filter_fn=fits)
