"""Budgets beside tensor parallelism: planned on the weights of one rank, kept by real ranks, and the gradients' bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import Job, parallelize
from nemo_like.options import MemoryBudget, PipelineParallel, StepSpec, TensorParallel
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.query import PlanQuery
from tests.checks import assert_bitwise, gradients_of, step
from tests.planning.queries import plan_of
from tests_distributed.allocated import pipeline_peak_bytes, step_peak_bytes
from tests_distributed.spawn import on_ranks

transformers = pytest.importorskip("transformers")

SEQ, VOCAB = 128, 384
STEP = StepSpec(keeps_output=False)
MODES = ("none", "full", "selective", "40%")


def _build(name: str, layers: int = 4) -> Any:
    torch.manual_seed(0)
    shape = dict(
        hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=SEQ, use_cache=False, tie_word_embeddings=False, head_dim=16,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**shape)).train()


def _batch(rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("world_size", "name", "precision", "modes"),
    [
        (2, "LlamaConfig", None, ("none", "40%")),
        pytest.param(2, "LlamaConfig", None, MODES, marks=pytest.mark.long),
        *(
            pytest.param(4, name, precision, MODES, marks=pytest.mark.long)
            for name in ("LlamaConfig", "Qwen3Config", "MistralConfig")
            for precision in (None, "bf16")
        ),
    ],
)
@on_ranks(timeout=280)
def test_a_budget_beside_tp(
    rank: int, world_size: int, name: str, precision: str | None, modes: tuple[str, ...]
) -> None:
    """On two ranks FSDP2 gathers on one rank, too."""
    job = Job.of(world_size=world_size, tp=2, step=STEP, precision=precision, gpu="cpu")
    query, first = PlanQuery.of(_build(name, 2), _batch(), job), dict[str, torch.Tensor]()
    for ac in modes:
        model = parallelize(_build(name, 2), ac=ac, tp=2, sample_input=_batch(), step=STEP, precision=precision)
        found = step(model, **_batch())
        first = first or found
        assert_bitwise(found, first, ac)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        optimizer.zero_grad()

        def one(optimizer: Any = optimizer, model: Any = model) -> None:
            model(**_batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        measured = step_peak_bytes(model, optimizer, one)
        said = [0]  # by the first rank, for all
        if rank == 0:
            by_budget = "%" in ac
            said = [
                plan_of(query, MemoryBudget.parse(ac)).peak_bytes
                if by_budget
                else peak_of(query, query.uniform(ac)).total
            ]
        torch.distributed.broadcast_object_list(said)
        (predicted,) = said
        assert abs(predicted - measured) <= 0.01 * measured, (ac, predicted, measured)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "budget", "options"),
    [("1f1b", "5MiB", {}), ("zbv", "7MiB", {}), ("1f1b", "40%", {"sequence_parallel": True})],
)
@on_ranks(4, timeout=280)
def test_a_budget_beside_tp_and_pp(
    rank: int, world_size: int, schedule: str, budget: str, options: dict[str, Any]
) -> None:
    pp = PipelineParallel(2, schedule=schedule, microbatches=4)
    first: dict[str, torch.Tensor] = {}
    for ac in ("none", budget):
        tensor = TensorParallel(2, **options)
        pipeline = parallelize(_build("LlamaConfig"), ac=ac, tp=tensor, pp=pp, sample_input=_batch())
        found = {"loss": pipeline.step(**_batch(8)), **gradients_of(pipeline)}
        first = first or found
        assert_bitwise(found, first)
    pipeline.zero_grad()
    if "%" not in budget:
        assert pipeline_peak_bytes(pipeline, _batch(8)) <= 1.001 * MemoryBudget.parse(budget).peak_bytes
