"""`nemo-like finetune` on two ranks: DDP under torchrun, accelerate's FSDP2, a rank that is killed, and resuming."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.finetune_files import make_model, questions, write_lines
from tests_distributed.integrations.test_trainer_fsdp import accelerate_launch, run, start
from tests_distributed.recipes.pretrain_job import ranks_of, wait_for

FSDP2 = Path(__file__).with_name("launched_finetune.py")
STEPS = "--steps 6 --save-every 2 --keep 9 --batch-size 2 --log-every 1 --device cpu --precision float32"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options with a model and samples."""
    folder = tmp_path_factory.mktemp("files")
    data = write_lines(folder / "data.jsonl", questions())
    return ["--model", make_model(folder / "model"), "--data", data, *STEPS.split()]


def _words(kind: str, folder: Path, options: list[str]) -> list[str]:
    if kind == "fsdp2":
        return [*accelerate_launch(folder, "mixed_precision: 'no'\n"), str(FSDP2), *options]
    return ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nemo_like", "finetune", *options]


def _trained(folder: Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    name = "adapter/adapter_model" if (folder / "adapter").exists() else "model/model"
    state = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text(encoding="utf-8"))
    return load_file(folder / f"{name}.safetensors"), [e["loss"] for e in state["log_history"] if "loss" in e]


@pytest.mark.long  # three launches of two ranks each, 10 s a launch
@pytest.mark.parametrize(("kind", "line"), [("ddp", ["--lora"]), ("fsdp2", ["--lora"]), ("fsdp2", [])])
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="finds the ranks' processes in /proc (Linux)")
def test_a_killed_rank_loses_nothing(files: list[str], tmp_path: Path, kind: str, line: list[str]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(*_words(kind, tmp_path, [*files, *line, "--output", str(whole), "--ac", "none"]))
    killed = start(*_words(kind, tmp_path, [*files, *line, "--output", str(cut), "--ac", "none"]))
    wait_for(lambda: (cut / "checkpoint-2" / "trainer_state.json").exists(), killed)
    os.kill(ranks_of(killed)[1], signal.SIGKILL)
    output, _ = killed.communicate(timeout=60)
    assert killed.returncode != 0 and not (cut / "adapter").exists() and not (cut / "model").exists(), output[-4000:]
    run(*_words(kind, tmp_path, [*files, *line, "--output", str(cut), "--ac", "full", "--resume"]))
    (weights, losses), (again, same) = _trained(whole), _trained(cut)
    assert losses == same and len(losses) == 6
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
