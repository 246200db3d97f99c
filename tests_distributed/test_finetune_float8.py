"""Matmuls in float8, emulated on CPU: near bfloat16's losses, alike on two ranks, the same bits in every mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests_distributed.finetune_job import make_model, questions, run_finetune, write_lines

pytest.importorskip("torchao.float8")


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
def test_float8_trains_alike_in_every_mode(tmp_path: Path, precision: str) -> None:
    make_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    write_lines(tmp_path / "data.jsonl", questions(20))
    line = (
        f"--model {tmp_path / 'model'} --data {tmp_path / 'data.jsonl'} --steps 5 --batch-size 4 --seq-len 32 --plain"
    )
    line += " --eval-samples 0 --warmup-steps 1 --lr 1e-2 --device cpu"
    found = {}
    for name, more in (
        ("bf16", "bf16 --ac none"), ("none", f"{precision} --ac none"), ("full", f"{precision} --ac full"),
        ("selective", f"{precision} --ac selective"),
    ):  # fmt: skip
        options = f"{line} --output {tmp_path / name} --precision {more}".split()
        found[name] = run_finetune(2, options, tmp_path / f"{name}.json")["losses"]
    assert found["none"] == found["full"] == found["selective"]
    assert found["none"] != found["bf16"]
    torch.testing.assert_close(torch.tensor(found["none"]), torch.tensor(found["bf16"]), rtol=0.05, atol=0)
    assert found["none"][-1] < found["none"][0] - 0.5
