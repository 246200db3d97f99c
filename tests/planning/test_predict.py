"""`predict` and its report: the three questions, predicted times, what binds, the printed call, and CPU memory."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import FSDP2, Job, OffloadConfig, Plan, PlanSearch, Precision, StepSpec, cli, parallelize, predict
from nemo_like._util.module_tree import bare_modules
from nemo_like.activation_checkpointing import is_checkpointed
from nemo_like.options import MemoryBudget
from nemo_like.options.optimizers import TrainedParameter
from nemo_like.planning.devices import Device, resolve_device
from nemo_like.planning.planner import describe, query_of
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import PlanReport, fewest, gpu_counts, largest, least_need, make_report
from nemo_like.planning.roofline import OpWork, exposed_seconds, optimizer_seconds, work_seconds
from tests.models.tiny import VOCAB, labelled
from tests.planning.queries import Text, part_of

ONE: dict[str, Any] = {"gpu": "cpu", "precision": None, "rows": ["60%"]}
SMALL: dict[str, Any] = ONE | {"seq_len": 512}


def _model() -> torch.nn.Module:
    """Of so few weights that its activations decide."""
    model = Text(6, 8)
    model.config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=1000)
    return model


def _need(**job: Any) -> Callable[[int, int], int]:
    """Bytes that full checkpointing needs for so many sequences of so many tokens."""

    def need(batch: int, length: int) -> int:
        sample = labelled(torch.zeros(batch, length, dtype=torch.long))
        return least_need(query_of(_model(), sample, Job.of(gpu="cpu", **job)), 1 << 40)

    return need


def test_a_report_names_the_fastest_that_fits() -> None:
    report = predict(_model(), **SMALL)
    assert [row.ac for row in report.rows] == ["none", "full", "selective", "60%"]
    assert report.best is report.rows[0] and report.verdict().startswith("Fits without checkpointing, ac='none': ")
    assert report.call() == "model = parallelize(model, strategy='fsdp2', ac='none')"
    limit = report.rows[1].need.bytes
    some = predict(_model(), **SMALL, memory=limit)
    assert some.best is not None and some.best.ac != "none" and some.limit == limit
    assert "slower than ac='none'" in some.verdict()
    none = predict(_model(), **SMALL, memory=min(row.need.bytes for row in some.rows) - 1)
    assert none.best is None and none.verdict().startswith("Does not fit: ac=")
    with pytest.raises(ValueError, match="Does not fit"):
        none.call()


def test_what_if_has_the_fastest_plan_that_then_fits() -> None:
    report = predict(_model(), gpu="h100-80gb", gpus=4, seq_len=64, rows=["60%"], what_if=True)
    changes = {change.change: change for change in report.what_if}
    assert set(changes) == {"twice the sequence", "half the GPUs"}, "it fits, so nothing needs to be lower"
    half = predict(_model(), gpu="h100-80gb", gpus=2, seq_len=64, rows=["60%"])
    assert half.best is not None
    assert changes["half the GPUs"].row.need == half.best.need
    assert changes["half the GPUs"].tokens_per_second == half.tokens_per_second(half.best)
    assert len(report.to_dict()["what_if"]) == len(report.what_if)
    assert report.what_if_table().text().splitlines()[1].startswith("as asked")
    tight = predict(_model(), gpu="h100-80gb", gpus=4, seq_len=64, rows=["60%"], what_if=True, memory=1 << 20)
    assert tight.best is None and "twice the sequence" not in (words := {change.change for change in tight.what_if})
    assert {"loss='chunked'", "optimizer='adamw-8bit'"} <= words


def test_the_largest_batch_is_what_its_report_is_of() -> None:
    report = predict(_model(), **SMALL, batch_size="max", memory=_need()(4, 512) - 1)
    assert report.answer == "Largest micro-batch: 3." and report.tokens == 512 * 3
    assert report.text().startswith(f"{report.answer} On cpu in fp32.\nFits with ac=")


def test_the_longest_sequence_and_the_fewest_gpus() -> None:
    need = _need()
    limit = need(1, 600)
    report = predict(_model(), **ONE, seq_len="max", memory=limit)
    assert report.tokens is not None and 600 <= report.tokens < 650
    assert need(1, report.tokens) <= limit < need(1, report.tokens + 1)
    assert report.answer == f"Longest sequence: {report.tokens} tokens."
    two = _need(world_size=2)(1, 512)
    assert two < need(1, 512)
    fewest = predict(_model(), **SMALL, gpus="min", memory=two)
    assert (fewest.answer, fewest.job.ranks) == ("Fewest GPUs: 2.", 2)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus": "min", "batch_size": "max"}, "one question each"),
        ({"gpus": 0}, "gpus is 0"),
        ({"seq_len": "most"}, "seq_len is 'most'"),
        ({"batch_size": "max", "memory": 1000}, "Not even a micro-batch of one sequence fits"),
        ({"seq_len": "max", "memory": 1000}, "Not even a sequence of"),
        ({"gpus": "min", "memory": 1000}, "No number of GPUs up to"),
        ({"batch_size": "max", "sample_input": torch.zeros(1, 4, dtype=torch.long)}, "sample_input has a size"),
        ({"job": Job.of(), "tp": 2}, "job is given, and so is tp"),
    ],
)
def test_a_wrong_question_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        predict(_model(), **({} if "job" in asked else {"gpu": "cpu"}) | {"seq_len": 32} | asked)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--gpus min --dp-replicate 2", "Fewest GPUs: 2."),
        ("--batch-size max --gpu cpu --memory 600KiB", "Largest micro-batch: "),
        ("--seq-len max --gpu cpu --memory 500KiB", "Longest sequence: "),
    ],
)
def test_the_command_answers_the_same_questions(words: str, answer: str, program: Any) -> None:
    line = f"plan --model tests.planning.queries:Text --seq-len 32 --ac 60% --no-what-if --json - {words}"
    body = json.loads(program(line).out)
    assert body["answer"].startswith(answer) and body["recommended"]


def own() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a model with its input."""
    layers = (torch.nn.TransformerEncoderLayer(8, 1, 16, batch_first=True) for _ in range(2))
    return torch.nn.Sequential(*layers), torch.randn(2, 4, 8)


def test_the_longest_sequence_is_not_looked_for_where_the_model_brings_its_input(
    program: Any,
) -> None:
    with pytest.raises(ValueError, match="has a sample input, whose length is not known"):
        predict(_model(), gpu="cpu", seq_len="max", sample_input=torch.zeros(1, 4, dtype=torch.long))
    assert (
        "has a sample input, whose length is not known"
        in program("plan --model tests.planning.test_predict:own --gpu cpu --seq-len max", 2).err
    )


@pytest.mark.parametrize("words", ["--gpus few", "--seq-len min", "--batch-size max --gpus min"])
def test_the_command_refuses_other_words(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert cli.main(f"plan --model llama-tiny {words}".split()) == 2
    except SystemExit as stop:  # argparse's own
        assert stop.code == 2
    assert "whole number" in (said := capsys.readouterr().err) or "one question each" in said


def test_the_longest_sequence_of_a_model_with_few_positions(tmp_path: Path, program: Any) -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    asked = f"plan --model {tmp_path} --gpu cpu --seq-len max --memory 64MiB --no-what-if"
    assert "Longest sequence: 32 tokens, all that its config has positions for." in program(asked).out


ROUND = Device("round", 10**9, {"half": 2e6, "single": 1e6}, {"half": 2e6, "single": 1e6}, 1e6, 1e5, "cpu", {})
"""A million of everything, so that numbers can be told by eye."""
TWO = Job.of(world_size=2)


def _query(batch: int = 2, tokens: int = 16, job: Job = TWO, **more: Any) -> PlanQuery:
    sample = labelled(torch.zeros(batch, tokens, dtype=torch.long))
    gpu = more.pop("device", ROUND)
    return PlanQuery.from_model(Text(), sample, job.change(gpu=gpu, search=PlanSearch(**more)))


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return make_report(_query(), ["50%"], 1 << 40, tokens=32)


def test_seconds_of_ops_are_the_larger_of_computing_and_moving() -> None:
    a, b = torch.ones(8, 16), torch.ones(16, 32)
    with OpWork() as timer:
        a @ b
    assert work_seconds(timer.work, ROUND)[0] == 2 * 8 * 16 * 32 / 1e6  # more than its 4 * (128 + 512 + 256) bytes
    with OpWork() as timer:
        (a + 1).t()
    assert work_seconds(timer.work, ROUND)[0] == 4 * 128 * 2 / 1e6  # read and written; a view is nothing
    with OpWork() as timer:
        a.bfloat16() @ b.bfloat16()
    assert work_seconds(timer.work, ROUND)[0] == pytest.approx((6 * (128 + 512) + 2 * 8 * 16 * 32 / 2) / 1e6)


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
        assert step_seconds(four, four.uniform(mode)).total - last == pytest.approx(4 * (seconds.total - last))
        assert describe(one, one.uniform(mode), mode).step_seconds == seconds.total
    replay = describe(one, one.uniform("full"), "full").recompute_seconds
    assert parts["full"]["replay"] == pytest.approx(replay) and "replay" not in parts["none"]
    layers = sum(part_of(one).problems[call.kind].forward_seconds for call in part_of(one).traced.calls)
    assert parts["none"]["forward"] == pytest.approx(layers) and parts["none"]["optimizer"] == last
    assert parts["none"]["head and embedding"] == one.stages[0].outside().seconds
    # The head's product, forward and twice in backward, is among what is around the layers.
    assert one.stages[0].outside().seconds > 3 * 2 * 32 * part_of(one).model.head.weight.numel() / 1e6


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
    counts = gpu_counts(Job.of(tp=2), per_node=8)
    assert counts[:6] == [2, 4, 6, 8, 16, 24]
    for count in (2, 6, 8, 24, 4096):
        assert fewest(lambda n: 2**30 // n, counts, 2**30 // count) == count
    assert fewest(lambda n: 10, counts, 9) is None


def test_the_speed_of_one_device_is_what_all_make_by_their_number(report: PlanReport) -> None:
    """Ranks of tp, cp and pp share the tokens of one micro-batch."""
    alone = report.tokens_per_second(report.best)
    assert alone is not None
    for axes in ({"tp": 2}, {"cp": 2}):
        assert replace(report, job=Job.of(world_size=2, **axes)).tokens_per_second(report.best) == pytest.approx(
            alone / 2
        )


def test_a_narrow_screen_has_fewer_columns_and_names_them(report: PlanReport) -> None:
    text = report.text(width=60)
    assert all(len(line) <= 60 for line in text.splitlines() if not line.startswith("Paste"))
    assert "Not shown at this width:" in text and "peak at" in text and "--wide" in text
    assert report.text(width=200).count("Not shown") == 0
    assert report.text(width=200).splitlines()[0] == f"{report.verdict()} On round in fp32."
    assert " ".join(str(report).split()).startswith(f"{report.verdict()} On round in fp32. Paste: ")


@pytest.mark.few(1)
@pytest.mark.parametrize("memory", [1 << 13, 1 << 14, 1 << 40])
def test_no_more_host_memory_is_planned_with_than_there_is(memory: int) -> None:
    query = _query(device=replace(ROUND, host_link=1e12), host=True, host_memory=memory)
    rows = make_report(query, ["60%", "40%", "20%"], 1 << 40).rows
    assert max(row.host_bytes for row in rows) <= memory
    assert (max(row.host_bytes for row in rows) > 1 << 14) == (memory == 1 << 40)


def test_what_an_offload_moves_takes_time_and_host_memory() -> None:
    job = Job.of(world_size=2, offload=OffloadConfig("boundary", min_bytes=1))
    slow = _query(job=job, device=replace(ROUND, host_link=1.0))
    choices = slow.uniform("full")
    moved = slow.stages[0].moved(choices[0])
    forward = [part_of(slow).problems[call.kind].forward_seconds for call in part_of(slow).traced.calls]
    waits = sum(exposed_seconds(*pair, slow.device) for pair in zip(moved, forward))
    assert waits == pytest.approx(sum(2 * size - 3 * one for size, one in zip(moved, forward) if size))
    plain = describe(slow, choices, "full").recompute_seconds - sum(choice.recompute_seconds for choice in choices[0])
    assert plain == pytest.approx(waits)
    for memory in (sum(moved) - 1, sum(moved)):
        limited = slow.under(replace(slow.job, search=replace(slow.job.search, host_memory=memory)))
        full = make_report(limited, ["50%"], 1 << 40).rows[1]
        assert full.host_bytes == sum(moved) and full.fits == (memory == sum(moved))
    capped = _query(job=replace(job, offload=replace(job.offload, host_budget_bytes=moved[0])))
    assert capped.stages[0].moved(choices[0]) == [moved[0]] + [0] * (len(moved) - 1)


def test_a_budget_that_nothing_meets_still_prints_the_table(program: Any) -> None:
    words = ["plan", "--model", "tests.planning.queries:Text", "--gpu", "cpu", "--seq-len", "64", "--no-what-if"]
    out, err = program([*words, "--ac", "10KiB", "--ac", "50%"], 1)
    assert "\nnone " in out and "\n50% " in out and out.startswith("Fits without checkpointing, ac='none': ")
    assert "Budget '10KiB'" in err and "the least that any plan peaks at" in err


def test_the_json_says_model_device_and_set_up(program: Any) -> None:
    words = "plan --model llama-tiny --gpu h100 --gpus 4 --dp-replicate 2 --seq-len 64 --batch-size 2"
    body = json.loads(
        program([*words.split(), "--json", "-", "--ac", "50%", "--offload", "boundary", "--host-memory", "1GiB"]).out
    )
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
    assert set(changes) == {"twice the sequence", "half the GPUs"}
    # The host launches as many kernels for twice the tokens, and a GPU is faster than it in a model this small.
    assert changes["twice the sequence"]["step_seconds"] == body["rows"][0]["step_seconds"]
    assert (
        MemoryBudget.parse("auto").device_share is not None
        and body["limit_bytes"] < resolve_device("h100").memory_bytes
    )


BATCH = labelled(torch.zeros(2, 16, dtype=torch.long))


def _report(job: Job) -> PlanReport:
    query = PlanQuery.from_model(Text(), BATCH, job.change(gpu=resolve_device("cpu")))
    return make_report(query, ["50%"], 1 << 40)


def _regions(model: nn.Module) -> dict[str, Any]:
    """What each checkpointed layer keeps."""
    return {
        name: getattr(module.forward.policy, "decisions", type(module.forward.policy).__name__)
        for name, module in bare_modules(model)
        if is_checkpointed(module)
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_every_printed_call_runs_its_row(precision: str | None) -> None:
    report = _report(Job.of(precision=precision))
    for row in report.rows:
        known = {"parallelize": parallelize, "FSDP2": FSDP2, "Precision": Precision, "Plan": Plan}
        known |= {"model": Text(), "batch": BATCH}
        exec(report.call(row), known)
        planned = {name: policy for name, policy in row.plan.policies().items() if policy is not None}
        if row.ac in ("none", "full", "selective"):
            assert len(_regions(known["model"])) == (0 if row.ac == "none" else 4)
        else:
            expected = {n: getattr(p, "decisions", type(p).__name__) for n, p in planned.items()}
            assert _regions(known["model"]) == expected
            assert expected or precision is not None


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job.of(world_size=2), "strategy='fsdp2', ac='50%', sample_input=batch"),
        (Job.of(world_size=8, dp_replicate=4), "dp_replicate=4"),
        (Job.of(world_size=2, step=StepSpec(optimizer="sgd")), ", optimizer='sgd', sample_input=batch"),
        (Job.of(world_size=2, step=StepSpec(microbatches=4, keeps_output=False)),
         ", step=StepSpec(microbatches=4, keeps_output=False), sample_input=batch"),
        (Job.of(world_size=2, precision=Precision("bf16", "bf16")), "param_dtype='bf16', reduce_dtype='bf16'"),
        (Job.of(strategy=FSDP2(False, 2, 2), world_size=2),
         "strategy=FSDP2(reshard_after_forward=False, forward_prefetch=2, backward_prefetch=2)"),
        (Job.of(world_size=2, search=PlanSearch(host=True)), "search=PlanSearch(host=True), sample_input=batch"),
    ],
)  # fmt: skip
def test_nothing_that_was_planned_for_is_left_out_of_the_call(job: Job, words: str) -> None:
    report = _report(job)
    row = next(row for row in report.rows if row.ac == "50%")
    assert words in report.call(row)


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [12, 1000])
def test_padding_is_named_where_it_is_much_of_what_a_rank_holds(ranks: int) -> None:
    report = _report(Job.of(world_size=ranks))
    exact = sum(p.numel() * p.element_size() for p in Text().parameters()) / ranks
    parameters = report.rows[0].plan.peak["parameters"]
    assert report.padding == pytest.approx(4 * (parameters - exact), abs=4)  # with a gradient and AdamW's two states
    assert report.to_dict()["padding_bytes"] == report.padding
    # Of each parameter four bytes, and twice as many of AdamW, with a counter of four for each.
    assert report.to_dict()["checkpoint_bytes"] == report.checkpoint_bytes
    assert report.checkpoint_bytes == 3 * parameters + 4 * len(list(Text().parameters()))
    least = min(row.plan.peak_bytes for row in report.rows)
    for size, said in ((least // 20, False), (least // 20 + 1, True)):
        assert (f"because {ranks} ranks do not divide" in replace(report, padding=size).text()) == said
