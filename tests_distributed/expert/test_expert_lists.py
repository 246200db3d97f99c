"""Experts in a list of modules: they train without ``ep``, also where ranks call others, and ``ep`` refuses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like.options import ExpertParallel, PipelineParallel
from nemo_like.planning.planner import plan_for
from tests.checks import step
from tests_distributed.expert.whole_gradients import assert_close
from tests_distributed.small_model import WIDTH, SmallModel, tokens
from tests_distributed.spawn import on_ranks

COUNT = 4
CALLED: dict[str, Tensor] = {}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(self.up(rows).relu())


class Mixture(nn.Module):
    """Each token goes to the expert of its own number; those from `COUNT` on to none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        out = flat.clone()
        for number in sorted(set(CALLED["ids"].tolist()) & set(range(COUNT))):
            rows = torch.where(CALLED["ids"] == number)[0]
            out.index_add_(0, rows, self.experts[number](flat[rows]))
        return out.view_as(x)


class Model(SmallModel):
    def __init__(self) -> None:
        super().__init__(Mixture)

    def forward(self, ids: Tensor) -> Tensor:
        CALLED["ids"] = ids.flatten()
        return super().forward(ids)


# Of each rank's tokens: no rank has all experts, and none has expert 3.
ROWS = torch.tensor([[0, 1, 9, 9], [2, 2, 2, 2]])


@on_ranks(2)
def test_experts_that_get_no_token_on_some_ranks(rank: int, world_size: int) -> None:
    wanted = step(Model(), ROWS)
    for options in ({"strategy": "fsdp2"}, {"strategy": "ddp"}):
        for ac in ("none", "full"):
            model = parallelize(Model(), ac=ac, device="cpu", **options)
            for _ in range(2):  # twice: DDP complains in the second forward
                found = step(model, ROWS[rank : rank + 1])
            found = {name.removeprefix("module."): grad for name, grad in found.items()} | {"loss": wanted["loss"]}
            assert_close(found, wanted, where=(options, ac))


@on_ranks(2)
def test_ep_refuses_lists_before_any_change(rank: int, world_size: int) -> None:
    reason = (
        r"'layers\.0\.experts' are a ModuleList of 4 modules Expert\..*from_pretrained\(\) of transformers 5 or newer"
    )
    for plan in (None, {"layers.*.experts": "routed"}):
        model = Model()
        before = dict(model.named_modules())
        with pytest.raises(ValueError, match=reason):
            parallelize(model, ep=ExpertParallel(2, plan=plan), device="cpu")
        assert dict(model.named_modules()) == before


@pytest.mark.parametrize("ways", [{"ep": 2}, {"ep": 2, "pp": PipelineParallel(2, loss_mean="rows")}])
def test_plans_refuse_lists(ways: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Convert it to fused experts"):
        plan_for(Model(), ac="50%", sample_input=tokens(2), world_size=4, **ways)


class Routed(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        for number in x.sum(-1).long().unique().tolist():
            x = x + self.experts[number % COUNT](x)
        return x


def test_budgets_without_ep_say_that_rows_are_not_known() -> None:
    with pytest.raises(ValueError, match=r"decides in Python how many rows each gets.*convert it to fused experts"):
        plan_for(SmallModel(Routed), ac="50%", sample_input=tokens(2), world_size=2)
