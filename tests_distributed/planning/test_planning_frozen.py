"""Predicted peaks where only a part trains, against the CPU allocator's events: adapters, frozen layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_like import Job, StepSpec, parallelize
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from tests_distributed.allocated import step_peak_bytes
from tests_distributed.spawn import run_ranks

pytest.importorskip("transformers")

VOCAB = 512


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCAB, max_position_embeddings=64, use_cache=False,
        )
    )  # fmt: skip


def _adapted(dropout: float = 0.0) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(_llama(), config)


def _half_frozen() -> nn.Module:
    model = _llama()
    for part in (model.model.embed_tokens, *model.model.layers[:2]):
        part.requires_grad_(False)
    return model


MODELS = {
    "adapters": _adapted,
    "adapters with dropout": lambda: _adapted(0.1),
    "half frozen": _half_frozen,
}


def _case(rank: int, world_size: int, name: str, ac: str, step: StepSpec) -> tuple[int, int, str]:
    torch.manual_seed(rank)
    model = MODELS[name]().train()
    ids = torch.randint(VOCAB, (4, 64))
    batch = {"input_ids": ids, "labels": ids}
    query = PlanQuery.of(model, batch, Job.of(world_size=world_size, step=step, gpu=resolve_device("cpu")))  # fmt: skip
    peak = peak_of(query, query.uniform(ac))
    model = parallelize(model, "single" if world_size == 1 else "fsdp2", ac, device="cpu")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)

    def one() -> None:
        for _ in range(step.microbatches):
            loss = model(**batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    one()
    one()
    return peak.total, step_peak_bytes(model, optimizer, one), peak.at


def _cases(rank: int, world_size: int, names: list[str], acs: tuple[str, ...]) -> list[tuple]:
    step = StepSpec(keeps_output=False)
    return [(name, ac, *_case(rank, world_size, name, ac, step)) for name in names for ac in acs]


def _check(rows: list[tuple]) -> None:
    for name, ac, predicted, measured, where in rows:
        assert abs(predicted - measured) <= 0.01 * measured, (name, ac, predicted, measured, where)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "half frozen",
        *(pytest.param(name, marks=pytest.mark.long) for name in MODELS if "adapters" in name),
    ],
)
def test_one_device(name):
    _check(_cases(0, 1, [name], ("none", "full")))


@pytest.mark.long
def test_two_ranks():
    for rows in run_ranks(2, _cases, ["adapters", "half frozen"], ("none", "full"), timeout=200):
        _check(rows)
