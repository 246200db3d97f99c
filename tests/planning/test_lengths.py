"""Sequences of different lengths: the step is planned for the largest, and a larger batch is said once and trains right."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from nemo_like import parallelize
from nemo_like._util.log import forget_announcements
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.lengths import planned_length, read_histogram

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


def test_the_step_is_planned_for_the_longest_and_the_report_says_so(tmp_path):
    asked = {"gpus": 1, "gpu": "cpu", "micro_batch": 2, "ac": "full", "loss": "model", "offload": "none"}
    longest = fit(_model(), seq_len=48, **asked)
    histogram = fit(_model(), seq_len=8, lengths={8: 900, 32: 99, 48: 1, 64: 0}, **asked)
    assert histogram.best.peak_bytes == longest.best.peak_bytes
    assert histogram.question.planned_for == "the longest sequences, of 48 tokens"
    assert histogram.to_dict()["planned_for"] == "the longest sequences, of 48 tokens"
    (tmp_path / "lines").write_text("8\n48\n8\n")
    (tmp_path / "json").write_text('{"8": 2, "48": 1}')
    assert read_histogram(tmp_path / "lines") == read_histogram(tmp_path / "json") == {8: 2, 48: 1}
    assert (
        planned_length(8, p99=32) == (32, planned_length(8, p99=32)[1])
        and "1 of 100 is longer" in planned_length(8, p99=32)[1]
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"longest": 8, "p99": 9}, "p99 is 9, and max_seq_len, 8, is less"),
        ({"longest": 1}, "max_seq_len is 1"),
        ({"histogram": {}}, "no sequence"),
        ({"histogram": {-1: 2}}, "that cannot be"),
        ({"histogram": {8: 1}, "p99": 8}, "Give one or the other"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        planned_length(4096, **asked)


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
