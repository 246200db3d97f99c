"""What is outside of torch's allocator: its parts, the share that leaves it room, and what it takes from a limit."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from nemo_like import Job
from nemo_like.models import text_batch
from nemo_like.planning.answers.outside_allocator import (
    Outside,
    communicator_bytes,
    default_limit,
    outside_bytes,
    outside_of,
)
from nemo_like.planning.devices import known_devices, resolve_device, step_limit
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.question import Question
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import make_report
from nemo_like.planning.roofline import RankGroup
from nemo_like.planning.what_if import Step
from tests.planning.queries import Text

pytest.importorskip("transformers")

MIB = 1 << 20
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
    assert outside_bytes(job(1), NVLINK) == {"CUDA context": 100 * MIB, "NCCL": 0}
    assert outside_bytes(job(4, strategy="single"), NVLINK)["NCCL"] == 0


def test_a_cpu_has_nothing_outside():
    assert outside_bytes(job(8), resolve_device("cpu")) == {}
    none = outside_of(job(8), resolve_device("cpu"))
    assert (none.total, none.fraction, none.words()) == (0, None, "")


def test_each_axis_has_a_communicator_and_all_ranks_have_one():
    assert outside_bytes(job(4), NVLINK)["NCCL"] == 688 * MIB  # dp_shard is all ranks
    assert outside_bytes(job(4, dp_replicate=2), NVLINK)["NCCL"] == (544 + 544 + 688) * MIB
    assert outside_bytes(job(4, tp=2), NVLINK)["NCCL"] == (544 + 544 + 688) * MIB
    assert outside_bytes(job(4, strategy="ddp"), NVLINK)["NCCL"] == 688 * MIB
    assert outside_bytes(job(4, cp=2), NVLINK)["NCCL"] == (688 + 544) * MIB  # dp_shard and cp shard together
    ring = outside_bytes(job(4, cp=4, tp=1), NVLINK)["NCCL"]
    assert ring == (688 + 688) * MIB
    assert outside_bytes(job(4, ep=2), NVLINK)["NCCL"] == (688 + 256 + 32 * 14 + 544) * MIB


def test_the_share_that_leaves_room_is_rounded_down():
    assert Outside({"CUDA context": 100}, 1000).fraction == 0.9
    assert Outside({"CUDA context": 101}, 1000).fraction == 0.89
    assert Outside({"CUDA context": 2000}, 1000).fraction == 0.0
    assert Outside({"CUDA context": 512 * MIB, "NCCL": 0}, 1 << 34).words() == (
        "Outside of torch's allocator: 512 MiB (CUDA context 512); "
        "torch.cuda.set_per_process_memory_fraction(0.96) leaves it room."
    )


def test_the_default_limit_falls_where_a_tenth_is_not_enough():
    assert default_limit(job(1), NVLINK) == step_limit(NVLINK) == 1800 * MIB  # 100 of 200 MiB
    assert default_limit(job(4), NVLINK) == (2000 - 788) * MIB
    assert default_limit(job(4), replace(NVLINK, memory_bytes=500 * MIB)) == 1
    for name in known_devices():  # a tenth of every card of the table is enough for eight of them
        device = resolve_device(name)
        assert default_limit(job(8), device) == step_limit(device)


@pytest.fixture(scope="module")
def query() -> PlanQuery:
    asked = Job.of(world_size=2, gpu=NVLINK)
    return Step(Text(1), asked, lambda batch, length: (text_batch(batch, length), ""), 1, 32).query()


def with_memory(query: PlanQuery, size: int) -> PlanQuery:
    stage = query.stages[0]
    part = copy(stage.part)
    part.device = replace(NVLINK, memory_bytes=size)
    return replace(query, stages=(replace(stage, part=part),))


def test_the_verdict_falls_with_it(query):
    roomy = make_report(query, ["50%"])
    assert roomy.limit == (2000 - 644) * MIB and roomy.best is not None and "Outside" not in roomy.text()
    assert roomy.to_dict()["outside_bytes"] == {"CUDA context": 100 * MIB, "NCCL": 544 * MIB}
    least = min(row.need.bytes for row in roomy.rows)
    less = 644 * MIB + least - 1  # the context, a communicator of two, and all but a byte of the step
    tight = make_report(with_memory(query, less), ["50%"])
    assert tight.limit == least - 1 and tight.best is None and "Outside" in tight.text()


def test_a_search_has_the_limit_of_each_job():
    device = replace(NVLINK, memory_bytes=1500 * MIB)
    one, two, four = job(1, gpu=device), job(2, gpu=device), job(4, gpu=device, tp=2)
    question = Question(one, gpus=4, seq_len=32, limit=step_limit(device), is_default_limit=True)
    assert [question.limit_of(each) for each in (one, two)] == [1350 * MIB, (1500 - 644) * MIB]
    assert question.limit_of(four) == 1 and replace(question, is_default_limit=False).limit_of(four) == 1350 * MIB


def test_fit_reports_what_is_beside_a_step():
    pins: dict[str, Any] = {"micro_batch": 1, "grad_accum": 1, "ac": "full", "loss": "model", "gpus": 2, "seq_len": 32}
    pins |= {
        "reshard_after_forward": [None],
        "dp_shard": 2,
        "cpu_offload": False,
        "sample": lambda rows: text_batch(rows, 32),
    }
    report = fit(Text(), gpu=replace(NVLINK, memory_bytes=(644 + 68) * MIB), **pins)
    best = report.to_dict()["candidates"][0]
    assert best["outside_bytes"] == {"CUDA context": 100 * MIB, "NCCL": 544 * MIB} and best["memory_fraction"] == 0.09
    assert "of 68.0 MiB reserved" in report.verdict()
    assert "Outside" in report.text(explain=1)
