"""The whole way on CPU: pretrain with a tokenizer of its own, export, fine-tune adapters on two ranks, answer."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest

from tests_distributed.recipes.finetune_job import run_finetune, write_lines
from tests_distributed.recipes.pretrain_job import LLAMA, run_job

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
MODULES = "os os.path shutil string textwrap random statistics json re ast bisect calendar datetime difflib email.utils"
MORE = (
    "fileinput functools glob gzip heapq inspect io itertools keyword linecache locale logging math mimetypes operator"
)


def docstrings() -> list[dict[str, str]]:
    """A function's name, and the first line of what the standard library says of it."""
    found = {}
    for module in f"{MODULES} {MORE}".split():
        for name, function in vars(importlib.import_module(module)).items():
            if callable(function) and not name.startswith("_") and (text := inspect.getdoc(function)):
                found[name] = text.split("\n")[0]
    return [{"prompt": f"{name}: ", "completion": text} for name, text in sorted(found.items()) if len(text) > 20]


@pytest.mark.long
def test_from_text_to_answers(tmp_path: Path) -> None:
    samples = docstrings()
    (tmp_path / "text.txt").write_text("\n".join(sample["completion"] for sample in samples) * 3)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": 64, "intermediate_size": 128}))
    line = f"--model {tmp_path / 'config.json'} --data {tmp_path / 'text.txt'} --tokenizer bpe --vocab-size 400"
    line += " --steps 150 --seq-len 32 --batch-size 16 --lr 5e-3 --ac none --eval-every 0 --eval-samples 8"
    line += f" --device cpu --export {tmp_path / 'base'}"
    run = run_job(2, line.split(), tmp_path / "pretrained.json")
    assert run["eval_losses"][-1]["loss"] < run["unigram_entropy"] - 0.2, "it learned more than how frequent tokens are"

    write_lines(tmp_path / "data.jsonl", samples)
    line = f"--model {tmp_path / 'base'} --data {tmp_path / 'data.jsonl'} --output {tmp_path / 'tuned'} --lora --merge"
    line += " --batch-size 8 --seq-len 48 --steps 40 --lr 1e-2 --pack --eval-every 20 --eval-samples 32 --device cpu"
    run = run_finetune(2, line.split(), tmp_path / "tuned.json")
    assert run["eval_losses"][-1]["loss"] < run["base_eval_loss"] - 0.2

    base, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / name)) for name in ("base", "tuned/model")
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "tuned" / "model"))
    prompt = tokenizer("split: ", return_tensors="pt")
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "tuned" / "adapter"))
    answers = [
        tokenizer.decode(
            model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        )
        for model in (adapted, merged)
    ]
    assert len(answers[0].strip()) > 5 and answers[0] == answers[1]
