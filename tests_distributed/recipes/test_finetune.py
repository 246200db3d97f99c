"""`nemo-like finetune` on two ranks: DDP under torchrun, accelerate's FSDP2, a rank that is killed, and resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.finetune_files import make_model, questions, write_lines
from tests_distributed.integrations.test_trainer_fsdp import CONFIG
from tests_distributed.recipes.pretrain_job import ranks_of, wait_for

pytest.importorskip("trl", reason="the extra 'finetune' is not installed")
pytest.importorskip("peft")

FSDP2 = Path(__file__).with_name("launched_finetune.py")
STEPS = "--steps 6 --save-every 2 --keep 9 --batch-size 2 --log-every 1 --device cpu --precision float32"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options with a model and samples."""
    folder = tmp_path_factory.mktemp("files")
    data = write_lines(folder / "data.jsonl", questions())
    return ["--model", make_model(folder / "model"), "--data", data, *STEPS.split()]


def _start(kind: str, folder: Path, options: list[str]) -> subprocess.Popen[str]:
    if kind == "fsdp2":
        (folder / "fsdp2.yaml").write_text(CONFIG + "mixed_precision: 'no'\n", encoding="utf-8")
        launcher = ["accelerate.commands.launch", "--config_file", str(folder / "fsdp2.yaml"), str(FSDP2)]
    else:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nemo_like", "finetune"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", *launcher, *options]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _run(kind: str, folder: Path, options: list[str]) -> None:
    process = _start(kind, folder, options)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-4000:]


def _trained(folder: Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    name = "adapter/adapter_model" if (folder / "adapter").exists() else "model/model"
    state = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text(encoding="utf-8"))
    return load_file(folder / f"{name}.safetensors"), [e["loss"] for e in state["log_history"] if "loss" in e]


@pytest.mark.long  # three launches of two ranks each, 10 s a launch
@pytest.mark.parametrize(("kind", "line"), [("ddp", ["--lora"]), ("fsdp2", ["--lora"]), ("fsdp2", [])])
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="finds the ranks' processes in /proc (Linux)")
def test_a_killed_rank_loses_nothing(files: list[str], tmp_path: Path, kind: str, line: list[str]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _run(kind, tmp_path, [*files, *line, "--output", str(whole), "--ac", "none"])
    killed = _start(kind, tmp_path, [*files, *line, "--output", str(cut), "--ac", "none"])
    wait_for(lambda: (cut / "checkpoint-2" / "trainer_state.json").exists(), killed)
    os.kill(ranks_of(killed)[1], signal.SIGKILL)
    output, _ = killed.communicate(timeout=60)
    assert killed.returncode != 0 and not (cut / "adapter").exists() and not (cut / "model").exists(), output[-4000:]
    _run(kind, tmp_path, [*files, *line, "--output", str(cut), "--ac", "full", "--resume"])
    (weights, losses), (again, same) = _trained(whole), _trained(cut)
    assert losses == same and len(losses) == 6
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
