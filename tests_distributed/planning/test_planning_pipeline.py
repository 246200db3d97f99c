"""Predicted peaks of each rank of a pipeline against allocator events of real steps; a plan for each stage."""

from __future__ import annotations

from typing import Any

import torch

from nemo_like import Job
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.distributed.pipeline.schedules import actions_of
from nemo_like.options import MemoryBudget, PipelineParallel, StepSpec
from nemo_like.planning import Plan
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.trace.layer_memory import backward_of_inputs
from tests.planning.queries import plan_of
from tests_distributed.allocated import allocator_events

SEQ, VOCAB, MICROBATCHES = 128, 384, 4


def _build(name: str = "LlamaConfig") -> Any:
    import transformers

    torch.manual_seed(0)
    shape = dict(
        hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=SEQ, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**shape)).train()


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (2 * MICROBATCHES, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _microbatch() -> dict[str, torch.Tensor]:
    return {name: value[:2] for name, value in _batch().items()}


def _query(pp: PipelineParallel, shard_ranks: int = 1, name: str = "LlamaConfig", **setup: Any) -> PlanQuery:
    return PlanQuery.of(
        _build(name),
        _microbatch(),
        Job.of(world_size=shard_ranks * pp.size, step=StepSpec(), **setup, gpu=resolve_device("cpu"), pp=pp),
    )


def test_actions_are_those_of_torch() -> None:
    # 1F1B's and GPipe's tables are ours; torch prints its own since 2.13, beside what it runs.
    rank = actions_of(PipelineParallel(4, microbatches=6))[1]
    assert " ".join(map(str, rank)) == "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5"
    first = actions_of(PipelineParallel(2, schedule="gpipe", microbatches=2))[0]
    assert " ".join(map(str, first)) == "0F0 0F1 0B0 0B1"


def test_early_stages_of_1f1b_keep_less_of_each_microbatch() -> None:
    pp = PipelineParallel(3, microbatches=6)
    query = _query(pp)
    assert [query.most_in_flight(index) for index in range(3)] == [3, 2, 1]
    plan = plan_of(query, MemoryBudget.parse("6MiB"), "6MiB")
    held = {layer.fqn: layer.held_bytes for layer in plan.layers}
    first, last = held["model.layers.0"], held["model.layers.5"]
    assert len(held) == 6 and first < last
    assert plan.step["balance"] == query.counts and plan.peak_bytes <= 6 << 20
    loaded = Plan.load(_saved(plan))
    assert loaded.only(["model.layers.0"]).layers == (loaded.layers[0],)


def _saved(plan: Plan) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".json", delete=False) as file:
        plan.save(file.name)
    return file.name


def _kept_between_halves(query: PlanQuery, mode: str) -> tuple[int, int]:
    """Of a middle layer of the second stage, for a microbatch that comes after the first: predicted, counted."""
    stage, choices = query.stages[1], query.uniform(mode)[1]
    predicted = stage.layer_calls(choices, accumulate=True, received=True, halves=True)[0].events
    policy = stage.part.policy(stage.part.traced.calls[0].kind, choices[0])
    model = _build()
    layer = model.model.layers[2]
    hidden = torch.randn(2, SEQ, 64, requires_grad=True)
    given = {"position_embeddings": model.model.rotary_emb(hidden, torch.arange(SEQ)[None])}
    rest: list[Any] = []

    def first_half() -> None:
        out = layer(hidden, **given) if policy is None else run_region(layer, (hidden,), given, policy=policy)
        grads = [torch.ones_like(out)]
        rest.append(backward_of_inputs([out], grads, [hidden], layer.parameters()))

    for _ in range(2):  # the first one learns what the layer draws and writes
        first_half()
        rest.pop()()
    hidden.grad = None
    _, left = allocator_events(first_half)
    assert hidden.grad is not None
    return predicted.between, left - hidden.grad.untyped_storage().nbytes()


def test_what_is_kept_between_the_halves_is_what_the_allocator_counts() -> None:
    query = _query(PipelineParallel(2, schedule="zbv", microbatches=MICROBATCHES))
    found = {mode: _kept_between_halves(query, mode) for mode in ("none", "full", "selective")}
    assert {case: predicted - counted for case, (predicted, counted) in found.items()} == dict.fromkeys(found, 0)
    kept = {case: counted for case, (_, counted) in found.items()}
    assert kept["full"] < kept["selective"] < kept["none"]
