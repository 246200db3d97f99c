"""Sequences of different lengths: the step is planned for the largest, and a larger batch is said once and trains right."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from nemo_like import fit, parallelize
from nemo_like._util.log import forget_announcements

transformers = pytest.importorskip("transformers")


def _model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def _ids(rows, width):
    return torch.randint(128, (rows, width), generator=torch.Generator().manual_seed(1))


def _budget():
    return {"strategy": "single", "ac": "40%", "sample_input": {"input_ids": _ids(2, 16), "labels": _ids(2, 16)}}


def _chosen(ac):
    asked = {"gpus": 1, "gpu": "cpu", "seq_len": 16, "micro_batch": 2, "loss": "model", "offload": "none"}
    best = fit(_model(), ac=ac, **asked).best
    assert f"ac={ac!r}, planned_tokens=32)" in best.call()
    return best.kwargs()


@pytest.mark.parametrize(
    "options", [_budget, lambda: _chosen("full"), lambda: _chosen("selective")], ids=["budget", "full", "selective"]
)
def test_a_larger_batch_than_planned_is_said_once_and_trains_right(caplog, options):
    forget_announcements()
    plain = _model()
    planned = copy.deepcopy(plain)
    planned = parallelize(planned, device="cpu", **options())
    with caplog.at_level(logging.WARNING, logger="nemo_like"):
        said = []
        for rows, width in ((2, 16), (1, 16), (2, 24), (4, 24)):
            ids = _ids(rows, width)
            for model in (plain, planned):
                model.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
            for (name, own), other in zip(plain.named_parameters(), planned.parameters()):
                assert torch.equal(own.grad, other.grad), name
            said.append(sum("A batch is larger" in record.getMessage() for record in caplog.records))
    assert said == [0, 0, 1, 1]


@pytest.mark.parametrize("tokens", [0, True, "32"])
def test_planned_tokens_that_no_batch_could_have_are_refused(tokens):
    with pytest.raises(ValueError, match="planned_tokens is"):
        parallelize(_model(), "single", "full", planned_tokens=tokens, device="cpu")
