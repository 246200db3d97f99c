"""A recorded peak compared with the planned one, of published records and of steps that run here."""

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

from nemo_like import Job, StepSpec, dry_run, explain
from nemo_like.models import resolve_model, text_batch
from tests.explaining.made import real
from tests.explaining.taped import dry_runs_taped
from tests.models import tiny
from tests.models.blocks import Layer, Stack

WIDTH, HEADS, TOKENS, BATCH, VOCABULARY = 1024, 16, 512, 4, 10_000


def _softmax(x: Tensor) -> Tensor:
    exponentials = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def _linear(inputs: int, outputs: int) -> nn.Module:
    """A product by einsum."""
    weight = nn.Parameter(torch.empty(outputs, inputs))
    return Layer(lambda layer, x: torch.einsum("bsi,oi->bso", x, layer.weight), weight=weight)


def _normed(norm: Any, x: Tensor) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    return (norm.weight * scaled).to(x.dtype)


def _norm() -> nn.Module:
    return Layer(_normed, weight=nn.Parameter(torch.ones(WIDTH)))


def _turned(x: Tensor, table: Tensor) -> Tensor:
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table[:, : x.size(-2), :].unbind(0)
    return torch.concat((cos * first - sin * second, sin * first + cos * second), dim=-1)


def _attention(layer: Any, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    q, k, v = (of(x).view(batch, length, HEADS, -1).transpose(1, 2) for of in (layer.q, layer.k, layer.v))
    places = torch.arange(length, device=x.device)
    turned = _turned(q, layer.table), _turned(k, layer.table)
    scores = torch.einsum("bhqd,bhkd->bhqk", *turned) / math.sqrt(q.shape[-1])
    masked = torch.where((places[:, None] >= places[None, :])[None], scores, float("-inf"))
    mixed = torch.einsum("bhqk,bhkd->bhqd", _softmax(masked), v)
    return layer.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH).contiguous())


def _mlp(layer: Any, x: Tensor) -> Tensor:
    gate = layer.gate(x)
    return layer.down(gate * torch.sigmoid(gate) * layer.up(x))


def _block(layer: Any, x: Tensor) -> Tensor:
    x = x + layer.attention(layer.first(x))
    return x + layer.mlp(layer.second(x))


def _medium_block(table: Tensor) -> nn.Module:
    projections = {name: _linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    attention = Layer(_attention, **projections, table=nn.Buffer(table, persistent=False))
    mlp = Layer(_mlp, gate=_linear(WIDTH, 4096), down=_linear(4096, WIDTH), up=_linear(WIDTH, 4096))
    return Layer(_block, attention=attention, mlp=mlp, first=_norm(), second=_norm())


def _medium_decoder() -> nn.Module:
    """The decoder of the records gpt-medium: matmuls by einsum, a softmax and a loss of its own."""
    table = torch.zeros(2, TOKENS, WIDTH // HEADS // 2)
    embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
    return Stack(
        (_medium_block(table) for _ in range(24)),
        start=Layer(lambda layer, ids: layer.embedding[ids, :], embedding=embedding),
        head=nn.Sequential(_norm(), _linear(WIDTH, VOCABULARY)),
    )


def _loss(logits: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = logits - torch.max(logits, dim=-1, keepdim=True)[0]
        negative = -(x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True)))
        return torch.mean(torch.gather(negative, -1, torch.zeros(logits.shape[:2], dtype=torch.long).unsqueeze(-1)))


def _without_stacks(snapshot: dict[str, Any]) -> dict[str, Any]:
    for part in (*snapshot["device_traces"][0], *(b for each in snapshot["segments"] for b in each["blocks"])):
        part["frames"] = []
    return snapshot


@pytest.mark.parametrize("change", [lambda snapshot: snapshot, _without_stacks], ids=["stacks", "no stacks"])
def test_a_published_record_beside_the_plan(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    with torch.device("meta"):
        model = _medium_decoder()
    step = StepSpec(keeps_output=False, loss_fn=_loss)
    job = Job.of(strategy="single", ac="none", precision="bf16", gpu="h100-80gb", step=step)
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    made = explain(change(real("gpt-medium-512-train")), model=model, job=job, sample_input=ids)
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
    sizes = {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}
    model = tiny.made("Llama", device="meta", intermediate_size=5632, **sizes)
    job = Job.of(strategy="single", ac="none", gpu="h100-80gb")
    made = explain(
        real("tinyllama-8bit-lora"), model=model, job=job, sample_input=text_batch(1, 1000)
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
    made = explain(_message(), model="llama3-8b", job=job, sample_input=text_batch(1, 8192))
    assert made.out_of_memory is not None and made.out_of_memory.device == 2
    assert made.cures and made.cures[0].change == "ac='full'"
    assert str(made).startswith("GPU 2 had 6.87 of 79.19GiB free")


LONG = (
    "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.00 GiB is free. "
    "Including non-PyTorch memory, this process has 78.19 GiB memory in use. Of the allocated memory {} GiB is allocated by "
    "PyTorch, and {} GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("requested", "allocated", "unallocated", "borne_out"),
    [
        (4, 73, 1, True),  # 77 GiB, of 75.6 planned
        (2, 60, 10, True),  # less than planned, and the process could not have had the planned bytes
        (9, 40, 36, False),  # it could have
        (40, 45, 25, False),  # 85 GiB, over a tenth more than planned
    ],
)
def test_savings_are_listed_if_the_plan_bears_a_message_out(
    requested: int, allocated: int, unallocated: int, borne_out: bool
) -> None:
    job = Job.of(world_size=8, ac="none", gpu="h100-80gb", precision="bf16")
    made = explain(LONG.format(requested, allocated, unallocated), model=_llama(), job=job, sample_input=text_batch(1, 8192))
    plan = made.comparison
    assert plan is not None and plan.peak_bytes >> 20 == 77_403 and f"Plan {75.6} GiB, in backward of the head" in str(made)
    assert bool(made.cures) is borne_out and bool(plan.refusal) is not borne_out
    if borne_out:
        assert all(cure.peak_after < plan.peak_bytes for cure in made.cures)
    else:
        assert f"{allocated + requested}.00GiB" in " ".join(str(made).split()) and "changes that lower" not in str(made)


@cache
def _llama() -> nn.Module:
    return resolve_model("llama3-8b").built("meta")[0]


def test_bytes_in_use_name_the_change_that_they_fit(program: Any) -> None:
    options = ["--model", "llama-tiny", "--gpus", "8", "--gpu", "h100-80gb", "--batch-size", "64", "--seq-len", "512"]
    lines = program(["explain", "--used", "70GiB", *options]).out.splitlines()
    planned = re.fullmatch(r"In use 70.0 GiB; the plan takes ([\d.]+) GiB of the GPU, [\d.]+ GiB less.", lines[0])
    assert planned is not None and lines[1].startswith("No single change of the job takes as much. The nearest is ")
    assert (
        f"With ac='none' it would be {planned[1]} GiB"
        in program(["explain", "--used", f"{planned[1]}GiB", *options, "--ac", "full"]).out
    )
    assert "--used with --model" in program("explain --used 2GiB", 2).err
    assert "--model" in program("explain - --gpus 8", 2).err


def test_a_number_of_bytes_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="alone has no parts"):
        explain(71 << 30)
    with pytest.raises(ValueError, match="are of a model"):
        explain(real("conv3d-nine-epochs"), job=Job.of())
