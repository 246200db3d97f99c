"""The training job with `--cp` and `--pack`: the same run, whoever holds which part of the sequences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.recipes.text import TextRows, load_text
from tests_distributed.recipes.pretrain_job import LLAMA, run_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small job on many short files; its samples of 22 tokens are no multiple of 4."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    texts = folder / "texts"
    texts.mkdir()
    for i in range(150):
        (texts / f"{i:03}.txt").write_text(
            f"{i} bottles of beer on the wall, {i} bottles of beer.\n"[: 20 + 7 * (i % 5)]
        )
    line = "--seq-len 22 --batch-size 8 --steps 50 --eval-samples 6 --eval-every 0"
    return [*line.split(), "--data", str(texts), "--model", str(folder / "config.json"), "--device", "cpu"]


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    losses = expected["losses"][found["first_step"] :]
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-4, atol=0)
    assert found["eval_losses"][-1]["loss"] == pytest.approx(expected["eval_losses"][-1]["loss"], rel=1e-4)


@pytest.mark.long
def test_fifty_steps_on_parts_are_those_on_whole_sequences_and_resume(job: list[str], tmp_path: Path) -> None:
    whole = run_job(2, job, tmp_path / "whole")
    assert len(whole["losses"]) == 50 and whole["losses"][-1] < whole["losses"][0] - 1
    folder = tmp_path / "kept"
    saved = ["--checkpoint-dir", str(folder), "--save-every", "25", "--keep", "9"]
    cut = run_job(4, [*job, "--cp", "2", *saved], tmp_path / "cut")
    _assert_same(cut, whole)
    shutil.rmtree(folder / "step-00000050")
    resumed = run_job(4, [*job, "--cp", "2", *saved, "--resume"], tmp_path / "resumed")
    assert resumed["first_step"] == 25 and resumed["losses"] == cut["losses"][25:], "the same bits"


@pytest.mark.long
def test_packed_files_are_the_same_on_parts(job: list[str], tmp_path: Path) -> None:
    arguments = [*job, "--steps", "8", "--pack"]
    whole = run_job(1, arguments, tmp_path / "whole")
    unpacked = run_job(1, [*job, "--steps", "8"], tmp_path / "unpacked")
    assert whole["losses"][0] != unpacked["losses"][0]
    for line in ("--grad-accum 2", "--cp 2", "--cp 2 --loss chunked --ac full", "--loss chunked"):
        _assert_same(run_job(2, [*arguments, *line.split()], tmp_path / "found"), whole)


def test_documents_of_a_batch_are_the_files_of_its_bytes(job: list[str]) -> None:
    text = load_text(job[job.index("--data") + 1])
    sampler = TextRows(text.train, 22, 8, 0, packed=True)
    starts = {sum(piece.length for piece in text.train.pieces[:i]) for i in range(len(text.train.pieces))}
    for row, targets in enumerate(sampler.batch(3).targets):
        first = sampler.start_of(24 + row)
        changes = {first + 1 + i for i in range(22) if targets[i] == -100}
        assert changes == {start for start in starts if first < start <= first + 22}
