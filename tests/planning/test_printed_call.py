"""The line that `nemo-like plan` prints runs what was planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import FSDP2, Job, Plan, PlanSearch, Precision, StepSpec, parallelize
from nemo_like._util.module_tree import bare_modules
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import PlanReport, make_report
from tests.planning.queries import Text

IDS = torch.zeros(2, 16, dtype=torch.long)
BATCH = {"input_ids": IDS, "labels": IDS}


def _report(job: Job) -> PlanReport:
    model = Text()
    query = PlanQuery.of(model, BATCH, job.change(gpu=resolve_device("cpu")))
    return make_report(query, ["50%"], 1 << 40)


def _regions(model: nn.Module) -> dict[str, Any]:
    """What each checkpointed layer keeps."""
    return {
        name: getattr(module.policy, "decisions", type(module.policy).__name__)
        for name, module in bare_modules(model)
        if isinstance(module, CheckpointWrapper)
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_every_printed_call_runs_its_row(precision: str | None) -> None:
    report = _report(Job.of(precision=precision))
    for row in report.rows:
        known = {"parallelize": parallelize, "FSDP2": FSDP2, "Precision": Precision, "Plan": Plan}
        known |= {"model": Text(), "batch": BATCH}
        exec(report.call(row), known)
        planned = {name: policy for name, policy in row.plan.policies().items() if policy is not None}
        if row.ac in ("none", "full", "selective"):
            assert len(_regions(known["model"])) == (0 if row.ac == "none" else 4)
        else:
            expected = {n: getattr(p, "decisions", type(p).__name__) for n, p in planned.items()}
            assert _regions(known["model"]) == expected
            assert expected or precision is not None


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job.of(world_size=2), "strategy='fsdp2', ac='50%', sample_input=batch"),
        (Job.of(world_size=8, dp_replicate=4), "dp_replicate=4"),
        (Job.of(world_size=2, step=StepSpec(optimizer="sgd")), ", optimizer='sgd', sample_input=batch"),
        (Job.of(world_size=2, step=StepSpec(microbatches=4, keeps_output=False)),
         ", step=StepSpec(microbatches=4, keeps_output=False), sample_input=batch"),
        (Job.of(world_size=2, precision=Precision("bf16", "bf16")), "param_dtype='bf16', reduce_dtype='bf16'"),
        (Job.of(strategy=FSDP2(False, 2, 2), world_size=2),
         "strategy=FSDP2(reshard_after_forward=False, forward_prefetch=2, backward_prefetch=2)"),
        (Job.of(world_size=2, search=PlanSearch(host=True)), "search=PlanSearch(host=True), sample_input=batch"),
    ],
)  # fmt: skip
def test_nothing_that_was_planned_for_is_left_out_of_the_call(job: Job, words: str) -> None:
    report = _report(job)
    row = next(row for row in report.rows if row.ac == "50%")
    assert words in report.call(row)


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [12, 1000])
def test_padding_is_named_where_it_is_much_of_what_a_rank_holds(ranks: int) -> None:
    report = _report(Job.of(world_size=ranks))
    exact = sum(p.numel() * p.element_size() for p in Text().parameters()) / ranks
    parameters = report.rows[0].plan.peak["parameters"]
    assert report.padding == pytest.approx(4 * (parameters - exact), abs=4)  # with a gradient and AdamW's two states
    assert report.to_dict()["padding_bytes"] == report.padding
    least = min(row.plan.peak_bytes for row in report.rows)
    for size, said in ((least // 20, False), (least // 20 + 1, True)):
        text = replace(report, padding=size).text()
        assert (f"because {ranks} ranks do not divide their sizes" in text) == said
