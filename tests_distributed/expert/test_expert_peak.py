"""A plan for split experts, and what the allocator says of the step at the routing that the plan was made for."""

from __future__ import annotations

import pytest
import torch

from nemo_like import Job, parallelize
from nemo_like.options import ExpertParallel, MemoryBudget
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from tests.models.expert_families import all_to_the_first_rank, tokens
from tests.planning.queries import plan_of
from tests_distributed.allocated import local, step_peak_bytes
from tests_distributed.spawn import run_ranks

MODES = ("none", "full", "selective")
BUDGETS = ("60%", "30%")
"""One that keeps the exchanged rows, and one that sends them again."""


def _peaks(rank: int, world_size: int, asked: tuple[str, ...], tp: int) -> list[tuple[str, int, int, bool]]:
    ids = tokens(2, 64, seed=rank // tp)
    sample = {"input_ids": ids, "labels": ids}
    setup = Job.of(world_size=(world_size // tp) * tp, tp=tp, ep=ExpertParallel(2, imbalance=2.0))
    query = PlanQuery.of(all_to_the_first_rank(), sample, setup.change(gpu=resolve_device("cpu")))
    found, bare = [], None
    for ac in asked:
        peak = (
            peak_of(query, query.uniform(ac)).total
            if ac in MODES
            else plan_of(query, MemoryBudget.parse(ac)).peak_bytes
        )
        model = parallelize(
            all_to_the_first_rank(),
            ac=ac,
            tp=tp,
            ep=ExpertParallel(2, imbalance=2.0),
            device="cpu",
            sample_input=None if ac in MODES else sample,
        )
        model(**sample).loss.backward()
        grads = [local(parameter.grad).clone() for parameter in model.parameters()]
        bare = bare or grads
        same = all(torch.equal(a, b) for a, b in zip(grads, bare, strict=True))
        model.zero_grad()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            out = model(**sample)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        found.append((ac, peak, step_peak_bytes(model, optimizer, step), same))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "asked", "tp"),
    [
        (2, (*MODES, *BUDGETS), 1),
        pytest.param(4, ("full",), 1, marks=pytest.mark.long),
        pytest.param(4, ("none", "60%"), 2, marks=pytest.mark.long),
        pytest.param(4, (*MODES, *BUDGETS), 2, marks=pytest.mark.long),
        pytest.param(4, MODES, 1, marks=pytest.mark.long),
    ],
)
def test_the_fullest_rank_peaks_as_planned(ranks: int, asked: tuple[str, ...], tp: int) -> None:
    for rank, rows in enumerate(run_ranks(ranks, _peaks, asked, tp, timeout=300)):
        for ac, planned, measured, same in rows:
            assert same, (rank, ac)
            if rank % 2:  # its experts get no token
                assert measured < planned, (rank, ac)
            else:
                assert abs(planned / measured - 1) <= 0.01, (rank, ac, planned, measured)
