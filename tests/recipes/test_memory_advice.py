"""What to change where memory ran out: the planner's peaks, to the byte, for every job and for budgets."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from nemo_like._util.words import write_bytes
from nemo_like.models import resolve_model
from nemo_like.options import MemoryBudget
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import plan_for
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.memory_advice import MemoryRanOutError, PlannedStep, advice_on_memory, smaller_budget
from nemo_like.recipes.options import PretrainOptions
from tests.models.tiny import llama

pytest.importorskip("transformers")
CPU = resolve_device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(llama(num_hidden_layers=2).config.to_dict()))
    return str(path)


def _step(options: PretrainOptions, ranks: Ranks) -> PlannedStep:
    def build(options: PretrainOptions) -> nn.Module:
        return resolve_model(options.model).build("meta", torch.float32)

    return PlannedStep(build, options, ranks, options.seq_len, CPU)


def _peak(options: PretrainOptions, budget: str) -> int:
    """What `parallelize` would plan for one rank."""
    sample = options.planned_input(options.rows(1), options.seq_len)
    bare = resolve_model(options.model).build("meta", torch.float32)
    step, loss = options.job().step, options.loss
    return plan_for(bare, ac=budget, sample_input=sample, gpu=CPU, step=step, precision="bf16", loss=loss).peak_bytes


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", ["60%", "auto"])
def test_a_budget_counts_as_what_it_was_planned_to(model: str, budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # With nothing left to change but the budget, which is what takes long to plan.
    said = {"loss": "chunked", "precision": "bfloat16", "batch_size": 8, "grad_accum": 8}
    options = PretrainOptions(model=model, ac=budget, seq_len=128, **said)
    step = _step(options, Ranks(0, 1, torch.device("cpu")))
    monkeypatch.setattr(step, "peak", functools.cache(step.peak))
    now, full = step.peak(options), step.peak(replace(options, ac="full"))
    assert full < now
    ways = step.ways_out()
    assert ways[0] == f"--ac full ({write_bytes(now - full)} less)"
    if budget == "auto":  # a tenth less of the device changes nothing here
        assert now == _peak(options, budget) and len(ways) == 1
    else:
        smaller = _peak(options, "30%")
        assert smaller == step.peak(replace(options, ac="30%")) < now
        assert ways[1:] == [f"--ac 30% ({write_bytes(now - smaller)} less)"]


def test_the_budget_to_try_next() -> None:
    found = {asked: smaller_budget(MemoryBudget.parse(asked), CPU) for asked in ("50%", "10MiB", "40GiB", "auto")}
    assert found == {"50%": "25%", "10MiB": "9.00MiB", "40GiB": "36.00GiB", "auto": "12.07GiB"}  # 0.9 of 0.9 of 16 GB


def test_ranks_and_axes_of_the_job_are_those_of_the_plan(model: str) -> None:
    options = PretrainOptions(model=model, ac="full", seq_len=64, batch_size=8, tp=2, cp=2)
    alone = PretrainOptions(model=model, ac="full", seq_len=64, batch_size=8)
    one = _step(alone, Ranks(0, 1, torch.device("cpu"))).peak(alone)
    split = _step(options, Ranks(0, 8, torch.device("cpu"), tp=2, cp=2)).peak(options)
    assert split < one / 3, "half of the rows, half of their tokens, a quarter of the weights"


def test_what_cannot_be_planned_says_so(model: str) -> None:
    options = PretrainOptions(model=model, ac="full", seq_len=64, batch_size=8, pp=2)
    step = _step(options, Ranks(0, 2, torch.device("cpu"), pp=2))
    reasons = r"no space.*no plan can be made.*nemo-like plan --pp.*larger --grad-accum"
    with pytest.raises(MemoryRanOutError, match=reasons), advice_on_memory(step):
        raise torch.OutOfMemoryError("no space left on the device.\nand more")
    with pytest.raises(RuntimeError, match=r"^something else$"), advice_on_memory(step):
        raise RuntimeError("something else")
