"""Fine-tuning a folder of a Hugging Face model: on one rank, on two, and what is left for other tools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests_distributed.finetune_job import make_model, questions, run_finetune, write_lines

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a small job."""
    folder = tmp_path_factory.mktemp("job")
    make_model(folder / "model")
    write_lines(folder / "data.jsonl", questions())
    line = f"--model {folder / 'model'} --data {folder / 'data.jsonl'} --steps 6 --batch-size 4 --grad-accum 2 --seq-len 32"
    line += (
        " --eval-every 3 --eval-samples 4 --save-every 2 --log-every 1 --warmup-steps 1 --lr 1e-2 --device cpu --plain"
    )
    return [*line.split(), "--precision", "float32"]


def test_adapters_train_alike_on_one_and_two_ranks_and_load_in_peft(base: list[str], tmp_path: Path) -> None:
    lora = [*base, "--lora", "--lora-rank", "4"]
    one = run_finetune(1, [*lora, "--output", str(tmp_path / "one")], tmp_path / "one.json")
    two = run_finetune(2, [*lora, "--output", str(tmp_path / "two"), "--ac", "full"], tmp_path / "two.json")
    assert {
        "losses",
        "eval_losses",
        "peak_bytes",
        "tokens_per_second",
        "ac",
        "strategy",
        "world_size",
        "versions",
    } <= set(two)
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
