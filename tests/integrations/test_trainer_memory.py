"""The largest batch of a Trainer's job, tried before the first step; its plan; and advice where memory runs out."""

import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing.plan import Plan
from tests.checks import assert_bitwise
from tests.integrations.common import QUIET, regions, tokenizer
from tests.models import decoders
from tests.models.tiny import made

trl = pytest.importorskip("trl", reason="the extra 'hosts' is not installed")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from nemo_like.integrations.trainer_batches import is_stream  # noqa: E402
from nemo_like.integrations.transformers import (  # noqa: E402
    CheckpointingArguments,
    CheckpointingMixin,
    plan_trainer,
)


@dataclass
class Arguments(CheckpointingArguments, transformers.TrainingArguments):
    """What a user writes, as the next ones are."""


@dataclass
class SFTArguments(CheckpointingArguments, trl.SFTConfig):
    """For supervised fine-tuning."""


@dataclass
class DPOArguments(CheckpointingArguments, trl.DPOConfig):
    """For preferences."""


@dataclass
class RewardArguments(CheckpointingArguments, trl.RewardConfig):
    """For a model of rewards."""


@dataclass
class GRPOArguments(CheckpointingArguments, trl.GRPOConfig):
    """For GRPO."""


class Trainer(CheckpointingMixin, transformers.Trainer):
    """Without the mixin that offloads."""


class SFTTrainer(CheckpointingMixin, trl.SFTTrainer):
    """For supervised fine-tuning."""


class DPOTrainer(CheckpointingMixin, trl.DPOTrainer):
    """For preferences."""


class RewardTrainer(CheckpointingMixin, trl.RewardTrainer):
    """For a model of rewards."""


class GRPOTrainer(CheckpointingMixin, trl.GRPOTrainer):
    """For GRPO."""


def _collated(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in rows])

    return {"input_ids": padded("input_ids", 2), "labels": padded("labels", -100)}


def _rows(lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(4, decoders.VOCAB, (length,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": row, "labels": list(row)} for row in ids]


def _texts(lengths: Sequence[int], columns: Sequence[str]) -> Any:
    import datasets

    draw = torch.Generator().manual_seed(0)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(4, decoders.VOCAB, (count,), generator=draw).tolist())

    return datasets.Dataset.from_list([{name: words(length) for name in columns} for length in lengths])


LENGTHS = (5, 9, 24, 7, 31, 6, 8, 28, 5, 12, 11, 30)


def made_trainer(
    kind: str,
    folder: Path,
    lengths: Sequence[int] = LENGTHS,
    model: Callable[[], nn.Module] | None = None,
    ready: Callable[[], None] = lambda: None,
    data: Any = None,
    collate: Any = None,
    evaluated: Any = None,
    sample: Any = None,
    **more: Any,
) -> Any:
    """Return a trainer. `ready`: called between its arguments and itself; `data`, `collate`: instead of those made here.

    `evaluated`: lengths of rows to evaluate; `sample`: the caller's ``ac_sample_input``."""
    common: dict[str, Any] = dict(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=3, logging_steps=1, bf16=False, seed=5,
        optim="adamw_torch",
    ) | QUIET | more  # fmt: skip
    torch.manual_seed(0)
    built = decoders.build("llama") if model is None else model()
    if kind != "trainer":
        common["activation_checkpointing"] = False
    kinds = {
        "trainer": Arguments, "sft": SFTArguments, "dpo": DPOArguments, "reward": RewardArguments, "grpo": GRPOArguments,
    }  # fmt: skip
    arguments = kinds[kind](**common)
    ready()
    if kind == "trainer":
        rows = {"train_dataset": data or _rows(lengths), "eval_dataset": None if evaluated is None else _rows(evaluated)}
        return Trainer(built, arguments, data_collator=collate or _collated, ac_sample_input=sample, **rows)
    if kind == "sft":
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.1)
        return SFTTrainer(
            model=built, args=arguments, train_dataset=_texts(lengths, ["text"]), processing_class=tokenizer(),
            eval_dataset=None if evaluated is None else _texts(evaluated, ["text"]),
            peft_config=None if getattr(arguments, "packing", False) else lora,
        )  # fmt: skip
    if kind == "reward":
        config = built.config
        config.num_labels, config.pad_token_id = 1, 2
        scored = transformers.AutoModelForSequenceClassification.from_config(config)
        pairs = _texts(lengths, ["chosen", "rejected"])
        return RewardTrainer(model=scored, args=arguments, train_dataset=pairs, processing_class=tokenizer())
    if kind == "grpo":
        return GRPOTrainer(
            model=built, args=arguments, train_dataset=_texts(lengths, ["prompt"]), processing_class=tokenizer(),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        )  # fmt: skip
    return DPOTrainer(
        model=built, args=arguments, ref_model=decoders.build("llama", seed=1),
        train_dataset=data or _texts(lengths, ["prompt", "chosen", "rejected"]), processing_class=tokenizer(),
    )  # fmt: skip


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo"])
def test_the_largest_batch_first_changes_nothing(tmp_path: Path, kind: str, accumulated: int) -> None:
    widths: list[int] = []
    timed = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    runs = []
    for check in (False, True):
        trainer = made_trainer(kind, tmp_path, check_memory=check, gradient_accumulation_steps=accumulated)
        trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        trainer.train()
        log = [{name: value for name, value in entry.items() if name not in timed} for entry in trainer.state.log_history]
        runs.append(({name: value.detach() for name, value in trainer.model.state_dict().items()}, log))
        if not check:
            widths.clear()
    assert_bitwise(runs[1][0], runs[0][0])
    assert runs[1][1] == runs[0][1]
    # The first passes, one for each of two micro-batches, have the longest rows.
    assert set(widths[:accumulated]) == {max(widths)} and len(widths) >= 3 * accumulated + min(2, accumulated)


def test_a_stream_is_not_read_to_its_end() -> None:
    rows = pytest.importorskip("datasets").Dataset.from_list(_rows([5, 6]))
    assert not is_stream(rows) and not is_stream(_rows([5])) and is_stream(rows.to_iterable_dataset())


@contextmanager
def counted(trainer: Any) -> Iterator[LiveBytes]:
    """Count a trainer's bytes, its weights included."""
    tensors = {t.untyped_storage() for t in itertools.chain(trainer.model.parameters(), trainer.model.buffers())}
    with LiveBytes() as counter:
        yield counter
    counter.peak += sum(storage.nbytes() for storage in tensors)


def wide(vocabulary: int = decoders.VOCAB) -> nn.Module:
    return made(
        "Llama", vocab_size=vocabulary, hidden_size=64, intermediate_size=160, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip


EVALUATION: dict[str, Any] = {"lengths": [40] * 24, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
PACKED = {"packing": True, "max_length": 400}
GRPO = {"lengths": [150] * 24, "num_generations": 2, "max_completion_length": 40, "beta": 0.0}
# The first word of a name is the trainer. Jobs of docs/how-to/trainers.md, and others.
JOBS: dict[str, dict[str, Any]] = {
    "trainer": {},
    "trainer full": {"ac": "full"},
    "trainer own checkpointing": {"activation_checkpointing": True},
    "trainer bf16": {"bf16": True},
    "trainer fused": {"optim": "adamw_torch_fused"},
    "trainer adafactor": {"optim": "adafactor"},
    "trainer 8-bit": {"optim": "adamw_bnb_8bit", "model": lambda: wide(2000)},
    "trainer accumulating, rmsprop": {"gradient_accumulation_steps": 2, "optim": "rmsprop"},
    "trainer evaluation": EVALUATION | {"evaluated": [400] * 24},
    "sft": {},
    "sft full": {"ac": "full"},
    "sft packed": PACKED,
    "dpo": {},
    "reward": {},
    "grpo": GRPO,
}


def job_of(name: str, folder: Path, **more: Any) -> tuple[Any, int]:
    """Return the trainer of a job, and the bytes that are planned for the most of its steps and evaluations."""
    options = {"lengths": [400] * 24, "model": wide, "check_memory": True} | more
    trainer = made_trainer(name.split()[0], folder, **options)
    report = plan_trainer(trainer, what_if=False)
    row = next(row for row in report.rows if row.ac == report.job.ac.mode)
    return trainer, max(row.plan.peak_bytes, report.evaluation_bytes)


@pytest.mark.usefixtures("overrides")
@pytest.mark.parametrize("name", JOBS)
def test_the_plan_of_a_trainer_is_what_is_counted(tmp_path: Path, name: str) -> None:
    trainer, planned = job_of(name, tmp_path, **JOBS[name])
    with counted(trainer) as counter:
        trainer.train()
    assert -0.005 < planned / counter.peak - 1 < 0.01


class Limited(LiveBytes):
    """Memory of so many bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def changed(self, number: int, size: int) -> None:
        super().changed(number, size)
        if size and self.live > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")


def test_memory_that_runs_out_is_said_before_the_first_step_with_what_to_paste(tmp_path: Path) -> None:
    def run(limit: int, **options: Any) -> Any:
        trainer = made_trainer("trainer", tmp_path, [40] * 11 + [400], wide, check_memory=True, **options)
        with Limited(limit):
            trainer.train()
        return trainer

    trainer = made_trainer("trainer", tmp_path, [40] * 11 + [400], wide)
    none, _, full = (row.plan.peak_bytes for row in plan_trainer(trainer, what_if=False).rows[:3])
    limit = (none + full) // 2 - sum(p.nbytes for p in trainer.model.parameters())
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as error:
        run(limit)
    lines = str(error.value).splitlines()
    assert lines[1].startswith("A step of its largest batch takes ") and lines[2].startswith("Lower it by ac='full' (")
    pasted = eval(f"dict({lines[2].removeprefix('Lower it by ').partition(' (')[0]})")
    assert run(limit, **pasted).state.global_step == 3


@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo"])
def test_a_budget_is_planned_for_the_largest_batch(tmp_path: Path, kind: str) -> None:
    trainer = made_trainer(kind, tmp_path, ac="60%")
    assert regions(trainer.model) and trainer.train().global_step == 3


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans that trainers have made."""
    from nemo_like.integrations import transformers as integration

    every: list[Plan] = []
    before = integration.plan_for

    def planned(*args: Any, **kwargs: Any) -> Plan:
        every.append(before(*args, **kwargs))
        return every[-1]

    monkeypatch.setattr(integration, "plan_for", planned)
    return every


def test_the_plan_of_a_budget_has_the_longest_rows(tmp_path: Path, plans: list[Plan]) -> None:
    made_trainer("trainer", tmp_path, ac="60%")
    assert "(2, 31)" in plans[0].step["sample"]


def test_a_budget_leaves_room_for_a_reference_model(tmp_path: Path, plans: list[Plan]) -> None:
    trainer = made_trainer("dpo", tmp_path, model=wide)
    reference = sum(p.nbytes for p in trainer.ref_model.parameters())
    report = plan_trainer(trainer, what_if=False)
    full, none = (next(row.plan.peak_bytes for row in report.rows if row.ac == ac) for ac in ("full", "none"))
    assert report.limit == plan_trainer(made_trainer("trainer", tmp_path, model=wide), what_if=False).limit - reference
    made_trainer("dpo", tmp_path, model=wide, ac=f"{full + reference}B")
    assert full <= plans[0].peak_bytes <= full + 4096 < none
    with pytest.raises(ValueError, match="the reference model alone takes"):
        made_trainer("dpo", tmp_path, model=wide, ac=f"{reference}B")


def test_the_program_of_the_page_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "trainers.md").read_text(encoding="utf-8")
    program = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    decoders.build("llama").save_pretrained("my-model")
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    words.save_pretrained("my-model")
    turns = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7 w8 w9"}]
    Path("chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4, encoding="utf-8")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    module = types.ModuleType("program")
    monkeypatch.setitem(sys.modules, "program", module)  # where a dataclass looks for its annotations
    exec(compile(program, "program.py", "exec"), module.__dict__)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained("my-model"), "adapter")
