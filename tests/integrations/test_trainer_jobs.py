"""Jobs of trainers as their settings make them: checkpointing of the trainer's own, its report, its largest batches."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from nemo_like._util.live_bytes import LiveBytes
from nemo_like.integrations.accelerate_settings import AccelerateSettings
from nemo_like.integrations.trainer_batches import find_largest
from nemo_like.integrations.trainer_job import job_of_trainer, optimizer_of
from nemo_like.integrations.trainer_memory import ways_out
from nemo_like.integrations.transformers import plan_trainer
from nemo_like.options import DDP, FSDP2
from nemo_like.options.optimizers import TRAINER_OPTIMIZERS, TrainedParameter, optimizer_memory
from nemo_like.planning.devices import device_of
from tests.integrations.common import QUIET, tokenizer
from tests.integrations.test_trainer_memory import (
    GRPO,
    LENGTHS,
    Limited,
    counted,
    made_trainer,
    transformers,
    wide,
)
from tests.models import decoders


def test_checkpointing_of_the_trainer_itself_is_planned(tmp_path: Path) -> None:
    trainer = made_trainer("trainer", tmp_path, [400] * 12, wide, activation_checkpointing=True, max_steps=2)
    report = plan_trainer(trainer, what_if=False)
    assert report.best.ac == report.job.ac.mode == "full"
    assert report.answer.startswith("The trainer is set up with activation_checkpointing=True") and "'none'" in report.answer


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


def test_the_batch_of_pairs_has_the_widest_prompt_and_answer(tmp_path: Path) -> None:
    import datasets

    sizes = [(5, 90, 400), (3, 300, 10), (200, 150, 150)] + [(4, 4, 4)] * 5
    rows = [{name: " ".join(["w5"] * size) for name, size in zip(("prompt", "chosen", "rejected"), each)} for each in sizes]
    trainer = made_trainer("dpo", tmp_path, data=datasets.Dataset.from_list(rows))
    read = trainer.get_train_dataloader().dataset
    widest = max(len(row["prompt_ids"]) + len(row[name]) for row in read for name in ("chosen_ids", "rejected_ids"))
    assert widest > 400 and find_largest(trainer).batch["input_ids"].shape == (4, widest)


def test_the_batch_of_packed_rows_is_named_by_its_rows(tmp_path: Path) -> None:
    trainer = made_trainer(
        "sft", tmp_path, [100] * 40, packing=True, max_length=510, per_device_train_batch_size=1,
        padding_free=True, model=lambda: decoders.build("llama"),
    )  # fmt: skip
    longest = max(map(len, trainer.get_train_dataloader().dataset["input_ids"]))
    assert longest > 400 and find_largest(trainer).shape == f"1 x {longest}"


class Drawn:
    """A data set whose rows are made."""

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, at: int) -> dict[str, list[int]]:
        return {"input_ids": [5] * (400 if at == 2999 else 10), "labels": [5] * 10}


def test_rows_that_were_not_measured_are_named(tmp_path: Path) -> None:
    trainer = made_trainer("trainer", tmp_path, data=Drawn())
    largest = find_largest(trainer)
    assert largest.shape == "2 x 10" and "of 2,000 rows out of 3,000 that were measured" in largest.unknown


def test_a_collator_with_a_generator_goes_on_as_without_the_check(tmp_path: Path) -> None:
    def losses(check: bool) -> list[float]:
        collate = transformers.DataCollatorForLanguageModeling(masking_tokenizer(), seed=3)
        rows = [{"input_ids": [5] * length} for length in LENGTHS]
        trainer = made_trainer("trainer", tmp_path, check_memory=check, data=rows, collate=collate)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def masking_tokenizer() -> Any:
        words = tokenizer()
        words.mask_token = "w4"
        return words

    assert losses(True) == losses(False)


def evaluating(folder: Path, **options: Any) -> Any:
    """Return a trainer whose evaluation takes more than its steps."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    return made_trainer("trainer", folder, [40] * 8, wide, evaluated=[400] * 24, **often | options)


def test_the_plan_of_an_evaluation_has_the_outputs_that_wait(tmp_path: Path) -> None:
    trainer = evaluating(tmp_path)
    trainer.compute_metrics = lambda predicted: {}
    report = plan_trainer(trainer, what_if=False)
    assert report.evaluation_bytes > report.rows[0].plan.peak_bytes and "An evaluation takes" in report.answer
    with counted(trainer) as counter:
        trainer.train()
    assert -0.005 < report.evaluation_bytes / counter.peak - 1 < 0.01


def test_an_evaluation_that_runs_out_is_told_before_the_first_step(tmp_path: Path) -> None:
    trainer = evaluating(tmp_path, check_memory=True)
    report = plan_trainer(trainer, what_if=False)
    limit = report.evaluation_bytes * 9 // 10 - sum(p.nbytes for p in trainer.model.parameters())
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as error, Limited(limit):
        trainer.train()
    assert trainer.state.global_step == 0
    lines = str(error.value).splitlines()
    assert lines[2].startswith("Lower it by per_device_eval_batch_size=4 (")
    trainer = evaluating(tmp_path, check_memory=True, per_device_eval_batch_size=4)
    with Limited(limit):
        assert trainer.train().global_step == 2


@pytest.mark.parametrize("where", ["evaluation", "optimizer", "saving"])
def test_memory_that_runs_out_elsewhere_has_advice(tmp_path: Path, where: str) -> None:
    def runs_out(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 bytes.")

    trainer = evaluating(tmp_path, optim="sgd")
    trainer.create_optimizer()
    owner, name = {
        "evaluation": (trainer, "prediction_step"),
        "optimizer": (trainer.optimizer, "step"),
        "saving": (trainer, "_save"),
    }[where]
    setattr(owner, name, runs_out)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.save_model() if where == "saving" else trainer.train()
    first = "An evaluation" if where == "evaluation" else "A step"
    assert str(error.value).splitlines()[1].startswith(f"{first} of its largest batch takes ")
    assert str(error.value).count("largest batch") == 1


NAMES = [each.value for each in transformers.training_args.OptimizerNames]
# bitsandbytes' 8-bit kinds share tables of 1 KiB; torchao's is another form of the same.
COUNTED = [name for name in TRAINER_OPTIMIZERS if name != "adamw_torch_8bit"]


@pytest.mark.usefixtures("overrides")
@pytest.mark.parametrize("name", COUNTED)
def test_the_bytes_of_an_optimizer_are_those_that_it_makes(tmp_path: Path, name: str) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), optim=name, **QUIET)
    kind, keywords = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
    params = [torch.nn.Parameter(torch.randn(size)) for size in ((64, 100), (100, 64), (5000,), (80,))]
    optimizer = kind(params, **keywords)
    trained = [TrainedParameter(tuple(p.shape), p.numel(), p.element_size()) for p in params]
    memory = optimizer_memory(trained, TRAINER_OPTIMIZERS[name], device="cpu")
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        with LiveBytes() as counter:
            optimizer.step()
    for param, states in zip(params, memory.states):
        made = [t for key, t in optimizer.state[param].items() if isinstance(t, torch.Tensor) and "qmap" not in key]
        assert sorted(t.nbytes for t in made) == sorted(states) or sum(t.nbytes for t in made) == sum(states)
    assert counter.peak == pytest.approx(memory.step, abs=1024)


@pytest.mark.parametrize("name", sorted({*NAMES} - {*TRAINER_OPTIMIZERS}))
def test_an_optimizer_of_unknown_bytes_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"optim='{name}'"):
        optimizer_of(transformers.TrainingArguments(str(tmp_path), optim=name, **QUIET))


def test_optimizer_arguments_that_make_more_states(tmp_path: Path) -> None:
    def word(name: str, more: str) -> str:
        return optimizer_of(transformers.TrainingArguments(str(tmp_path), optim=name, optim_args=more, **QUIET))

    assert word("sgd", "momentum=0.9") == "sgd-momentum"
    with pytest.raises(NotImplementedError, match=r"optim_args='momentum=0\.9'"):
        word("rmsprop", "momentum=0.9")


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch"])
def test_lighter_states_are_offered(tmp_path: Path, name: str) -> None:
    trainer = made_trainer("trainer", tmp_path, LENGTHS, wide, optim=name)
    assert any(line.startswith("Lower it by optim='adamw_bnb_8bit'") for line in ways_out(trainer, *trainer.planned_job()))


def test_a_vllm_in_the_process_takes_its_share(tmp_path: Path) -> None:
    trainer = made_trainer("grpo", tmp_path, **GRPO)
    limit = plan_trainer(trainer, what_if=False).limit
    device = device_of(job_of_trainer(trainer))
    trainer.args.use_vllm = True  # behind the constructor, which looks for the package
    share = int(trainer.args.vllm_gpu_memory_utilization * device.memory_bytes)
    assert plan_trainer(trainer, what_if=False).limit == limit - share
    assert "vLLM alone takes" in ways_out(trainer, *trainer.planned_job())[0]
    trainer.args.vllm_enable_sleep_mode = True
    assert plan_trainer(trainer, what_if=False).limit == limit


def test_a_sample_of_the_callers_is_planned(tmp_path: Path) -> None:
    sample = {name: torch.ones(1, 900, dtype=torch.int64) for name in ("input_ids", "labels")}
    trainer = made_trainer("trainer", tmp_path, [10] * 8, sample=sample)
    assert plan_trainer(trainer, what_if=False).tokens == 900
    assert not any("per_device_train_batch_size" in line for line in ways_out(trainer, *trainer.planned_job()))


def test_settings_of_fsdp2_are_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_like.integrations import trainer_job

    monkeypatch.setattr(trainer_job, "world_size", lambda: 2)
    trainer, told = made_trainer("trainer", tmp_path), AccelerateSettings(shards=FSDP2(reshard_after_forward=False))

    def job(**more: Any) -> Any:
        monkeypatch.setattr(trainer_job, "accelerate_settings", lambda: replace(told, **more))
        return job_of_trainer(trainer)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    made = job(policy=policy, units=("LlamaDecoderLayer",))
    assert made.fsdp.reshard_after_forward is False
    assert (made.param_dtype, made.precision.dtypes["reduce_dtype"]) == (torch.bfloat16, torch.float32)
    with pytest.raises(NotImplementedError, match="fsdp_transformer_layer_cls_to_wrap is LlamaMLP"):
        job(units=("LlamaMLP",))
    with pytest.raises(NotImplementedError, match="fsdp_ignored_modules"):
        job(not_planned="fsdp_ignored_modules, whose parameters are whole on each rank")


def test_settings_of_ddp_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_like.integrations import trainer_job

    monkeypatch.setattr(trainer_job, "world_size", lambda: 2)
    trainer = made_trainer("trainer", tmp_path, ddp_bucket_cap_mb=3)
    assert job_of_trainer(trainer).ddp == DDP(True, 3, gradient_as_bucket_view=False)
    trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
    assert job_of_trainer(trainer).ddp == DDP(True, 3)


def test_changes_are_arguments_of_a_trainer(tmp_path: Path) -> None:
    trainer = made_trainer("trainer", tmp_path, LENGTHS, wide, optim="lion_32bit")
    full = next(row for row in plan_trainer(trainer, what_if=False).rows if row.ac == "full")
    report = plan_trainer(trainer, memory=full.plan.peak_bytes + 4096)
    assert "optim='lion_8bit'" in {change.change for change in report.what_if}


def test_checkpointing_of_every_other_layer_is_planned_as_more(tmp_path: Path) -> None:
    some = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}
    assert job_of_trainer(made_trainer("trainer", tmp_path, **some)).ac.mode == "none"
