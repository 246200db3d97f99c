"""`nemo-like plan --check`: the plan of a job, and one rank of it on fake tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from nemo_like import Job, fake_rank
from nemo_like.cli import main
from tests.models.tiny import llama

ASKED = "plan --seq-len 16 --budget 50% --no-what-if --check --model"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ("--world-size 4 --tp 2", {"world_size": 4, "tp": 2, "precision": "bf16"}),
        ("--world-size 4 --pp 2 --precision fp32", {"world_size": 4, "pp": 2}),
    ],
)
def test_a_rank_is_run_and_compared(
    more: str, asked: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list = []

    def dry_run(model: Any, job: Job, sample: Any, own: Any = fake_rank.dry_run) -> Any:
        made.extend([job, sample["input_ids"].shape, own(model, job, sample)])
        return made[-1]

    monkeypatch.setattr(fake_rank, "dry_run", dry_run)
    config, path = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps(llama(num_hidden_layers=2 if "pp" in asked else 1).config.to_dict()))
    assert main([*ASKED.split(), str(config), *more.split(), "--json", str(path)]) == 0
    body = json.loads(path.read_text())
    check = body["check"]
    job, shape, found = made
    assert job == Job.of(ac=check["ac"], gpu="h100-80gb", **asked) and shape == (1, 16)
    assert (check["peak_bytes"], check["planned_bytes"]) == (found.peak_bytes, found.against)
    assert check["planned_bytes"] == (body["rows"][0]["rank_peak_bytes"] or [body["rows"][0]["peak_bytes"]])[0]
    assert check["difference_bytes"] == found.against - found.peak_bytes and abs(check["difference"]) < 0.005
    assert check["ac"] == body["rows"][0]["ac"] == "none" and check["rank"] == 0 and check["seconds"] > 0
    assert (check["at"], sum(check["parts"].values())) == (found.at, found.peak_bytes)
    printed = capsys.readouterr().out
    assert f"Rank 0 of {asked['world_size']} with ac='none'" in printed and f"{found.at}." in printed
    assert f"{found.against:,} bytes: {check['difference_bytes']:+,}, {check['difference']:+.3%}." in printed


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--optimizer adamw-8bit", "StepSpec.optimizer='adamw-8bit'"),
        ("--offload all", "--offload all"),
    ],
)
def test_what_cannot_be_run_is_named(more: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED.split(), "llama-tiny", *more.split()]) == 2
    said = capsys.readouterr()
    refused = said.err.partition(" ...\n")[2]
    assert refused.startswith(f"nemo-like plan: {named} is not run without ranks and memory yet.") and not said.out
