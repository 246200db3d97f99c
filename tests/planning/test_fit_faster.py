"""What `fit` names beside its winner: a compiler and the fused AdamW, predicted as `predict` predicts them."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from nemo_like import Job, predict
from nemo_like.options import FSDP2, StepSpec
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.faster import faster_than
from nemo_like.planning.fit.question import Question, left_open
from nemo_like.planning.fit.shapes import Shape, ShapeKey
from tests.models.fit_models import llama

transformers = pytest.importorskip("transformers")

_ASKED = {"gpus": 1, "gpu": "h100-80gb", "seq_len": 512, "micro_batch": 1, "loss": "model", "offload": "none"}


def test_a_compiler_and_the_fused_optimizer_are_named_as_a_prediction_has_them() -> None:
    """On the host AdamW as torch builds it goes over its bytes one kernel after the other, and once if fused."""
    model, pins = llama(1), {"gpus": 2, "seq_len": 16, "dp_shard": 2, "tp": 1, "cp": 1, "ac": "none"}
    device = replace(resolve_device("h100-80gb"), host_bandwidth=6e8)
    report = fit(model, **_ASKED | pins | {"gpu": device}, cpu_offload=True, reshard_after_forward=[None])
    assert [each.flags for each in report.faster] == [
        "--compile inductor", "--optimizer adamw-fused", "--compile inductor --optimizer adamw-fused",
    ]  # fmt: skip
    for each in report.faster[1:]:
        asked = {"gpus": 2, "gpu": device, "seq_len": 16, "precision": "bf16", "strategy": FSDP2(cpu_offload=True)}
        row = predict(model, **asked | dict(each.changed)).rows[0]
        assert row.ac == "none"
        assert (each.candidate.step_seconds, each.candidate.need) == (pytest.approx(row.seconds), row.need)
        assert each.gain == pytest.approx(report.best.step_seconds / row.seconds - 1)
    assert report.faster[2].gain >= 0.01 + max(each.gain for each in report.faster[:2])
    text = report.text()
    assert "Faster still, with results that differ in their last bits:\n  --compile inductor: " in text
    assert all(each.words() in text for each in report.faster)
    written = json.loads(json.dumps(report.to_dict()))["faster"]
    assert [each["changed"] for each in written] == [dict(each.changed) for each in report.faster]


def test_a_plan_is_made_anew_for_the_change() -> None:
    report = fit(llama(2), **_ASKED | {"seq_len": 64}, ac="plan", memory="80MiB", tp=1)
    (compiled,) = report.faster
    assert compiled.flags == "--compile inductor" and compiled.candidate.plan is not None
    assert compiled.candidate.job.compile == "inductor" and compiled.candidate.need.bytes <= 80 << 20


@pytest.mark.parametrize("decided", [{"gpu": "cpu"}, {"compile": ["none"], "optimizer": "adamw"}])
def test_nothing_is_named_on_a_cpu_or_where_the_caller_decided(decided: dict[str, object]) -> None:
    assert fit(llama(2), **_ASKED | {"seq_len": 64} | decided, ac="none").faster == ()


def _never(key: ShapeKey, question: Question) -> Shape:
    raise AssertionError("nothing is traced")


def test_nothing_is_predicted_after_the_minutes_and_nothing_is_named_that_does_not_fit() -> None:
    best = fit(llama(2), **_ASKED | {"seq_len": 64}, compile="none", optimizer="adamw", ac="none").best
    question = Question(best.job, gpus=1, seq_len=64, limit=1 << 30)
    search = SimpleNamespace(shapes={}, until=math.inf, question=question, predicted=lambda *given: None)
    both = ("compile", "optimizer")
    assert faster_than(best, search, lambda key, question: object(), both) == ()  # none fits
    search.until = time.monotonic() - 1
    assert faster_than(best, search, _never, both) == ()


def test_an_interrupt_after_the_search_leaves_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_like.planning.fit.fitting.faster_than", mock.Mock(side_effect=KeyboardInterrupt))
    report = fit(llama(1), **_ASKED | {"seq_len": 64}, tp=1, ac="none")
    assert report.best.fits and report.faster == () and "Faster still" not in report.text()


def test_what_the_caller_left_open() -> None:
    assert left_open(None, {}) == left_open(Job.of(strategy=FSDP2()), {"step": StepSpec()}) == ("compile", "optimizer")
    assert left_open(Job.of(compile=False), {"step": StepSpec(keeps_output=False)}) == ("optimizer",)
    assert left_open(Job.of(optimizer="adamw"), {"compile": ["none", "inductor"]}) == ()
    assert left_open(None, {"step": StepSpec(optimizer="sgd")}) == ("compile",)
    assert left_open(replace(Job(), compile="eager"), {"optimizer": ["adamw", "adamw-8bit"]}) == ()
