"""Six decoders x modes x strategies x two dtypes: loss and every gradient are those of ``ac="none"``, to the bit."""

from __future__ import annotations

import pytest
import torch

from nemo_like import parallelize
from tests.checks import assert_bitwise, whole
from tests.models.decoders import NAMES, batch, build, loss_of
from tests_distributed.spawn import on_ranks

MODES = ("none", "full", "selective", "submodule")


def _step(name: str, strategy: str, ac: str, dtype: str, ids: torch.Tensor, **more: int) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step by the names that the model shows."""
    model = parallelize(build(name), strategy=strategy, ac=ac, precision=None if dtype == "fp32" else dtype, **more)
    torch.manual_seed(7)
    loss = loss_of(model, ids)
    loss.backward()
    named = {key.removeprefix("module."): p for key, p in model.named_parameters()}
    assert list(named) == [key for key, _ in build(name).named_parameters()]
    return {"loss": loss.detach(), **{key: whole(p.grad) for key, p in named.items()}}


def _compare(rank: int, name: str, strategy: str, dtype: str, dp_replicate: int) -> None:
    ids = batch(2, seed=rank)
    expected = _step(name, strategy, "none", dtype, ids, dp_replicate=dp_replicate)
    assert all(torch.isfinite(tensor).all() for tensor in expected.values())
    for ac in MODES[1:]:
        assert_bitwise(_step(name, strategy, ac, dtype, ids, dp_replicate=dp_replicate), expected, ac)


@pytest.mark.few(7)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_single(name: str, dtype: str) -> None:
    _compare(0, name, "single", dtype, 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("strategy", "ranks", "dp_replicate"), [("ddp", 2, 1), ("fsdp2", 2, 1), ("fsdp2", 4, 2)])
@on_ranks(timeout=180)
def test_ranks(rank: int, ranks: int, name: str, strategy: str, dp_replicate: int, dtype: str) -> None:
    _compare(rank, name, strategy, dtype, dp_replicate)
