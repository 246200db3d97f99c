"""The account of a configuration: its rows add up to the peak and to the step, and the timeline's top is the peak."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest

from nemo_like.cli import main
from nemo_like.options import Precision
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.fit import fit
from tests.models.fit_models import llama, mixture
from tests.planning.queries import Text

pytest.importorskip("transformers")

_ONE = {"gpus": 1, "gpu": "cpu", "micro_batch": 2, "grad_accum": 2}
_TWO = {"gpus": 2, "gpu": "h100-80gb", "micro_batch": 2, "tp": 1, "cp": 1}
_STAGES = {"gpus": 2, "gpu": "cpu", "micro_batch": 1, "pp": 2, "loss": "model", "global_batch": 4}
CASES = {
    "one device, nothing kept": (_ONE, {"ac": "full", "loss": "model", "offload": "none"}),
    "one device, in chunks": (_ONE, {"ac": "none", "loss": "chunked", "offload": "none"}),
    "layer inputs on the host": (_TWO, {"ac": "full", "loss": "model", "offload": "boundary"}),
    "weights on the host, too": (
        _TWO | {"grad_accum": 3}, {"ac": "full", "loss": "model", "offload": "boundary", "cpu_offload": True}
    ),
    "two ranks, selective": (_TWO, {"ac": "selective", "loss": "model", "offload": "none"}),
    "stages": (_STAGES, {"ac": "selective", "schedule": "1f1b"}),
    "stages of sharded ranks": ({**_STAGES, "gpus": 4}, {"ac": "full", "schedule": "1f1b", "tp": 1, "cp": 1}),
    "several stages on a rank": (_STAGES, {"ac": "full", "schedule": "zbv"}),
}  # fmt: skip
LONG = ("one device, nothing kept", "layer inputs on the host", "two ranks, selective", "stages")
"""What another case has, too."""


def _check(candidate):
    account = candidate.account
    assert sum(row.amount for row in account.bytes) == candidate.peak_bytes
    for part, size in candidate.peak.parts.items():
        assert sum(row.amount for row in account.bytes if row.part == part) == size, part
    assert all(isinstance(row.amount, int) and row.amount > 0 for row in account.bytes)
    step = candidate.step_seconds
    assert math.isclose(sum(row.amount for row in account.seconds), step, rel_tol=1e-12)
    for part, seconds in candidate.seconds.parts.items():
        own = [row for row in account.seconds if row.part == part]
        assert math.isclose(sum(row.amount for row in own), seconds, rel_tol=1e-9), part
        assert all(row.what and row.what != "other" and row.amount >= 0 and row.hidden >= 0 for row in own), own


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] if case in LONG else []) for case in CASES]
)
def test_the_rows_add_up_to_the_peak_and_to_the_step(case):
    asked, pins = CASES[case]
    model = llama(4) if {"chunked", "zbv"} & {pins.get("loss"), pins.get("schedule")} else Text(4)
    report = fit(model, seq_len=64, count=1, **asked, **pins)
    for candidate in report.candidates:
        _check(candidate)
        if candidate.layout.pp > 1:
            assert max(rank.total for rank in candidate.account.ranks) == candidate.peak_bytes
        sent = pickle.loads(pickle.dumps(candidate))
        assert sent.account.bytes == candidate.account.bytes


def test_experts_replicas_and_split_sequences_are_accounted_for():
    hosts = replace(resolve_device("h100-80gb"), gpus_per_host=2)
    seen = set()
    for pins in ({"ep": 2, "dp_replicate": 2}, {"tp": 2, "dp_replicate": 2}, {"cp": 2}):
        model = mixture() if "ep" in pins else llama(1)
        asked = {"gpus": 4, "gpu": hosts, "seq_len": 64, "micro_batch": 2, "precision": Precision("bf16"), "pp": 1}
        best = fit(model, ac="full", loss="model", offload="none", **asked, **pins).best
        _check(best)
        seen |= {row.what.split(" (")[0] for row in best.account.seconds}
    assert {
        "all-reduce", "all-gather of keys and values", "all-to-all of rows", "all-gather of layers",
        "reduce-scatter of layers' gradients", "all-reduce of layers' gradients", "launch",
    } <= seen  # fmt: skip


def test_seconds_of_replicas_are_not_those_of_a_pipelines_replicas():
    """A bound that asks a local shape of stages leaves nothing behind: stages have half as many replicas."""
    sizes = {"gpus": 16, "gpu": "h100-80gb", "dp_replicate": [2, 4], "micro_batch": [1, 64], "pp": [1, 2]}
    pins = {"tp": 1, "cp": 1, "schedule": "1f1b", "ac": "none", "loss": "model", "offload": "none"}
    report = fit("llama-tiny", seq_len=64, **sizes, **pins)
    assert {(c.conf.dp_replicate, c.conf.pp) for c in report.candidates} >= {(4, 1), (2, 2)}
    for candidate in report.candidates:
        _check(candidate)


def test_what_is_kept_is_told_by_the_operators_that_made_it():
    """Of two layers under `full` inputs alone, to the byte; with nothing checkpointed products and attention, too."""
    asked = {"gpus": 1, "gpu": "cpu", "seq_len": 64, "micro_batch": 2, "loss": "model", "offload": "none"}
    rows = {}
    for ac in ("full", "none"):
        best = fit(llama(2), ac=ac, **asked).best
        rows[ac] = {row.what: row.amount for row in best.account.bytes if row.part == "saved activations"}
    assert rows["full"] == {"layers' inputs": 2 * 2 * 64 * 48 * 4}
    assert rows["none"].keys() >= {"layers' inputs", "kept outputs of matrix products", "kept outputs of attention"}


def test_explain_prints_every_row(capsys):
    asked = "--model llama-tiny --gpus 1 --gpu cpu --seq-len 64 --micro-batch 8 --ac full none --loss model"
    assert main(["fit", *asked.split(), "--offload", "none", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "Number 1:" in said
    assert "no GPU at hand was compared" in " ".join(said.split())
    for words in (
        "layers' inputs",
        "kept outputs of attention",
        "adamw, of layers",
        "matmul",
        "memory-bound",
        "attention",
    ):
        assert words in said, words
