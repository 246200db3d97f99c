"""Planning in a job: rank 0 plans for all, and its error is everybody's."""

from __future__ import annotations

import pytest
import torch

from tests_distributed.spawn import run_ranks

pytest.importorskip("transformers")


def _plan(rank, world_size, budget):
    from nemo_like.models import resolve_model
    from nemo_like.planning import plan_for

    source = resolve_model("llama-tiny")
    # Other ranks look at other inputs: only rank 0's counts, or plans would differ.
    return plan_for(source.build("meta"), ac=budget, sample_input=source.sample_input(1, 32 + 8 * rank), gpu="cpu")


def _policies(rank, world_size, budget):
    plan = _plan(rank, world_size, budget)
    return plan.held_bytes, {name: policy and repr(policy) for name, policy in plan.policies().items()}


def test_all_ranks_get_the_plan_of_rank_zero():
    first, second = run_ranks(2, _policies, "40%", timeout=120)
    assert first == second and first[0] > 0


def test_all_ranks_get_the_error_of_rank_zero():
    errors = run_ranks(2, _plan, "1MiB", return_exceptions=True, timeout=120)
    assert [type(error).__name__ for error in errors] == ["BudgetError", "BudgetError"]
    assert len({error.smallest_bytes for error in errors}) == 1


def _replicated(rank, world_size):
    from nemo_like.models import resolve_model
    from nemo_like.planning import plan_for

    source = resolve_model("llama-tiny")
    model, sample = source.build("meta"), source.sample_input(1, 32)
    asked = {"ac": "100%", "sample_input": sample, "gpu": "cpu"}
    return [plan_for(model, **asked, dp_replicate=size).peak["parameters"] for size in (1, 2)]


def test_the_number_of_replicas_says_how_far_parameters_are_sharded():
    from nemo_like.models import resolve_model

    params = 4 * sum(p.numel() for p in resolve_model("llama-tiny").build("meta").parameters())
    (fsdp, hsdp), again = run_ranks(4, _replicated, timeout=180)[:2]
    assert [fsdp, hsdp] == again == [params // 4, params // 2]


def test_rank_without_group_plans_alone():
    assert not torch.distributed.is_initialized()
    assert _plan(0, 1, "40%").peak["parameters"] > 0
