"""Fine-tuning a folder of a Hugging Face model: on one rank, on two, and what is left for other tools."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.command_line import parse_options
from nemo_like.recipes.finetune import FineTuning, main
from nemo_like.recipes.loop import run_job
from nemo_like.recipes.run_log import read_log
from nemo_like.recipes.sample_rows import SampleRows
from tests_distributed.recipes.finetune_job import make_model, questions, read_samples, run_finetune, write_lines
from tests_distributed.spawn import run_ranks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a small job."""
    folder = tmp_path_factory.mktemp("job")
    make_model(folder / "model")
    write_lines(folder / "data.jsonl", questions())
    line = f"--model {folder / 'model'} --data {folder / 'data.jsonl'} --steps 6 --batch-size 4 --grad-accum 2 --seq-len 32"
    line += " --eval-every 3 --eval-samples 4 --save-every 2 --log-every 1 --warmup-steps 1 --lr 1e-2 --device cpu"
    return [*line.split(), "--precision", "float32"]


def test_adapters_train_alike_on_one_and_two_ranks_and_load_in_peft(base: list[str], tmp_path: Path) -> None:
    lora = [*base, "--lora", "--lora-rank", "4"]
    one = run_finetune(1, [*lora, "--output", str(tmp_path / "one")], tmp_path / "one.json")
    two = run_finetune(2, [*lora, "--output", str(tmp_path / "two"), "--ac", "full"], tmp_path / "two.json")
    assert {"losses", "eval_losses", "peak_bytes", "tokens_per_second", "ac", "strategy", "versions"} <= set(two)
    assert (two["world_size"], two["strategy"], two["ac"], len(two["peak_bytes"])) == (2, "fsdp2", "full", 2)
    assert len(two["losses"]) == 6 and [found["step"] for found in two["eval_losses"]] == [3, 6]
    torch.testing.assert_close(torch.tensor(two["losses"]), torch.tensor(one["losses"]), rtol=1e-4, atol=0)
    assert two["eval_losses"][-1]["loss"] == pytest.approx(one["eval_losses"][-1]["loss"], rel=1e-4)
    assert two["losses"][-1] < two["losses"][0] - 0.2

    model = base[base.index("--model") + 1]
    found = {
        name: peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(model), str(tmp_path / name / "adapter")
        ).state_dict()
        for name in ("one", "two")
    }
    assert any("lora_B" in name and value.abs().sum() > 0 for name, value in found["two"].items())
    for name, value in found["one"].items():
        torch.testing.assert_close(found["two"][name], value, rtol=1e-3, atol=1e-4)


def _rows(base: list[str], room: int) -> tuple[int, int]:
    """How many samples the data has, and how many packed rows of `room` tokens the first epoch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base[base.index("--model") + 1])
    samples = read_samples(Path(base[base.index("--data") + 1]), tokenizer)
    return len(samples), SampleRows(samples, 1, 0, room).rows_per_epoch


def _weights(folder: Path | str) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder)).state_dict()


def test_packed_rows_train_as_their_samples_one_by_one(base: list[str], tmp_path: Path) -> None:
    """All samples in one step: as rows of their own, and in as few packed rows as they take."""
    count, rows = _rows(base, 64)
    assert rows < count / 2
    one = [*base, "--eval-samples", "0", "--steps", "1", "--grad-accum", "1", "--train", "**", "--seq-len", "64"]
    found = {}
    for name, size, more in (("a", count, "--loss model"), ("b", rows, "--pack"), ("c", rows, "--pack --loss model")):
        line = [*one, "--batch-size", str(size), *more.split(), "--output", str(tmp_path / name)]
        found[name] = run_finetune(1, line, tmp_path / f"{name}.json")
        assert found[name]["samples"] == count
    for name in ("b", "c"):
        assert found[name]["losses"][0] == pytest.approx(found["a"]["losses"][0], rel=1e-5)
        packed, whole = _weights(tmp_path / name / "model"), _weights(tmp_path / "a" / "model")
        for key, value in whole.items():
            torch.testing.assert_close(packed[key], value, rtol=1e-4, atol=2e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "same"), [(2, True), (1, False)])
def test_whole_weights_resume_to_the_bit_and_open_with_from_pretrained(
    base: list[str], tmp_path: Path, ranks: int, same: bool
) -> None:
    whole = [*base, "--output", str(tmp_path / "whole"), "--keep", "9", "--ac", "full"]
    full = run_finetune(2, whole, tmp_path / "full.json")
    assert full["trained_parameters"] == full["parameters"]
    copied = shutil.copytree(tmp_path / "whole", tmp_path / f"on{ranks}")
    shutil.rmtree(copied / "model")
    for step in (4, 6):
        shutil.rmtree(copied / "checkpoints" / f"step-{step:08d}")
    again = [*base, "--output", str(copied), "--resume", "--ac", "full"]
    resumed = run_finetune(ranks, again, tmp_path / "resumed.json")
    assert resumed["first_step"] == 3, "the best evaluation has a checkpoint beside every second step"
    if same:
        assert resumed["losses"] == full["losses"][3:], "the same bits"
    torch.testing.assert_close(torch.tensor(resumed["losses"]), torch.tensor(full["losses"][3:]), rtol=1e-4, atol=0)
    records = read_log(copied / "log.jsonl")
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6], "none twice"
    found = _weights(copied / "model")
    for name, value in _weights(tmp_path / "whole" / "model").items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0 if same else 1e-3)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "whole" / "model").chat_template


def test_only_what_the_glob_names_trains(base: list[str], tmp_path: Path) -> None:
    line = [*base, "--train", "model.layers.1.mlp.*.weight,**norm.weight", "--precision", "bf16", "--steps", "2"]
    line += ["--output", str(tmp_path), "--sample", "what is 1 and 2?", "--sample-tokens", "4"]
    run_finetune(2, line, tmp_path / "run.json")
    before, after = _weights(base[base.index("--model") + 1]), _weights(tmp_path / "model")
    changed = {name for name, value in before.items() if not torch.equal(after[name], value.bfloat16().to(value))}
    assert changed == {n for n in before if n.startswith("model.layers.1.mlp.") or n.endswith("norm.weight")}
    records = read_log(tmp_path / "log.jsonl")
    assert [record["step"] for record in records if "sample" in record] == [2]
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    assert sum(path.stat().st_size for path in checkpoint.glob("*.distcp")) < 200_000, "frozen weights are not in it"


def test_merged_adapters_answer_as_peft_does(base: list[str], tmp_path: Path) -> None:
    line = [*base, "--lora", "--merge", "--precision", "bf16", "--lora-targets", "q_proj,down_proj", "--steps", "3"]
    run_finetune(2, [*line, "--output", str(tmp_path), "--export", "best"], tmp_path / "run.json")
    model = base[base.index("--model") + 1]
    plain, merged = (transformers.AutoModelForCausalLM.from_pretrained(str(f)) for f in (model, tmp_path / "model"))
    ids = torch.arange(20)[None]
    before = plain(ids).logits
    adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.equal(adapted(ids).logits, before)


def test_a_resume_says_which_option_differs(base: list[str], tmp_path: Path) -> None:
    data = Path(base[base.index("--data") + 1])
    copy = shutil.copy(data, tmp_path / "renamed.jsonl")
    other = write_lines(tmp_path / "other.jsonl", questions(41))
    whole = [*base, "--steps", "1", "--output", str(tmp_path / "run")]
    run_finetune(1, whole, tmp_path / "run.json")
    cases = {
        "--resume: --lora was False when the checkpoint was written, and is True now. Give the same again, or start anew "
        "with another --output.": ["--lora"],
        "--resume: --train was None when": ["--train", "lm_head.*"],
        "--resume: --seq-len was 32 when the checkpoint was written, and is 16": ["--seq-len", "16"],
        f"--resume: --data '{other}' holds other data than the checkpoint's run read, from --data '{data}'.": [
            *("--data", str(other))
        ],
        "Give --tokenizer, --eval-samples, --eval-data and --skip-bad as they were": ["--eval-samples", "2"],
        "no error": ["--data", str(copy)],
    }
    found = run_ranks(1, _errors, [[*whole, "--resume", *case] for case in cases.values()], timeout=150)[0]
    for message, error in zip(cases, found, strict=True):
        assert message in error, (message, error)


def _interrupted(rank: int, world_size: int, arguments: list[str], folder: str) -> int:
    def interrupt() -> None:
        while not list(Path(folder).glob("step-*")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    return main(arguments)


def test_sigterm_saves_and_the_run_goes_on(base: list[str], tmp_path: Path) -> None:
    line = [*base, "--lora", "--eval-every", "0", "--output", str(tmp_path)]
    codes = run_ranks(
        1, _interrupted, [*line, "--steps", "9999"], str(tmp_path / "checkpoints"), init_group=False, timeout=100
    )
    assert codes == [128 + signal.SIGTERM]
    assert not (tmp_path / "adapter").exists()
    reached = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    more = ["--steps", str(reached + 1), "--resume=auto"]
    assert run_finetune(1, [*line, *more], tmp_path / "on.json")["first_step"] == reached
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def _errors(rank: int, world_size: int, cases: list[list[str]]) -> list[str]:
    ranks = Ranks(rank, world_size, torch.device("cpu"), control=dist.new_group(backend="gloo"))
    found = []
    for case in cases:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                run_job(FineTuning(parse_options("finetune", case), ranks))
                found.append("no error")
            except (ValueError, RuntimeError) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_bad_input_is_a_clear_error_on_every_rank(base: list[str], tmp_path: Path) -> None:
    model = Path(base[base.index("--model") + 1])
    truncated = shutil.copytree(model, tmp_path / "truncated")
    data = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(data[: len(data) // 2])
    small = make_model(tmp_path / "small", vocab=290)
    code = shutil.copytree(model, tmp_path / "code")
    config = json.loads((code / "config.json").read_text())
    (code / "config.json").write_text(json.dumps(config | {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C"}}))
    wide = shutil.copytree(model, tmp_path / "wide")
    (wide / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    parts = shutil.copytree(model, tmp_path / "parts")
    (parts / "model.safetensors").unlink()
    transformers.AutoModelForCausalLM.from_pretrained(model).save_pretrained(parts, max_shard_size="40KB")
    (parts / "model-00002-of-00005.safetensors").unlink()
    no_json = shutil.copytree(model, tmp_path / "no_json")
    (no_json / "config.json").write_text("{")
    empty, broken = tmp_path / "empty.jsonl", tmp_path / "broken.jsonl"
    empty.write_text("")
    long = write_lines(tmp_path / "long.jsonl", [{"text": "1" * 150}])
    broken.write_text('{"text": "fine"}\n' * 9 + "{\n")
    (tmp_path / "done" / "adapter").mkdir(parents=True)
    (tmp_path / "done" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    cases = {
        "which is not a folder": ["--model", str(tmp_path / "nowhere")],
        "without any safetensors file": ["--model", str(tmp_path / "done")],
        "truncated cannot be read": ["--model", str(truncated)],
        "model-00002-of-00005.safetensors": ["--model", str(parts)],
        "config.json is not valid JSON": ["--model", str(no_json)],
        "The tokenizer has tokens up to number": ["--model", str(small), "--tokenizer", str(model)],
        "which is not run": ["--model", str(code)],
        "gate_proj": ["--model", str(wide)],
        "it is empty": ["--data", str(empty)],
        "broken.jsonl, line 10: it is not JSON": ["--data", str(broken)],
        "has a result already (adapter)": ["--output", str(tmp_path / "done")],
        "where nothing can be written": ["--output", str(tmp_path / "file")],
        "--lora-targets is 'nothing'": ["--lora", "--lora-targets", "nothing"],
        "--train 'nothing' matches no parameter": ["--train", "nothing"],
        "A held-out sample requires sequences of 150 tokens, and the model has positions for 128": [
            *f"--eval-data {long} --eval-samples 1 --seq-len 200".split()
        ],
        "fewer than --batch-size 64": ["--batch-size", "64"],
        "--resume finds no checkpoint": ["--resume"],
        "--sample is '', of which the tokenizer makes no token": ["--sample", ""],
        "--sample with --sample-tokens requires sequences of 501 tokens": ["--sample", "?", "--sample-tokens", "500"],
    }
    lines = [
        [*base, *(["--output", str(tmp_path / f"o{i}")] if "--output" not in case else []), *case]
        for i, case in enumerate(cases.values())
    ]
    for found in run_ranks(2, _errors, lines, timeout=150):
        for message, error in zip(cases, found, strict=True):
            assert message in error or error.startswith("OtherRankError"), (message, error)
    assert not list((tmp_path / "done" / "adapter").iterdir())
