"""A recorded peak compared with the planned one, of published records and of steps that run here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like import Explanation, Job, StepSpec, dry_run, explain
from nemo_like.cli import main
from nemo_like.models import resolve_model
from tests.explaining.made import real
from tests.explaining.taped import dry_runs_taped

WIDTH, HEADS, TOKENS, BATCH, VOCABULARY = 1024, 16, 512, 4, 10_000


def _softmax(x: Tensor) -> Tensor:
    exponentials = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsi,oi->bso", x, self.weight)


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * scaled).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (_Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("table", table, persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.table[:, : x.size(-2), :].unbind(0)
        return torch.concat((cos * first - sin * second, sin * first + cos * second), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (of(x).view(batch, length, HEADS, -1).transpose(1, 2) for of in (self.q, self.k, self.v))
        q, k, v = heads
        places = torch.arange(length, device=x.device)
        scores = torch.einsum("bhqd,bhkd->bhqk", self.turned(q), self.turned(k)) / math.sqrt(q.shape[-1])
        masked = torch.where((places[:, None] >= places[None, :])[None], scores, float("-inf"))
        mixed = torch.einsum("bhqk,bhkd->bhqd", _softmax(masked), v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH).contiguous())


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down, self.up = _Linear(WIDTH, 4096), _Linear(4096, WIDTH), _Linear(WIDTH, 4096)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class _Block(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.attention, self.mlp, self.first, self.second = _Attention(table), _Mlp(), _Norm(), _Norm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class _Medium(nn.Module):
    """The decoder of the records gpt-medium: matmuls by einsum, a softmax and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        table = torch.zeros(2, TOKENS, WIDTH // HEADS // 2)
        self.layers = nn.ModuleList(_Block(table) for _ in range(24))
        self.norm, self.head = _Norm(), _Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding[ids, :]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _loss(logits: Tensor) -> Tensor:
    targets = torch.zeros(logits.shape[:2], dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        x = logits - torch.max(logits, dim=-1, keepdim=True)[0]
        negative = -(x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True)))
        return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def _medium(snapshot: dict[str, Any]) -> Explanation:
    with torch.device("meta"):
        model = _Medium()
    job = Job.of(
        strategy="single",
        ac="none",
        precision="bf16",
        gpu="h100-80gb",
        step=StepSpec(keeps_output=False, loss_fn=_loss),
    )
    return explain(snapshot, model=model, job=job, sample_input=torch.zeros(BATCH, TOKENS, dtype=torch.long))


def _without_stacks(snapshot: dict[str, Any]) -> dict[str, Any]:
    for part in (*snapshot["device_traces"][0], *(b for each in snapshot["segments"] for b in each["blocks"])):
        part["frames"] = []
    return snapshot


@pytest.mark.parametrize("change", [lambda snapshot: snapshot, _without_stacks], ids=["stacks", "no stacks"])
def test_a_published_record_beside_the_plan(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    made = _medium(change(real("gpt-medium-512-train")))
    assert made.comparison is not None and not made.comparison.refusal and not made.comparison.layers
    assert made.comparison.peak_bytes == pytest.approx(made.peak_bytes, rel=0.005)
    for part, (recorded, planned) in made.comparison.parts.items():
        if part == "not planned":  # cuBLAS' workspaces, the batch
            assert planned == 0 and recorded < 0.005 * made.peak_bytes
        else:
            assert recorded == pytest.approx(planned, rel=0.02), part
    assert made.named_bytes >= 0.95 * made.peak_bytes
    assert made.layers and max(made.layers) < 1.02 * min(made.layers)
    assert made.cures[0].change == "ac='full'" and made.cures[0].peak_after < 0.7 * made.peak_bytes


def test_weights_that_do_not_match_are_not_compared() -> None:
    config = LlamaConfig(
        hidden_size=2048, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, intermediate_size=5632
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(1, 1000, dtype=torch.long)
    job = Job.of(strategy="single", ac="none", gpu="h100-80gb")
    made = explain(
        real("tinyllama-8bit-lora"), model=model, job=job, sample_input={"input_ids": ids, "labels": ids.clone()}
    )
    assert made.comparison is not None and "--dtype" in made.comparison.refusal and not made.comparison.parts
    # Its weights have 4 bits a number, which their sizes tell.
    assert made.named_bytes > 0.99 * made.peak_bytes and 1_000 < made.parts["weights"] >> 20 < 1_100


def test_the_parts_of_a_rank_of_eight_are_those_of_its_plan() -> None:
    model, source = resolve_model("llama-tiny").built("meta")
    job, batch = Job.of(gpu="h100-80gb", ac="none", world_size=8), source.sample_input(2, 128)
    with dry_runs_taped() as tapes:
        dry_run(model, job, batch, layers=None)
    made = explain(tapes[-1].snapshot(), model=model, job=job, sample_input=batch)
    counters = 4 * len(list(model.parameters()))  # of steps, which are on the host
    assert made.comparison is not None and made.peak_bytes == made.comparison.peak_bytes + counters
    parts = made.comparison.parts
    assert parts["optimizer state"] == (parts["optimizer state"][1] + counters, parts["optimizer state"][1])
    for part in ("activations", "backward's temporaries", "gathered weights and communication"):
        assert parts[part][0] == pytest.approx(parts[part][1], rel=0.1), part
    assert not made.comparison.layers and len(made.layers) == model.config.num_hidden_layers


@cache
def _message() -> str:
    records = json.loads(Path(__file__).with_name("oom_messages.json").read_text(encoding="utf-8"))
    return next(record["text"] for record in records)


def test_a_message_beside_a_plan_names_the_tensor_and_what_lowers_the_peak() -> None:
    job = Job.of(world_size=8, ac="none", gpu="h100-80gb", precision="bf16")
    made = explain(_message(), model="llama3-8b", job=job)
    assert made.out_of_memory is not None and made.out_of_memory.device == 2
    assert made.cures and made.cures[0].change == "ac='full'"
    assert str(made).startswith("GPU 2 had 6.87 of 79.19GiB free")


def test_bytes_in_use_name_the_change_that_they_fit(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "llama-tiny", "--gpus", "8", "--gpu", "h100-80gb", "--batch-size", "64", "--seq-len", "512"]
    assert main(["explain", "--used", "70GiB", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    planned = re.fullmatch(r"In use 70.0 GiB; the plan takes ([\d.]+) GiB of the GPU, [\d.]+ GiB less.", lines[0])
    assert planned is not None and lines[1].startswith("No single change of the job takes as much. The nearest is ")
    assert main(["explain", "--used", f"{planned[1]}GiB", *options, "--ac", "full"]) == 0
    assert f"With ac='none' it would be {planned[1]} GiB" in capsys.readouterr().out
    assert main(["explain", "--used", "2GiB"]) == 2
    assert "--used with --model" in capsys.readouterr().err
    assert main(["explain", "-", "--gpus", "8"]) == 2
    assert "--model" in capsys.readouterr().err


def test_a_number_of_bytes_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="alone has no parts"):
        explain(71 << 30)
    with pytest.raises(ValueError, match="are of a model"):
        explain(real("conv3d-nine-epochs"), job=Job.of())
