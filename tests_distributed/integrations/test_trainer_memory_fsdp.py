"""Trainers on two ranks under `accelerate launch` with FSDP2: the largest batch first, plans, and budgets, as counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests_distributed.integrations.test_trainer_fsdp import accelerate_launch, run

JOB = Path(__file__).with_name("launched_memory.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("memory")
    run(*accelerate_launch(folder, "mixed_precision: 'no'\n"), str(JOB), str(folder))
    return json.loads((folder / "memory.json").read_text(encoding="utf-8"))


@pytest.mark.long  # ten trainings of three trainers on two ranks, 45 s in all
@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo"])
def test_the_largest_batch_first_and_the_plan(results: dict[str, Any], kind: str) -> None:
    made = results[kind]
    plain, checked, within = made["plain"], made["checked"], made["within"]
    assert checked["digests"] == plain["digests"] == within["digests"]
    assert checked["losses"] == plain["losses"] == within["losses"]
    assert plain["counted"] < checked["counted"]  # three steps do not reach the longest rows
    # What is counted has the batch and its masks, which a plan leaves out.
    assert checked["counted"] == pytest.approx(made["planned"]["none"], rel=0.01)
    assert within["counted"] == pytest.approx(made["budget"], rel=0.01)


@pytest.mark.long  # as above
def test_a_budget_with_sequences_that_ranks_share(results: dict[str, Any]) -> None:
    assert results["cp"]["counted"] == pytest.approx(results["cp"]["planned"], rel=0.01)
