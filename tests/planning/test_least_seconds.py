"""No part of a planned step is faster than the device: its FLOPs at the peak rate, its bytes at the peak bandwidth.

The judge is the data sheet (`devices.json`'s peaks, not the shares of them that kernels reach) and FLOPs and bytes that
this file counts from the config: 2 for each parameter and token in forward, twice that in backward (once for a frozen one),
half of a square for attention.
"""

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import Job
from nemo_like.layers import find_layers
from nemo_like.models import resolve_model, text_batch
from nemo_like.options import (
    CONTEXT_METHODS,
    FSDP2,
    ChunkedLoss,
    ContextParallel,
    ExpertParallel,
    PipelineParallel,
    StepSpec,
    TensorParallel,
)
from nemo_like.planning.device_table import device_table, known_devices
from nemo_like.planning.model.traced import with_adapters
from nemo_like.planning.predictions.seconds import Links, fsdp_rows, step_seconds
from nemo_like.planning.query import PlanQuery
from tests.models.tiny import made

MODELS = (
    "llama-small", "llama3-1b", "llama3-3b", "llama3-8b", "llama3-70b", "llama3-405b", "qwen3-8b", "mixtral-8x7b",
    "qwen3-30b-a3b", "gpt-oss-20b",
)  # fmt: skip
MIXTURES = ("mixtral-tiny", "mixtral-8x7b", "qwen3-30b-a3b")
# Bytes that an optimizer reads and writes for each float32 parameter: itself twice, its gradient, its state twice.
TRAFFIC = {"adamw": 28, "adamw-fused": 28, "sgd-momentum": 20, "adamw-8bit": 16}
HEAD = "head and embedding"


@dataclass(frozen=True)
class Asked:
    """One job of the law."""

    model: str
    rows: int
    tokens: int
    ac: str
    job: Job
    lora: int | None  # Rank of adapters, beside which all is frozen.


@functools.lru_cache(maxsize=4)
def _built(name: str, lora: int | None, frozen: torch.dtype | None) -> nn.Module:
    model = resolve_model(name).build("meta")
    return model if lora is None else with_adapters(model, lora, frozen)


def _model(asked: Asked) -> nn.Module:
    return _built(asked.model, asked.lora, None if asked.lora is None else asked.job.param_dtype)


def _drawn(draw: random.Random, models: Sequence[str], compilers: Sequence[str | None]) -> Asked:
    pick, name = draw.choice, draw.choice(models)
    tp, cp, pp, shards = pick([1, 1, 2]), pick([1, 1, 2]), pick([1, 1, 1, 2]), pick([1, 2, 4])
    ac = pick(["none", "full", "selective"])
    optional: dict[str, Any] = {"pp": PipelineParallel(2, "1f1b", 4)} if pp > 1 else {}
    if name in MIXTURES:
        optional["ep"] = ExpertParallel(pick([1, 2]))
    if tp > 1:
        optional["tp"] = TensorParallel(tp, sequence_parallel=pick([True, False]), loss_parallel=pick([True, False]))
    chunked = ChunkedLoss(
        chunk_tokens=pick([None, 100, 256, 1024]), z_loss=pick([0.0, 1e-4]), grads_in_float32=pick([True, False])
    )
    job = Job.of(
        world_size=tp * cp * pp * shards,
        cp=ContextParallel(cp, pick(tuple(CONTEXT_METHODS))),
        gpu=pick(known_devices()),
        precision=pick([None, "bf16", "bf16", "fp8"]),
        strategy=FSDP2(cpu_offload=pp == 1 and draw.random() < 0.1),
        loss=pick([None, chunked, chunked]),
        compile=pick(compilers),
        offload=pick(["none", "boundary"]) if ac == "full" and pp == 1 else "none",
        ac=ac,
        step=StepSpec(1 if pp > 1 else pick([1, 3]), keeps_output=False, optimizer=pick(list(TRAFFIC))),
        **optional,
    )
    # peft adds no adapters that are planned to fused experts.
    lora = None if name in (*MIXTURES, "gpt-oss-20b") else pick([None, None, 8, 64])
    return Asked(name, pick([1, 2]), pick([512, 1000, 4096]), ac, job, lora)


def _planned(seed: int, models: Sequence[str], compilers: Sequence[str | None]) -> tuple[Asked, PlanQuery]:
    """Return the first job from `seed` on that is not refused."""
    draw = random.Random(seed)
    for _ in range(100):
        try:
            asked = _drawn(draw, models, compilers)
            return asked, PlanQuery.from_model(_model(asked), text_batch(asked.rows, asked.tokens), asked.job)
        except (ValueError, NotImplementedError):
            continue
    raise AssertionError("a hundred jobs were refused")


def least(asked: Asked) -> dict[str, float]:
    """Return the least seconds of each part of a step on one rank, of a pipeline in its mean over the ranks."""
    model, job, sheet = _model(asked), asked.job, device_table()[str(asked.job.gpu)]
    config, half = model.config, job.precision.dtypes["param_dtype"] is not None
    rates = [
        sheet["bf16_tflops" if half else "fp32_tflops"],
        sheet.get("fp8_tflops", 0) if job.precision.matmuls else 0,
    ]
    rate, bandwidth, width = max(rates) * 1e12, sheet["memory_gbps"] * 1e9, 2 if half else 4
    micro = 4 if job.pp.size > 1 else job.step.microbatches
    tokens, split = asked.rows * asked.tokens / job.cp.size * micro, job.tp.size * job.pp.size
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    share = config.num_experts_per_tok / experts if experts else 1.0
    used = last = stored = back = read = 0.0
    for number, layer in enumerate(find_layers(model)):
        for name, weight in layer.module.named_parameters():
            if weight.dim() >= 2 and not name.endswith("bias"):
                # Products of backward: the weight's gradient, and the input's, which no one needs below the first adapters.
                below = asked.lora and number == 0 and re.search(r"[qkv]_proj\.(base_layer|lora_A)", name)
                again = weight.requires_grad + (not below)
                held, per_token = weight.numel() * width, weight.numel()
                if weight.dim() == 3:  # fused experts
                    held, per_token = held / job.ep.size, per_token * share
                stored += held
                read += held * again
                used += per_token
                back += per_token * again
                last += per_token if "down_proj" in name else 0.0
    width_of_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    seen = min(asked.tokens, getattr(config, "sliding_window", None) or asked.tokens) / 2
    attention = 4 * config.num_attention_heads * width_of_head * seen * config.num_hidden_layers
    head, products = config.vocab_size * config.hidden_size, 3 if asked.lora is None else 2
    # Each product of each whole chunk reads the head's weight, or writes its gradient.
    chunks = max(1, asked.rows * asked.tokens // job.cp.size // (getattr(job.loss, "chunk_tokens", None) or 10**9))
    return {
        "forward": max(tokens * (2 * used + attention) / rate, micro * stored / bandwidth) / split,
        "backward": max(tokens * 2 * (back + attention) / rate, micro * read / bandwidth) / split,
        # Recomputation ends before the last matmul, whose output nothing in the layer needs.
        "replay": tokens * 2 * (used - last) / rate / split if asked.ac == "full" else 0.0,
        HEAD: products * max(tokens * 2 * head / rate, micro * chunks * head * width / bandwidth) / split,
    }


def assert_not_faster(asked: Asked, query: PlanQuery) -> None:
    """Assert the law for one plan."""
    choices, bounds = query.uniform(asked.ac), least(asked)
    parts = step_seconds(query, choices).parts
    if query.is_pipeline:  # the busiest rank has no less than the mean
        assert sum(parts.values()) >= sum(bounds.values()), (asked, parts, bounds)
        return
    for name, bound in bounds.items():
        assert parts.get(name, 0.0) >= bound, (name, asked)
    job, sheet, weights = query.job, device_table()[query.device.name], list(_model(asked).parameters())
    assert isinstance(job.strategy, FSDP2)
    if not job.strategy.cpu_offload:
        traffic = sum(p.numel() for p in weights if p.requires_grad) / job.ranks * TRAFFIC[job.step.optimizer]
        assert parts["optimizer"] >= traffic / (sheet["memory_gbps"] * 1e9), asked
    if query.stages[0].sharding.on and job.ep.size == 1:
        rows = fsdp_rows(query.stages[0], choices[0], Links.for_job(job, query.device))
        sent = sum(row.amount + row.hidden for row in rows if row.part == "parameter gathers")
        once = sum(p.numel() for p in weights) / job.tp.size * (2 if job.param_dtype else 4)
        assert sent >= once * job.step.microbatches * (1 - 1 / job.shard_ranks) / (sheet["nvlink_gbps"] * 1e9), asked


@pytest.mark.few(3)  # 2 to 5 s each, the trace of a model: one plan of experts is among them
@pytest.mark.parametrize("seed", range(60))
def test_no_part_is_faster_than_the_device(seed: int) -> None:
    assert_not_faster(*_planned(seed, ("llama-tiny", "mixtral-tiny"), (None,)))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(120))
def test_no_part_of_a_published_model_is_faster_than_the_device(seed: int) -> None:
    assert_not_faster(*_planned(seed, MODELS, (None, None, "inductor")))


@functools.cache
def _wide() -> nn.Module:
    """A layer of little, and the head of an 8B."""
    sizes = {"hidden_size": 4096, "vocab_size": 128_256, "intermediate_size": 64, "num_hidden_layers": 1}
    return made("Llama", device="meta", num_attention_heads=32, num_key_value_heads=1, **sizes)


def _head(tokens: int, loss: Any) -> float:
    job = Job.of(loss=loss, gpu="h100-80gb", precision="bf16", world_size=8, ac="none")
    query = PlanQuery.from_model(_wide(), text_batch(1, tokens), job)
    return step_seconds(query, query.uniform("none")).parts[HEAD]


CHUNKS = (None, "chunked", ChunkedLoss(chunk_tokens=256))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("tokens", "loss"), [(tokens, loss) for tokens in (8192, 2048, 131_072) for loss in CHUNKS[::-1]]
)
def test_each_token_of_the_head_takes_its_flops(tokens: int, loss: Any) -> None:
    """FLOPs by hand: three matmuls of tokens x 4096 x 128,256 at the 989.4 TFLOP/s of the data sheet."""
    once, twice = _head(tokens, loss), _head(2 * tokens, loss)
    assert min(once, twice - once) >= 3 * 2 * tokens * 4096 * 128_256 / 989.4e12
    assert twice <= 2.001 * once


@pytest.mark.parametrize("size", [512, *(pytest.param(size, marks=pytest.mark.long) for size in (8192, 2000, 300))])
def test_chunks_of_half_the_tokens_are_not_faster(size: int) -> None:
    assert _head(8192, ChunkedLoss(chunk_tokens=size)) <= _head(8192, ChunkedLoss(chunk_tokens=size // 2))


@pytest.mark.parametrize("tokens", [1500, *(pytest.param(tokens, marks=pytest.mark.long) for tokens in (1025, 2047))])
def test_a_last_chunk_that_is_not_full_counts_by_its_rows(tokens: int) -> None:
    loss = ChunkedLoss(chunk_tokens=512)
    assert _head(1024, loss) < _head(tokens, loss) < _head(2048, loss)
