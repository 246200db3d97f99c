"""Plans for pipelines without a process group: schedules, the dealing of layers, the command, the search."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like import Job
from nemo_like.cli import main
from nemo_like.distributed.pipeline.schedules import Action, actions_of, all_actions_of
from nemo_like.models import text_batch
from nemo_like.options import FSDP2, PipelineParallel, Precision, StepSpec
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.fit.fitting import make_search
from nemo_like.planning.fit.question import Question, read_pins
from nemo_like.planning.planner import balanced, describe
from nemo_like.planning.predictions.rank import parts_at_peak, peaks_of
from nemo_like.planning.predictions.reserved import reserved_within
from nemo_like.planning.predictions.seconds import action_seconds, step_seconds, timeline, timeline_of
from nemo_like.planning.query import PlanQuery
from tests.models.tiny import VOCAB, llama, made
from tests.planning.queries import Text
from tests.planning.search_of_all import search_of_all


def _model(layers: int = 4) -> Any:
    return Text(layers, 32).to("meta")


COUNTER = 4
"""Bytes of AdamW's counter of steps, of which each parameter has one."""
SAMPLE = text_batch(2, 64)


def _query(pp: PipelineParallel, model: Any = None) -> PlanQuery:
    job = Job.of(world_size=pp.size, step=StepSpec(), gpu=resolve_device("cpu"), pp=pp)
    return PlanQuery.from_model(model or _model(), SAMPLE, job)


def _equal_seconds(stages: int, forward: float, backward: float) -> dict[tuple[str, int], float]:
    seconds = (forward, backward, backward / 2, backward / 2)
    return {(kind, stage): each for kind, each in zip("FBIW", seconds) for stage in range(stages)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_that_of_the_formula(schedule: str) -> None:
    # (P - 1) / (M + P - 1): Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters".
    found = timeline(actions_of(PipelineParallel(4, schedule=schedule, microbatches=8)), _equal_seconds(4, 1.0, 2.0), 4)
    assert found.seconds == (8 + 3) * 3.0
    assert found.bubble == pytest.approx(3 / 11)


def test_a_cut_backward_fills_the_bubble() -> None:
    split = timeline(actions_of(PipelineParallel(2, schedule="zbv", microbatches=8)), _equal_seconds(4, 1.0, 2.0), 4)
    whole = timeline(actions_of(PipelineParallel(2, schedule="1f1b", microbatches=8)), _equal_seconds(2, 2.0, 4.0), 2)
    assert split.busy == whole.busy and split.bubble < whole.bubble


def test_an_order_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="standstill at 1F0"):
        timeline([(Action("F", 1, 0),)], _equal_seconds(2, 1.0, 2.0), 2)


def test_every_schedule_runs_every_microbatch_of_every_stage_once() -> None:
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"):
        pp = PipelineParallel(2, schedule=schedule, microbatches=4)
        ran = [action for rank in actions_of(pp) for action in rank]
        forwards = sorted((a.stage, a.microbatch) for a in ran if a.kind == "F")
        backwards = sorted((a.stage, a.microbatch) for a in ran if a.kind in "BI")
        assert forwards == backwards == [(s, m) for s in range(pp.stages) for m in range(4)], schedule
        assert sum(a.kind == "I" for a in ran) == sum(a.kind == "W" for a in ran), schedule


def test_the_memory_of_1f1b_repeats_itself() -> None:
    job = Job.of(world_size=4, gpu="h100-80gb", pp=PipelineParallel(4, microbatches=24))
    short, long = (PlanQuery.from_model(_model(8), SAMPLE, job) for _ in range(2))
    vars(long)["actions"] = all_actions_of(job.pp)
    assert [len(actions) for actions in short.actions] == [21, 17, 13, 9] and len(long.actions[0]) == 49
    each = [(q, q.uniform(mode)) for mode in ("none", "full") for q in (short, long)]
    took = [(peaks_of(*it), reserved_within(*it, 1 << 40)) for it in each]
    assert took[::2] == took[1::2]


def test_layers_are_dealt_out_for_memory() -> None:
    # Under 1F1B the first stage has most micro-batches in flight, so that without checkpointing it gets fewer layers.
    query = _query(PipelineParallel(2, microbatches=4), _model(6))
    other = balanced(query, "none")
    worst = [max(peak.total for peak in peaks_of(p, p.uniform("none"))) for p in (query, other)]
    assert query.counts == [3, 3] and worst[1] < worst[0]
    assert other.counts[0] < other.counts[1] == 6 - other.counts[0]


def test_what_each_action_of_a_stage_takes() -> None:
    stages = [{"forward": 1.0, "backward": 2.0, "replay": 0.5, "head and embedding": 0.3, "host copies": 0.2}] * 2
    wanted = {  # the first stage's backward runs whole, in the place of its second half
        ("F", 0): 1.2, ("B", 0): 2.8, ("I", 0): 0.0, ("W", 0): 2.8,
        ("F", 1): 1.2, ("B", 1): 2.8, ("I", 1): 1.7, ("W", 1): 1.6,
    }  # fmt: skip
    assert action_seconds(stages) == pytest.approx(wanted)


def test_recomputation_costs_time_in_both_halves() -> None:
    query = _query(PipelineParallel(2, schedule="zbv", microbatches=4))
    assert timeline_of(query, query.uniform("full")).seconds > timeline_of(query, query.uniform("none")).seconds


def test_the_plan_of_a_pipeline_names_every_layer_once() -> None:
    query = _query(PipelineParallel(2, microbatches=2))
    plan = describe(query, query.uniform("full"), "full")
    assert [layer.fqn for layer in plan.layers] == [f"layers.{i}" for i in range(4)]
    assert plan.peak_bytes == max(peak.total for peak in peaks_of(query, query.uniform("full")))


def test_the_command(tmp_path: Path, program: Any) -> None:
    out = tmp_path / "plan.json"
    base = f"plan --model {Text.__module__}:Text --gpu cpu --gpus 2 --pp 2 --seq-len 32 --ac 60% --no-what-if".split()
    more = f"--grad-accum 4 --memory 1GiB --json {out} --save {tmp_path / 'p'}".split()
    said = " ".join(program([*base, *more]).out.split())
    assert "in 2 stages of 3, 1 layers (1f1b)" in said and "pp=2" in said
    body = json.loads(out.read_text())
    assert body["recommended"] == "none" and len(body["rows"][0]["rank_peak_bytes"]) == 2
    assert 0 < body["rows"][0]["bubble"] < 1
    assert [main([*base, "--grad-accum", "4", "--memory", "10KiB"]), main([*base, "--pp", "3"])] == [1, 2]
    assert "--balance is 'some'" in program([*base, "--balance", "some"], 2).err
    config = tmp_path / "config.json"
    config.write_text(json.dumps(llama(num_hidden_layers=2).config.to_dict()))
    four = [*base, "--model", str(config), "--grad-accum", "2", "--gpus", "4", "--memory", "1GiB", "--json", "-"]
    call = json.loads(program([*four, "--cp", "2", "--loss", "chunked"]).out)["call"]
    # Stages that are sharded, and run in bfloat16.
    assert "cp=2, pp=" in call and call.endswith("loss='chunked', precision='bf16', sample_input=microbatch)")


def test_stages_are_told_apart_by_what_they_train_and_share_what_is_the_same() -> None:
    model = _model(8)
    for layer in model.layers[:4]:
        layer.requires_grad_(False)
    query = _query(PipelineParallel(4, microbatches=4, balance=(2, 2, 2, 2)), model)
    layer = sum(p.numel() * 4 for p in model.layers[7].parameters())
    none = query.uniform("none")
    trained = [query.stages[index].optimizer.state for index in (1, 2)]
    counters = COUNTER * len(list(model.layers[7].parameters()))
    assert trained == [0, 2 * (2 * layer + counters)]  # AdamW's two states, of two layers
    grads = [query.stages[n].layer_calls(none[n], accumulate=True)[0].events.held for n in (1, 2)]
    assert grads[0] < grads[1]  # the inputs of matmuls are kept for their weights' gradients alone
    numbers = [stage.part.block_number(0) for stage in query.stages]
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]


def _of_rank_0(tied: bool, device: str) -> dict[str, int]:
    with torch.device(device):
        model = Text(4, 32, tied=tied)
    query = _query(PipelineParallel(2, schedule="zbv", microbatches=4), model)
    assert query.of_rank(0) == [0, 3]
    return parts_at_peak(query, 0, query.uniform("none"))


def test_a_tied_embedding_is_there_once_where_the_first_and_the_last_stage_share_a_rank() -> None:
    embedding = VOCAB * 32 * 4
    two, one, materialized = _of_rank_0(False, "cpu"), _of_rank_0(True, "cpu"), _of_rank_0(True, "meta")
    assert two["parameters"] - one["parameters"] == two["gradients"] - one["gradients"] == embedding
    assert two["optimizer state"] - one["optimizer state"] == 2 * embedding + COUNTER
    assert materialized == one


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_stage_that_trains_nothing_is_planned(schedule: str) -> None:
    model = _model()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    query = PlanQuery.from_model(
        model, SAMPLE, Job.of(world_size=2, gpu=resolve_device("cpu"), pp=PipelineParallel(2, schedule, microbatches=2))
    )
    head = model.head.weight.numel() * 4
    for mode in ("none", "full"):
        peaks = [parts_at_peak(query, rank, query.uniform(mode)) for rank in (0, 1)]
        trains = 1 if schedule == "1f1b" else 0  # a V: the first rank has the last stage
        state = 2 * head + COUNTER
        assert [parts.get("optimizer state", 0) for parts in peaks] == ([0, state] if trains else [state, 0])
        assert [parts.get("gradients", 0) for parts in peaks][1 - trains] == 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_what_a_forward_frees_is_gathered_behind_it(schedule: str) -> None:
    job = Job.of(world_size=4, gpu="h100-80gb", pp=PipelineParallel(2, schedule, microbatches=4))
    queries = (PlanQuery.from_model(_model(), SAMPLE, job.change(strategy=FSDP2(asked))) for asked in (None, True))
    seconds = [step_seconds(query, query.uniform("none")).parts["parameter gathers"] for query in queries]
    # Before the first action of a stage, and before whatever follows each of its four forwards.
    assert 5 * seconds[0] == pytest.approx(seconds[1])


def _dense(trains="all"):
    model = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4, vocab_size=2048)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains in name or trains == "all")
    return model


_experts = partial(
    made, "Qwen3Moe", hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, vocab_size=512,
    use_cache=False, tie_word_embeddings=True,
)  # fmt: skip


def _search(model, precision="bf16", limit=1 << 40, **pins):
    question = Question(
        Job.of(gpu=replace(resolve_device("h100-80gb"), gpus_per_node=2), precision=Precision.of(precision)),
        gpus=4,
        seq_len=64,
        limit=limit,
        global_batch=16,
        pins=read_pins({"micro_batch": 1, "offload": "none", "tp": 1, "cp": 1, "ac": "none", "loss": "model"} | pins),
    )
    return make_search(model, [question])


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "pins"),
    [
        (_dense, {"pp": [2, 4], "schedule": ["1f1b", "zbv"], "ac": ["full", "selective"]}),
        (_dense, {"pp": 2, "schedule": ["gpipe", "interleaved_1f1b"], "cp": 2, "loss": "chunked", "precision": None}),
        (_dense, {"pp": 2, "tp": 2, "schedule": ["1f1b", "interleaved_1f1b"], "ac": ["none", "full"]}),
        (_experts, {"pp": 2, "ep": 2, "schedule": ["1f1b", "zbv"], "ac": "full"}),
    ],
    ids=["schedules", "parts of sequences", "split weights", "experts"],
)
def test_the_fastest_pipeline_is_found(model, pins):
    """Among some that are all planned."""
    everything = search_of_all(_search(model(), **pins))
    found = _search(model(), **pins).run(1).best
    assert len(everything) > 1 and 1 / found[0].tokens_per_second_per_gpu <= 1.02 * everything[0].per_token


@pytest.mark.long
def test_where_nothing_fits_the_pipeline_that_needs_least_is_named():
    pins = {"pp": 2, "dp_shard": 2, "schedule": ["1f1b", "zbv"], "ac": ["none", "full"]}
    needs = [row.need.bytes for row in search_of_all(_search(_dense(), **pins))]
    found = _search(_dense(), limit=min(needs) - 1, **pins).run()
    assert not found.best and found.nearest.layout.pp == 2 and found.nearest.need.bytes <= 1.05 * min(needs)


def test_questions_that_differ_in_the_optimizer_trace_a_shape_once():
    asked = {"gpus": 2, "seq_len": 64, "limit": 1 << 40, "pins": read_pins({"micro_batch": 1, "tp": 1})}
    jobs = [Job.of(step=StepSpec(optimizer=name), gpu="h100-80gb") for name in ("adamw", "adamw-8bit")]
    search = make_search(_dense(), [Question(job, **asked) for job in jobs])
    parts = [ranking.formula.part for ranking in search.rankings]
    states = [ranking.formula.stage.optimizer.state for ranking in search.rankings]
    assert parts[0] is parts[1] and states[0] > states[1]
