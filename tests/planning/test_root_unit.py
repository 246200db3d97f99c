"""A large vocabulary: a step peaks where FSDP2 reduces the embedding's gradient, or in the head of a chunked loss."""

from __future__ import annotations

import pytest
import torch

from nemo_like import FSDP2, ChunkedLoss, Job
from nemo_like.fake_rank import SAME, dry_run
from tests.models.tiny import llama, tokens


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_says_what_the_rank_takes(tied: bool) -> None:
    """The root is gathered again in backward. FSDP2 holds the last gradient of a unit until all are reduced."""
    ids = tokens(1, 8)
    with torch.device("meta"):
        model = llama(vocab_size=2048, num_hidden_layers=1, tie_word_embeddings=tied)
    job = Job.of(strategy=FSDP2(reshard_after_forward=True), ac="full", world_size=2, gpu="cpu")
    found = dry_run(model, job, {"input_ids": ids, "labels": ids})
    assert found.against is not None and abs(found.against - found.peak_bytes) <= SAME


@pytest.mark.parametrize("precision", ["bf16", None])
def test_a_tied_head_has_no_second_gradient_beside_that_of_the_chunks(precision: str | None) -> None:
    ids = tokens(4, 64)
    with torch.device("meta"):
        model = llama(vocab_size=2048, num_hidden_layers=1, tie_word_embeddings=True)
    job = Job.of(loss=ChunkedLoss(chunk_tokens=64), precision=precision, ac="full", world_size=2, gpu="cpu")
    found = dry_run(model, job, {"input_ids": ids, "labels": ids})
    assert found.against == found.peak_bytes
