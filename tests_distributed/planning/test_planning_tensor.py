"""Budgets beside tensor parallelism: planned on the weights of one rank, kept by real ranks, and the gradients' bits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import loss_parallel

from nemo_like import Job, parallelize
from nemo_like.options import MemoryBudget, PipelineParallel, StepSpec, TensorParallel
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from tests.planning.queries import plan_of
from tests_distributed.allocated import local, pipeline_peak_bytes, step_peak_bytes
from tests_distributed.spawn import on_ranks, run_ranks

transformers = pytest.importorskip("transformers")

SEQ, VOCAB = 128, 384
STEP = StepSpec(keeps_output=False)


def _build(name: str) -> Any:
    torch.manual_seed(0)
    shape = dict(
        hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=SEQ, use_cache=False, tie_word_embeddings=False, head_dim=16,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**shape)).train()


def _batch(rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _steps(rank: int, world_size: int, name: str, asked: tuple[str, ...], precision: str | None) -> list[Any]:
    query = PlanQuery.of(
        _build(name),
        _batch(),
        Job.of(world_size=(world_size // 2) * 2, tp=2, step=STEP, precision=precision, gpu=resolve_device("cpu")),
    )
    rows, bare = [], None
    for ac in asked:
        model = parallelize(_build(name), ac=ac, tp=2, sample_input=_batch(), step=STEP, precision=precision)
        optimizer = torch.optim.AdamW(model.parameters())

        def backward(model: Any = model) -> float:
            loss = model(**_batch()).loss
            loss.backward()
            return float(loss)

        loss = backward()
        found = [loss, *(local(p.grad).clone() for p in model.parameters())]
        bare = bare or found
        same = found[0] == bare[0] and all(torch.equal(a, b) for a, b in zip(found[1:], bare[1:], strict=True))
        optimizer.step()
        optimizer.zero_grad()

        def step(optimizer: Any = optimizer, backward: Any = backward) -> None:
            backward()
            optimizer.step()
            optimizer.zero_grad()

        measured = step_peak_bytes(model, optimizer, step)
        if "%" in ac:
            predicted = plan_of(query, MemoryBudget.parse(ac)).peak_bytes
        else:
            predicted = peak_of(query, query.uniform(ac)).total
        rows.append((ac, same, predicted, measured))
    return rows


def _assert_right(ranks: list[list[Any]]) -> None:
    for rows in ranks:
        for ac, same, predicted, measured in rows:
            assert same, ac
            assert abs(predicted - measured) <= 0.01 * measured, (ac, predicted, measured)


def test_a_budget_beside_tp() -> None:
    """FSDP2 gathers on one rank, too."""
    _assert_right(run_ranks(2, _steps, "LlamaConfig", ("none", "selective", "40%"), None, timeout=240))


@pytest.mark.long
@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config", "MistralConfig"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_budgets_of_families_on_four_ranks(name: str, precision: str | None) -> None:
    _assert_right(run_ranks(4, _steps, name, ("none", "full", "selective", "40%"), precision, timeout=280))


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "budget"), [("1f1b", "5MiB"), ("zbv", "7MiB")])
@on_ranks(4, timeout=280)
def test_a_budget_beside_tp_and_pp(rank: int, world_size: int, schedule: str, budget: str) -> None:
    pp = PipelineParallel(2, schedule=schedule, microbatches=4)
    plain, planned = (
        parallelize(_build("LlamaConfig"), ac=ac, tp=2, pp=pp, sample_input=_batch()) for ac in ("none", budget)
    )
    losses = [float(pipeline.step(**_batch(8))) for pipeline in (plain, planned)]
    pairs = zip(plain.parameters(), planned.parameters(), strict=True)
    same = losses[0] == losses[1] and all(torch.equal(local(a.grad), local(b.grad)) for a, b in pairs)
    planned.zero_grad()
    del plain, pairs
    assert same
    assert pipeline_peak_bytes(planned, _batch(8)) <= 1.001 * MemoryBudget.parse(budget).peak_bytes


def _parts(rank: int, world_size: int, options: TensorParallel, asked: tuple[str, ...]) -> list[Any]:
    """(ac, planned, measured) of steps that are cut along the sequence, or by vocabulary."""
    setup = Job.of(
        world_size=2,
        tp=TensorParallel(2, sequence_parallel=options.sequence_parallel, loss_parallel=options.loss_parallel),
        step=STEP,
    )
    query, rows = PlanQuery.of(_build("LlamaConfig"), _batch(), setup.change(gpu=resolve_device("cpu"))), []
    for ac in asked:
        model = parallelize(_build("LlamaConfig"), ac=ac, tp=options, sample_input=_batch(), step=STEP)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            with loss_parallel() if options.loss_parallel else nullcontext():
                model(**_batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        plan = (
            plan_of(query, MemoryBudget.parse(ac)).peak_bytes if "%" in ac else peak_of(query, query.uniform(ac)).total
        )
        rows.append((ac, plan, step_peak_bytes(model, optimizer, step)))
    return rows


def _assert_near(ranks: list[list[Any]]) -> None:
    """A part of a hidden state, which the first region is given, is 1 % of `full`."""
    for rows in ranks:
        for ac, planned, measured in rows:
            assert abs(planned - measured) <= 0.003 * measured, (ac, planned, measured)


@pytest.mark.long
def test_budgets_beside_sequences_and_logits_in_parts() -> None:
    options = TensorParallel(2, sequence_parallel=True, loss_parallel=True)
    _assert_near(run_ranks(2, _parts, options, ("full", "40%"), timeout=240))


@pytest.mark.long
@pytest.mark.parametrize(("sequence", "loss"), [(True, False), (False, True), (True, True)])
def test_modes_beside_sequences_or_logits_in_parts(sequence: bool, loss: bool) -> None:
    options = TensorParallel(2, sequence_parallel=sequence, loss_parallel=loss)
    _assert_near(run_ranks(2, _parts, options, ("none", "selective", "40%"), timeout=280))


def _in_stages(rank: int, world_size: int) -> list[list[bool]]:
    found, ids = [], _batch()["input_ids"].repeat(2, 1)
    batch = {"input_ids": ids, "labels": ids}
    pp = PipelineParallel(2, microbatches=2)
    for options in (TensorParallel(2, sequence_parallel=True), TensorParallel(2)):
        grads = []
        for ac in ("40%", "none"):
            pipeline = parallelize(_build("LlamaConfig"), ac=ac, tp=options, pp=pp, sample_input=batch, device="cpu")
            pipeline.step(**batch)
            grads.append([p.grad.to_local() for p in pipeline.parameters() if p.grad is not None])
        found.append([bool(grads[0]), *map(torch.equal, *grads)])
    return found


# Two plans and four steps on four ranks (20 s).
@pytest.mark.long
def test_budgets_of_stages_with_sequences_in_parts_give_the_same_gradients() -> None:
    assert all(all(equal) for ranks in run_ranks(4, _in_stages, timeout=120) for equal in ranks)
