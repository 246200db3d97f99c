"""TRL's `DPOTrainer` and `GRPOTrainer` on real CPU training runs: the weights are the same, bit for bit.

Both call the model more than once before a backward: a reference (another model, or the adapter switched off) and, for
GRPO, `generate` in between.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.integrations import ActivationOffloadingMixin
from nemo_like.losses import chunked_log_probs
from nemo_like.losses.model_loss import computes_in_chunks
from nemo_like.options import OffloadConfig
from tests.checks import assert_bitwise, same, seeded
from tests.integrations.common import QUIET, WORDS, regions, tokenizer, weights
from tests.models import decoders

trl = pytest.importorskip("trl", reason="the extra 'hosts' is not installed")
transformers = pytest.importorskip("transformers")

from nemo_like.integrations.transformers import CheckpointingArguments, CheckpointingMixin  # noqa: E402


@dataclass
class DPOArguments(CheckpointingArguments, trl.DPOConfig):
    """What a user writes, as the next ones are."""


@dataclass
class GRPOArguments(CheckpointingArguments, trl.GRPOConfig):
    """For GRPO."""


class DPOTrainer(CheckpointingMixin, ActivationOffloadingMixin, trl.DPOTrainer):
    """With both mixins."""


class GRPOTrainer(CheckpointingMixin, ActivationOffloadingMixin, trl.GRPOTrainer):
    """With both mixins."""


KINDS = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, DPOTrainer, DPOArguments),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, GRPOTrainer, GRPOArguments),
}


def _rows(kind: str) -> Any:
    import datasets

    draw = torch.Generator().manual_seed(0)

    def words(least: int) -> str:
        count = least + int(torch.randint(5, (1,), generator=draw))
        return " ".join(WORDS[i] for i in torch.randint(4, decoders.VOCAB, (count,), generator=draw).tolist())

    columns = ("prompt", "chosen", "rejected") if kind == "dpo" else ("prompt",)
    rows = [{name: words(3) if name == "prompt" else " " + words(3) for name in columns} for _ in range(8)]
    return datasets.Dataset.from_list(rows)


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(word in ("w10", "w20", "w30") for word in text.split()) + len(text) % 3) for text in completions]


def _train(
    folder: Path, kind: str, bare: bool, lora: bool = False, sample: Any = None, reference: bool = False,
    kind_of_trainer: Any = None, **settings: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    theirs, their_arguments, ours, our_arguments = KINDS[kind]
    common: dict[str, Any] = dict(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2,
        weight_decay=0.1, max_grad_norm=0.5, logging_steps=1, activation_checkpointing=False, bf16=False, seed=5, beta=0.1,
    ) | QUIET | settings  # fmt: skip
    more: dict[str, Any] = {}
    if kind == "grpo":
        # Its reference is the model without the adapter; another one it would load by name.
        common = dict(max_completion_length=6) | common
        common |= dict(num_generations=4, num_iterations=2, beta=0.1 if lora else 0.0)
        more["reward_funcs"] = _reward
    elif reference or not lora:
        more["ref_model"] = decoders.build("llama", seed=1)
    if lora:
        peft = pytest.importorskip("peft", reason="LoRA needs peft")
        more["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.1)
    if sample is not None:
        more["ac_sample_input"] = sample
    kinds = (theirs, their_arguments) if bare else (kind_of_trainer or ours, our_arguments)
    torch.manual_seed(0)
    trainer = kinds[0](
        model=decoders.build("llama"), args=kinds[1](**common), train_dataset=_rows(kind),
        processing_class=tokenizer(), **more,
    )  # fmt: skip
    before = weights(trainer.model)
    seeded(trainer.train, seed=1)
    after = weights(trainer.model)
    assert sum(not torch.equal(before[name], value) for name, value in after.items()) > len(after) // 2
    return trainer, after


_references: dict[Any, dict[str, torch.Tensor]] = {}


def _alike(folder: Path, kind: str, lora: bool = False, reference: bool = False, **settings: Any) -> Any:
    """Return a trainer with our classes, which has trained the weights that TRL's own trains, bit for bit."""
    key = kind, lora, reference
    if key not in _references:
        _references[key] = _train(folder / "bare", kind, bare=True, lora=lora, reference=reference)[1]
    trainer, actual = _train(folder / "ours", kind, bare=False, lora=lora, reference=reference, **settings)
    assert_bitwise(actual, _references[key], settings)
    assert regions(trainer.model) > 0
    return trainer


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_no_weight_changes(tmp_path: Path, kind: str, lora: bool) -> None:
    _alike(tmp_path, kind, lora, ac="selective", offload=OffloadConfig(mode="saved", min_bytes=0))
    _alike(tmp_path, kind, lora, ac="full")


def test_a_chunked_loss_is_left_to_trl_which_has_one(tmp_path: Path, logs: pytest.LogCaptureFixture) -> None:
    logs.set_level("INFO", "nemo_like")
    trainer = _alike(tmp_path, "dpo", loss="chunked", ac="full")
    assert (
        "TRL's trainer takes log-probabilities in chunks already" in logs.text and "whole logits" not in logs.text
    )
    assert not computes_in_chunks(trainer.model)

    model = trainer.model.train()
    ids = decoders.batch(2, 9, seed=3)
    labels = ids.masked_fill(ids % 5 == 0, -100)
    theirs = seeded(model, input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    torch.manual_seed(0)
    ours = chunked_log_probs(model.model(ids)[0], model.lm_head, labels, shift=True, chunk_tokens=4)[:, :-1]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_largest_batch_of_a_trainer_that_generates_is_tried(
    tmp_path: Path, logs: pytest.LogCaptureFixture
) -> None:
    logs.set_level("INFO", "nemo_like")
    _alike(tmp_path, "grpo", ac="full", check_memory=True)
    assert ", with the longest prompt and completions" in logs.text


def test_grpo_within_a_budget(tmp_path: Path) -> None:
    _alike(tmp_path, "grpo", ac="50%")
    with pytest.raises(ValueError, match=r"no max_completion_length.*pass ac_sample_input="):
        _train(tmp_path, "grpo", bare=False, ac="50%", max_completion_length=None)


def test_grpo_within_a_budget_of_the_sample_that_the_caller_gives(tmp_path: Path) -> None:
    sample = {"input_ids": decoders.batch(4, 13, seed=0), "attention_mask": torch.ones(4, 13, dtype=torch.int64)}
    _alike(tmp_path, "grpo", ac="50%", sample=sample)


def test_dpo_of_an_adapter_against_another_model(tmp_path: Path) -> None:
    for ac in ("full", "50%"):
        trainer = _alike(tmp_path, "dpo", lora=True, reference=True, ac=ac)
        assert regions(trainer.ref_model) == 0, "no backward goes through it"
    _, without = _train(tmp_path / "without", "dpo", bare=True, lora=True)
    assert not same(without, _references["dpo", True, True]), "the reference is another"


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in trl.__all__
        if name.endswith("Config") and "learning_rate" in vars(getattr(trl, name)).get("__dataclass_fields__", ())
    ],
)
def test_no_field_of_trls_arguments_is_hidden(tmp_path: Path, name: str) -> None:
    theirs = getattr(trl, name)
    mixed: Any = dataclass(type("Mixed", (CheckpointingArguments, theirs), {}))
    made = mixed(output_dir=str(tmp_path), bf16=False, use_cpu=True, ac="full", offload="saved")
    plain = theirs(output_dir=str(tmp_path), bf16=False, use_cpu=True)
    same = {field.name for field in fields(theirs)} - {"logging_dir"}
    assert {key: getattr(made, key) for key in same} == {key: getattr(plain, key) for key in same}
    assert (made.ac, made.offload) == ("full", "saved")


def test_two_settings_of_offloading_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="offload is 'saved' and activation_offloading is True"):
        _train(tmp_path, "dpo", bare=False, offload="saved", activation_offloading=True)


def test_the_documented_classes_train_dpo_without_trls_offloader(tmp_path: Path) -> None:
    class Documented(CheckpointingMixin, trl.DPOTrainer):
        """As the page has it."""

    _alike(tmp_path, "dpo", kind_of_trainer=Documented, ac="selective")


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_trls_default_of_checkpointing_beside_ours_is_refused(tmp_path: Path, kind: str) -> None:
    assert KINDS[kind][1](output_dir=str(tmp_path), bf16=False, use_cpu=True).activation_checkpointing is True
    with pytest.raises(ValueError, match="activation_checkpointing=True in the training arguments and ac="):
        _train(tmp_path, kind, bare=False, ac="full", activation_checkpointing=True)
