"""One interface for how rows travel: each implementation computes what all-to-all does, and replay never routes again."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from nemo_like import parallelize
from nemo_like.distributed.expert.exchange import AllGather, AllToAll, Dispatch, group_key
from nemo_like.options import ExpertParallel
from tests.checks import refused
from tests.models.expert_families import build, tokens
from tests_distributed.counting import CountOps
from tests_distributed.expert.whole_gradients import assert_trains, expected
from tests_distributed.spawn import on_ranks

EXPERTS, WIDTH = 4, 16


def _through(dispatch: Dispatch, rank: int, weighted: bool) -> list[Tensor]:
    """Result and gradients of rows that each expert multiplies by its own matrix; other numbers of them on each rank."""
    made = torch.Generator().manual_seed(rank)
    rows = torch.randn(5 + 3 * rank, WIDTH, generator=made).bfloat16().requires_grad_()
    weights = torch.rand(len(rows), 2, generator=made).requires_grad_()
    chosen = torch.stack([torch.randperm(3, generator=made)[:2] for _ in rows])  # the last expert gets none
    if not weighted:
        chosen = chosen[:, :1].clone()
        chosen[1] = EXPERTS  # goes to none
    taken, sent = dispatch.send(rows, chosen, weights if weighted else None)
    assert (
        taken.shape == (sum(sent.counts), WIDTH) and sent.ends.tolist() == torch.tensor(sent.counts).cumsum(0).tolist()
    )
    first = rank * EXPERTS // 2
    parts = [part * (first + number + 1) for number, part in enumerate(taken.split(sent.counts))]
    out = dispatch.bring_back(torch.cat(parts), sent)
    out.backward(torch.randn(out.shape, generator=made).bfloat16())
    found = [out.detach(), rows.grad]
    if weighted:
        found.append(weights.grad)
    by_hand = [float(1 + number) for number in range(EXPERTS)] + [0.0]
    counted = torch.tensor(by_hand)[chosen] * (weights.detach() if weighted else 1.0)
    assert torch.allclose(out.float(), rows.detach().float() * counted.sum(1, keepdim=True), rtol=0.03, atol=0.03)
    return [tensor.float() for tensor in found if tensor is not None]


@on_ranks(2)
def test_implementations_agree(rank: int, world_size: int) -> None:
    group = group_key(torch.distributed.group.WORLD)
    for weighted in (True, False):
        plain = _through(AllToAll(EXPERTS, group, leaves_out=not weighted), rank, weighted)
        found = _through(AllGather(EXPERTS, group), rank, weighted)
        assert len(found) == len(plain) == 2 + weighted
        for mine, wanted in zip(found, plain):
            assert (mine - wanted).norm() <= 0.02 * wanted.norm(), weighted


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama4", "mixtral"])
@on_ranks(2)
def test_a_model_by_all_gather(rank: int, world_size: int, name: str) -> None:
    ids = tokens(world_size)
    mine = ids[rank : rank + 1]
    again = {"none": 0, "full": 1, "selective": 0}
    ways = [{"ac": ac, "ep": ExpertParallel(2, dispatch="all-gather")} for ac in again]
    assert_trains(partial(build, name), expected(name, ids), {"input_ids": mine, "labels": mine}, *ways)
    for way in ways:
        model, ac = parallelize(build(name), device="cpu", **way), way["ac"]
        with CountOps("nemo_like") as forward:
            part = model(input_ids=mine, labels=mine).loss
        with CountOps("nemo_like") as backward:
            part.backward()
        layers = forward.counts["route_gathered"]
        assert layers and not backward.counts["route_gathered"], ac
        gathers = forward.counts["gather_rows"]
        assert backward.counts["gather_rows"] == gathers * again[ac] + layers, ac  # and the gradient of each sum


@on_ranks(2)
def test_what_is_not_there_is_said_before_any_change(rank: int, world_size: int) -> None:
    with refused("dispatch is 'deepep'; it must be one of all_to_all, all_gather"):
        ExpertParallel(2, dispatch="deepep")
    model = build("mixtral")
    before = dict(model.named_modules())
    with refused("plans know all-to-all alone"):
        parallelize(model, ep=ExpertParallel(2, dispatch="all_gather"), ac="50%", sample_input=tokens(1), device="cpu")
    assert dict(model.named_modules()) == before
