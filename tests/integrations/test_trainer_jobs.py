"""Jobs of trainers as their settings make them: checkpointing of the trainer's own, its report, its largest batches."""

import logging
from pathlib import Path

import pytest

from nemo_like.integrations.trainer_job import job_of_trainer
from nemo_like.integrations.transformers import plan_trainer
from tests.integrations.common import QUIET
from tests.integrations.test_trainer_memory import LENGTHS, counted, made_trainer, transformers, wide


def test_checkpointing_of_the_trainer_itself_is_planned(tmp_path: Path) -> None:
    trainer = made_trainer("trainer", tmp_path, [400] * 12, wide, activation_checkpointing=True, max_steps=2)
    report = plan_trainer(trainer, what_if=False)
    assert report.best.ac == report.job.ac.mode == "full"
    assert report.answer.startswith("The trainer is set up with activation_checkpointing=True") and "'none'" in report.answer
    with counted(trainer) as counter:
        trainer.train()
    assert counter.peak == pytest.approx(report.best.plan.peak_bytes, rel=0.01)


def test_the_line_to_paste_is_of_a_trainer(tmp_path: Path) -> None:
    trainer = made_trainer("trainer", tmp_path, max_steps=2, gradient_accumulation_steps=2)
    report = plan_trainer(trainer, what_if=False)
    lines = report.call(next(row for row in report.rows if row.ac == "full"))
    written = lines.removeprefix("Trainer: TrainingArguments(").partition(")")[0]
    arguments = eval(f"dict({written})")
    assert transformers.TrainingArguments(**arguments | QUIET).gradient_accumulation_steps == 2
    assert 'CheckpointingArguments: ac="full"' in lines and "fsdp" not in lines


def test_the_loss_of_liger_is_planned_in_chunks(tmp_path: Path) -> None:
    trainer = made_trainer("trainer", tmp_path)
    trainer.args.use_liger_kernel = True  # behind the constructor, which looks for the package
    assert job_of_trainer(trainer).loss is not None
    trainer.args.liger_kernel_config = {"fused_linear_cross_entropy": False}  # as TRL's trainers set it
    assert job_of_trainer(trainer).loss is None


def test_a_budget_is_answered_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo_like")
    made_trainer("trainer", tmp_path, LENGTHS, wide, ac="auto")
    assert "ac='auto' chose, by layers: 4 none. A step takes " in caplog.text
