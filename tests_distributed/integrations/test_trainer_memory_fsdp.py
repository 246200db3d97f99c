"""Trainers on two ranks under `accelerate launch` with FSDP2: the largest batch first, plans, and budgets, as counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests_distributed.integrations.test_trainer_fsdp import CONFIG

pytest.importorskip("trl", reason="the extra 'hosts' is not installed")
pytest.importorskip("peft", reason="the extra 'hosts' is not installed")

JOB = Path(__file__).with_name("launched_memory.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("memory")
    (folder / "fsdp2.yaml").write_text(CONFIG + "mixed_precision: 'no'\n", encoding="utf-8")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", folder / "fsdp2.yaml", JOB, folder]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    loaded: dict[str, Any] = json.loads((folder / "memory.json").read_text(encoding="utf-8"))
    return loaded


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
