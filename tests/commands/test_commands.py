"""The commands `layers` and `plan`: a rank on fake tensors beside a plan, flags, models of `module:function`; surveys."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import Job, fake_rank
from nemo_like.cli import main, make_parser
from nemo_like.commands.layers_command import describe, to_text
from nemo_like.commands.step_options import asked_job
from nemo_like.options import Precision
from tests.models.blocks import Stack, in_turn
from tests.models.families import FAMILIES
from tests.models.tiny import Block, llama
from tests.tools.surveys import layers
from tests.tools.surveys.__main__ import main as survey


def test_layers_of_a_preset(program: Any) -> None:
    lines = program("layers --model llama3-8b --dtype bf16 --wide").out.splitlines()
    assert lines[0] == "LlamaForCausalLM: 8.03 B parameters, 15.0 GiB; layers: 32 language."
    (row,) = [line.split() for line in lines if "LlamaDecoderLayer" in line]
    # Published shapes: 4 * D^2 * (1 + 1/4) / 2 attention, 3 * D * F MLP, 2 * D norms, D = 4096, F = 14336; two bytes each.
    assert row == ["language", "model.layers.0-31", "LlamaDecoderLayer", "32", "218", "M", "0.41", "own", "yes"]
    assert max(map(len, lines)) > 80


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_fit_a_screen(name: str) -> None:
    lines = to_text(describe(FAMILIES[name].build()), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "checkpointed" in lines[2] or "checkpointed" in lines[3]
    assert any(line.startswith("Not shown at this width: ") for line in lines)


def test_layers_as_json(program: Any) -> None:
    report = json.loads(program("layers --model llama-tiny --layers model.layers.[02] --json -").out)
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
    more: list[str], message: str, program: Any
) -> None:
    assert message in program(["layers", "--model", "llama-tiny", *more], 2).err


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


ASKED = "plan --seq-len 16 --ac 50% --no-what-if --check --model"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ("--gpus 4 --tp 2", {"world_size": 4, "tp": 2, "precision": "bf16"}),
        ("--gpus 4 --pp 2 --precision fp32", {"world_size": 4, "pp": 2}),
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
def test_what_cannot_be_run_is_named(more: str, named: str, program: Any) -> None:
    said = program([*ASKED.split(), "llama-tiny", *more.split()], 2)
    refused = said.err.partition(" ...\n")[2]
    assert refused.startswith(f"nemo-like plan: {named} is not run without ranks and memory yet.") and not said.out


@pytest.mark.parametrize(
    ("flags", "precision"),
    [
        ("--dtype bf16", Precision()),
        ("--dtype bf16 --reduce-dtype float32", Precision(torch.bfloat16, torch.float32)),
        ("--dtype bf16 --reduce-dtype bf16", Precision(torch.bfloat16, torch.bfloat16)),
        ("", Precision(torch.bfloat16, torch.float32)),
        ("--reduce-dtype bf16", Precision(torch.bfloat16, torch.bfloat16)),
    ],
)
def test_a_dtype_to_reduce_in_counts_also_where_parameters_have_the_dtype_to_compute_in(
    flags: str, precision: Precision
) -> None:
    asked = make_parser("plan").parse_args(["plan", "--model", "llama-tiny", *flags.split()])
    assert asked_job(asked).precision == precision


WIDTH, VOCAB = 16, 32
SMALL = ["--seq-len", "8", "--batch-size", "2"]
PLANS = {
    "plan": ["--gpu", "cpu", "--ac", "50%", "--no-what-if", "--json", "-"],
    "profile": ["--runs", "1", "--json", "-"],
}


def gpt() -> nn.Module:
    """Takes token ids by position, and says nothing of itself."""
    return Stack((Block(WIDTH) for _ in range(2)), start=nn.Embedding(VOCAB, WIDTH), head=nn.Linear(WIDTH, VOCAB))


class Diffusion(Stack):
    """Takes keywords of several shapes and types."""

    def forward(self, *, hidden_states: Tensor, timestep: Tensor) -> Tensor:  # type: ignore[override]
        return in_turn(self.layers, hidden_states + timestep[:, None, None])


def diffusion() -> Any:
    return Diffusion(Block(WIDTH) for _ in range(2)), {"hidden_states": torch.zeros(3, 8, WIDTH), "timestep": torch.zeros(3)}


def by_position() -> Any:
    return gpt(), (torch.zeros(3, 8, dtype=torch.long),)


def hugging_face() -> nn.Module:
    return llama(hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, vocab_size=VOCAB)


@pytest.mark.parametrize("command", PLANS)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt", [*SMALL, "--vocab-size", str(VOCAB)]),
        ("hugging_face", SMALL),
        ("diffusion", []),
        ("by_position", ["--batch-size", "4"]),
    ],
)
def test_every_planning_command_takes_it(
    command: str, model: str, words: list[str], program: Any
) -> None:
    assert json.loads(program([command, "--model", f"{__name__}:{model}", *words, *PLANS[command]]).out)


@pytest.mark.parametrize("command", PLANS)
def test_what_it_takes_is_asked_for(command: str, program: Any) -> None:
    assert (
        "states no vocab_size. Give --vocab-size if it takes token ids"
        in program([command, "--model", f"{__name__}:gpt", *SMALL], 2).err
    )
    assert (
        "returns its own sample input. Leave it out"
        in program([command, "--model", f"{__name__}:diffusion", "--seq-len", "8"], 2).err
    )


def test_fit_takes_a_sample_input_and_says_how_to_give_one(program: Any) -> None:
    words = ["--gpus", "1", "--gpu", "h100-80gb", "--global-batch", "2", "--ac", "none", "--json", "-"]
    assert json.loads(program(["fit", "--model", f"{__name__}:diffusion", *words]).out)["candidates"]
    assert "have module:function return (model, sample)" in program(["fit", "--model", f"{__name__}:gpt", *words], 2).err


@pytest.mark.parametrize(
    "words",
    [
        "layers --json -",
        f"plan --gpu cpu --ac 50% --no-what-if --json - {' '.join(SMALL)}",
        "fit --gpus 1 --gpu h100-80gb --micro-batch 2 --seq-len 8 --ac none --loss model --json -",
        f"profile --runs 1 --json - {' '.join(SMALL)}",
        f"profile --runs 1 --modes full {' '.join(SMALL)}",
    ],
)
def test_every_command_takes_a_folder_with_a_config(
    words: str, tmp_path: Path, program: Any
) -> None:
    """A folder as `hf download` makes it."""
    hugging_face().config.save_pretrained(tmp_path)
    command, *more = words.split()
    assert program([command, "--model", str(tmp_path), *more]).out


HEAD = "# Page\n\n"


def test_the_survey_of_layers_writes_a_table_and_fails_where_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = layers.survey(["llama", "glm_image_vqmodel", "no_such_type"])
    table = layers.to_markdown(rows)
    assert "| llama | LlamaModel | language: 32 x LlamaDecoderLayer | 100.0% |" in table
    assert f"| glm_image_vqmodel | 0.0% | {layers.EXCEPTIONS['glm_image_vqmodel']} |" in table
    assert "| no_such_type | cannot be built" in table
    assert list(layers.failures(rows)) == []
    monkeypatch.setattr(layers, "EXCEPTIONS", {})
    (failure,) = layers.failures(rows)
    assert failure.startswith("glm_image_vqmodel: No repeated layers were found")
    path = tmp_path / "coverage.md"
    assert survey(["--only", "llama", "--processes", "1", "--output", str(path)]) == 0
    assert "LlamaDecoderLayer" in path.read_text()


_REFUSED = {
    "--only nosuch": "'nosuch'",
    "--losses --only LlamaForCausalLLM": "Did you mean 'LlamaForCausalLM'",
    "--plan --only nosuch": "'nosuch'",
    "--plan --resume": "--resume",
    "--processes 0": "--processes is 0",
    "--losses --processes 3": "--processes is 3, and nothing reads it",
    "--losses --plan": "--losses and --plan are two surveys",
    "--output /nonexistent/x.json": "--output names a file in '/nonexistent', which is not an existing",
    "--plan --output /nonexistent/x.json": "--output names a file in '/nonexistent', which is not an existing",
}


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.long] if "LLM" in line else []) for line in _REFUSED]
)
def test_a_survey_refuses_it_before_any_work(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert survey(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and _REFUSED[line] in said.err
