"""`predict`: the report of a plan in Python, and the three questions: how many GPUs, how long, how large a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_like import Job, cli, predict
from nemo_like.planning.planner import query_of
from nemo_like.planning.what_if import least_need
from tests.models.tiny import VOCAB
from tests.planning.queries import Text

pytest.importorskip("transformers")

ONE: dict[str, Any] = {"gpu": "cpu", "budgets": ["60%"]}
SMALL: dict[str, Any] = ONE | {"seq_len": 512}


def _model() -> torch.nn.Module:
    """Of so few weights that its activations decide."""
    model = Text(6, 8)
    model.config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=1000)
    return model


def _need(**job: Any) -> Callable[[int, int], int]:
    """Bytes that full checkpointing needs for so many sequences of so many tokens."""

    def need(batch: int, length: int) -> int:
        ids = torch.zeros(batch, length, dtype=torch.long)
        asked = Job.of(gpu="cpu", **job)
        return least_need(query_of(_model(), {"input_ids": ids, "labels": ids}, asked), 1 << 40)

    return need


def test_a_report_names_the_fastest_that_fits() -> None:
    report = predict(_model(), **SMALL)
    assert [row.ac for row in report.rows] == ["none", "full", "selective", "60%"]
    assert report.best is report.rows[0] and report.verdict().startswith("Fits without checkpointing, ac='none': ")
    assert report.call() == "model = parallelize(model, strategy='fsdp2', ac='none')"
    limit = report.rows[1].need.bytes
    some = predict(_model(), **SMALL, memory=limit)
    assert some.best is not None and some.best.ac != "none" and some.limit == limit
    assert "slower than ac='none'" in some.verdict()
    none = predict(_model(), **SMALL, memory=min(row.need.bytes for row in some.rows) - 1)
    assert none.best is None and none.verdict().startswith("Does not fit: ac=")
    with pytest.raises(ValueError, match="Does not fit"):
        none.call()


def test_what_if_has_the_fastest_plan_that_then_fits() -> None:
    report = predict(_model(), gpu="h100-80gb", gpus=4, seq_len=64, budgets=["60%"], what_if=True)
    changes = {change.change: change for change in report.what_if}
    assert {"twice the sequence", "half the GPUs", "loss='chunked'", "optimizer='adamw-8bit'"} <= set(changes)
    half = predict(_model(), gpu="h100-80gb", gpus=2, seq_len=64, budgets=["60%"])
    assert half.best is not None
    assert changes["half the GPUs"].row.need == half.best.need
    assert changes["half the GPUs"].tokens_per_second == half.tokens_per_second(half.best)
    assert len(report.to_dict()["what_if"]) == len(report.what_if)
    assert report.what_if_table().text().splitlines()[1].startswith("as asked")


def test_the_largest_batch_is_what_its_report_is_of() -> None:
    report = predict(_model(), **SMALL, batch_size="max", memory=_need()(4, 512) - 1)
    assert report.answer == "Largest micro-batch: 3." and report.tokens == 512 * 3
    assert report.text().startswith(f"{report.answer}\nFits with ac=")


def test_the_longest_sequence_and_the_fewest_gpus() -> None:
    need = _need()
    limit = need(1, 600)
    report = predict(_model(), **ONE, seq_len="max", memory=limit)
    assert report.tokens is not None and 600 <= report.tokens < 650
    assert need(1, report.tokens) <= limit < need(1, report.tokens + 1)
    assert report.answer == f"Longest sequence: {report.tokens} tokens."
    two = _need(world_size=2)(1, 512)
    assert two < need(1, 512)
    fewest = predict(_model(), **SMALL, gpus="min", memory=two)
    assert (fewest.answer, fewest.job.ranks) == ("Fewest GPUs: 2.", 2)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus": "min", "batch_size": "max"}, "one question each"),
        ({"gpus": 0}, "gpus is 0"),
        ({"seq_len": "most"}, "seq_len is 'most'"),
        ({"batch_size": "max", "memory": 1000}, "Not even a micro-batch of one sequence fits"),
        ({"seq_len": "max", "memory": 1000}, "Not even a sequence of"),
        ({"gpus": "min", "memory": 1000}, "No number of GPUs up to"),
        ({"batch_size": "max", "sample_input": torch.zeros(1, 4, dtype=torch.long)}, "sample_input has a size"),
        ({"job": Job.of(), "tp": 2}, "job is given, and so is tp"),
    ],
)
def test_a_wrong_question_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        predict(_model(), **({} if "job" in asked else {"gpu": "cpu"}) | {"seq_len": 32} | asked)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--gpus min --dp-replicate 2", "Fewest GPUs: 2."),
        ("--batch-size max --gpu cpu --memory 600KiB", "Largest micro-batch: "),
        ("--seq-len max --gpu cpu --memory 500KiB", "Longest sequence: "),
    ],
)
def test_the_command_answers_the_same_questions(words: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"plan --model tests.planning.queries:Text --seq-len 32 --budget 60% --no-what-if --json - {words}"
    assert cli.main(line.split()) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["answer"].startswith(answer) and body["recommended"]


def own() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a model with its input."""
    layers = (torch.nn.TransformerEncoderLayer(8, 1, 16, batch_first=True) for _ in range(2))
    return torch.nn.Sequential(*layers), torch.randn(2, 4, 8)


def test_the_longest_sequence_is_not_looked_for_where_the_model_brings_its_input(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="has a sample input, whose length is not known"):
        predict(_model(), gpu="cpu", seq_len="max", sample_input=torch.zeros(1, 4, dtype=torch.long))
    assert cli.main(["plan", "--model", "tests.planning.test_predict:own", "--gpu", "cpu", "--seq-len", "max"]) == 2
    assert "has a sample input, whose length is not known" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--gpus few", "--seq-len min", "--batch-size max --gpus min"])
def test_the_command_refuses_other_words(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert cli.main(f"plan --model llama-tiny {words}".split()) == 2
    except SystemExit as stop:  # argparse's own
        assert stop.code == 2
    assert "whole number" in (said := capsys.readouterr().err) or "one question each" in said


def test_the_longest_sequence_of_a_model_with_few_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    asked = f"plan --model {tmp_path} --gpu cpu --seq-len max --memory 64MiB --no-what-if"
    assert cli.main(asked.split()) == 0
    assert "Longest sequence: 32 tokens, all that its config has positions for." in capsys.readouterr().out
