"""Memory of a device: what is reserved for a step by the allocator's rules, what is outside; and rates measured there."""

import json
import math
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from nemo_like import FSDP2, Job, StepSpec, parallelize
from nemo_like._util.folders import cache_folder
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.cli import main
from nemo_like.models import text_batch
from nemo_like.options import Precision
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning import Plan
from nemo_like.planning.calibration import calibrate
from nemo_like.planning.devices import (
    RATES,
    calibrated,
    device_at_hand,
    known_devices,
    rates_file,
    resolve_device,
    step_limit,
)
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.question import Question
from nemo_like.planning.memory_model.allocator import CachingAllocator
from nemo_like.planning.memory_model.storages import COMPUTE, Events
from nemo_like.planning.planner import describe
from nemo_like.planning.predictions import budget_search
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.predictions.reserved import (
    RESERVED,
    Need,
    Outside,
    StepLogs,
    communicator_bytes,
    default_limit,
    outside_of,
    replay,
)
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import Step, make_report
from nemo_like.planning.roofline import RankGroup
from tests.gpusim import on_device
from tests.models.tiny import labelled, made
from tests.planning.queries import Text, reserved

MIB = 1 << 20
BF16 = Precision.of("bf16")
SETUPS = {
    "one device": Job.of(),
    "one device, momentum, zeroed": Job.of(step=StepSpec(optimizer="sgd-momentum", zero_grad="zero")),
    "accumulated": Job.of(step=StepSpec(microbatches=4, keeps_output=False)),
    "accumulated, the output kept": Job.of(step=StepSpec(microbatches=32), precision=BF16),
    "ddp": Job.of(strategy="ddp", world_size=2),
    "sharded": Job.of(world_size=8, precision=BF16),
    "sharded, loop": Job.of(world_size=3, step=StepSpec(optimizer="adamw-loop")),
    "kept gathered": Job.of(strategy=FSDP2(False, 2, 2), world_size=8, precision=BF16),
    "reduced every time": Job.of(world_size=8, step=StepSpec(microbatches=2)),
    "reduced in the last": Job.of(world_size=8, step=StepSpec(microbatches=2, sync="last"), precision=BF16),
    "reduced in the last of four": Job.of(world_size=8, step=StepSpec(microbatches=4, sync="last")),
}


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}


def _model() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 640}
    return made("Llama", device="meta", max_position_embeddings=256, **sizes, **_HEADS)


def _query(job: Job, device: str = "h100-80gb", model: nn.Module | None = None) -> PlanQuery:
    sample = labelled(torch.zeros(2, 128, dtype=torch.long))
    return PlanQuery.from_model(_model() if model is None else model, sample, job.change(gpu=resolve_device(device)))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SETUPS)
def test_the_replayed_tensors_peak_where_the_arithmetic_says(name):
    query = _query(SETUPS[name])
    for ac in ("none", "full", "selective"):
        choices = query.uniform(ac)
        found = reserved(query, choices)
        assert found.tensors == peak_of(query, choices).total
        assert found.tensors <= found.allocated <= found.reserved
        assert found.reserved % (2 * MIB) == 0
        assert found == reserved(query, choices)


def test_experts_in_a_unit_of_their_own():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
    model = made("Mixtral", device="meta", num_local_experts=8, max_position_embeddings=256, **sizes, **_HEADS)
    query = _query(Job.of(world_size=4, ep=2, precision=BF16), model=model)
    choices = query.uniform("full")
    peak = peak_of(query, choices).total
    assert abs(reserved(query, choices).tensors - peak) <= 0.01 * peak


def test_a_step_of_one_layer_to_the_byte():
    """Without a layer's activations: a linear layer of 1024 x 1024 weights in float32, SGD, one row."""
    query = PlanQuery.from_model(
        nn.Sequential(nn.Linear(1024, 1024, bias=False)),
        torch.zeros(1, 1024),
        Job.of(step=StepSpec(optimizer="sgd", keeps_output=False), gpu=resolve_device("a100-80gb"), layers=["0"]),
    )
    found = reserved(query, query.uniform("none"))
    # cuBLAS for two threads: 8.125 MiB each, of one segment of 20 MiB. The weight and its gradient (4 MiB each) share
    # another, since what is left of the first is less than 4 MiB. The rest is a few KiB of one small segment.
    assert found.workspaces == 2 * (8 * MIB + 128 * 1024)
    assert found.reserved == (20 + 20 + 2) * MIB
    assert found.allocated - found.tensors - found.workspaces < 8 * 512


def test_settings_of_the_allocator_count():
    query = _query(SETUPS["sharded"])
    choices = query.uniform("full")
    plain = reserved(query, choices)
    logs = StepLogs(query, 0, choices)
    growing = replay(logs, query.device, AllocatorConfig(expandable_segments=True))
    steps = replay(logs, query.device, AllocatorConfig(roundup_power2_divisions=2))
    assert plain.tensors == growing.tensors == steps.tensors
    assert len({plain.reserved, growing.reserved, steps.reserved}) > 1
    assert steps.allocated > plain.allocated


def test_where_nothing_is_said():
    query = _query(SETUPS["one device"], "cpu")
    for mode in ("none", "full"):
        assert describe(query, query.uniform(mode), mode).reserved_bytes is None


def test_a_plan_keeps_it(tmp_path):
    query = _query(SETUPS["sharded"])
    choices = query.uniform("full")
    plan = describe(query, choices, "full")
    assert plan.reserved_bytes == reserved(query, choices).reserved
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").reserved_bytes == plan.reserved_bytes


@pytest.mark.long
def test_the_command_says_so(program, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    args = ["plan", "--model", "llama-tiny", "--gpus", "8", "--seq-len", "64", "--no-what-if"]
    text = program(args).out
    assert "reserved" in text.splitlines()[0] and " reserved " in text
    growing = json.loads(program([*args, "--json", "-"]).out)
    plain = json.loads(program([*args, "--json", "-", "--alloc-conf", ""]).out)
    assert (
        growing["job"]["allocator"] == "AllocatorConfig(expandable_segments=True)" and "allocator" not in plain["job"]
    )
    assert all(row["reserved_bytes"] >= row["peak_bytes"] for row in plain["rows"])


def test_what_a_report_shows_as_reserved_is_what_decides():
    """With 100 MiB less than it would reserve, the allocator gives segments back in the first step, and needs no more."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 32_000}
    model = made("Llama", device="meta", **sizes, **_HEADS | {"num_key_value_heads": 4})
    job = Job.of(gpu="h100-80gb", precision="bf16", world_size=8)
    query = PlanQuery.from_model(model, labelled(torch.zeros(1, 2048, dtype=torch.long)), job)
    found = reserved(query, query.uniform("none"))
    report = make_report(query, ["50%"], found.reserved + query.input_bytes - 100 * MIB)
    assert report.best is report.rows[0] and report.best.need.reserved < found.reserved - 100 * MIB
    for row in report.rows:
        assert row.plan.reserved_bytes == row.need.reserved == row.need.bytes - query.input_bytes
        assert row.fits == (row.need.bytes <= report.limit)


def test_a_storage_is_freed_by_its_last_holder():
    events = Events()
    one, nothing = events.make(100, Part.GRADIENTS), events.make(0, Part.GRADIENTS)
    events.hold(one)
    events.drop_all([one, nothing, one])
    assert [event[:2] for event in events.log] == [(one, 100), (one, -100)]
    assert (nothing, events.log[0].stream, events.log[0].label.part) == (0, COMPUTE, Part.GRADIENTS)
    with pytest.raises(KeyError):
        events.hold(one)


class _Beside:
    """The model of the allocator, run beside the simulated device's."""

    def __init__(self, memory):
        self.memory, self.model, self.blocks = memory, CachingAllocator(), {}
        self.allocate, self.release = memory.allocate, memory._release
        memory.allocate, memory._release = self.both_allocate, self.both_release

    def both_allocate(self, size, stream):
        address = self.allocate(size, stream)
        self.blocks[address] = self.model.allocate(size, stream)
        assert self.model.reserved == self.memory.now["reserved"]
        return address

    def both_release(self, block):
        self.model.free(self.blocks.pop(self.memory.base + block.lo))
        self.release(block)


def _steps(device, ac):
    """Return the bytes that a step asks for and that are reserved for it, on the simulated device and predicted."""
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 320}
    model = made("Llama", device="meta", attn_implementation="eager", **sizes, **_HEADS)
    ids = torch.zeros(2, 64, dtype=torch.long)
    # The device has the CPU's kernels, and an allocator as CUDA's.
    query = PlanQuery.from_model(model, labelled(ids), Job.of(gpu="cpu", step=StepSpec(optimizer="adamw-loop")))
    predicted = replay(StepLogs(query, 0, query.uniform(ac)), resolve_device("h100-80gb"))
    _Beside(device.memory)
    model = parallelize(model.to_empty(device="gpusim"), "single", ac, device="gpusim")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = {"input_ids": ids.to("gpusim"), "labels": ids.to("gpusim")}
    for _ in range(3):
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = torch.gpusim.memory_stats()
    asked, inputs = stats["requested_bytes.all.peak"], 2 * ids.nbytes
    return asked - inputs, stats["reserved_bytes.all.peak"], predicted


@pytest.mark.few(2)
@pytest.mark.parametrize("ac", ["none", "full", "selective"])
def test_against_an_allocator_that_real_steps_drive(ac):
    asked, held, predicted = on_device(_steps, ac)
    # Backward makes a few small copies there that no CPU kernel makes, so the last segment may be needed or not.
    assert abs(held - (predicted.reserved - predicted.workspaces)) <= 2 * MIB
    kept_by_verification = (
        0 if ac == "none" else 4 * 1024
    )  # signs, for rows and columns of what is compared on a device
    assert predicted.tensors + kept_by_verification - 512 <= asked <= predicted.tensors + kept_by_verification


ASKED = {"gpus": 1, "seq_len": 64, "micro_batch": 1, "ac": "full", "loss": "model", "offload": "none"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_LIKE_CACHE", str(tmp_path))
    return tmp_path


def test_what_was_measured_is_what_later_plans_use_and_name(cache, monkeypatch):
    monkeypatch.setattr("nemo_like.planning.calibration.pick_device_type", lambda: "cpu")
    monkeypatch.setattr("nemo_like.planning.devices.pick_device_type", lambda: "cpu")
    before = fit("llama-tiny", gpu="cpu", **ASKED)
    path = calibrate(seconds=0.1)
    assert path == cache / "rates" / "cpu.json"
    rates = json.loads(path.read_text())["rates"]
    assert set(rates) == {name for name in RATES if name not in ("host_link", "nvlink", "network")}
    assert all(rate > 0 for rate in rates.values())
    device = device_at_hand()
    assert device == calibrated(resolve_device("cpu")) and device.matmul_flops["half"] == rates["matmul_half"]
    assert (device.attention_flops["single"], device.bandwidth) == (rates["attention_single"], rates["bandwidth"])
    assert device.host_link == resolve_device("cpu").host_link, "not measured here"
    after = fit("llama-tiny", gpu="cpu", **ASKED)
    assert str(path) in after.question.device.rates and before.question.device.rates == "the table"
    assert after.to_dict()["rates"] == after.question.device.rates
    assert after.best.peak_bytes == before.best.peak_bytes and after.best.step_seconds != before.best.step_seconds


def test_a_damaged_file_is_said_and_not_used(cache, caplog):
    path = rates_file(resolve_device("cpu"))
    path.parent.mkdir()
    for text in ("{", "{}", '{"rates": {"bandwidth": -1}, "measured": "", "torch": ""}'):
        path.write_text(text)
        assert calibrated(resolve_device("cpu")) == resolve_device("cpu")
    assert "is damaged" in caplog.text


def test_the_command_line_names_the_file(cache, capsys, program, monkeypatch):
    monkeypatch.setattr("nemo_like.planning.calibration.SECONDS", 0.1)
    said = program("fit --calibrate").err
    (path,) = (cache_folder() / "rates").iterdir()
    assert str(path) in said and "matmul_half" in said
    assert main(["fit", "--gpus", "1"]) != 0 and "--model is needed" in capsys.readouterr().err


NVLINK = replace(
    resolve_device("cpu"), kind="cuda", name="made-up", memory_bytes=2000 * MIB, nvlink=200e9, context_bytes=100 * MIB
)
HOPPER = replace(NVLINK, capability=(9, 0))
BUS = replace(NVLINK, nvlink=20e9)


def job(ranks: int, **asked: Any) -> Job:
    return Job.of(world_size=ranks, **asked)


@pytest.mark.parametrize(
    ("device", "group", "peers", "mib"),
    [
        (NVLINK, RankGroup(2, 2), 0, 544),  # NCCL's issue 964: 4 A100, a group of two, and one of more
        (NVLINK, RankGroup(4, 4), 0, 688),
        (HOPPER, RankGroup(8, 8), 0, 688 + 8 * 32),
        (HOPPER, RankGroup(16, 8), 0, 16 * 18 + 170 + 8 * 32),
        (HOPPER, RankGroup(4, 1), 0, 16 * 20 + 170),
        (BUS, RankGroup(4, 4), 0, 4 * 18 + 42),
        (NVLINK, RankGroup(8, 8), 8, 688 + 7 * 32 * 14),
        (NVLINK, RankGroup(72, 72), 72, 688 + 7 * 32 * 14),
        (NVLINK, RankGroup(16, 8), 2, 16 * 18 + 170 + 2 * 2 * 14),
    ],
)
def test_a_communicator(device, group, peers, mib):
    assert communicator_bytes(group, peers, True, device) == mib * MIB


def test_sends_alone_make_no_rings():
    assert communicator_bytes(RankGroup(8, 8), 8, False, NVLINK) == (256 + 7 * 32 * 14) * MIB
    assert communicator_bytes(RankGroup(4, 1), 2, False, NVLINK) == 170 * MIB  # one buffer for all


def test_one_gpu_has_a_context_alone():
    assert outside_of(job(1), NVLINK).parts == {"CUDA context": 100 * MIB, "NCCL": 0}
    assert outside_of(job(4, strategy="single"), NVLINK).parts["NCCL"] == 0


def test_a_cpu_has_nothing_outside():
    assert outside_of(job(8), resolve_device("cpu")).parts == {}
    none = outside_of(job(8), resolve_device("cpu"))
    assert (none.total, none.fraction, none.words()) == (0, None, "")


@pytest.mark.parametrize(
    ("axes", "mib"),
    [
        ({}, 688),  # dp_shard is all ranks
        ({"dp_replicate": 2}, 544 + 544 + 688),
        ({"tp": 2}, 544 + 544 + 688),
        ({"strategy": "ddp"}, 688),
        ({"cp": 2}, 688 + 544),  # dp_shard and cp shard together
        ({"cp": 4, "tp": 1}, 688 + 688),
        ({"ep": 2}, 688 + 256 + 32 * 14 + 544),
    ],
)
def test_each_axis_has_a_communicator_and_all_ranks_have_one(axes, mib):
    assert outside_of(job(4, **axes), NVLINK).parts["NCCL"] == mib * MIB


def test_the_share_that_leaves_room_is_rounded_down():
    for outside, fraction in ((100, 0.9), (101, 0.89), (2000, 0.0)):
        assert Outside({"CUDA context": outside}, 1000).fraction == fraction
    assert Outside({"CUDA context": 512 * MIB, "NCCL": 0}, 1 << 34).words() == (
        "Of the GPU's 16.0 GiB, 512 MiB are outside of torch's allocator (CUDA context 512); "
        "torch.cuda.set_per_process_memory_fraction(0.96) leaves them room. By default 5 % stay free, because predictions "
        "are off; --memory changes it."
    )


def test_the_default_limit_leaves_a_twentieth_and_what_is_outside():
    assert step_limit(NVLINK) == 1900 * MIB and default_limit(job(1), NVLINK) == (1900 - 100) * MIB
    assert default_limit(job(4), NVLINK) == (1900 - 788) * MIB
    assert default_limit(job(4), replace(NVLINK, memory_bytes=500 * MIB)) == 1


def test_devices_have_the_bytes_that_torch_reports():
    """Of out-of-memory messages; a data sheet's 80 GB are neither 80 GiB nor what a driver leaves."""
    for name, least, most in (("h100-80gb", 79.1, 79.3), ("rtx-4090", 23.5, 23.7), ("b200", 178.3, 178.4)):
        assert least <= resolve_device(name).memory_bytes / 2**30 <= most
    for name in set(known_devices()) - {"cpu"}:
        assert resolve_device(name).sources["memory"]


@pytest.fixture(scope="module")
def query() -> PlanQuery:
    asked = Job.of(world_size=2, gpu=NVLINK)
    return Step(Text(1), asked, lambda batch, length: (text_batch(batch, length), ""), 1, 32).query()


def test_the_verdict_falls_with_it(query):
    roomy = make_report(query, ["50%"])
    assert roomy.limit == (1900 - 644) * MIB and roomy.best is not None and "are outside" not in roomy.text()
    assert roomy.to_dict()["outside_bytes"] == {"CUDA context": 100 * MIB, "NCCL": 544 * MIB}
    least = min(row.need.bytes for row in roomy.rows)
    # The context, a communicator of two, and all but a byte of the step.
    part = copy(query.stages[0].part)
    part.device = replace(NVLINK, memory_bytes=math.ceil((644 * MIB + least) / 0.95) - 2)
    tight = make_report(replace(query, stages=(replace(query.stages[0], part=part),)), ["50%"])
    assert least - 3 < tight.limit < least and tight.best is None and "are outside" in tight.text()


def test_a_plan_takes_the_memory_that_there_is_where_reserved_bytes_hardly_fall(monkeypatch):
    query = _query(Job.of(world_size=2))
    low, high = (peak_of(query, query.uniform(mode)).total for mode in ("full", "none"))

    def need_of(query, choices, peaks, limit):
        return Need(high + (max(peak.total for peak in peaks.values()) - high) // 4, RESERVED)

    looks = Mock(side_effect=need_of)
    monkeypatch.setattr(budget_search, "verdict", looks)
    limit = high - (high - low) // 8
    _, peak, need, _ = budget_search.plan_within(query, limit)
    assert 0.97 * limit < need.bytes <= limit and low < peak.total and looks.call_count < 6


def test_a_search_has_the_limit_of_each_job():
    device = replace(NVLINK, memory_bytes=1500 * MIB)
    one, two, four = job(1, gpu=device), job(2, gpu=device), job(4, gpu=device, tp=2)
    question = Question(one, gpus=4, seq_len=32, limit=step_limit(device), is_default_limit=True)
    assert [question.limit_of(each) for each in (one, two)] == [(1425 - 100) * MIB, (1425 - 644) * MIB]
    assert question.limit_of(four) == 1 and replace(question, is_default_limit=False).limit_of(four) == 1425 * MIB


def test_fit_reports_what_is_beside_a_step():
    pins: dict[str, Any] = {"micro_batch": 1, "grad_accum": 1, "ac": "full", "loss": "model", "gpus": 2, "seq_len": 32}
    pins |= {
        "reshard_after_forward": [None],
        "dp_shard": 2,
        "cpu_offload": False,
        "sample": lambda rows: text_batch(rows, 32),
    }
    report = fit(Text(), gpu=replace(NVLINK, memory_bytes=math.ceil((644 + 68) * MIB / 0.95)), **pins)
    best = report.to_dict()["candidates"][0]
    assert best["outside_bytes"] == {"CUDA context": 100 * MIB, "NCCL": 544 * MIB} and best["memory_fraction"] == 0.14
    assert "of 68.0 MiB reserved" in report.verdict()
    assert "are outside" in report.text(explain=1)
