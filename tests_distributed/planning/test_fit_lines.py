"""The two lines that `nemo-like fit` prints run as they stand: the one to paste, and the recipe's command."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from nemo_like import FSDP2, parallelize
from nemo_like.models import resolve_model
from nemo_like.options import PipelineParallel
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.report import recipe
from nemo_like.recipes import pretrain
from tests_distributed.spawn import run_ranks

pytest.importorskip("transformers")

TINY = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64, "use_cache": False,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
ONE = [
    {"ac": "plan", "loss": "chunked", "micro_batch": 2, "memory": "3MiB"},
    {"ac": "selective", "loss": "model", "micro_batch": 4, "precision": "bf16", "offload": "boundary"},
]
TWO = [
    {
        "ac": "full",
        "loss": "model",
        "micro_batch": 2,
        "reshard_after_forward": False,
        "tp": 1,
        "cp": 1,
        "cpu_offload": True,
    },
    {"ac": "selective", "loss": "chunked", "micro_batch": 4, "tp": 2, "cp": 1},
    {"ac": "full", "loss": "model", "micro_batch": 2, "pp": 2, "schedule": "1f1b"},
]


def _run(rank, world_size, config, data, asked):
    """Losses of the recipe's two steps, and of one step of the pasted line."""
    said = {"gpus": world_size, "gpu": "cpu", "seq_len": 64, "global_batch": 8, "offload": "none"} | asked
    report = fit(config, **said)
    best = report.best
    ids = torch.randint(256, (best.layout.micro_batch, 64), generator=torch.Generator().manual_seed(1))
    names = {"parallelize": parallelize, "FSDP2": FSDP2, "PipelineParallel": PipelineParallel}
    names |= {"model": resolve_model(config).build(), "batch": {"input_ids": ids, "labels": ids}}
    exec(best.call(), names)
    model, whole = names.get("pipeline", names["model"]), ids.repeat(best.layout.grad_accum, 1)
    staged = best.layout.pp > 1
    pasted = model.step(input_ids=whole, labels=whole) if staged else model(input_ids=ids, labels=ids).loss
    command, out = recipe(report, best), Path(data).parent / "run.json"
    begin, words = re.split(r"-m nemo_like\.recipes\.pretrain ", command)
    more = ["--data", data, "--steps", "2", "--device", "cpu", "--eval-samples", "0", "--json", str(out)]
    assert pretrain.main([*shlex.split(words), *more]) == 0, command
    assert (begin == "python ") == (world_size == 1) and f"--batch-size {best.layout.sequences}" in words
    return command, float(pasted.detach()), json.loads(out.read_text())["losses"] if rank == 0 else None


def _check(command, pasted, losses, asked):
    assert len(losses) == 2 and all(0 < loss < 10 for loss in [pasted, *losses]), (command, pasted, losses)
    if "reshard_after_forward" in asked:
        assert "--reshard-after-forward no" in command and command.endswith("--cpu-offload")
    if "plan" in asked.values():
        assert re.search(r"--ac [\d.]+[KMG]iB", command)


def _inputs(folder):
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "text.txt").write_text("a text that is learned, " * 400)
    return str(folder / "config.json"), str(folder / "text.txt")


@pytest.mark.few(1)
@pytest.mark.parametrize("asked", ONE[::-1])
def test_both_lines_run_on_one_device(tmp_path, asked):
    _check(*_run(0, 1, *_inputs(tmp_path), asked), asked)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(TWO[0], id="kept gathered, on the host"),
        pytest.param(TWO[1], id="tp", marks=pytest.mark.long),
        pytest.param(TWO[2], id="stages"),
    ],
)
def test_both_lines_run_on_two_ranks(tmp_path, asked):
    _check(*run_ranks(2, _run, *_inputs(tmp_path), asked, timeout=280)[0], asked)
