"""Experts of models without transformers: named by a plan or found by structure, computed by their own forward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like.distributed.expert import find_experts
from nemo_like.options import ExpertParallel
from tests.checks import step
from tests_distributed.expert.whole_gradients import assert_trains
from tests_distributed.small_model import VOCAB, WIDTH, SmallModel
from tests_distributed.spawn import on_ranks

COUNT = 4


class Weights(nn.Module):
    """Experts with names and biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(COUNT, *s) / 4) for s in ((WIDTH, 24), (24, WIDTH)))
        self.bias = nn.Parameter(torch.randn(COUNT, WIDTH) / 4)
        self.n_experts = COUNT

    def each(self, rows: Tensor, number: int) -> Tensor:
        return F.gelu(rows @ self.first[number]) @ self.second[number] + self.bias[number]


class Routed(Weights):
    """(N, D), (N, k), (N, k) to (N, D)."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number in range(self.n_experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, self.each(tokens[rows], number) * weights[rows, places, None])
        return out


class Every(Weights):
    """(experts * N, D) to the same; a row of zeros gives the bias, so none can be left out."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens.view(self.n_experts, -1, WIDTH)
        return torch.stack([self.each(row, number) for number, row in enumerate(rows)]).view(-1, WIDTH)


class Block(nn.Module):
    def __init__(self, kind: type[Weights]) -> None:
        super().__init__()
        self.norm, self.router, self.pool = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, COUNT), kind()

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        probabilities = self.router(flat).softmax(-1)
        if isinstance(self.pool, Routed):
            weights, chosen = probabilities.topk(2)
            return x + self.pool(flat, chosen, weights).view_as(x)
        rows = flat.repeat(COUNT, 1) * probabilities.T.reshape(-1, 1)
        return x + self.pool(rows).view(COUNT, *x.shape).sum(0)


class Model(SmallModel):
    def __init__(self, kind: type[Weights]) -> None:
        super().__init__(lambda: Block(kind))


def test_found_by_structure_or_by_name() -> None:
    for kind, call in ((Routed, "routed"), (Every, "every")):
        model = Model(kind)
        for found in (find_experts(model), find_experts(model, {"layers.*.pool": call})):
            assert [(e.fqn, e.count, e.call) for e in found] == [(f"layers.{i}.pool", COUNT, call) for i in (0, 1)]
            assert found[0].parameters == ("first", "second", "bias")


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks(timeout=90)
def test_experts_of_a_plain_model(rank: int, ranks: int) -> None:
    ids = torch.randint(VOCAB, (ranks, 6), generator=torch.Generator().manual_seed(1))
    for kind, call in ((Routed, "routed"), (Every, "every")):
        plan = ExpertParallel(2, plan={"layers.*.pool": call})
        ways = [{"ac": ac, "ep": ep} for ac in ("none", "full", "selective") for ep in (2, plan)]
        assert_trains(partial(Model, kind), step(Model(kind), ids), {"ids": ids[rank : rank + 1]}, *ways)
