"""What a report says besides bytes: predicted times, how far the device goes, what binds, and host memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from nemo_like import Job, OffloadConfig, PlanSearch, StepSpec, cli
from nemo_like.activation_checkpointing.plan import ACTIVATIONS, GATHERED, STATE
from nemo_like.options import MemoryBudget
from nemo_like.options.optimizers import TrainedParameter
from nemo_like.planning.devices import Device, resolve_device
from nemo_like.planning.plan_advice import advice, binds
from nemo_like.planning.plan_report import make_report, table
from nemo_like.planning.plan_search import full_peak, largest_batch, least_gpus
from nemo_like.planning.planner import Planner
from nemo_like.planning.seconds import planned_seconds
from nemo_like.planning.step_time import OpSeconds, exposed_seconds, optimizer_seconds
from tests.models import decoders

ROUND = Device("round", 10**9, {"half": 2e6, "single": 1e6}, {"half": 2e6, "single": 1e6}, 1e6, 1e5, "cpu", {})
"""A million of everything, so that numbers can be told by eye."""


TWO = Job.of(world_size=2)


def _planner(batch: int = 2, tokens: int = 16, job: Job = TWO, **more: Any) -> Planner:
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    sample = {"input_ids": ids, "labels": ids}
    gpu = more.pop("device", ROUND)
    return Planner(decoders.build("llama"), sample, job.change(gpu=gpu, search=PlanSearch(skip=False, **more)))


def test_seconds_of_ops_are_the_larger_of_computing_and_moving() -> None:
    a, b = torch.ones(8, 16), torch.ones(16, 32)
    with OpSeconds(ROUND) as timer:
        a @ b
    assert timer.seconds == 2 * 8 * 16 * 32 / 1e6  # more than its 4 * (128 + 512 + 256) bytes
    with OpSeconds(ROUND) as timer:
        (a + 1).t()
    assert timer.seconds == 4 * 128 * 2 / 1e6  # read and written; a view is nothing
    with OpSeconds(ROUND) as timer:
        a.bfloat16() @ b.bfloat16()
    assert timer.seconds == pytest.approx((6 * (128 + 512) + 2 * 8 * 16 * 32 / 2) / 1e6)


@pytest.mark.parametrize(("name", "passes"), [("sgd", 3), ("sgd-momentum", 5), ("adamw-8bit", 4), ("adamw", 7)])
def test_an_optimizer_step_goes_over_its_bytes(name: str, passes: int) -> None:
    assert optimizer_seconds([TrainedParameter((n,), n, 4) for n in (150, 100)], name, ROUND) == passes * 1000 / 1e6


def test_a_step_is_its_microbatches_and_the_optimizer() -> None:
    one = _planner()
    four = _planner(job=Job.of(world_size=2, step=StepSpec(microbatches=4)))
    last = optimizer_seconds(one.sharding.trained, "adamw", ROUND)
    parts = {}
    for mode in ("none", "full"):
        seconds = planned_seconds(one, one.uniform(mode))
        parts[mode] = seconds.parts
        again = planned_seconds(four, four.uniform(mode)).total
        assert again - last == pytest.approx(4 * (seconds.total - last))
        assert (
            one.describe(one.uniform(mode), mode).step_seconds == one.step_seconds(one.uniform(mode)) == seconds.total
        )
    replay = one.describe(one.uniform("full"), "full").replay_seconds
    assert parts["full"]["replay"] == pytest.approx(replay) and "replay" not in parts["none"]
    layers = sum(one.problems[call.kind].forward_seconds for call in one.traced.calls)
    assert parts["none"]["forward"] == pytest.approx(layers) and parts["none"]["optimizer"] == last
    assert parts["none"]["head and embedding"] == one.outer().seconds
    # The head's product, forward and twice in backward, is among what is around the layers.
    head = one.model.lm_head.weight
    assert one.outer().seconds > 3 * 2 * 32 * head.numel() / 1e6


def test_the_table_has_milliseconds_and_tokens_per_second() -> None:
    report = make_report(_planner(), ["50%"], 1 << 40, tokens=32)
    for row in report.rows:
        assert report.tokens_per_second(row) == pytest.approx(32 / row.plan.step_seconds)
    head, none = table(report).splitlines()[:2]
    assert head.split() == ["ac=", "held", "peak", "at", "replay", "step", "ms", "tokens/s", "fits"]
    assert float(none.split()[-3].replace(",", "")) == pytest.approx(1000 * report.rows[0].plan.step_seconds, rel=0.01)
    without = make_report(_planner(), ["50%"], 1 << 40)
    assert "tokens/s" not in table(without) and without.tokens_per_second(without.rows[0]) is None


def test_the_largest_batch_is_the_last_that_fits() -> None:
    planners = {batch: _planner(batch) for batch in (1, 2, 3, 5, 6)}
    peaks = {batch: full_peak(planner) for batch, planner in planners.items()}
    made: list[int] = []

    def make(batch: int) -> Planner:
        made.append(batch)
        return planners.get(batch) or planners.setdefault(batch, _planner(batch))

    for limit, most in ((peaks[5], 5), (peaks[6] - 1, 5), (peaks[1], 1), (peaks[1] - 1, 0)):
        for start in (1, 3):
            made.clear()
            assert largest_batch(make, start, peaks[start], limit, 100) == most, (limit, start)
            assert len(made) <= 4
    assert largest_batch(make, 1, peaks[1], peaks[6], 5) == 5  # no more than are looked for
    assert largest_batch(make, 6, peaks[6], peaks[6], 5) == 6


def test_the_least_number_of_gpus_is_the_first_that_fits() -> None:
    planner, whole = _planner(), _planner(job=Job.of())
    peaks = {ranks: full_peak(_planner(job=Job.of(world_size=ranks))) for ranks in (2, 4, 8)}
    assert peaks[2] > peaks[4] > peaks[8]
    assert {ranks: full_peak(planner.on_ranks(ranks)) for ranks in peaks} == peaks
    for limit, least in ((peaks[8], 8), (peaks[4], 4), (peaks[4] - 1, 8), (full_peak(whole), 1), (10, None)):
        assert least_gpus(planner, lambda: whole, limit) == least


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("job", "shape", "kind", "said"),
    [
        (Job.of(world_size=2), (1, 4), STATE, "more ranks to shard over (now 2)"),
        (Job.of(), (1, 4), STATE, "more ranks to shard over (now 1)"),
        (Job.of(world_size=64), (8, 64), ACTIVATIONS, "a smaller micro-batch with more of them (now 1 per step)"),
        (Job.of(world_size=64, step=StepSpec(optimizer="sgd")), (1, 2), GATHERED, "tensor parallelism"),
    ],
)  # fmt: skip
def test_advice_is_for_what_binds(job: Job, shape: tuple[int, int], kind: str, said: str) -> None:
    planner = _planner(*shape, job=job)
    report = make_report(planner, ["50%"], 1000)
    assert report.best is None and binds(report) == kind
    assert said in advice(report, "batch")


def test_where_the_head_binds_the_output_and_the_loss_are_named() -> None:
    planner = _planner(8, 64)
    report = make_report(planner, ["50%"], full_peak(planner) - 1)
    rows = tuple(
        replace(row, plan=replace(row.plan, peak={"outside of layers": 1 << 30, "kept output": 1 << 29}))
        for row in report.rows
    )
    said = advice(replace(report, rows=rows), "batch")
    assert "Most of the peak: head." in said and "drops the output (" in said and "loss='chunked' (" in said


@pytest.mark.few(1)
@pytest.mark.parametrize("memory", [1 << 14, 1 << 15, 1 << 40])
def test_no_more_host_memory_is_planned_with_than_there_is(memory: int) -> None:
    planner = _planner(device=replace(ROUND, host_link=1e12), host=True, host_memory=memory)
    rows = make_report(planner, ["60%", "40%", "20%"], 1 << 40).rows
    assert max(row.host_bytes for row in rows) <= memory
    assert (max(row.host_bytes for row in rows) > 1 << 15) == (memory == 1 << 40)


def test_what_an_offload_moves_takes_time_and_host_memory() -> None:
    job = Job.of(world_size=2, offload=OffloadConfig("boundary", min_bytes=1))
    slow = _planner(job=job, device=replace(ROUND, host_link=1.0))
    choices = slow.uniform("full")
    moved = slow.moved(choices)
    forward = [slow.problems[call.kind].forward_seconds for call in slow.traced.calls]
    waits = sum(exposed_seconds(*pair, slow.device) for pair in zip(moved, forward))
    assert waits == pytest.approx(sum(2 * size - 3 * one for size, one in zip(moved, forward) if size))
    plain = slow.describe(choices, "full").replay_seconds - sum(choice.replay_seconds for choice in choices)
    assert plain == pytest.approx(waits)
    for memory in (sum(moved) - 1, sum(moved)):
        slow.host_memory = memory
        full = make_report(slow, ["50%"], 1 << 40).rows[1]
        assert full.host_bytes == sum(moved) and full.fits == (memory == sum(moved))
    capped = _planner(job=replace(job, offload=replace(job.offload, host_budget_bytes=moved[0])))
    assert capped.moved(choices) == [moved[0]] + [0] * (len(moved) - 1)


def test_a_budget_that_nothing_meets_still_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama-tiny", "--gpu", "cpu", "--seq-len", "64", "--no-skip", "--no-search"]
    assert cli.main([*words, "--budget", "1MiB", "--budget", "50%"]) == 1
    out, err = capsys.readouterr()
    assert "\nnone " in out and "\n50% " in out and "Recommended: ac='none'" in out
    assert "Budget '1MiB'" in err and "the least that any plan peaks at" in err


def test_the_json_says_model_device_and_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --model llama-tiny --gpu h100 --world-size 4 --dp-replicate 2 --seq-len 64 --batch-size 2 --no-skip"
    assert (
        cli.main([*words.split(), "--json", "-", "--budget", "50%", "--offload", "boundary", "--host-memory", "1GiB"])
        == 0
    )
    body = json.loads(capsys.readouterr().out)
    assert (body["model"], body["device"], body["input"], body["tokens"]) == (
        "llama-tiny",
        "h100-80gb",
        "2 x 64 tokens",
        128,
    )
    assert body["job"] == {
        "strategy": "'fsdp2'", "ac": "'none'", "dp_replicate": "2", "precision": "'bf16'", "offload": "'boundary'",
        "gpu": "'h100'", "world_size": "4", "search": "PlanSearch(skip=False, host_memory=1073741824)",
    }  # fmt: skip
    assert body["least_gpus"] == 1 and body["largest_batch"] > 2
    for row in body["rows"]:
        assert row["predicted_tokens_per_second"] == pytest.approx(128 / row["predicted_step_seconds"])
        assert "host_bytes" in row
    assert (
        MemoryBudget.parse("auto").device_share is not None
        and body["limit_bytes"] < resolve_device("h100").memory_bytes
    )
