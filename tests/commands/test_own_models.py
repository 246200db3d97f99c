"""Models that `module:function` builds: a plain GPT, one of transformers, and one that brings its sample input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import cli
from tests.models.tiny import Block

WIDTH, VOCAB = 16, 32
SMALL = ["--seq-len", "8", "--batch-size", "2"]
PLANS = {
    "plan": ["--gpu", "cpu", "--budget", "50%", "--no-what-if", "--json", "-"],
    "profile": ["--runs", "1", "--json"],
}


class Gpt(nn.Module):
    """Takes token ids by position, and says nothing of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Diffusion(Gpt):
    """Takes keywords of several shapes and types."""

    def forward(self, *, hidden_states: Tensor, timestep: Tensor) -> Tensor:  # type: ignore[override]
        x = hidden_states + timestep[:, None, None]
        for layer in self.layers:
            x = layer(x)
        return x


def diffusion() -> Any:
    return Diffusion(), {"hidden_states": torch.zeros(3, 8, WIDTH), "timestep": torch.zeros(3)}


def by_position() -> Any:
    return Gpt(), (torch.zeros(3, 8, dtype=torch.long),)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCAB,
    ))  # fmt: skip


@pytest.mark.parametrize("command", PLANS)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Gpt", [*SMALL, "--vocab-size", str(VOCAB)]),
        ("llama", SMALL),
        ("diffusion", []),
        ("by_position", ["--batch-size", "4"]),
    ],
)
def test_every_planning_command_takes_it(
    command: str, model: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--model", f"{__name__}:{model}", *words, *PLANS[command]]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", PLANS)
def test_what_it_takes_is_asked_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--model", f"{__name__}:Gpt", *SMALL]) == 2
    assert "states no vocab_size. Give --vocab-size if it takes token ids" in capsys.readouterr().err
    assert cli.main([command, "--model", f"{__name__}:diffusion", "--seq-len", "8"]) == 2
    assert "returns its own sample input. Leave it out" in capsys.readouterr().err


def test_fit_takes_a_sample_input_and_says_how_to_give_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "1", "--gpu", "h100-80gb", "--global-batch", "2", "--ac", "none", "--json", "-"]
    assert cli.main(["fit", "--model", f"{__name__}:diffusion", *words]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"]
    assert cli.main(["fit", "--model", f"{__name__}:Gpt", *words]) == 2
    assert "have module:function return (model, sample)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "layers --json",
        f"plan --gpu cpu --budget 50% --no-what-if --json - {' '.join(SMALL)}",
        "fit --gpus 1 --gpu h100-80gb --micro-batch 2 --seq-len 8 --ac none --loss model --json -",
        f"profile --runs 1 --json {' '.join(SMALL)}",
        f"bench --repeats 1 --warmup 0 --modes full {' '.join(SMALL)}",
    ],
)
def test_every_command_takes_a_folder_with_a_config(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder as `hf download` makes it."""
    llama().config.save_pretrained(tmp_path)
    command, *more = words.split()
    assert cli.main([command, "--model", str(tmp_path), *more]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out
