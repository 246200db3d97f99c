"""An optimizer that holds what sharding has replaced is refused at its step; one that is built anew trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import parallelize
from tests_distributed.small_model import SmallModel, tokens
from tests_distributed.spawn import on_ranks
from tests_distributed.weights.test_stale_weights import Block


def _step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = model(tokens(2))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("arguments", [{}, {"ac": "full", "dp_replicate": 2}], ids=["fsdp2", "replicas"])
@on_ranks(2)
def test_an_optimizer_that_was_built_before_is_refused(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    model = SmallModel(Block)
    early = torch.optim.SGD(model.parameters(), lr=0.5)
    listed = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    model = parallelize(model, device="cpu", **arguments)
    late = torch.optim.SGD(listed, lr=0.5)  # of a list that was made before
    for optimizer in (early, late):
        with pytest.raises(
            RuntimeError,
            match=r"^This SGD has \d+ parameter\(s\) that parallelize\(\) or materialize\(\) has replaced, '",
        ):
            _step(model, optimizer)
    model.zero_grad()
    right = torch.optim.SGD(model.parameters(), lr=0.5)
    first = _step(model, right)
    assert _step(model, right) < first
    del early, late, listed, optimizer
    assert _step(model, torch.optim.AdamW(model.parameters())) > 0
