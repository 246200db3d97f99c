"""What `fit` says beside its answer: the account, whose rows add up to peak and step, and what helps where nothing fits."""

import math
import pickle
from dataclasses import replace

import pytest
import torch

from nemo_like import Job
from nemo_like._util.words import write_bytes
from nemo_like.options import PipelineParallel, Precision
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.report import _spans_nodes
from nemo_like.planning.predictions.reserved import StepLogs, replay
from nemo_like.planning.query import PlanQuery
from tests.models.fit_models import llama, mixture
from tests.models.tiny import labelled, made
from tests.planning.queries import Text

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
    assert all(isinstance(row.amount, int) and row.amount > 0 and row.what != "other" for row in account.bytes)
    assert math.isclose(sum(row.amount for row in account.seconds), candidate.step_seconds, rel_tol=1e-12)
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
    for candidate in fit(model, seq_len=64, count=1, **asked, **pins).candidates:
        _check(candidate)
        if candidate.layout.pp > 1:
            assert max(peak.total for _, peak in candidate.account.ranks) == candidate.peak_bytes
        assert pickle.loads(pickle.dumps(candidate)).account.bytes == candidate.account.bytes


def test_experts_replicas_and_split_sequences_are_accounted_for():
    hosts = replace(resolve_device("h100-80gb"), gpus_per_node=2)
    seen = set()
    for pins in ({"ep": 2, "dp_replicate": 2}, {"tp": 2, "dp_replicate": 2}, {"cp": 2}):
        model = mixture() if "ep" in pins else llama(1)
        asked = {"gpus": 4, "gpu": hosts, "seq_len": 64, "micro_batch": 2, "precision": Precision("bf16"), "pp": 1}
        best = fit(model, ac="full", loss="model", offload="none", **asked, **pins).best
        _check(best)
        seen |= {row.what.split(" (")[0] for row in best.account.seconds}
    assert {
        "all-reduce", "all-gather of keys and values", "all-to-all of rows", "all-gather of layers",
        "reduce-scatter of layers", "all-reduce of layers' gradients", "launch",
    } <= seen  # fmt: skip


def test_seconds_of_replicas_are_not_those_of_a_pipelines_replicas():
    """A bound that asks a local shape of stages leaves nothing behind: stages have half as many replicas."""
    sizes = {"gpus": 16, "gpu": "h100-80gb", "dp_replicate": [2, 4], "micro_batch": [1, 64], "pp": [1, 2]}
    pins = {"tp": 1, "cp": 1, "schedule": "1f1b", "ac": "none", "loss": "model", "offload": "none"}
    report = fit("llama-tiny", seq_len=64, **sizes, **pins)
    assert {(c.layout.dp_replicate, c.layout.pp) for c in report.candidates} >= {(4, 1), (2, 2)}
    for candidate in report.candidates:
        _check(candidate)


def test_what_is_kept_is_told_by_the_operators_that_made_it():
    """Of two layers under `full` inputs alone, to the byte; with nothing checkpointed products and attention, too."""
    asked = {"gpus": 1, "gpu": "cpu", "seq_len": 64, "micro_batch": 2, "loss": "model", "offload": "none"}
    full, none = (
        {row.what: row.amount for row in best.account.bytes if row.part == "saved activations"}
        for best in (fit(llama(2), ac=ac, **asked).best for ac in ("full", "none"))
    )
    assert full == {"layers' inputs": 2 * 2 * 64 * 48 * 4}
    assert none.keys() >= {"layers' inputs", "kept outputs of matrix products", "kept outputs of attention"}


def test_explain_prints_every_row(program):
    asked = "--model llama-tiny --gpus 1 --gpu cpu --seq-len 64 --micro-batch 8 --ac full none --loss model"
    said = program(["fit", *asked.split(), "--offload", "none", "--explain"]).out
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


_TWO_STAGES = {"gpus": 2, "pp": 2, "gpu": "cpu", "schedule": "1f1b", "loss": "model", "offload": "none", "seq_len": 64}
_AXES = {"tp": 1, "cp": 1, "dp_replicate": 1, "ac": "full"}


def _fits(asked, **changed):
    return bool(fit(llama(6), **(asked | changed)).candidates)


@pytest.mark.long
def test_what_is_named_for_a_pipeline_makes_it_fit():
    asked = _TWO_STAGES | _AXES | {"memory": int(2.9 * 2**20), "micro_batch": 4, "global_batch": 8}
    report = fit(llama(6), **asked)
    assert not report.candidates and report.nearest.need.bytes > report.question.limit
    assert report.helps[:3] == (
        "micro-batch 2 instead of 4", "14 GPUs more (16 in all)", "sequence 40 instead of 64"
    )  # fmt: skip
    assert report.helps[-1].startswith("not enough alone: ") and "loss='chunked' (" in report.helps[-1]
    assert _fits(asked, micro_batch=2) and _fits(asked, seq_len=40) and _fits(asked, gpus=16, global_batch=64)


@pytest.mark.long
def test_a_smaller_optimizer_and_more_stages_are_named_where_they_help():
    asked = _TWO_STAGES | _AXES | {"memory": int(1.7 * 2**20), "micro_batch": 1, "global_batch": 8}
    report = fit(llama(6), **asked)
    saved = report.nearest.need.bytes - fit(llama(6), **asked, optimizer="adamw-8bit").best.need.bytes
    assert report.helps[0] == f"optimizer='adamw-8bit' ({write_bytes(saved)} less)"
    # What a stage holds gathered does not shrink on more ranks.
    asked |= {"seq_len": 16, "global_batch": 4, "memory": int(1.2 * 2**20)}
    report = fit(llama(12), **asked, optimizer="sgd")
    assert report.helps[0] == "2 GPUs more (4 in all) in 2 times as many stages"
    assert fit(llama(12), **(asked | {"gpus": 4, "pp": 4}), optimizer="sgd").candidates


def test_a_microbatch_that_nobody_pinned_is_not_advised():
    report = fit(Text(2), gpus=1, gpu="cpu", seq_len=64, memory=1 << 16, global_batch=2, ac="full", loss="model")
    assert report.helps and not any("micro-batch" in words for words in report.helps)


@pytest.mark.long
def test_growing_segments_are_named_for_a_pipeline_where_its_ranks_reserve_less_with_them():
    model = made(
        "Llama", device="meta", hidden_size=1024, intermediate_size=2752, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=2000, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    asked = _TWO_STAGES | _AXES | {"gpu": "h100-80gb", "seq_len": 1500, "micro_batch": 2, "global_batch": 8}
    report = fit(model, memory="875MiB", optimizer="adamw", **asked)
    query = PlanQuery.from_model(
        model,
        labelled(torch.zeros(2, 1500, dtype=torch.long)),
        Job.of(
            world_size=2,
            precision=Precision("bf16"),
            gpu=resolve_device("h100-80gb"),
            pp=PipelineParallel(2, "1f1b", 4),
        ),
    )
    whole, growing = (
        max(replay(StepLogs(query, rank, query.uniform("full")), query.device, config).reserved for rank in range(2))
        for config in (AllocatorConfig(), AllocatorConfig(expandable_segments=True))
    )
    assert report.nearest.reserved == whole > 875 << 20 and growing < 875 << 20
    assert f"PYTORCH_ALLOC_CONF=expandable_segments:True ({write_bytes(whole - growing)} less)" in report.helps


@pytest.mark.parametrize(
    ("job", "part", "between"),
    [
        (Job.of(world_size=16, tp=8), "tensor-parallel sums", False),
        (Job.of(world_size=16, tp=8), "parameter gathers", True),
        (Job.of(world_size=16, dp_replicate=2), "parameter gathers", False),
        (Job.of(world_size=16, dp_replicate=2), "gradient reductions", True),
        (Job.of(world_size=16, cp=4, tp=4), "sequence gathers", True),
        (Job.of(world_size=16, pp=2), "pipeline sends", True),
        (Job.of(world_size=8), "parameter gathers", False),
    ],
)
def test_a_collective_is_between_hosts_where_its_ranks_are(job: Job, part: str, between: bool) -> None:
    assert _spans_nodes(part, job, resolve_device("h100-80gb")) == between
