"""The line that `nemo-like plan` prints, executed on two ranks: the step peaks at the bytes that were printed beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import nemo_like
from nemo_like import cli
from nemo_like.models import resolve_model
from tests_distributed.allocated import step_peak_bytes
from tests_distributed.spawn import run_ranks

pytest.importorskip("transformers")

WORDS = "plan --model llama-tiny --gpu cpu --world-size 2 --seq-len 64 --batch-size 4"


def _printed(capsys: pytest.CaptureFixture[str], words: str, numbers: Path) -> tuple[str, int]:
    """The recommended line and the bytes of its row."""
    assert cli.main([*WORDS.split(), *words.split(), "--json", str(numbers)]) == 0
    body = json.loads(numbers.read_text())
    assert f"\nPaste: {body['call']}\n" in capsys.readouterr().out
    (row,) = [row for row in body["rows"] if row["ac"] == body["recommended"]]
    return body["call"], row["peak_bytes"]


def _run(rank: int, world_size: int, lines: list[tuple[str, Any]]) -> list[int]:
    peaks = []
    for line, (optimizer, microbatches) in lines:
        torch.manual_seed(rank)
        ids = torch.randint(256, (4, 64))
        known = {name: getattr(nemo_like, name) for name in nemo_like.__all__}
        known |= {"model": resolve_model("llama-tiny").build().train(), "batch": {"input_ids": ids, "labels": ids}}
        exec(line, known)
        model, kept = known["model"], {}
        rule = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-4)

        def step(model=model, batch=known["batch"], rule=rule, kept=kept, microbatches=microbatches) -> None:
            for _ in range(microbatches):
                kept["out"] = model(**batch)
                kept["out"].loss.backward()
            rule.step()
            rule.zero_grad()

        step()
        step()
        peaks.append(step_peak_bytes(model, rule, step, lambda kept=kept: kept["out"]))
    return peaks


@pytest.mark.long
def test_the_printed_line_peaks_as_it_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("--memory 10.5MiB", ("AdamW", 1), "KiB', precision='bf16'"),
        (  # 11 MiB without the token ids and the labels
            "--memory 11MiB --reshard-after-forward no --prefetch 2 --optimizer sgd --grad-accum 2",
            ("SGD", 2),
            "strategy=FSDP2(reshard_after_forward=False, forward_prefetch=2, backward_prefetch=2), ac='11260KiB', "
            "precision='bf16', step=StepSpec(microbatches=2, optimizer='sgd')",
        ),
    ]
    lines = [_printed(capsys, words, tmp_path / "numbers.json") for words, _, _ in cases]
    for (line, _), (_, _, part) in zip(lines, cases, strict=True):
        assert part in line, line
    asked = [(line, loop) for (line, _), (_, loop, _) in zip(lines, cases, strict=True)]
    for peaks in run_ranks(2, _run, asked, timeout=240):
        for peak, (line, predicted) in zip(peaks, lines, strict=True):
            assert abs(predicted - peak) <= 0.01 * peak, (line, predicted, peak)
