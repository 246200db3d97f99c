"""A method of context parallelism, a schedule, an optimizer or a GPU that is put into its registry is known everywhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_like import ContextParallel, Job, PipelineParallel, predict
from nemo_like.distributed.context import check_context_parallel
from nemo_like.options.parallel import CONTEXT_METHODS
from nemo_like.planning.device_table import device_table
from nemo_like.planning.fit import fit
from nemo_like.planning.query import PlanQuery
from tests.models.expert_families import tokens
from tests.models.families import FAMILIES
from tests.models.tiny import labelled
from tests.registered import KNOWN, WORD, register


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A file of a GPU with the figures of an H100, and the other toys in their registries."""
    register(monkeypatch.setitem)
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(device_table()["h100-80gb"]), encoding="utf-8")
    return str(path)


def _numbers(report: Any, names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in names} for row in report.to_dict().get("rows", report.to_dict().get("candidates"))]


@pytest.mark.parametrize("word", CONTEXT_METHODS)
def test_facts_of_a_method_are_those_of_the_operators_that_it_runs(word: str) -> None:
    job = Job.of(world_size=2, cp=ContextParallel(2, word), gpu="h100-80gb")
    query = PlanQuery.from_model(FAMILIES["llama"].build(), labelled(tokens(2, 64) % 48), job)
    records = query.stages[0].part.problems[0].records
    assert (sum(record.gathered for record in records) > 0) == CONTEXT_METHODS[word].gathers_again


# 3 s each: a plan of two stages, and a search.
def test_toys_are_planned_as_the_objects_that_they_are_copies_of(gpu: str) -> None:
    model, reports = FAMILIES["llama"].build(), []
    for words, device in ((dict.fromkeys(KNOWN, WORD), gpu), (KNOWN, "h100-80gb")):
        cp, pp = ContextParallel(2, words["cp_method"]), PipelineParallel(2, words["schedule"], 4)
        optimizer = words["optimizer"]
        reports.append(predict(model, gpus=8, cp=cp, pp=pp, optimizer=optimizer, gpu=device, seq_len=64, precision=None))
    toys, known = (_numbers(each, ("ac", "peak_bytes", "reserved_bytes", "step_seconds")) for each in reports)
    assert toys == known and len(known) >= 3
    with pytest.raises(ValueError, match="no three ranks"):
        check_context_parallel(model, ContextParallel(3, WORD))


def test_toys_are_searched_for_as_the_objects_that_they_are_copies_of(gpu: str) -> None:
    model, reports = FAMILIES["llama"].build(), []
    for words, device in ((dict.fromkeys(KNOWN, WORD), gpu), (KNOWN, "h100-80gb")):
        reports.append(fit(model, gpus=4, cp=2, pp=2, gpu=device, seq_len=64, grad_accum=4, compile="none", **words))
    toys, known = (_numbers(each, ("micro_batch", "ac", "reserved_bytes", "step_seconds")) for each in reports)
    assert toys == known and len(known) >= 1
    assert (reports[0].best.layout.schedule, reports[0].best.layout.cp_method) == (WORD, WORD)
