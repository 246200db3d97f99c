"""Whatever stays gathered under FSDP2, each forward reads the weights that are stored; optimizers of others are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import FSDP2, parallelize
from tests.checks import backward, update
from tests.models.tiny import Block
from tests_distributed.small_model import SmallModel, tokens
from tests_distributed.spawn import on_ranks


def _loss(model: Any) -> torch.Tensor:
    return model(tokens(2))


def _evaluated(model: Any) -> float:
    model.eval()
    with torch.no_grad():
        loss = _loss(model)
    model.train()
    return loss.item()


def _evaluation_before_the_step(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        loss = backward(_loss(model))
        losses += [loss.item(), _evaluated(model)]
        update(optimizer)
    return losses


def _evaluation_in_an_accumulation(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        for _ in range(2):
            _loss(model).backward()
            losses.append(_evaluated(model))
        update(optimizer)
    return losses


def _evaluation_before_backward(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = _loss(model)
        losses.append(_evaluated(model))
        loss.backward()
        update(optimizer)
    return losses


def _no_backward_before_the_step(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    _loss(model).backward()
    losses = [_loss(model).item()]  # with a graph, and nobody goes backward through it
    optimizer.step()
    return [*losses, _loss(model).item()]


def _an_average_swapped_in(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    average = [parameter.detach().clone() for parameter in model.parameters()]
    losses = _evaluation_before_the_step(model, optimizer)
    with torch.no_grad():
        for parameter, mean in zip(model.parameters(), average):
            parameter.copy_(mean)
    return [*losses, _evaluated(model)]


def _zeroth_order(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    with torch.no_grad():
        for step in (0.1, -0.2, 0.1):
            for parameter in model.parameters():
                parameter.add_(step)
            losses.append(_loss(model).item())
    return losses


FLOWS: tuple[Callable[[Any, torch.optim.Optimizer], list[float]], ...] = (
    _evaluation_before_the_step,
    _evaluation_in_an_accumulation,
    _evaluation_before_backward,
    _no_backward_before_the_step,
    _an_average_swapped_in,
    _zeroth_order,
)


@pytest.mark.parametrize(("reshard", "ac"), [(None, "none"), (False, "full")])
@on_ranks(2)
def test_each_forward_reads_what_is_stored(rank: int, world_size: int, reshard: bool | None, ac: str) -> None:
    found = []
    for flow in FLOWS:
        losses = []
        for sharded in (False, True):
            model: nn.Module = SmallModel(Block)
            if sharded:
                model = parallelize(model, FSDP2(reshard_after_forward=reshard), ac, device="cpu")
            losses.append(flow(model, torch.optim.SGD(model.parameters(), lr=0.5)))
        if losses[0] != pytest.approx(losses[1], rel=1e-6):  # a mean of two ranks' gradients, which are equal
            found.append(f"{flow.__name__}: {losses}")
    assert not found, found


def _step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = backward(model(tokens(2)))
    update(optimizer)
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
