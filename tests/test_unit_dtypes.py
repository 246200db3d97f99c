"""What a layer stores in another dtype than the rest of it is sharded as a unit of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_like.distributed.units import plan_units

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def linear(dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(4, 4, bias=False, dtype=dtype)


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize(
    ("dtypes", "main", "split"),
    [
        ((FP32, FP32, FP32, FP32), FP32, {}),
        ((BF16, BF16, BF16, BF16), BF16, {}),
        ((FP32, FP16, FP16, FP16), FP16, {"layer.a": FP32}),
        ((FP16, FP16, FP32, FP16), FP16, {"layer.b.1": FP32}),
        ((FP32, FP16, FP16, BF16), FP16, {"layer.a": FP32, "layer.c": BF16}),
        ((FP16, FP32, FP32, FP16), FP16, {"layer.b.0+layer.b.1": FP32}),
    ],
)
def test_what_is_stored_in_another_dtype_is_a_unit_of_its_own(
    dtypes: tuple[torch.dtype, ...], main: torch.dtype, split: dict[str, torch.dtype], buffer: bool
) -> None:
    a, first, second, c = map(linear, dtypes)
    layer = nn.Module()
    layer.a, layer.b, layer.c = a, nn.Sequential(first, second), c
    if buffer:
        layer.b.register_buffer("scale", torch.zeros(1, dtype=torch.float64))
    plan = plan_units(nn.ModuleDict({"layer": layer}), [layer])
    assert {param.dtype for param in plan.layers[0].params} == {main}
    assert {unit.name: {param.dtype for param in unit.params} for unit in plan.by_dtype} == {
        name: {dtype} for name, dtype in split.items()
    }
    assert sum(len(unit.params) for unit in plan.units) == 4


def test_a_model_without_parameters_has_nothing_to_shard() -> None:
    model = nn.Sequential(nn.Identity())
    assert not any(unit.params for unit in plan_units(model, [model[0]]).units)
