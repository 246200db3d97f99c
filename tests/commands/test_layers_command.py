"""`nemo-like layers`."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

from nemo_like.cli import main
from nemo_like.commands.layers_command import describe, to_text
from tests.models.families import FAMILIES


def test_layers_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", "--model", "llama3-8b", "--dtype", "bf16", "--wide"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "LlamaForCausalLM: 8.03 B parameters, 15.0 GiB; layers: 32 language."
    (row,) = [line.split() for line in lines if "LlamaDecoderLayer" in line]
    # Published shapes: 4 * D^2 * (1 + 1/4) / 2 attention, 3 * D * F MLP, 2 * D norms, D = 4096, F = 14336; two bytes each.
    assert row == ["language", "model.layers.0-31", "LlamaDecoderLayer", "32", "218", "M", "0.41", "own", "yes"]
    assert max(map(len, lines)) > 80


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_fit_a_screen(name: str) -> None:
    report = describe(FAMILIES[name].build())
    lines = to_text(report, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "checkpointed" in lines[2] or "checkpointed" in lines[3]
    assert any(line.startswith("Not shown at this width: ") for line in lines)


def test_layers_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", "--model", "llama-tiny", "--layers", "model.layers.[02]", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (run,) = report["runs"]
    assert run["names"] == "model.layers.0,2" and run["count"] == 2 and run["checkpointed"]
    assert report["parameters"] == 2 * run["parameters_each"] + report["outside_parameters"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--scope", "vision"], "this model has 4 language layers"),
        (["--layers", "model.layer.0"], "matches no module"),
        (["--dtype", "int8"], "--dtype is 'int8'"),
    ],
)
def test_bad_requests_are_one_line_and_status_2(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layers", "--model", "llama-tiny", *more]) == 2
    assert message in capsys.readouterr().err


def test_what_is_frozen_or_out_of_scope_is_said() -> None:
    model = FAMILIES["llava"].build()
    model.model.vision_tower.requires_grad_(False)
    report = describe(model, scope="language")
    vision, language = sorted(report.runs, key=lambda run: run.group, reverse=True)
    assert (vision.group, vision.trainable, vision.checkpointed) == ("vision", False, False)
    assert (language.group, language.trainable, language.checkpointed) == ("language", True, True)
    assert "the layer is frozen, and checkpointed where a gradient flows through it" in to_text(describe(model))
    inside = sum(run.count * run.bytes_each for run in report.runs)
    assert inside + report.outside_bytes == report.bytes == 4 * report.parameters
