"""`fit`: the best configuration is found, runs, and takes what was predicted; wrong questions are refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_like import Job, parallelize
from nemo_like.cli import main
from nemo_like.distributed.pipeline.schedules import actions_of
from nemo_like.options import PipelineParallel, Precision
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.fitting import make_search
from nemo_like.planning.fit.layouts import Layout, Room, layouts
from nemo_like.planning.fit.question import Question, read_pins
from nemo_like.planning.fit.report import recipe
from nemo_like.planning.predictions.reserved import ALLOCATED, Need
from nemo_like.planning.predictions.seconds import step_seconds, timeline
from nemo_like.planning.roofline import gather_seconds, group_of
from tests.models import tiny
from tests.models.fit_models import mixture
from tests.planning.queries import Text
from tests.planning.search_of_all import search_of_all
from tests_distributed.allocated import loop_peak_bytes

transformers = pytest.importorskip("transformers")

KEYS = {
    "dp_replicate", "dp_shard", "tp", "cp", "ep", "pp", "schedule", "micro_batch", "grad_accum", "ac", "loss", "offload",
    "cpu_offload", "precision", "optimizer", "peak_bytes", "reserved_bytes", "parts", "step_seconds",
    "tokens_per_second_per_gpu", "mfu", "fits", "call",
}  # fmt: skip


FREE, PINNED = (
    {"micro_batch": [4, 8], "offload": "none", "loss": "model"},
    {"loss": "model", "ac": "full", "micro_batch": 4},
)


@pytest.mark.parametrize("pins", [FREE, PINNED])
def test_the_best_runs_and_peaks_as_predicted(pins):
    free = fit(Text(2), gpus=1, gpu="cpu", seq_len=64, global_batch=8, ac="none", loss="model", micro_batch=8)
    limit = free.best.peak_bytes * 6 // 10
    best = fit(Text(2), gpus=1, gpu="cpu", seq_len=64, global_batch=8, memory=limit, **pins).best
    assert best.fits and best.peak_bytes <= limit and best.layout.sequences == 8
    model = parallelize(Text(2), device="cpu", **best.kwargs())
    sample = tiny.labelled(torch.zeros(best.layout.micro_batch, 64, dtype=torch.long))
    measured = loop_peak_bytes(model, sample, microbatches=best.layout.grad_accum)
    assert abs(best.peak_bytes - measured) <= 0.01 * measured


def test_the_json_has_the_keys_of_the_contract(tmp_path, capsys):
    out = tmp_path / "fit.json"
    asked = "--model tests.planning.queries:Text --gpus 2 --gpu cpu --seq-len 64 --global-batch 4 --offload none --tp 1"
    asked += " --cp 1 --ac none full"
    assert main(["fit", *asked.split(), "--json", str(out), "--explain", "1"]) == 0
    said = json.loads(out.read_text())
    assert said["candidates"] and all(entry.keys() >= KEYS for entry in said["candidates"])
    best = said["candidates"][0]
    assert best["fits"] and best["peak_bytes"] == sum(best["parts"].values())
    assert best["step_seconds"] == pytest.approx(sum(best["seconds"].values()))
    rates = [entry["tokens_per_second_per_gpu"] for entry in said["candidates"]]
    assert rates[1:] == sorted(rates[1:], reverse=True) and rates[0] >= max(rates) / 1.01  # of those alike the plainest
    assert best["call"] in capsys.readouterr().out


def test_an_impossible_wish_ends_with_1_and_says_what_needs_least(tmp_path, program):
    """Of the layers of Llama 3 70B, eight, with the ids of Qwen 2.5."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 8, "vocab_size": 152064, **sizes}))
    asked = f"--model {config} --gpus 1 --gpu rtx-4090 --seq-len 512 --micro-batch 1 --offload none --ac full"
    asked += " --loss chunked --tp 1"
    said = " ".join(program(["fit", *asked.split()], 1).out.split())
    assert "Nothing fits" in said and "rtx-4090" in said and "bound by memory: parameters and optimizer" in said
    # The peak of 32 GPUs would fit; what the caching allocator reserves for it does not.
    alone, expandable = "63 GPUs more (64 in all)", "31 GPUs more (32 in all)"
    assert f"{alone}; {expandable} with PYTORCH_ALLOC_CONF=expandable_segments:True" in said


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("gpus", "limit", "pins"),
    [
        (1, 400, {"micro_batch": [1, 4]}),
        (2, 350, {"micro_batch": [2, 4], "schedule": "1f1b", "ac": ["none", "full"], "loss": "model"}),
        (4, 180, {"cp": [1, 2], "pp": [1, 2], "micro_batch": 2, "schedule": "1f1b", "ac": "full", "loss": "model"}),
        (2, 1300, {"micro_batch": 4, "tp": [1, 2], "offload": "none"}),
        (2, 1000, {"micro_batch": [1, 8], "cp": [1, 2], "ac": ["none", "full", "selective"], "loss": "chunked"}),
    ],
)
def test_the_search_finds_what_looking_at_everything_finds(gpus, limit, pins):
    """With a limit, in KiB, that some ways to train keep and others do not."""
    model = tiny.llama(num_hidden_layers=2) if "tp" in pins or pins.get("loss") == "chunked" else Text(4)
    # Across hosts, pipelines are looked at though nobody asks for them.
    device = replace(resolve_device("cpu"), gpus_per_node=1 if "schedule" in pins else 8)
    question = Question(
        Job.of(gpu=device), gpus=gpus, seq_len=64, limit=limit << 10, global_batch=8, pins=read_pins(pins)
    )
    everything = search_of_all(make_search(model, [question]))
    found = make_search(model, [question]).run(1)
    assert found.best[0].fits and found.best[0].need.bytes <= question.limit
    assert 1 / found.best[0].tokens_per_second_per_gpu <= 1.02 * everything[0].per_token


def test_the_steps_input_must_fit_beside_the_peak_and_is_in_none_of_its_parts():
    asked = {"gpus": 1, "gpu": "cpu", "seq_len": 64, "ac": "full", "loss": "model", "micro_batch": 4, "offload": "none"}
    best = fit(Text(), **asked).best
    inputs = 4 * 64 * 16
    assert best.need == Need(best.peak_bytes + inputs, ALLOCATED, None, inputs)
    assert best.to_dict()["input_bytes"] == inputs and sum(best.account.parts.values()) == best.peak_bytes
    assert f"{inputs / 1024:11.3f} KiB  step's input" in best.explanation()
    assert fit(Text(), memory=best.need.bytes, **asked).candidates
    assert not fit(Text(), memory=best.need.bytes - 1, **asked).candidates


def test_layouts_are_all_those_that_use_every_gpu_and_the_global_batch():
    found, rejected = layouts(
        Room(gpus=8, seq_len=64, global_batch=16, layers=4, tensor_sizes=(1, 2, 4, 8), stages=False)
    )
    assert len(found) == len(set(found)) and all(layout.gpus == 8 for layout in found)
    assert all(layout.sequences == 16 for layout in found)
    assert Layout(1, 8, micro_batch=2) in found and Layout(2, 2, tp=2, micro_batch=4) in found
    assert not any(layout.dp_replicate > 1 and layout.dp_shard == 1 for layout in found)
    # On one host, stages are for what tp leaves of it.
    assert {(layout.tp, layout.pp) for layout in found if layout.pp > 1} == {(2, 4), (4, 2)}
    assert set(rejected) == {"fewer micro-batches than stages", "more stages than layers"}


def test_layouts_of_stages_and_experts_keep_to_what_can_run():
    room = Room(gpus=8, seq_len=8192, global_batch=16, layers=4, experts=4, tensor_sizes=(1, 2))
    found, _ = layouts(room)
    assert all(layout.grad_accum >= layout.pp for layout in found if layout.pp > 1)
    # Two stages on each of four ranks are more than four layers.
    assert {layout.schedule for layout in found if layout.pp == 4} == {"1f1b"}
    assert not any(layout.ep > 1 and layout.tp > 1 for layout in found)  # only where it is known how
    beside = layouts(replace(room, beside_experts=(1, 2)))[0]
    assert any(layout.ep > 1 and layout.tp > 1 for layout in beside) and set(found) < set(beside)
    # Ranks of tp are among those that share experts.
    assert max(layout.ep for layout in beside if layout.dp_shard == 1 and layout.tp == 2 and layout.cp == 1) == 2
    assert any(layout.cp > 1 and layout.pp > 1 for layout in found)
    assert all(layout.gpus == 8 and layout.sequences == 16 for layout in found)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpus": 0}, "gpus is 0"),
        ({"gpus": 8, "tp": 3}, "tp=3 does not divide gpus=8. Use tp=1, tp=2, tp=4 or tp=8"),
        (
            {"gpus": 8, "dp_shard": 2, "dp_replicate": 1, "tp": 2, "cp": 1, "pp": 1},
            "dp_replicate=1 x dp_shard=2 x tp=2 x cp=1 x pp=1 is 4, and gpus=8",
        ),
        ({"gpus": 8, "global_batch": 9, "dp_shard": 8}, "global_batch is 9"),
        ({"gpus": 8, "gpu": "h1000"}, "h1000"),
        ({"gpus": 8, "cp": 4, "pp": 4}, "cp=4 x pp=4 is 16, which does not divide gpus=8"),
        ({"gpus": 8, "ac": "fulll"}, "Did you mean 'full'"),
        ({"gpus": 8, "tpp": 2}, "Did you mean 'tp'"),
        ({"gpus": 8, "memory": "40 apples"}, "40 apples"),
        ({"gpus": 8, "memory": 0}, "memory is 0"),
        ({"gpus": 8, "seq_len": 1}, "seq_len is 1"),
        ({"gpus": 8, "schedule": "1f1b", "pp": 1}, "schedule is '1f1b' and pp is 1"),
    ],
)
def test_wrong_questions_are_refused(asked, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fit(Text(), **({"gpu": "cpu"} | asked))


def test_several_precisions_and_optimizers_are_searched_only_where_they_are_listed(program):
    asked = {
        "gpus": 1,
        "gpu": "h100-80gb",
        "seq_len": 64,
        "micro_batch": 2,
        "ac": "full",
        "loss": "model",
        "offload": "none",
    }
    one = fit(Text(1), **asked)
    assert {(c.job.step.optimizer, c.to_dict()["precision"]) for c in one.candidates} == {("adamw-fused", "bf16")}
    alone = [
        fit(Text(1), **asked, precision=cast, optimizer=name).best
        for cast in ("bf16", "fp32") for name in ("adamw", "adamw-8bit")
    ]  # fmt: skip
    report = fit(Text(1), **asked, precision=["bf16", "fp32"], optimizer=["adamw", "adamw-8bit"])
    assert report.best in alone and {c.job.compile for c in report.candidates} == {"inductor"}
    assert sorted(c.step_seconds for c in report.candidates) == sorted(c.step_seconds for c in alone)
    said = "--model tests.planning.queries:Text --gpus 1 --seq-len 64 --micro-batch 2 --ac full --loss model --offload none"
    assert "adamw-8bit" in program(["fit", *said.split(), "--optimizer", "adamw,adamw-8bit"]).out
    with pytest.raises(ValueError, match="optimizer is"):
        fit(Text(1), **asked, optimizer=[])


def test_a_wrong_kind_of_value_is_refused():
    with pytest.raises(TypeError, match="tp is '2'"):
        fit(Text(), gpus=2, gpu="cpu", tp="2")


def test_kwargs_and_the_printed_call_say_the_same():
    report = fit(
        tiny.llama(num_hidden_layers=1), gpus=2, gpu="cpu", seq_len=64, micro_batch=1, precision="bf16", tp=2,
        ac="full", loss="chunked",
    )  # fmt: skip
    best = report.best
    assert best.kwargs()["tp"].size == 2 and best.kwargs()["precision"] == Precision("bf16")
    assert (
        "tp=TensorParallel(size=2, sequence_parallel=True)" in best.call()
        and "ac='full'" in best.call()
        and "precision='bf16'" in best.call()
    )


def test_collectives_take_the_slowest_link_that_they_need():
    h100 = resolve_device("h100-80gb")
    inside, across, spread = group_of(8, 1, 8), group_of(16, 1, 8), group_of(16, 8, 8)
    assert (across.per_node, across.nodes, spread.per_node, spread.nodes) == (8, 2, 1, 16)
    size = 1 << 30
    for group, seconds in (
        (inside, size * 7 / 8 / 360e9 + 7e-5),
        # Two hosts with eight cards each, and sixteen with one: eight cards send as fast as 8 x 20 GB/s.
        (across, size * 15 / 16 / 160e9 + 9e-5),
        (spread, size * 15 / 16 / 20e9 + 8e-5),
        (group_of(1, 1, 8), 0.0),
    ):
        assert gather_seconds(size, group, h100) == pytest.approx(seconds)


def test_the_search_finds_what_looking_at_everything_finds_where_experts_are_split_beside_tp():
    pins = {"tp": [1, 2], "ep": [1, 2], "cp": 1, "micro_batch": 2, "ac": ["none", "full"], "loss": "model"}
    question = Question(
        Job.of(gpu=resolve_device("cpu")),
        gpus=4,
        seq_len=64,
        limit=1 << 40,
        global_batch=8,
        pins=read_pins(pins | {"offload": "none", "sequence_parallel": False}),
    )
    everything = search_of_all(make_search(mixture(), [question]))
    assert {(row.layout.tp, row.layout.ep) for row in everything} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    found = make_search(mixture(), [question]).run(1).best
    assert 1 / found[0].tokens_per_second_per_gpu <= 1.02 * everything[0].per_token
    # Behind split experts, rows are gathered and not summed up.
    sizes = {(row.layout.tp, row.layout.ep, row.layout.dp_replicate, row.layout.ac): row for row in everything}
    parts = [step_seconds(sizes[2, ep, 1, "none"].query, sizes[2, ep, 1, "none"].choices).parts for ep in (1, 2)]
    whole, split = (each["tensor-parallel sums"] for each in parts)
    assert split < whole and parts[1]["expert exchanges"] > 0


def test_a_plan_is_made_for_a_peak_with_which_what_is_reserved_fits():
    asked = {"gpus": 1, "gpu": "h100-80gb", "seq_len": 64, "micro_batch": 64, "loss": "model", "offload": "none"}
    sizes = [fit(Text(6, 64), ac=mode, **asked).best.reserved for mode in ("full", "none")]
    limit = sum(sizes) // 2
    best = fit(Text(6, 64), ac="plan", memory=limit, **asked).best
    assert sizes[0] <= best.reserved <= limit and best.peak_bytes < best.reserved


def test_stages_are_looked_at_where_they_are_asked_for_and_say_what_they_wait_for():
    asked = {"gpus": 2, "gpu": "cpu", "seq_len": 64, "global_batch": 4, "ac": ["none", "full"], "loss": "model"}
    report = fit(Text(2), pp=[1, 2], schedule="1f1b", micro_batch=1, offload="none", cp=1, tp=1, **asked)
    staged = next(candidate for candidate in report.candidates if candidate.layout.pp == 2)
    parts = staged.seconds.parts
    # Two stages of a layer each, and four microbatches: about one part in four is waited for.
    assert 0.1 < parts["pipeline bubble"] / (staged.step_seconds - parts["optimizer"]) < 0.4
    assert parts["pipeline sends"] > 0 and "parameter gathers" not in parts
    assert staged.kwargs()["pp"].microbatches == 4 and staged.layout.gpus == 2
    assert "--pp 2" in recipe(report, staged) and "--global-batch 4 --grad-accum 4" in recipe(report, staged)
    rates = [candidate.tokens_per_second_per_gpu for candidate in report.candidates]
    assert rates[1:] == sorted(rates[1:], reverse=True) and rates[0] >= max(rates) / 1.01  # of those alike the plainest
    assert not any(c.layout.pp > 1 for c in fit(Text(2), micro_batch=2, offload="none", **asked).candidates)


def test_a_send_delays_only_what_another_rank_needs():
    actions = actions_of(PipelineParallel(2, microbatches=2))
    seconds = {(kind, stage): 1.0 for kind in "FB" for stage in range(2)}
    assert timeline(actions, seconds, 2).seconds == 6
    # The first microbatch's way there and back, and the second one's back: forward is sent while the other rank computes.
    assert timeline(actions, seconds, 2, 0.25).seconds == 6.5
    alone = actions_of(PipelineParallel(1, microbatches=2))
    assert timeline(alone, seconds, 1, 0.25).seconds == timeline(alone, seconds, 1).seconds


def test_pipelines_are_searched_across_hosts_and_one_stage_may_have_no_experts():
    model = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4, first_k_dense_replace=2,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, vocab_size=64,
            use_cache=False,
        )
    ).train()  # fmt: skip
    asked = {
        "gpus": 4,
        "gpu": replace(resolve_device("h100-80gb"), gpus_per_node=1),
        "seq_len": 64,
        "global_batch": 4,
        "ac": "full",
        "loss": "model",
        "offload": "none",
    }
    report = fit(model, schedule="1f1b", micro_batch=1, tp=1, ep=2, **asked)
    assert {candidate.layout.pp for candidate in report.candidates} == {1, 2} and not report.nearest
    assert all(candidate.layout.ep == 2 for candidate in report.candidates)


def test_stages_are_resharded_and_offloaded_where_that_is_asked_for():
    asked = {"gpus": 4, "gpu": "cpu", "seq_len": 64, "global_batch": 8, "micro_batch": 1, "loss": "model"}
    pinned = {"pp": 2, "schedule": "1f1b", "ac": "full", "dp_shard": 2, "tp": 1, "cp": 1, **asked}
    plain = fit(Text(2), **pinned).best
    assert (plain.job.offload.mode, plain.layout.fsdp.reshard_after_forward) == ("none", None)
    moved = fit(Text(2), offload="boundary", reshard_after_forward=[True], **pinned).best
    assert (moved.job.offload.mode, moved.layout.fsdp.reshard_after_forward) == ("boundary", True)
    assert moved.peak_bytes < plain.peak_bytes
    with pytest.raises(ValueError, match="beside pp: cpu_offload"):
        fit(Text(2), cpu_offload=True, **pinned)


def test_a_batch_that_the_gpus_do_not_divide_is_refused_at_the_call():
    with pytest.raises(ValueError, match="the global batch is not a multiple of the data-parallel ranks"):
        fit("llama-tiny", gpus=8, gpu="cpu", seq_len=64, global_batch=3, tp=1, cp=1, ep=1, pp=1)


def test_an_interrupted_search_has_what_was_found():
    asked = {"gpus": 2, "gpu": "cpu", "seq_len": 64, "ac": "full", "loss": "model", "offload": "none", "tp": 1}
    asked["micro_batch"] = [1, 2]
    said = []
    whole = fit(Text(2), progress=said.append, **asked)
    left = len(said) - 1

    def interrupt(words):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    report = fit(Text(2), progress=interrupt, **asked)
    assert report.interrupted and not whole.interrupted and said[0].startswith("planned 0 of ")
    assert report.verdict() == whole.verdict().replace("Fits: ", "Stopped, the best so far: ")
    left = 0
    with pytest.raises(KeyboardInterrupt):  # nothing was found by then
        fit(Text(2), progress=interrupt, **asked)


def test_print_of_a_report_is_its_screen_and_its_repr_one_line():
    asked = {"gpus": 1, "gpu": "cpu", "seq_len": 64, "ac": "full", "loss": "model", "micro_batch": [1, 2]}
    report = fit(Text(2), **asked)
    first, second, *_ = report.text(width=120).splitlines()
    assert first == f"{report.verdict()} On cpu in fp32." and second == f"Paste: {report.call()}"
    narrow = [line for line in report.text(width=80).splitlines() if not line.startswith(("Paste: ", "Train: "))]
    assert all(len(line) <= 80 for line in narrow) and " ".join(narrow[:2]) == first
    assert repr(report) == f"<FitReport: {report.verdict()}>"


def test_a_search_ends_with_its_minutes():
    asked = {"gpus": 2, "gpu": "cpu", "seq_len": 64, "ac": "full", "loss": "model", "offload": "none", "tp": 1}
    with pytest.raises(
        ValueError, match="Nothing that fits was found in the minutes that there were: 0 layouts were looked at"
    ):
        fit("llama-tiny", minutes=1e-9, **asked)
    with pytest.raises(ValueError, match="minutes is 0; it must be a number above 0"):
        fit("llama-tiny", minutes=0, **asked)


def test_pipelines_of_one_trace_have_bytes_of_their_own() -> None:
    """Two stages with replicas and four without are made of the same local shape."""

    def found(**pins: Any) -> dict[tuple[int, int], int]:
        answer = fit(
            Text(4, 16), gpus=8, gpu="cpu", seq_len=16, micro_batch=1, dp_shard=2, tp=1, cp=1, grad_accum=8, ac="full",
            schedule="1f1b", loss="model", offload="none", cpu_offload=False, reshard_after_forward=[None], **pins,
        )  # fmt: skip
        return {(each.layout.pp, each.layout.dp_replicate): each.peak_bytes for each in answer.candidates}

    both = found(pp=[2, 4])
    assert both == found(pp=2) | found(pp=4) and both.keys() == {(2, 2), (4, 1)}


def test_every_layout_has_the_global_batch() -> None:
    found, rejected = layouts(Room(gpus=4, seq_len=256, global_batch=6, layers=2))
    assert found and {one.dp_replicate * one.dp_shard * one.micro_batch * one.grad_accum for one in found} == {6}
    assert rejected["the global batch is not a multiple of the data-parallel ranks"]
