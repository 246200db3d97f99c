"""Plans of jobs on several ranks: one for all of them, of the weights that tensor parallelism leaves, and for each stage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from nemo_like import Job, parallelize
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.distributed.pipeline.schedules import actions_of
from nemo_like.models import resolve_model
from nemo_like.options import ExpertParallel, MemoryBudget, PipelineParallel, StepSpec
from nemo_like.planning import Plan, plan_for
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.trace.layer_memory import backward_of_inputs
from tests.checks import assert_bitwise, labelled, seeded, step, update
from tests.planning.queries import plan_of
from tests_distributed.allocated import allocator_events, loop_peak_bytes, step_peak_bytes
from tests_distributed.planning.peak_families import build, tokens
from tests_distributed.spawn import on_ranks, run_ranks

transformers = pytest.importorskip("transformers")

SEQ, VOCAB = 128, 384
STEP = StepSpec(keeps_output=False)
MODES = ("none", "full", "selective", "40%")


def _build(name: str = "LlamaConfig", layers: int = 6) -> Any:
    shape = dict(
        hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=SEQ, use_cache=False, tie_word_embeddings=False, head_dim=16,
    )  # fmt: skip
    return seeded(transformers.AutoModelForCausalLM.from_config, getattr(transformers, name)(**shape)).train()


def _batch(rows: int = 2) -> dict[str, torch.Tensor]:
    return labelled(torch.randint(0, VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(0)))


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
    query, first = PlanQuery.from_model(_build(name, 2), _batch(), job), dict[str, torch.Tensor]()
    for ac in modes:
        model = parallelize(_build(name, 2), ac=ac, tp=2, sample_input=_batch(), step=STEP, precision=precision)
        found = step(model, **_batch())
        first = first or found
        assert_bitwise(found, first, ac)
        optimizer = torch.optim.AdamW(model.parameters())
        update(optimizer)

        def one(optimizer: Any = optimizer, model: Any = model) -> None:
            model(**_batch()).loss.backward()
            update(optimizer)

        measured = step_peak_bytes(model, optimizer, one)
        said = [0]  # by the first rank, for all
        if rank == 0:
            said = [
                plan_of(query, MemoryBudget.parse(ac)).peak_bytes
                if ("%" in ac)
                else peak_of(query, query.uniform(ac)).total
            ]
        torch.distributed.broadcast_object_list(said)
        (predicted,) = said
        assert abs(predicted - measured) <= 0.01 * measured, (ac, predicted, measured)


def _query(pp: PipelineParallel, shard_ranks: int = 1, name: str = "LlamaConfig", **setup: Any) -> PlanQuery:
    return PlanQuery.from_model(
        _build(name),
        _batch(),
        Job.of(world_size=shard_ranks * pp.size, step=StepSpec(), **setup, gpu=resolve_device("cpu"), pp=pp),
    )


def test_actions_are_those_of_torch() -> None:
    # 1F1B's and GPipe's tables are ours; torch prints its own since 2.13, beside what it runs.
    rank = actions_of(PipelineParallel(4, microbatches=6))[1]
    assert " ".join(map(str, rank)) == "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5"
    assert " ".join(map(str, actions_of(PipelineParallel(2, schedule="gpipe", microbatches=2))[0])) == "0F0 0F1 0B0 0B1"


def test_early_stages_of_1f1b_keep_less_of_each_microbatch(tmp_path: Path) -> None:
    query = _query(PipelineParallel(3, microbatches=6))
    assert [query.most_in_flight(index) for index in range(3)] == [3, 2, 1]
    plan = plan_of(query, MemoryBudget.parse("6MiB"), "6MiB")
    held = {layer.fqn: layer.held_bytes for layer in plan.layers}
    first, last = held["model.layers.0"], held["model.layers.5"]
    assert len(held) == 6 and first < last
    assert plan.step["balance"] == query.counts and plan.peak_bytes <= 6 << 20
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.only(["model.layers.0"]).layers == (loaded.layers[0],)


def _kept_between_halves(query: PlanQuery, mode: str, change: Callable[[Any], None] = lambda layer: None) -> tuple[int, int]:
    """Of a middle layer of the second stage, for a microbatch that comes after the first: predicted, counted.

    change: what is done to the layer before it runs.
    """
    stage, choices = query.stages[1], query.uniform(mode)[1]
    predicted = stage.layer_calls(choices, accumulate=True, received=True, halves=True)[0].events
    policy = stage.part.regions(stage.part.traced.calls[0].kind, choices[0]).get("")
    model = _build()
    layer = model.model.layers[2]
    change(layer)
    hidden = torch.randn(2, SEQ, 64, requires_grad=True)
    given = {"position_embeddings": model.model.rotary_emb(hidden, torch.arange(SEQ)[None])}
    rest: list[Any] = []

    def first_half() -> None:
        out = layer(hidden, **given) if policy is None else run_region(layer, (hidden,), given, policy=policy)
        rest.append(backward_of_inputs([out], [torch.ones_like(out)], [hidden], layer.parameters()))

    for _ in range(2):  # the first one learns what the layer draws and writes
        first_half()
        rest.pop()()
    hidden.grad = None
    _, left = allocator_events(first_half)
    assert hidden.grad is not None
    return predicted.between, left - hidden.grad.untyped_storage().nbytes()


def test_what_is_kept_between_the_halves_is_what_the_allocator_counts() -> None:
    query = _query(PipelineParallel(2, schedule="zbv", microbatches=4))
    found = {mode: _kept_between_halves(query, mode) for mode in ("none", "full", "selective")}
    assert {case: predicted - counted for case, (predicted, counted) in found.items()} == dict.fromkeys(found, 0)
    kept = {case: counted for case, (_, counted) in found.items()}
    assert kept["full"] < kept["selective"] < kept["none"]
    # A compiled layer is planned with the bytes of an eager one there, which are more.
    torch._dynamo.reset()  # of another test's graph of the same layer, whose backward may run once
    with torch._functorch.config.patch(donated_buffer=False):  # a backward in halves runs a graph twice
        predicted, counted = _kept_between_halves(query, "none", lambda layer: layer.compile(backend="aot_eager"))
    assert counted < predicted


def _compiled_around_experts(rank: int, world_size: int, cells: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, int]]:
    """Peak of each job, and the graphs that were made for it."""
    found = []
    for family, job in cells:
        torch.compiler.reset()
        counters.clear()
        model = parallelize(seeded(build, family), device="cpu", **job)
        found.append((loop_peak_bytes(model, labelled(tokens(2)), lr=0.0), counters["stats"]["unique_graphs"]))
    return found


@pytest.mark.long
def test_experts_on_other_ranks_between_graphs_peak_as_planned() -> None:
    """All rows go to the experts of one rank. Regions that keep tensors run eagerly, and no graph is made of them."""
    jobs = [
        (family, {"ac": ac, "ep": ExpertParallel(2, imbalance=2.0), "compile": compile})
        for family, modes in (("qwen3_moe", MODES[:3]), ("deepseek_v3", MODES[:1]), ("gpt_oss", MODES[:1]))
        for ac in modes
        for compile in (None, "aot_eager")
    ]
    off = []
    for (family, job), *ranks in zip(jobs, *run_ranks(2, _compiled_around_experts, jobs, timeout=200)):
        query = PlanQuery.from_model(seeded(build, family), labelled(tokens(2)), Job.of(world_size=2, device="cpu", **job))
        peak, graphs = max(ranks)
        assert bool(graphs) == (job["compile"] is not None and job["ac"] != "selective")
        off.append((peak_of(query, query.uniform(job["ac"])).total - peak) / peak)
        assert abs(off[-1]) <= 0.01, (family, job)
    # The difference is in eager layers, too.
    assert all(abs(eager - compiled) <= 0.001 for eager, compiled in zip(off[::2], off[1::2])), off


def _plan(rank, world_size, budget):
    source = resolve_model("llama-tiny")
    # Other ranks look at other inputs: only rank 0's counts, or plans would differ.
    return plan_for(source.build("meta"), ac=budget, sample_input=source.sample_input(1, 32 + 8 * rank), gpu="cpu")


def _policies(rank, world_size, budget):
    plan = _plan(rank, world_size, budget)
    return plan.held_bytes, {name: policy and repr(policy) for name, policy in plan.policies().items()}


def test_all_ranks_get_the_plan_of_rank_zero():
    first, second = run_ranks(2, _policies, "40%", timeout=120)
    assert first == second and first[0] > 0


def test_all_ranks_get_the_error_of_rank_zero():
    errors = run_ranks(2, _plan, "1MiB", return_exceptions=True, timeout=120)
    assert [type(error).__name__ for error in errors] == ["BudgetError", "BudgetError"]
    assert len({error.smallest_bytes for error in errors}) == 1


def _replicated(rank, world_size):
    source = resolve_model("llama-tiny")
    model, sample = source.build("meta"), source.sample_input(1, 32)
    asked = {"ac": "100%", "sample_input": sample, "gpu": "cpu"}
    return [plan_for(model, **asked, dp_replicate=size).peak["parameters"] for size in (1, 2)]


def test_the_number_of_replicas_says_how_far_parameters_are_sharded():
    params = 4 * sum(p.numel() for p in resolve_model("llama-tiny").build("meta").parameters())
    (fsdp, hsdp), again = run_ranks(4, _replicated, timeout=180)[:2]
    assert [fsdp, hsdp] == again == [params // 4, params // 2]


def test_rank_without_group_plans_alone():
    assert not torch.distributed.is_initialized()
    assert _plan(0, 1, "40%").peak["parameters"] > 0
