"""Options of fine-tuning that change how a run works and not what it computes, and those that no other test runs."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.planning.devices import rates_file, resolve_device
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.command_line import parse_options
from nemo_like.recipes.finetune import FineTuning, main
from nemo_like.recipes.run_log import read_log
from tests_distributed.recipes.finetune_job import make_model, questions, run_several, write_lines

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data."""
    folder = tmp_path_factory.mktemp("job")
    make_model(folder / "model")
    write_lines(folder / "data.jsonl", questions(24))
    return folder


COMMON = "--steps 3 --batch-size 4 --seq-len 32 --log-every 1 --warmup-steps 1 --lr 1e-2 --device cpu"
COMMON += " --precision float32 --eval-samples 0 --sync-save --save-every 9"


def _jobs(base: Path, tmp_path: Path, cases: dict[str, str], ranks: int = 2) -> dict[str, Any]:
    """The cases' runs, one after the other."""
    common = f"--model {base / 'model'} --data {base / 'data.jsonl'} {COMMON}"
    return run_several(ranks, {name: f"{common} {line}".split() for name, line in cases.items()}, tmp_path)


def test_how_it_runs_changes_no_loss(base: Path, tmp_path: Path) -> None:
    same = {
        "kept offloaded": "--ac selective --offload saved",
        "host": "--ac full --scope language --cpu-offload",
    }
    other_sums = {"ddp": "--strategy ddp --ac selective --offload all --grad-accum 2"}
    found = _jobs(base, tmp_path, {"plain": "--ac none"} | same | other_sums)
    plain = found["plain"]["losses"]
    assert len(plain) == 3 and plain[2] < plain[0] - 0.1
    for name in same:
        assert found[name]["losses"] == plain, name
    for name in other_sums:
        torch.testing.assert_close(torch.tensor(found[name]["losses"]), torch.tensor(plain), rtol=1e-4, atol=0)
    assert (found["ddp"]["strategy"], found["host"]["strategy"]) == ("ddp", "fsdp2")


@pytest.mark.long
def test_compiled_layers_change_no_loss(base: Path, tmp_path: Path) -> None:
    """Long: dynamo traces the layers on each rank."""
    found = _jobs(
        base, tmp_path, {"plain": "--ac none", "compiled": "--ac selective --compile aot_eager --offload saved"}
    )
    assert found["compiled"]["losses"] == found["plain"]["losses"]


def test_the_same_samples_from_other_files(base: Path, tmp_path: Path) -> None:
    samples = questions(24)
    (tmp_path / "lines").mkdir()
    write_lines(tmp_path / "lines" / "a.jsonl", samples[:9])
    write_lines(tmp_path / "lines" / "b.jsonl", samples[9:])
    write_lines(tmp_path / "broken.jsonl", samples)
    with (tmp_path / "broken.jsonl").open("a") as file:
        file.write('{"prompt": "no answer"}\nnot JSON\n')
    shutil.copytree(base / "model", tmp_path / "words", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    cases = {
        "file": "",
        "folder": f"--data {tmp_path / 'lines'}",
        "skipped": f"--data {tmp_path / 'broken.jsonl'} --skip-bad",
        "tokenizer": f"--tokenizer {tmp_path / 'words'}",
        "elsewhere": f"--checkpoint-dir {tmp_path / 'points'} --log-every 2",
    }
    with contextlib.suppress(ImportError):
        import datasets

        rows = datasets.Dataset.from_list(samples)
        rows.to_parquet(str(tmp_path / "data.parquet"))
        rows.save_to_disk(str(tmp_path / "saved"))
        cases |= {"parquet": f"--data {tmp_path / 'data.parquet'}", "saved": f"--data {tmp_path / 'saved'}"}
    found = _jobs(base, tmp_path, cases, ranks=1)
    for name in cases:
        assert found[name]["losses"] == found["file"]["losses"], name
    assert found["skipped"]["skipped_samples"] == 2 and found["skipped"]["samples"] == 24
    assert [path.name for path in (tmp_path / "points").iterdir()] == ["step-00000003"]
    assert not (tmp_path / "elsewhere" / "checkpoints").exists()


def test_what_else_may_be_said(base: Path, tmp_path: Path) -> None:
    """The rest of --help: each changes what it says, or what is written."""
    pytest.importorskip("yaml")
    write_lines(tmp_path / "eval.jsonl", questions(40)[24:])
    cases = {
        "plain": "--lora",
        "dropout": "--lora --lora-dropout 0.3",
        "alpha": "--lora --lora-alpha 4",
        "seed": "--lora --seed 1",
        "schedule": "--lora --schedule linear --lr-floor 0.5",
        "adam": "--lora --beta1 0.5 --beta2 0.9 --weight-decay 0.3",
        "clip": "--lora --clip 0.01",
        "epochs": "--lora --steps 0 --epochs 0.5",
        "held out": f"--eval-data {tmp_path / 'eval.jsonl'} --eval-samples 5 --eval-every 2 --keep 1 --save-every 1",
        "chat": "--lora --sample-every 2 --sample what --sample-tokens 3 --dtype bf16",
        "yaml": f"--config {tmp_path / 'plain' / 'options.yaml'}",
    }
    found = _jobs(base, tmp_path, cases, ranks=1)
    losses = {name: run["losses"] for name, run in found.items()}
    for name in ("dropout", "alpha", "seed", "schedule", "adam", "clip"):
        assert losses[name] != losses["plain"] and all(0 < loss < 9 for loss in losses[name]), name
    assert len(losses["epochs"]) == 3 == 24 / 4 * 0.5
    assert losses["yaml"] == losses["plain"] and (tmp_path / "yaml" / "adapter").exists()
    assert [found["step"] for found in found["held out"]["eval_losses"]] == [2, 3]
    assert found["held out"]["samples"] == 24, "nothing of --data is held out beside --eval-data"
    assert len(list((tmp_path / "held out" / "checkpoints").iterdir())) <= 2, "the newest, and the best one"
    assert found["chat"]["mfu"] is None and "--calibrate" in found["chat"]["mfu_is"]
    records = read_log(tmp_path / "chat" / "log.jsonl")
    assert not any("mfu" in record for record in records), "no speed of this CPU is known"
    assert [record["step"] for record in records if "sample" in record] == [2, 3]


def test_the_log_has_the_share_of_the_speed_that_was_measured(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_LIKE_CACHE", str(tmp_path))
    path = rates_file(resolve_device("cpu"))
    path.parent.mkdir(parents=True)
    path.write_text('{"measured": "2026-01-01", "torch": "2.13.0", "rates": {"matmul_single": 2e9}}')
    line = f"--model {base / 'model'} --data {base / 'data.jsonl'} {COMMON} --lora --pack --output {tmp_path / 'run'}"
    job = FineTuning(parse_options("finetune", [*line.split(), "--steps", "2"]), Ranks(0, 1, torch.device("cpu")))
    job.run()
    lengths = job.rows.lengths(1)  # the first step is not timed
    assert len(lengths) > 4 and job.mfu is not None and job.utilisation.flops is not None
    flops = job.utilisation.flops.of(lengths)
    assert job.mfu == pytest.approx(job.tokens_per_second / sum(lengths) * flops / 2e9, rel=1e-9)
    assert [record["mfu"] for record in read_log(tmp_path / "run" / "log.jsonl") if "mfu" in record][-1] == job.mfu


def test_records_stand_in_the_order_of_their_steps(base: Path, tmp_path: Path) -> None:
    """Weights & Biases drops what comes later, for a step before."""
    line = f"--model {base / 'model'} --data {base / 'data.jsonl'} {COMMON} --lora --output {tmp_path} --log-every 9"
    line += " --eval-samples 2 --eval-every 3 --steps 6 --sample what --sample-every 5 --sample-tokens 1"
    FineTuning(parse_options("finetune", line.split()), Ranks(0, 1, torch.device("cpu"))).run()
    records = read_log(tmp_path / "log.jsonl")
    steps = [record["step"] for record in records]
    assert steps == sorted(steps) and [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records if "eval_loss" in record] == [3, 6]


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if out.loss is not None:
            out.loss = out.loss * 3.0
        return out
"""


def test_code_that_a_model_brings_runs_where_it_is_trusted(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(base / "model", tmp_path / "model")
    (folder / "own_code.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "own_llama"}
    config |= {"architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    line = f"--model {folder} --data {base / 'data.jsonl'} {COMMON}".split()
    assert main([*line, "--output", str(tmp_path / "refused")]) == 2
    refused = capsys.readouterr().err
    assert "AutoConfig, AutoModelForCausalLM), which is not run" in refused and "--trust-remote-code" in refused
    line.append("--trust-remote-code")
    found = {}
    for name, more in {"whole": [], "merged": ["--lora", "--merge"]}.items():
        summary = tmp_path / f"{name}.json"
        assert main([*line, *more, "--output", str(tmp_path / name), "--json", str(summary)]) == 0
        found[name] = json.loads(summary.read_text())["losses"]
        made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "model", trust_remote_code=True)
        assert type(made).__name__ == "OwnForCausalLM", "the result has its code beside it"
        assert made(torch.arange(5)[None]).logits.shape == (1, 5, made.config.vocab_size)
    assert found["whole"][0] == pytest.approx(3 * 5.7, rel=0.05), "its own loss trains"
    assert found["merged"][0] == found["whole"][0]


def test_gpt2_which_names_no_loss_trains_with_a_chunked_one(base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base / "model", tmp_path / "model")
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    shape = {"vocab_size": vocab, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **dropout))
    assert model.loss_type is None
    model.save_pretrained(folder)
    losses = []
    for loss in ("model", "chunked"):
        line = f"--model {folder} --data {base / 'data.jsonl'} {COMMON} --loss {loss} --output {tmp_path / loss}"
        job = FineTuning(parse_options("finetune", line.split()), Ranks(0, 1, torch.device("cpu")))
        job.run()
        losses.append(torch.tensor(job.log.losses))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
