"""`nemo-like plan --check`: the plan of a job, and one rank of it on fake tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from nemo_like import Job, dry_run
from nemo_like.cli import main
from nemo_like.models import resolve_model

ASKED = "plan --model llama-tiny --seq-len 64 --budget 50% --no-what-if --check"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ("--world-size 8 --tp 2", {"world_size": 8, "tp": 2, "precision": "bf16"}),
        ("--world-size 4 --pp 2 --precision fp32", {"world_size": 4, "pp": 2}),
    ],
)
def test_a_rank_is_run_and_compared(more: str, asked: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*ASKED.split(), *more.split(), "--json", str(path)]) == 0
    body = json.loads(path.read_text())
    check = body["check"]
    source = resolve_model("llama-tiny")
    found = dry_run(source.build("meta"), Job.of(ac=check["ac"], gpu="h100-80gb", **asked), source.sample_input(1, 64))
    assert (check["peak_bytes"], check["planned_bytes"]) == (found.peak_bytes, found.against)
    assert check["difference_bytes"] == found.against - found.peak_bytes and abs(check["difference"]) < 0.005
    assert check["ac"] == "none" and check["rank"] == 0 and check["seconds"] > 0
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
    assert main([*ASKED.split(), *more.split()]) == 2
    said = capsys.readouterr()
    refused = said.err.partition(" ...\n")[2]
    assert refused.startswith(f"nemo-like plan: {named} is not run without ranks and memory yet.") and not said.out


def test_nothing_is_run_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED.removesuffix(" --check").split(), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["check"] is None
