"""Sequences that are longer than a model's positions: predicted where these are rotary, refused where they are weights."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from nemo_like import predict
from nemo_like._util.log import forget_announcements
from nemo_like.cli import main
from nemo_like.models import check_positions
from nemo_like.planning.fit import fit
from tests.models.fit_models import llama

transformers = pytest.importorskip("transformers")

_SAID = (
    "96 tokens are more than the 64 positions of LlamaForCausalLM: predicted as with a longer rotary embedding. Training "
    "needs its rope_scaling: give a config with that."
)
_ONE = {"gpus": 1, "gpu": "cpu", "micro_batch": 1, "tp": 1, "ac": "none", "loss": "model", "offload": "none"}


def _gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64, use_cache=False)
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config).train()


def _rows(model: torch.nn.Module) -> list[tuple[int, float]]:
    report = predict(model, gpu="cpu", gpus=1, seq_len=96, budgets=["60%"])
    return [(row.need.bytes, row.seconds) for row in report.rows]


def test_a_rotary_model_is_predicted_as_one_with_more_positions(caplog: pytest.LogCaptureFixture) -> None:
    forget_announcements()
    model = llama(1)
    with caplog.at_level(logging.WARNING, "nemo_like"):
        rows = _rows(model)
        found = fit(model, seq_len=96, **_ONE).best
    assert [record.message for record in caplog.records if record.name == "nemo_like"] == [_SAID]
    longer = llama(1)
    longer.config.max_position_embeddings = 96
    assert rows == _rows(longer) and found.need.bytes > 0


def test_the_command_predicts_it_and_names_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forget_announcements()
    llama(1).config.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "nemo_like"):
        assert (
            main(
                ["plan", "--model", str(tmp_path), "--seq-len", "96", "--no-what-if", "--budget", "60%", "--gpu", "cpu"]
            )
            == 0
        )
    assert f"96 tokens are more than the 64 positions of {tmp_path}: predicted as" in caplog.text


@pytest.mark.parametrize("ask", [lambda m: predict(m, gpu="cpu", seq_len=96), lambda m: fit(m, seq_len=96, **_ONE)])
def test_learned_positions_stay_refused(ask) -> None:
    with pytest.raises(ValueError, match="requires sequences of 96 tokens, and the model has positions for 64"):
        ask(_gpt2())


def test_a_step_that_runs_needs_the_positions() -> None:
    with pytest.raises(
        ValueError, match="--seq-len requires sequences of 96 tokens, and the model has positions for 64"
    ):
        check_positions(llama(2).config, "--seq-len", 96)
