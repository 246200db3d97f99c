"""What helps where nothing fits: each change that is named makes the job fit, with and without stages."""

from __future__ import annotations

import pytest
import torch

from nemo_like import Job
from nemo_like._util.words import write_bytes
from nemo_like.options import PipelineParallel, Precision
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.answers.reserved import StepLogs, replay
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.advice import _spans_hosts
from nemo_like.planning.query import PlanQuery
from tests.models.fit_models import llama
from tests.planning.queries import Text

transformers = pytest.importorskip("transformers")

_STAGES = {"gpus": 2, "pp": 2, "gpu": "cpu", "schedule": "1f1b", "loss": "model", "offload": "none", "seq_len": 64}
_AXES = {"tp": 1, "cp": 1, "dp_replicate": 1, "ac": "full"}


def _fits(asked, **changed):
    return bool(fit(llama(6), **(asked | changed)).candidates)


@pytest.mark.long
def test_what_is_named_for_a_pipeline_makes_it_fit():
    asked = _STAGES | _AXES | {"memory": int(2.9 * 2**20), "micro_batch": 4, "global_batch": 8}
    report = fit(llama(6), **asked)
    assert not report.candidates and report.nearest.need.bytes > report.question.limit
    assert report.helps[:3] == (
        "micro-batch 2 instead of 4", "14 GPUs more (16 in all)", "sequence 40 instead of 64"
    )  # fmt: skip
    assert report.helps[-1].startswith("not enough alone: ") and "loss='chunked' (" in report.helps[-1]
    assert _fits(asked, micro_batch=2) and _fits(asked, seq_len=40) and _fits(asked, gpus=16, global_batch=64)


@pytest.mark.long
def test_a_smaller_optimizer_and_more_stages_are_named_where_they_help():
    asked = _STAGES | _AXES | {"memory": int(1.7 * 2**20), "micro_batch": 1, "global_batch": 8}
    report = fit(llama(6), **asked)
    eight_bit = fit(llama(6), **asked, optimizer="adamw-8bit").best
    saved = report.nearest.need.bytes - eight_bit.need.bytes
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
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2752, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2000, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    asked = _STAGES | _AXES | {"gpu": "h100-80gb", "seq_len": 1500, "micro_batch": 2, "global_batch": 8}
    report = fit(model, memory="875MiB", **asked)
    ids = torch.zeros(2, 1500, dtype=torch.long)
    query = PlanQuery.of(
        model,
        {"input_ids": ids, "labels": ids},
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
    assert _spans_hosts(part, job, resolve_device("h100-80gb")) == between
