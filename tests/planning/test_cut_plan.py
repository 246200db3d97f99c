"""What a plan says of sequences that are cut over ranks: seconds on the network."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nemo_like import Job
from nemo_like.cli import main
from nemo_like.distributed.context import check_context_parallel, methods
from nemo_like.distributed.context.methods.all_gather import GatherKeys
from nemo_like.distributed.context.parts import Attention
from nemo_like.options import ContextParallel, parallel
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from tests.models.expert_families import tokens
from tests.models.families import FAMILIES
from tests.planning.queries import part_of

ROWS, LENGTH, WIDTH = 2, 64, 8


class _OneGather(GatherKeys):
    """Keys and values in one collective, for attention that heads share evenly and that has no mask."""

    triangles = False

    def check(self, stack: Any, ranks: int) -> None:
        if ranks == 3:
            raise ValueError("method='one_gather' has no three ranks.")

    def attend(self, call: Attention) -> Any:
        key, value = call.parts.gather(torch.stack([call.key, call.value]), 3).unbind(0)
        return call.run(call.query, key, value, call.mask)


def test_a_method_is_one_file_and_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options, the checks of a model and plans take a method that only its file and the list of words know."""
    file = ModuleType(f"{methods.__name__}.one_gather")
    monkeypatch.setattr(file, "METHOD", _OneGather(), raising=False)
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setattr(parallel, "CONTEXT_METHODS", (*parallel.CONTEXT_METHODS, "one_gather"))
    model, ids = FAMILIES["llama"].build(), tokens(ROWS, LENGTH) % 48
    with pytest.raises(ValueError, match="no three ranks"):
        check_context_parallel(model, ContextParallel(3, "one_gather"))
    job = Job.of(world_size=2, cp=ContextParallel(2, "one_gather")).change(gpu=resolve_device("h100"))
    query = PlanQuery.of(model, {"input_ids": ids, "labels": ids}, job)
    gathers = [record for record in part_of(query).problems[0].records if "gather_sequence" in record.op.name()]
    assert [record.bytes for record in gathers] == [2 * ROWS * model.config.num_key_value_heads * LENGTH * WIDTH * 4]


def test_no_code_compares_the_word_of_a_method() -> None:
    package = Path(methods.__file__).parents[3]
    assert {path.stem for path in Path(methods.__file__).parent.glob("[a-z]*.py")} == set(parallel.CONTEXT_METHODS)
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            assert not any(isinstance(side, ast.Attribute) and side.attr == "method" for side in sides), path


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gather_costs_what_a_rank_receives(ranks: int) -> None:
    ids = tokens(ROWS, LENGTH) % 48
    setup = Job.of(world_size=ranks, cp=ContextParallel(ranks))
    device = resolve_device("h100")
    query = PlanQuery.of(FAMILIES["llama"].build(), {"input_ids": ids, "labels": ids}, setup.change(gpu=device))
    problem = part_of(query).problems[0]
    gathers = [
        (record, seconds)
        for record, seconds in zip(problem.records, problem.seconds, strict=True)
        if record.op.name() == "nemo_like::gather_sequence"
    ]
    heads = part_of(query).model.config.num_key_value_heads
    part = ROWS * heads * LENGTH // ranks * WIDTH * 4
    assert [record.bytes for record, _ in gathers] == [ranks * part] * 2
    assert [seconds for _, seconds in gathers] == [(ranks - 1) * part / device.host_link] * 2
    full, none = (query.uniform(mode)[0][0] for mode in ("full", "none"))
    assert full.replay_seconds > none.replay_seconds
    assert full.replay_seconds >= 2 * (ranks - 1) * part / device.host_link


@pytest.mark.long
def test_the_command_plans_for_the_part_of_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`nemo-like plan --cp 8`: no GPU, no other ranks; a rank of eight holds far less of the same sequences."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FAMILIES["llama"].build().config.to_dict()))
    base = f"plan --model {config} --gpu h100 --world-size 8 --seq-len 64 --batch-size 2".split()
    peaks = {}
    for cp in ("1", "8"):
        out = tmp_path / f"{cp}.json"
        assert main([*base, "--cp", cp, "--json", str(out)]) == 0
        assert ("cp=8" in capsys.readouterr().out) is (cp == "8")
        peaks[cp] = {row["ac"]: row["peak_bytes"] for row in json.loads(out.read_text())["rows"]}
    assert all(peaks["8"][ac] < peaks["1"][ac] / 2 for ac in ("none", "full"))
