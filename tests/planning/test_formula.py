"""The formula of `fit` against the planner: seconds and bytes of layouts that were not traced."""

from dataclasses import replace

import pytest

from nemo_like import Job
from nemo_like.options import Precision
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.fit.fitting import make_search
from nemo_like.planning.fit.formula import _fill
from nemo_like.planning.fit.layouts import Layout
from nemo_like.planning.fit.question import Question, read_pins
from nemo_like.planning.fit.search import Entry
from tests.models import tiny

transformers = pytest.importorskip("transformers")


def _llama():
    return tiny.llama(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16,
        vocab_size=4096, max_position_embeddings=8192,
    )  # fmt: skip


def _search(gpus: int, **pins):
    job = Job.of(
        gpu=replace(resolve_device("h100-80gb"), gpus_per_node=4, launch_seconds=0.0), precision=Precision("bf16")
    )
    free = {"loss": "model", "sync": "every", "cpu_offload": False}
    asked = {"gpus": gpus, "seq_len": 4096, "limit": 1 << 50, "global_batch": 8}
    return make_search(_llama(), [Question(job, pins=read_pins(free | pins), **asked)])


@pytest.mark.parametrize(
    ("gpus", "pins", "seconds", "size"),
    [
        (2, {"tp": 1, "cp": 1, "micro_batch": [1, 2]}, 0.03, 0.1),
        (4, {"tp": [1, 2], "cp": 1, "micro_batch": 1, "offload": "none", "reshard_after_forward": [None],
             "dp_replicate": 1, "sequence_parallel": True}, 0.15, 0.3),
        (4, {"tp": 1, "cp": [1, 2], "micro_batch": 1, "offload": "none", "reshard_after_forward": [None]}, 0.15, 0.25),
        (8, {"tp": 1, "cp": 1, "pp": [1, 2], "micro_batch": 1, "schedule": "1f1b", "offload": "none",
             "reshard_after_forward": [None]}, 0.15, 0.3),
    ],
    ids=["batches", "split weights", "parts of sequences", "stages"],
)  # fmt: skip
def test_the_formula_is_near_the_planner_for_layouts_that_were_not_traced(gpus, pins, seconds, size):
    search = _search(gpus, **pins)
    ranking, looked = search.rankings[0], 0
    for i in range(len(ranking.layouts)):
        for j in range(len(ranking.ways)):
            if not ranking.open[i, j]:
                continue
            for at, mode in enumerate(ranking.formula.modes):
                if mode == "none" and ranking.ways[j].offload != "none":
                    continue
                row = search.under(Entry(ranking, i, j), mode)
                estimate = ranking.estimate
                assert float(estimate.seconds[i, j, at]) == pytest.approx(row.seconds, rel=seconds), row.layout
                assert float(estimate.bytes[i, j, at]) == pytest.approx(row.need.bytes, rel=size), row.layout
                looked += 1
    assert looked >= 6


@pytest.mark.parametrize(
    ("schedule", "per_rank", "expected"), [("1f1b", 1, 3.0), ("interleaved_1f1b", 2, 1.5), ("gpipe", 1, 3.0)]
)
def test_a_pipeline_waits_for_as_many_stages_as_lie_before_the_last_rank(schedule, per_rank, expected):
    assert _fill(schedule, 4, per_rank, 8, 0.0) == expected


def test_a_backward_in_two_halves_waits_less():
    assert 0 < _fill("zbv", 4, 2, 8, 0.0) < _fill("interleaved_1f1b", 4, 2, 8, 0.0)


def test_layouts_of_one_line_differ_in_how_they_are_run():
    layout = Layout(dp_shard=4, tp=2)
    assert (
        layout.sizes == layout.way(ac="full", sequence_parallel=True, loss="chunked").sizes != Layout(dp_shard=8).sizes
    )
