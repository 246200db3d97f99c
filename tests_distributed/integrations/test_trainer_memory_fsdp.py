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
    run(*accelerate_launch(folder, "mixed_precision: 'no'\n"), str(JOB), str(folder), "fsdp")
    run("torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOB), str(folder), "ddp")
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("fsdp", "ddp")}


@pytest.mark.long  # ten trainings of three trainers on two ranks, 45 s in all
@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo"])
def test_the_largest_batch_first_and_the_plan(results: dict[str, Any], kind: str) -> None:
    made = results["fsdp"][kind]
    plain, checked, within = made["plain"], made["checked"], made["within"]
    assert checked["digests"] == plain["digests"] == within["digests"]
    assert checked["losses"] == plain["losses"] == within["losses"]
    assert plain["counted"] < checked["counted"]  # three steps do not reach the longest rows
    # What is counted has the batch and its masks, which a plan leaves out.
    assert checked["counted"] == pytest.approx(made["planned"]["none"], rel=0.01)
    assert within["counted"] == pytest.approx(made["budget"], rel=0.01)


@pytest.mark.long  # as above
@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_the_plans_of_jobs(results: dict[str, Any], sharding: str) -> None:
    for name, (planned, counted) in results[sharding]["jobs"].items():
        print(f"{sharding} {name}: {planned:,} {counted:,} {counted / planned - 1:+.2%}")
        assert -0.005 < planned / counted - 1 < 0.01, name


@pytest.mark.long  # as above
def test_a_budget_with_sequences_that_ranks_share(results: dict[str, Any]) -> None:
    assert results["fsdp"]["cp"]["counted"] == pytest.approx(results["fsdp"]["cp"]["planned"], rel=0.01)
