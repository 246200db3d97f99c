"""CPU seconds of the thread that runs a layer, by what runs around it: where `nemo_like.planning.roofline` has its rates.

    OMP_NUM_THREADS=1 python -m tests.tools.benchmarks.host

Tiny Llama layers of transformers, of which 6 run less 2, so that embedding and loss drop out; each number is for one layer.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from nemo_like import FSDP2, TensorParallel, parallelize
from tests.models.blocks import Operators
from tests_distributed.spawn import run_ranks

LAYERS, REPEATS, WARM = (2, 6), 60, 10
ALONE: dict[str, Any] = {"strategy": "single"}
SPLIT = {"tp": TensorParallel(2, sequence_parallel=False)}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (1, {"ac": "none", **ALONE}),
    "full": (1, {"ac": "full", **ALONE}),
    "selective": (1, {"ac": "selective", **ALONE}),
    "none, FSDP2": (2, {"ac": "none", "strategy": FSDP2()}),
    "none, tp": (2, {"ac": "none", **SPLIT}),
    "none, tp with sequence parallelism": (2, {"ac": "none", "tp": TensorParallel(2, sequence_parallel=True)}),
}


def _model(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(  # type: ignore[call-arg]  # transformers reads any further keyword
        vocab_size=64, hidden_size=64, intermediate_size=224, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa", tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def measure(rank: int, world_size: int, given: dict[str, Any]) -> tuple[float, ...]:
    """Microseconds of a layer, forward and backward; operators in its forward, and those that compute something."""
    ids = torch.randint(0, 64, (1, 32))
    models = {layers: parallelize(_model(layers), device="cpu", **given) for layers in LAYERS}
    seconds: dict[int, list[tuple[float, float]]] = {layers: [] for layers in LAYERS}
    for _ in range(REPEATS):
        for layers, model in models.items():
            begin = time.thread_time()
            loss = model(input_ids=ids, labels=ids).loss
            between = time.thread_time()
            loss.backward()
            seconds[layers].append((between - begin, time.thread_time() - between))
    counted = []
    for layers in LAYERS:
        with Operators() as operators:
            _model(layers)(input_ids=ids, labels=ids)
        counted.append((len(operators.ops), len(operators.kernels)))
    few, many = LAYERS
    median = {n: [statistics.median(part) for part in zip(*seconds[n][WARM:])] for n in LAYERS}
    found = [(after - before) / (many - few) for before, after in zip(median[few], median[many])]
    return (*(1e6 * value for value in found), *((b - a) / (many - few) for a, b in zip(*counted)))


if __name__ == "__main__":
    for name, (ranks, given) in VARIANTS.items():
        ahead, behind, *operators = run_ranks(ranks, measure, given, timeout=300)[0]
        print(f"{name:36} forward {ahead:6,.0f} us  backward {behind:6,.0f} us  operators {operators}")
