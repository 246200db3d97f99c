"""What a report says besides bytes: predicted times, how far the device goes, what binds, and host memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from nemo_like import Job, OffloadConfig, PlanSearch, StepSpec, cli
from nemo_like.options import MemoryBudget
from nemo_like.options.optimizers import TrainedParameter
from nemo_like.planning.answers.seconds import step_seconds
from nemo_like.planning.devices import Device, resolve_device
from nemo_like.planning.planner import describe
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import PlanReport, make_report
from nemo_like.planning.roofline import OpSeconds, exposed_seconds, optimizer_seconds
from nemo_like.planning.what_if import fewest, gpu_counts, largest, least_need
from tests.planning.queries import Text, part_of

ROUND = Device("round", 10**9, {"half": 2e6, "single": 1e6}, {"half": 2e6, "single": 1e6}, 1e6, 1e5, "cpu", {})
"""A million of everything, so that numbers can be told by eye."""


TWO = Job.of(world_size=2)


def _query(batch: int = 2, tokens: int = 16, job: Job = TWO, **more: Any) -> PlanQuery:
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    sample = {"input_ids": ids, "labels": ids}
    gpu = more.pop("device", ROUND)
    return PlanQuery.of(Text(), sample, job.change(gpu=gpu, search=PlanSearch(**more)))


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return make_report(_query(), ["50%"], 1 << 40, tokens=32)


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
    one = _query()
    four = _query(job=Job.of(world_size=2, step=StepSpec(microbatches=4)))
    last = optimizer_seconds(one.stages[0].sharding.trained, "adamw", ROUND)
    parts = {}
    for mode in ("none", "full"):
        seconds = step_seconds(one, one.uniform(mode))
        parts[mode] = seconds.parts
        again = step_seconds(four, four.uniform(mode)).total
        assert again - last == pytest.approx(4 * (seconds.total - last))
        assert describe(one, one.uniform(mode), mode).step_seconds == seconds.total
    replay = describe(one, one.uniform("full"), "full").replay_seconds
    assert parts["full"]["replay"] == pytest.approx(replay) and "replay" not in parts["none"]
    layers = sum(part_of(one).problems[call.kind].forward_seconds for call in part_of(one).traced.calls)
    assert parts["none"]["forward"] == pytest.approx(layers) and parts["none"]["optimizer"] == last
    assert parts["none"]["head and embedding"] == one.stages[0].outside().seconds
    # The head's product, forward and twice in backward, is among what is around the layers.
    head = part_of(one).model.head.weight
    assert one.stages[0].outside().seconds > 3 * 2 * 32 * head.numel() / 1e6


def test_the_table_has_milliseconds_and_tokens_per_second(report: PlanReport) -> None:
    for row in report.rows:
        assert report.tokens_per_second(row) == pytest.approx(32 / row.plan.step_seconds)
    head, none = report.table().text().splitlines()[:2]
    assert head.split() == ["ac", "saved", "peak", "recompute", "slower", "ms", "tokens/s", "fits", "peak", "at"]
    assert float(none.split()[7].replace(",", "")) == pytest.approx(1000 * report.rows[0].plan.step_seconds, rel=0.01)
    without = make_report(_query(), ["50%"], 1 << 40)
    assert "tokens/s" not in without.text() and without.tokens_per_second(without.rows[0]) is None


def test_the_largest_batch_is_the_last_that_fits() -> None:
    needs = {batch: least_need(_query(batch), 1 << 40) for batch in (1, 2, 3, 5, 6)}
    asked: list[int] = []

    def need(batch: int) -> int:
        asked.append(batch)
        return needs.get(batch) or needs.setdefault(batch, least_need(_query(batch), 1 << 40))

    for limit, most in ((needs[5], 5), (needs[6] - 1, 5), (needs[1], 1), (needs[1] - 1, 0)):
        for start in (1, 3):
            asked.clear()
            assert largest(need, start, limit, 100) == most, (limit, start)
            assert len(asked) <= 5
    assert largest(need, 1, needs[6], 5) == 5  # no more than are looked for
    assert largest(need, 6, needs[6], 6) == 6


@pytest.mark.parametrize(("limit", "step", "found"), [(1000, 1, 333), (1000, 128, 256), (2, 1, 0), (10**9, 7, 994)])
def test_the_largest_multiple_is_found_with_few_probes(limit: int, step: int, found: int) -> None:
    asked: list[int] = []
    assert largest(lambda size: asked.append(size) or 3 * size, 64, limit, 1000, step) == found
    assert len(asked) <= 6


def test_the_fewest_gpus_are_the_first_that_fit() -> None:
    job = Job.of(tp=2)
    counts = gpu_counts(job, per_host=8)
    assert counts[:6] == [2, 4, 6, 8, 16, 24]
    for count in (2, 6, 8, 24, 4096):
        assert fewest(lambda n: 2**30 // n, counts, 2**30 // count) == count
    assert fewest(lambda n: 10, counts, 9) is None


def test_the_speed_of_one_device_is_what_all_make_by_their_number(report: PlanReport) -> None:
    """Ranks of tp, cp and pp share the tokens of one micro-batch."""
    alone = report.tokens_per_second(report.best)
    assert alone is not None
    for axes in ({"tp": 2}, {"cp": 2}):
        shared = replace(report, job=Job.of(world_size=2, **axes))
        assert shared.tokens_per_second(report.best) == pytest.approx(alone / 2)


def test_a_narrow_screen_has_fewer_columns_and_names_them(report: PlanReport) -> None:
    text = report.text(width=60)
    assert all(len(line) <= 60 for line in text.splitlines() if not line.startswith(("Paste", "Fits")))
    assert "Not shown at this width:" in text and "peak at" in text and "--wide" in text
    assert report.text(width=200).count("Not shown") == 0
    assert str(report).splitlines()[0] == report.verdict()


@pytest.mark.few(1)
@pytest.mark.parametrize("memory", [1 << 14, 1 << 15, 1 << 40])
def test_no_more_host_memory_is_planned_with_than_there_is(memory: int) -> None:
    query = _query(device=replace(ROUND, host_link=1e12), host=True, host_memory=memory)
    rows = make_report(query, ["60%", "40%", "20%"], 1 << 40).rows
    assert max(row.host_bytes for row in rows) <= memory
    assert (max(row.host_bytes for row in rows) > 1 << 15) == (memory == 1 << 40)


def test_what_an_offload_moves_takes_time_and_host_memory() -> None:
    job = Job.of(world_size=2, offload=OffloadConfig("boundary", min_bytes=1))
    slow = _query(job=job, device=replace(ROUND, host_link=1.0))
    choices = slow.uniform("full")
    moved = slow.stages[0].moved(choices[0])
    forward = [part_of(slow).problems[call.kind].forward_seconds for call in part_of(slow).traced.calls]
    waits = sum(exposed_seconds(*pair, slow.device) for pair in zip(moved, forward))
    assert waits == pytest.approx(sum(2 * size - 3 * one for size, one in zip(moved, forward) if size))
    plain = describe(slow, choices, "full").replay_seconds - sum(choice.replay_seconds for choice in choices[0])
    assert plain == pytest.approx(waits)
    for memory in (sum(moved) - 1, sum(moved)):
        limited = slow.under(replace(slow.job, search=replace(slow.job.search, host_memory=memory)))
        full = make_report(limited, ["50%"], 1 << 40).rows[1]
        assert full.host_bytes == sum(moved) and full.fits == (memory == sum(moved))
    capped = _query(job=replace(job, offload=replace(job.offload, host_budget_bytes=moved[0])))
    assert capped.stages[0].moved(choices[0]) == [moved[0]] + [0] * (len(moved) - 1)


def test_a_budget_that_nothing_meets_still_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "tests.planning.queries:Text", "--gpu", "cpu", "--seq-len", "64", "--no-what-if"]
    assert cli.main([*words, "--budget", "10KiB", "--budget", "50%"]) == 1
    out, err = capsys.readouterr()
    assert "\nnone " in out and "\n50% " in out and out.startswith("Fits without checkpointing, ac='none': ")
    assert "Budget '10KiB'" in err and "the least that any plan peaks at" in err


def test_the_json_says_model_device_and_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --model llama-tiny --gpu h100 --world-size 4 --dp-replicate 2 --seq-len 64 --batch-size 2"
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
        "gpu": "'h100'", "world_size": "4", "search": "PlanSearch(host_memory=1073741824)",
    }  # fmt: skip
    for row in body["rows"]:
        assert row["tokens_per_second"] == pytest.approx(128 / row["step_seconds"])
        assert "host_bytes" in row
    changes = {change["change"]: change for change in body["what_if"]}
    assert {"twice the sequence", "half the GPUs", "loss='chunked'", "optimizer='adamw-8bit'"} <= set(changes)
    assert changes["twice the sequence"]["step_seconds"] > body["rows"][0]["step_seconds"]
    assert (
        MemoryBudget.parse("auto").device_share is not None
        and body["limit_bytes"] < resolve_device("h100").memory_bytes
    )
