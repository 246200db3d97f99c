"""Plans for a loss in chunks: budgets, the report's line, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import ChunkedLoss, Job, cli, parallelize
from nemo_like._util.log import forget_announcements
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from nemo_like.planning import BudgetError, plan_for
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import PlanReport, make_report
from nemo_like.planning.what_if import Step, what_if
from tests.checks import assert_bitwise, step
from tests.planning.queries import part_of

transformers = pytest.importorskip("transformers")

IDS = torch.randint(4096, (4, 96), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
CHUNKS = ChunkedLoss(chunk_tokens=16)


def wide() -> nn.Module:
    """A decoder whose logits are most of its step."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def _query(model: nn.Module, sample: Any = BATCH, loss: ChunkedLoss | None = None) -> PlanQuery:
    return PlanQuery.of(model, sample, Job.of(loss=loss, gpu=resolve_device("cpu")))


def test_a_budget_that_only_chunks_meet() -> None:
    plain, chunked = _query(wide()), _query(wide(), loss=CHUNKS)
    least, most = (peak_of(chunked, chunked.uniform(mode)).total for mode in ("full", "none"))
    assert least < most < peak_of(plain, plain.uniform("full")).total
    budget = f"{(least + most) // 2}B"
    options = dict(strategy="single", device="cpu", optimizer="adamw", sample_input=BATCH)
    with pytest.raises(BudgetError, match=r"loss='chunked' \([\d.]+MiB less\)"):
        parallelize(wide(), ac=budget, **options)
    model = parallelize(wide(), ac=budget, loss=CHUNKS, **options)
    assert any(isinstance(module, CheckpointWrapper) for module in model.modules())
    whole = parallelize(wide(), ac="none", loss=CHUNKS, strategy="single", device="cpu")
    assert_bitwise(step(model, **BATCH), step(whole, **BATCH))


def test_plan_for_takes_what_parallelize_takes() -> None:
    plans = {
        loss: plan_for(wide(), ac="1TiB", sample_input=BATCH, gpu="cpu", loss=loss) for loss in ("model", "chunked")
    }
    assert plans["chunked"].peak_bytes < plans["model"].peak_bytes
    asleep = plan_for(wide().eval(), ac="1TiB", sample_input=BATCH, gpu="cpu", loss="chunked")
    assert asleep.peak_bytes == plans["chunked"].peak_bytes  # a loaded model is in evaluation mode, and will train
    with pytest.raises(ValueError, match=r"loss is 'chunk'.*chunked"):
        plan_for(wide(), ac="1TiB", sample_input=BATCH, gpu="cpu", loss="chunk")
    with pytest.raises(ValueError, match="needs the output head"):
        plan_for(wide().model, ac="1TiB", sample_input={"input_ids": IDS}, gpu="cpu", loss="chunked")


def test_a_head_that_is_no_plain_linear_is_planned() -> None:
    model = wide()
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    assert _query(model, loss=CHUNKS).stages[0].outside().in_chunks


def test_logits_that_stay_whole_are_planned_whole_and_said(caplog: pytest.LogCaptureFixture) -> None:
    forget_announcements()
    plain, asked = _query(wide(), {"input_ids": IDS}), _query(wide(), {"input_ids": IDS}, CHUNKS)
    with caplog.at_level(logging.WARNING, "nemo_like"):
        assert peak_of(plain, plain.uniform("full")) == peak_of(asked, asked.uniform("full"))
    assert "gets whole logits, because it is called without labels" in caplog.text
    assert "loss='chunked'" not in _changes(plain, {"input_ids": IDS}, make_report(plain, ["50%"], 1 << 24))


def _changes(query: PlanQuery, sample: dict[str, torch.Tensor], report: PlanReport) -> dict[str, int]:
    """The bytes that each change of the job would need."""
    step = Step(part_of(query).whole, query.job, lambda batch, length: (sample, ""))
    return {change.change: change.row.need.bytes for change in what_if(step, query, report)}


def test_the_report_says_what_chunks_would_buy() -> None:
    plain, chunked = _query(wide()), _query(wide(), loss=ChunkedLoss())
    peaks = [peak_of(query, query.uniform("full")).total for query in (plain, chunked)]
    limit = peaks[1] + chunked.input_bytes
    report = make_report(plain, ["50%"], limit)
    assert report.best is None and report.verdict().startswith("Does not fit: ac='full', the least, takes ")
    sample = {"input_ids": IDS, "labels": IDS}
    bought = _changes(plain, sample, report)
    assert bought["loss='chunked'"] <= limit < bought["optimizer='adamw-8bit'"]
    asked = make_report(chunked, ["50%"], limit)
    assert asked.best is not None and "loss='chunked'" in asked.call()
    assert "loss='chunked'" not in _changes(chunked, sample, asked)
    sizes = make_report(_query(wide(), loss=CHUNKS), ["50%"], peaks[0])
    assert "loss=ChunkedLoss(chunk_tokens=16)" in sizes.call(sizes.rows[0])


@pytest.mark.long
def test_the_command_takes_the_word(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wide().save_pretrained(tmp_path)
    words = ["plan", "--model", str(tmp_path / "config.json"), "--seq-len", "384", "--json", "-", "--loss"]
    assert cli.main([*words, "chunked"]) == 0
    chunked = json.loads(capsys.readouterr().out)
    assert cli.main([*words, "model"]) == 0
    plain = json.loads(capsys.readouterr().out)
    full = [next(row for row in body["rows"] if row["ac"] == "full")["peak_bytes"] for body in (plain, chunked)]
    assert full[0] > full[1] and "loss='chunked'" in chunked["call"] and "chunked" not in plain["call"]
    assert cli.main([*words, "chunk"]) == 2
    assert "Did you mean 'chunked'" in capsys.readouterr().err
