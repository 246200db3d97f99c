"""What a plan says of sequences that are cut over ranks: seconds on the network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_like import Job
from nemo_like.cli import main
from nemo_like.options import ContextParallel
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import Planner
from tests.models.expert_families import tokens
from tests.models.families import FAMILIES

ROWS, LENGTH, WIDTH = 2, 64, 8


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gather_costs_what_a_rank_receives(ranks: int) -> None:
    ids = tokens(ROWS, LENGTH) % 48
    setup = Job.of(world_size=ranks, cp=ContextParallel(ranks))
    device = resolve_device("h100")
    with Planner(FAMILIES["llama"].build(), {"input_ids": ids, "labels": ids}, setup.change(gpu=device)) as planner:
        problem = planner.problems[0]
        gathers = [
            (record, seconds)
            for record, seconds in zip(problem.records, problem.seconds, strict=True)
            if record.op.name() == "nemo_like::gather_sequence"
        ]
        heads = planner.model.config.num_key_value_heads
        part = ROWS * heads * LENGTH // ranks * WIDTH * 4
        assert [record.bytes for record, _ in gathers] == [ranks * part] * 2
        assert [seconds for _, seconds in gathers] == [(ranks - 1) * part / device.host_link] * 2
        full, none = planner.uniform("full")[0], planner.uniform("none")[0]
        assert full.replay_seconds > none.replay_seconds
        assert full.replay_seconds >= 2 * (ranks - 1) * part / device.host_link


def test_the_command_plans_for_the_part_of_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`nemo-like plan --cp 8`: no GPU, no other ranks; a rank of eight holds far less of the same sequences."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FAMILIES["llama"].build().config.to_dict()))
    base = [
        "plan",
        "--model",
        str(config),
        "--gpu",
        "h100",
        "--world-size",
        "8",
        "--seq-len",
        "64",
        "--batch-size",
        "2",
    ]
    peaks = {}
    for cp in ("1", "8"):
        out = tmp_path / f"{cp}.json"
        assert main([*base, "--cp", cp, "--json", str(out)]) == 0
        assert ("cp=8" in capsys.readouterr().out) is (cp == "8")
        peaks[cp] = {row["ac"]: row["peak_bytes"] for row in json.loads(out.read_text())["rows"]}
    assert all(peaks["8"][ac] < peaks["1"][ac] / 2 for ac in ("none", "full"))
