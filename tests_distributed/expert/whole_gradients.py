"""Experts that are split over ranks against one process: loss and whole gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from nemo_like import parallelize
from tests.checks import assert_bitwise, step
from tests.models.expert_families import build


def expected(name: str, ids: Tensor, **changes: object) -> dict[str, Tensor]:
    """Gradients of one process by name, and its loss."""
    return step(build(name, **changes), input_ids=ids, labels=ids)


def assert_close(
    mine: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = 1e-5, where: object = ""
) -> None:
    assert mine.keys() == wanted.keys(), where
    for name, grad in wanted.items():
        # Relative to the gradient's norm: sums over ranks round differently from one sum.
        error = (mine[name] - grad).norm() / grad.norm().clamp(min=1e-8)
        assert error <= tolerance, (where, name, error)


def assert_trains(
    make: Callable[[], nn.Module], wanted: Mapping[str, Tensor], batch: dict[str, Tensor], *ways: dict[str, Any]
) -> nn.Module:
    """Train `make()` in each of `ways` on this rank's `batch`: loss and gradients are those `wanted` of one process, and
    those of the first way to the bit. Returns the last model."""
    first: dict[str, Tensor] = {}
    for way in ways:
        sample = {"sample_input": batch} if "%" in str(way.get("ac")) else {}
        model = parallelize(make(), device="cpu", **way, **sample)
        found = step(model, **batch)
        first = first or found
        assert_bitwise(found, first, way)
        mean = found["loss"].clone()
        dist.all_reduce(mean)
        assert abs(mean / dist.get_world_size() - wanted["loss"]) <= 1e-6 * abs(wanted["loss"]), way
        assert_close(found | {"loss": wanted["loss"]}, wanted, where=way)
    return model
