"""Plans that are known: bytes, parts, reserved bytes and seconds of every mode and a budget, for families and parallel axes.

``python -m tests.planning.test_golden`` writes the file anew. A difference that is wanted is named in the commit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like import predict
from tests.models import expert_families
from tests.models.decoders import build

FILE = Path(__file__).with_name("golden.json")
BF16 = {"precision": "bf16"}
OURS = ("llama", "qwen3", "gemma3", "mixtral", "gpt2")
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tp 2": ("llama", {"tp": 2}),
    "llama pp 2": ("llama", {"pp": 2}),
    "llama cp 2": ("llama", {"cp": 2}),
    "llama fp8": ("llama", {"precision": "fp8"}),
    "llama chunked": ("llama", {"loss": "chunked", **BF16}),
    "qwen3": ("qwen3", BF16),
    "gemma3": ("gemma3", BF16),
    "gemma3 tp 2": ("gemma3", {"tp": 2}),
    "mixtral ep 2": ("mixtral", {"ep": 2}),
    "mixtral ep 2 bf16": ("mixtral", {"ep": 2, **BF16}),
    "mixtral tp 2": ("mixtral", {"tp": 2}),
    "mixtral ep 2 tp 2": ("mixtral", {"ep": 2, "tp": 2}),
    "deepseek_v3": ("deepseek_v3", BF16),
    "gpt_oss ep 4": ("gpt_oss", {"ep": 4, **BF16}),
    "gpt2": ("gpt2", BF16),
}


def golden(name: str) -> list[dict[str, Any]]:
    """Return the rows of one cell: none, full, selective and half of the activations, on 8 ranks."""
    family, asked = CELLS[name]
    model = build(family) if family in OURS else expert_families.build(family)
    with torch.random.fork_rng():
        report = predict(model, gpus=8, gpu="h100-80gb", seq_len=16, batch_size=4, budgets=("50%",), **asked).to_dict()
    kept = (
        "ac",
        "peak_bytes",
        "peak_at",
        "peak_parts",
        "reserved_bytes",
        "saved_bytes",
        "step_seconds",
        "rank_peak_bytes",
    )
    return [{key: row[key] for key in kept} for row in report["rows"]]


def write() -> None:
    """Write every cell."""
    FILE.write_text(json.dumps({name: golden(name) for name in CELLS}, indent=1) + "\n", encoding="utf-8")


@pytest.mark.few(5)
@pytest.mark.parametrize("name", CELLS)
def test_a_plan_is_what_it_was(name: str) -> None:
    assert golden(name) == json.loads(FILE.read_text(encoding="utf-8"))[name]


@pytest.mark.long
def test_plans_are_the_same_in_any_order() -> None:
    known = json.loads(FILE.read_text(encoding="utf-8"))
    for name in [*reversed(CELLS), *CELLS]:
        assert golden(name) == known[name], name


if __name__ == "__main__":
    write()
