"""A backward that a pipeline's schedule cuts in two, in plans: against a rank on fake tensors.

The second halves run in the order of the parameters, and each starts at nodes that have references to all of the graph
before them: what no half runs through stays until the last one is done.
"""

import functools
from typing import Any

import pytest

from nemo_like import Job
from nemo_like.fake_rank import dry_run
from nemo_like.models import text_batch
from nemo_like.options import ExpertParallel, PipelineParallel
from tests.models.fit_models import llama
from tests.models.tiny import made

NUMBERS = 64
"""Bytes: autograd's numbers of a micro-batch and each parameter's count of steps, which a plan does not have."""


_mixture = functools.partial(
    made, "Qwen3Moe", device="meta", hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, vocab_size=128,
    use_cache=False,
)  # fmt: skip
_dense = functools.partial(llama, 8)


CASES: tuple[tuple[Any, str, int, dict[str, Any]], ...] = (
    # Experts' gradients wait for the next micro-batch's first half, which makes float32 of them: else 12,324 too few.
    (_mixture, "zbv", 3, {"precision": "bf16", "ep": ExpertParallel(2, imbalance=2.0), "world_size": 4}),
    # What is saved above the experts' weights, such as a router's choices, is there in the second half: 69,680.
    (_mixture, "zbv", 3, {"ac": "full"}),
    # Two layers in a stage, neither of which is a region, so that what they share is held otherwise: 646,952.
    (_dense, "zbv", 3, {}),
    # What is above the last weights of a stage stays till its first half ends: 24,584.
    (_dense, "interleaved_zero_bubble", 2, {}),
)


@pytest.mark.parametrize(
    ("model", "schedule", "microbatches", "job"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.long) for case in CASES[1:])],
)
def test_both_halves(model: Any, schedule: str, microbatches: int, job: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        "ac": "none",
        "world_size": 2,
        "gpu": "cpu",
        "pp": PipelineParallel(2, schedule, microbatches),
    } | job
    found = dry_run(model(), Job.of(**asked), text_batch(2, 64))
    assert found.against is not None
    assert 0 <= found.peak_bytes - found.against <= NUMBERS, (found.peak_bytes, found.against, found.peak)
