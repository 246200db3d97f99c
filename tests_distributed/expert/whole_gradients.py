"""Experts that are split over ranks against one process: loss and whole gradients."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from nemo_like import parallelize
from tests.checks import assert_bitwise, assert_near, mean_over_ranks, step
from tests.models.expert_families import build


def expected(name: str, ids: Tensor, **changes: object) -> dict[str, Tensor]:
    """Gradients of one process by name, and its loss."""
    return step(build(name, **changes), input_ids=ids, labels=ids)


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
        assert_near(mean_over_ranks(found["loss"]), wanted["loss"], 1e-6, way)
        # Sums over ranks round differently from one sum.
        assert_near(found | {"loss": wanted["loss"]}, wanted, where=way, least=1e-8)
    return model
