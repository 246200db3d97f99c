"""Options in `fit`: every field of a `Job` reaches the configurations or is refused by name; ``cpu_offload`` as an axis."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like import FSDP2, ChunkedLoss, ContextParallel, ExpertParallel, Job, OffloadConfig, PipelineParallel
from nemo_like.models import text_batch
from nemo_like.options import PlanSearch, Precision, StepSpec, TensorParallel
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.fitting import make_search
from nemo_like.planning.fit.layouts import Layout, job_of
from nemo_like.planning.fit.question import _SEARCHED, Question, read_pins, read_question
from nemo_like.planning.fit.report import recipe
from nemo_like.planning.planner import query_of
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from tests.models.fit_models import llama, mixture
from tests.planning.queries import Text, reserved
from tests.planning.search_of_all import search_of_all

PINS: dict[str, Any] = {"ac": "full", "loss": "model", "offload": "none", "micro_batch": 1, "cpu_offload": False}
PINS |= dict.fromkeys(("tp", "cp", "pp", "dp_replicate"), 1)


def rows_of(output: Any) -> Any:
    return output.logits.float().mean()


def counted(batch: Any) -> int:
    return batch["input_ids"].shape[0]


PLAN = {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise"} | {
    "model.layers.*.mlp.down_proj": "rowwise"
}
OPTIONS: dict[type, dict[str, Any]] = {
    FSDP2: {
        "reshard_after_forward": False,
        "forward_prefetch": 2,
        "backward_prefetch": 2,
        "cpu_offload": True,
        "frozen_sharding": "replicate",
        "ends": "root",
        "on_one_rank": True,
        "timeout_seconds": 60.0,
    },
    TensorParallel: {"size": 2, "plan": PLAN, "sequence_parallel": True, "loss_parallel": True, "asynchronous": True},
    ContextParallel: {"size": 2, "method": "ulysses", "loss_mean": "rows"},
    ExpertParallel: {
        "size": 2,
        "plan": {"model.layers.*.mlp.experts": "routed"},
        "imbalance": 1.2,
    },
    PipelineParallel: {
        "size": 2,
        "schedule": "gpipe",
        "microbatches": 4,
        "stages_per_rank": 2,
        "balance": "memory",
        "loss_mean": counted,
        "split": None,
    },
    ChunkedLoss: {
        "chunk_tokens": 64,
        "chunk_bytes": "1MiB",
        "grads_in_float32": False,
        "z_loss": 0.1,
        "compile": "aot_eager",
    },
    Precision: {
        "param_dtype": "bf16",
        "reduce_dtype": "bf16",
        "output_dtype": "float32",
        "cast_forward_inputs": False,
        "matmuls": "fp8",
    },
    OffloadConfig: {
        "mode": "boundary",
        "min_bytes": 1,
        "max_inflight_bytes": 1 << 20,
        "prefetch": 2,
        "pin_memory": False,
        "host_budget_bytes": 1 << 30,
    },
    StepSpec: {
        "sync": "last",
        "keeps_output": False,
        "zero_grad": "zero",
        "optimizer": "sgd",
        "loss_fn": rows_of,
        "ema": True,
        "in_backward": True,
    },
    AllocatorConfig: {
        "expandable_segments": True,
        "max_split_size": 1 << 30,
        "roundup_power2_divisions": 4,
        "large_segment": 32 << 20,
    },
    PlanSearch: {"host": True, "host_memory": 1 << 30},
}
"""A value of every option that differs from its default."""
WITH: dict[type, dict[str, Any]] = {
    TensorParallel: {"size": 2},
    ContextParallel: {"size": 2},
    ExpertParallel: {"size": 2},
    PipelineParallel: {"size": 2, "schedule": "interleaved_1f1b", "microbatches": 4},
    OffloadConfig: {"mode": "boundary"},
    Precision: {"param_dtype": "bf16"},
}
"""What an option needs beside it."""
FIELDS: dict[str, Any] = {
    "ac_scope": ("language",),
    "layers": ("model.layers.*",),
    "dp_replicate": 2,
    "compile": "aot_eager",
    "gpu": "a100-80gb",
    "attention": "flash",
}
HOLDERS = {
    "strategy": FSDP2, "tp": TensorParallel, "cp": ContextParallel, "ep": ExpertParallel, "pp": PipelineParallel,
    "loss": ChunkedLoss, "precision": Precision, "offload": OffloadConfig, "step": StepSpec, "allocator": AllocatorConfig,
    "search": PlanSearch,
}  # fmt: skip
OF_TRANSFORMERS = ("tp", "cp", "loss", "step", "layers", "ac_scope")
"""Fields that name or need what `Text` has not."""
CHOSEN = {"ac", "planned_tokens", "world_size", "device", "asked"}
"""What fit makes itself, and what only a run reads."""


def test_every_field_of_a_job_is_known_here():
    assert {field.name for field in fields(Job)} == set(FIELDS) | set(HOLDERS) | CHOSEN
    for holder, values in OPTIONS.items():
        chosen = {"microbatches"} if holder is StepSpec else set()
        assert {field.name for field in fields(holder)} == set(values) | chosen, holder


ALONE = {
    "strategy.cpu_offload", "tp.plan", "tp.sequence_parallel", "tp.asynchronous", "ep.plan", "pp.schedule",
    "step.in_backward",
}  # fmt: skip
"""Fields that are not asked for beside the others of their option."""


def _cases() -> list[Any]:
    cases = [pytest.param(name, value, id=name) for name, value in FIELDS.items()]
    for field, holder in HOLDERS.items():
        given = {name: value for name, value in OPTIONS[holder].items() if value is not None}
        together = {name: value for name, value in given.items() if f"{field}.{name}" not in ALONE}
        made = holder(**(WITH.get(holder, {}) | together))
        cases.append(pytest.param(field, made, id=f"{field}: {', '.join(together)}"))
        for name, value in given.items():
            marks = [] if f"{field}.{name}" in ALONE else [pytest.mark.long]
            needed = {"sequence_parallel": True} if name == "asynchronous" else {}
            made = holder(**(WITH.get(holder, {}) | needed | {name: value}))
            cases.append(pytest.param(field, made, id=f"{field}.{name}", marks=marks))
    return cases


@pytest.mark.parametrize(("field", "value"), _cases())
def test_a_field_reaches_what_is_found(field: str, value: Any) -> None:
    model = mixture() if field == "ep" else llama(1) if field in OF_TRANSFORMERS else Text(4)
    pins = {name: pin for name, pin in PINS.items() if name != field}
    if field == "strategy":
        pins.pop("cpu_offload")
    best = fit(model, gpus=4, seq_len=64, count=1, **{"gpu": "h100-80gb"} | pins | {field: value}).best
    got = getattr(best.job, field)
    if isinstance(value, StepSpec):
        value = replace(value, microbatches=got.microbatches)
    assert got == value


_SMALL = {"gpus": 2, "gpu": "h100-80gb", "seq_len": 64, "micro_batch": 2, "tp": 1, "cp": 1, "loss": "model"}


@pytest.mark.long
def test_state_stays_on_the_device_where_that_is_faster():
    # Of a small model, launches would take all of the time, and all ways the same.
    device = replace(resolve_device("h100-80gb"), launch_seconds=0.0, hop_seconds=0.0)
    pins = read_pins({"tp": 1, "cp": 1, "grad_accum": [1, 3], "micro_batch": [2, 8], "ac": ["none", "full"]})
    question = Question(Job.of(gpu=device, precision=Precision("bf16")), gpus=2, seq_len=64, limit=1 << 40, pins=pins)
    everything = search_of_all(make_search(llama(2), [question]))
    best = make_search(llama(2), [question]).run(1).best[0]
    assert best.layout.fsdp.cpu_offload is everything[0].layout.fsdp.cpu_offload is False
    assert 1 / best.tokens_per_second_per_gpu <= 1.02 * everything[0].per_token


def test_gradients_of_several_microbatches_are_copied_and_summed_up_on_the_host():
    """By hand: head and embedding, which nothing hides."""
    device = replace(resolve_device("h100-80gb"), host_link=1e6, host_bandwidth=2e6)
    asked = _SMALL | {"gpu": device, "ac": "full", "offload": "none", "reshard_after_forward": True}
    once, thrice = (
        fit(Text(2), grad_accum=n, cpu_offload=True, sync="every", optimizer="adamw", **asked).best for n in (1, 3)
    )
    rows = {row.what: row.amount for row in thrice.account.seconds}
    parameters = sum(p.numel() * 4 for p in Text(2).parameters()) // 2
    around = sum(p.numel() * 4 for name, p in Text(2).named_parameters() if not name.startswith("layers.")) // 2
    copied = sum(seconds for what, seconds in rows.items() if what.startswith(("parameters of", "gradients of")))
    assert copied == pytest.approx(3 * 2 * around / 1e6)
    sums = sum(seconds for what, seconds in rows.items() if what in ("of head", "of embedding and last norm"))
    assert sums == pytest.approx(2 * 3 * around / 2e6)
    assert "gradient sums on the host" not in once.seconds.parts
    assert thrice.seconds.parts["gradient sums on the host"] == pytest.approx(2 * 3 * parameters / 2e6)
    # AdamW on the host goes over them twenty times, once in a step.
    assert once.seconds.parts["optimizer"] == thrice.seconds.parts["optimizer"] == pytest.approx(20 * parameters / 2e6)
    last = fit(Text(2), grad_accum=3, step=StepSpec(sync="last"), **asked).best
    assert "gradient sums on the host" not in last.seconds.parts


def test_gradients_are_reduced_once_where_whole_ones_fit():
    device = replace(resolve_device("h100-80gb"), nvlink=1e6)  # slower than the host
    asked = _SMALL | {"gpu": device, "ac": "full", "offload": "none", "cpu_offload": False, "grad_accum": 3}
    once = fit(Text(2), **asked).best
    each = fit(Text(2), sync="every", **asked).best
    assert (once.job.step.sync, each.job.step.sync) == ("last", "every")
    assert once.peak_bytes > each.peak_bytes and once.step_seconds < each.step_seconds
    assert once.to_dict()["sync"] == "last" and "step" not in once.kwargs()  # it is the loop that does it


def test_a_model_whose_state_no_gpu_can_hold_fits_with_as_many_bytes_as_its_plan_says():
    asked = {"gpus": 8, "gpu": "h100-80gb", "seq_len": 8192, "micro_batch": 1, "tp": 1, "cp": 1, "dp_replicate": 1,
             "ac": "full", "loss": "model", "offload": "none", "reshard_after_forward": True}  # fmt: skip
    with torch.device("meta"):
        model = Text(64, 16384)  # 69 billion parameters
    small = fit(model, grad_accum=1, **asked)
    assert not small.candidates and small.rejected["CPU memory"]
    assert small.helps[0].startswith(
        "strategy=FSDP2(reshard_after_forward=True, cpu_offload=True) with 128.01GiB of CPU memory per rank ("
    )
    report = fit(model, grad_accum=1, host_memory="132GiB", **asked)
    best = report.best
    ids = best.sample["input_ids"]
    query = PlanQuery.from_model(
        model,
        {"input_ids": ids, "labels": ids},
        Job.of(
            strategy=FSDP2(True, cpu_offload=True),
            world_size=8,
            precision=Precision("bf16"),
            gpu=resolve_device("h100-80gb"),
        ),
    )
    assert best.layout.fsdp.cpu_offload and best.peak_bytes == peak_of(query, query.uniform("full")).total
    assert best.host_bytes == query.stages[0].state_on_host
    assert best.need.bytes == reserved(query, query.uniform("full")).reserved + 8192 * 16  # token ids and labels
    assert "strategy=FSDP2(reshard_after_forward=True, cpu_offload=True)" in best.call()
    assert best.kwargs()["strategy"] == FSDP2(reshard_after_forward=True, cpu_offload=True)
    assert " --cpu-offload" in recipe(report, best) and "cpu_offload" in report.table().text()
    usual = replace(best, layout=best.layout.way(fsdp=FSDP2(cpu_offload=True)))
    assert "default" in replace(report, candidates=(best, usual)).table().text()
    assert best.to_dict()["cpu_offload"] is True and best.to_dict()["host_bytes"] == best.host_bytes


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpu": "rtx-4090", "cpu_offload": True}, "beside rtx-4090 is not known"),
        ({"gpus": 1, "cpu_offload": True}, "one rank keeps the model whole"),
        ({"host_memory": "all"}, "all"),
        ({"host_memory": -1}, "host_memory is -1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(asked, message):
    with pytest.raises(ValueError, match=message):
        fit(Text(2), **(_SMALL | asked))


def test_where_it_is_not_looked_at_the_report_says_so():
    pins = {"ac": "full", "offload": "none"}
    unknown = fit(Text(2), **(_SMALL | pins | {"gpu": "rtx-4090"}))
    assert any("bandwidth of CPU memory" in reason for reason in unknown.rejected)
    assert not any(c.layout.fsdp.cpu_offload for c in unknown.candidates)
    with pytest.raises(ValueError, match="not planned beside pp: cpu_offload"):
        fit(Text(2), pp=2, schedule="1f1b", global_batch=4, cpu_offload=True, **(_SMALL | pins | {"micro_batch": 1}))


def test_on_the_cpu_it_changes_nothing_and_is_there_only_where_it_is_pinned(program):
    pins = {"gpu": "cpu", "ac": "full", "offload": "none", "grad_accum": 1}
    here, there = fit(Text(2), **(_SMALL | pins)).best, fit(Text(2), cpu_offload=True, **(_SMALL | pins)).best
    assert not here.layout.fsdp.cpu_offload and there.layout.fsdp.cpu_offload and there.host_bytes == 0
    assert here.peak == there.peak and here.seconds == there.seconds
    said = "--model tests.planning.queries:Text --gpus 2 --gpu cpu --seq-len 64 --micro-batch 1 --tp 1 --cp 1 --ac full"
    assert (
        "FSDP2(reshard_after_forward=False, cpu_offload=True)"
        in program(["fit", *said.split(), "--loss", "model", "--cpu-offload", "--host-memory", "1GiB"]).out
    )


def test_fields_that_are_searched_are_those_of_the_docstring() -> None:
    """Against what a layout changes in a job."""
    listed = " ".join((fit.__doc__ or "").split()).partition("Of a job's fields, ")[2]
    groups = [set(re.findall(r"``(\w+)``", re.sub(r"\(.*?\)", "", part))) for part in listed.split("; these", 3)]
    whole, parts, follow, given = (names & {f.name for f in fields(Job)} for names in groups)
    (asked,), _, _ = read_question(None, {"gpu": "cpu", "precision": "bf16"})
    layout = Layout(
        dp_replicate=2, dp_shard=2, tp=2, cp=2, ep=2, pp=2, ac="full", loss="chunked", offload="boundary", sync="last",
        grad_accum=4, fsdp=FSDP2(reshard_after_forward=True, cpu_offload=True),
    )  # fmt: skip
    other = job_of(asked, layout, lambda _: 1)
    changed = {f.name for f in fields(Job) if getattr(other, f.name) != getattr(asked, f.name)} - {"asked"}
    assert changed == whole | parts | {"world_size"}
    assert whole == {*_SEARCHED} - {"planned_tokens"} and follow == {"world_size", "planned_tokens"}
    assert given == {f.name for f in fields(Job)} - whole - parts - follow - {"asked"}


def test_adapters_are_those_of_a_plan(tmp_path: Path, program: Any) -> None:
    """`fit` that is pinned to one layout, against `plan` with the same flags."""
    config = {"model_type": "llama", "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}))
    both = f"--model {path} --gpus 2 --seq-len 64 --lora 4 --precision bf16 --optimizer adamw --json -".split()
    pins = "--tp 1 --cp 1 --pp 1 --dp-replicate 1 --micro-batch 1 --grad-accum 1 --ac full --loss model --offload none"
    found = json.loads(
        program(["fit", *both, *pins.split(), "--no-cpu-offload", "--compile", "none", "--count", "9"]).out
    )
    planned = json.loads(program(["plan", *both, "--no-what-if"]).out)
    (full,) = (row for row in planned["rows"] if row["ac"] == "full")
    best = found["candidates"][0]
    assert (found["lora"], best["ac"], best["reshard_after_forward"]) == (4, "full", None)
    assert best["peak_bytes"] == full["peak_bytes"] < 1_000_000 and best["step_seconds"] == full["step_seconds"]


def test_adapters_that_fit_refuses() -> None:
    with pytest.raises(ValueError, match="lora is 4, and model is a LlamaForCausalLM, not a name"):
        fit(llama(), gpus=2, lora=4)
    with pytest.raises(ValueError, match="lora is 4, and precision is one of several"):
        fit("llama3-8b", gpus=2, lora=4, precision=["bf16", "fp32"])


def test_an_imbalance_without_ep_is_refused_alike() -> None:
    told = r"imbalance is 2.0, and ep is 1: every rank has all experts, .* Leave it out, or use ep above 1"
    with pytest.raises(ValueError, match=told):
        query_of(mixture(), text_batch(1, 16), Job.of(ep=ExpertParallel(1, imbalance=2.0), gpu="cpu", world_size=2))
    with pytest.raises(ValueError, match=told):
        fit(mixture(), gpus=2, gpu="cpu", ep=1, imbalance=2.0)
