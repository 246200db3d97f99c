"""What a plan says of sequences that are cut over ranks: seconds on the network."""

from __future__ import annotations

import pytest

from nemo_like.options import ContextParallel
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import Planner, Setup
from tests.models.expert_families import tokens
from tests.models.families import FAMILIES

ROWS, LENGTH, WIDTH = 2, 64, 8


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gather_costs_what_a_rank_receives(ranks: int) -> None:
    ids = tokens(ROWS, LENGTH) % 48
    setup = Setup(shard_ranks=ranks, cp=ContextParallel(ranks))
    device = resolve_device("h100")
    with Planner(
        FAMILIES["llama"].build(), {"input_ids": ids, "labels": ids}, device=device, setup=setup
    ) as planner:  # fmt: skip
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
