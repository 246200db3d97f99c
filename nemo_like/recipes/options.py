"""Options of both jobs: their flags, their checks, and the job that follows."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from nemo_like._util.console import check_new_folder, check_writable, flag, tokens
from nemo_like._util.option_fields import AnyOptions, Condition, Options, option
from nemo_like._util.words import check_dtype_word
from nemo_like.flags import FLAGS, flags_on, job_of
from nemo_like.options import ADAMW, FLOAT8, parse_ac, parse_bytes
from nemo_like.options.parallel import BACKENDS
from nemo_like.options.step import SYNC
from nemo_like.recipes import JOBS

if TYPE_CHECKING:  # the help of a job needs no torch
    from nemo_like.job import Job

DEVICES = ("auto", *reversed(BACKENDS))
RATES = ("cosine", "linear", "constant")
# `finetune` has no --checkpoint-dir: it always writes checkpoints, to --output.
WITH_CHECKPOINTS = Condition("--checkpoint-dir", lambda options: getattr(options, "checkpoint_dir", "") is not None)
# By the part of a job: the option without which nothing reads the options of that part. `finetune` has no --strategy.
NEEDS = {
    "strategy": Condition("--strategy fsdp2", lambda options: getattr(options, "strategy", "fsdp2") == "fsdp2"),
    "cp": Condition("--cp above 1", lambda options: options.cp > 1),
    "pp": Condition("--pp above 1", lambda options: options.pp > 1),
}


def job_option(name: str, default: object = None, **more: Any) -> Any:
    """An `option` that is a field of the job, by its entry in `FLAGS`; `default`, `more`: other than there."""
    known = FLAGS[name]
    part, _, inside = known.field.partition(".")
    facts = {
        "choices": known.choices,
        "group": known.group,
        "least": known.least,
        "needs": None if inside in ("", "size") else NEEDS.get(part),
    }
    return option(known.default if default is None else default, known.help, known.kind, **facts | more)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, job_option))
def with_flags(command: str) -> Callable[[type[AnyOptions]], type[AnyOptions]]:
    """Return the decorator of a class of options that has all flags that `command` takes (see `Flag.on`)."""

    def decorate(cls: type[AnyOptions]) -> type[AnyOptions]:
        for name in [name for name in flags_on(command) if not hasattr(cls, name)]:
            known = FLAGS[name]
            cls.__annotations__[name] = known.kind.__name__ + (" | None" if known.default is None else "")
            setattr(cls, name, job_option(name))
        return dataclass(frozen=True, kw_only=True)(cls)

    return decorate


@dataclass(frozen=True, kw_only=True)
class SharedOptions(Options):
    """Options that both jobs have, alike."""

    device: str = option("auto", f"{' | '.join(DEVICES)}; auto is cuda where there is one", choices=DEVICES)
    schedule: str = option("cosine", f"learning rate after the warm-up: {' | '.join(RATES)}", choices=RATES)
    resume: str = option(
        "no",
        "go on from the last complete checkpoint: --resume needs one, --resume=auto starts again where there is none",
        choices=("no", "must", "auto"),
        nargs="?",
        const="must",
    )
    ac: str = job_option("ac", trainer="ac")
    cp: int = job_option("cp", trainer="cp")
    grad_accum: int = job_option("grad_accum", trainer="gradient_accumulation_steps")
    clip: float = option(1.0, "clip the gradient to this norm; 0 clips nothing", least=0, trainer="max_grad_norm")
    seed: int = option(0, "seed of new weights, data order and dropout", least=0, trainer="seed")
    eval_samples: int = option(64, "most held-out samples of an evaluation; 0 evaluates nothing", least=0)
    log_every: int = option(10, "steps between reports of the loss", least=1, trainer="logging_steps")
    save_every: int = option(
        100,
        "steps between checkpoints; the last step has one too",
        least=1,
        needs=WITH_CHECKPOINTS,
        trainer="save_steps",
    )
    keep: int = option(
        2,
        "complete checkpoints to keep; older ones are deleted",
        least=1,
        needs=WITH_CHECKPOINTS,
        trainer="save_total_limit",
    )


@with_flags("pretrain")
class PretrainOptions(SharedOptions):
    """Options of pretraining."""

    model: str = option("llama-tiny", "a preset, the path of a config.json, or module:function that returns a model")
    data: str | None = option(
        None,
        "text to train on: a file, a folder, JSON lines or Parquet with a column text (default: this Python's standard "
        "library)",
    )
    tokenizer: str = option(
        "bytes", "kind of token: bytes | bpe, byte pairs learned from the text (tokenizers)", choices=("bytes", "bpe")
    )
    vocab_size: int = option(
        1024,
        "tokens of --tokenizer bpe, which the model then has, too",
        least=1,
        needs=Condition("--tokenizer bpe", lambda options: options.tokenizer == "bpe"),
    )
    export: str | None = option(
        None,
        "at the end, write a folder here that transformers' from_pretrained opens, with --tokenizer bpe's tokenizer",
    )
    init: str = option(
        "host",
        "host: each rank builds all weights on the CPU | sharded: each rank makes only its shard (large models)",
        choices=("host", "sharded"),
    )
    strategy: str = job_option("strategy")
    loss: str = job_option("loss")
    precision: str = job_option("precision")
    optimizer: str = job_option("optimizer", choices=ADAMW)
    dp_replicate: int = job_option("dp_replicate")
    tp: int = job_option("tp")
    sequence_parallel: bool | None = option(
        None,
        "norms and residuals are split along the sequence, over the ranks of --tp (default: where the model's plan and "
        "--seq-len allow it)",
        group="parallelism",
        needs=Condition("--tp above 1", lambda options: options.tp > 1),
        action=argparse.BooleanOptionalAction,
    )
    pp: int = job_option("pp")
    pp_schedule: str = job_option("pp_schedule")
    seq_len: int = option(256, "tokens per sample", tokens, least=1)
    global_batch: int = option(8, "samples per step over all ranks and micro-batches", least=1)
    sync: str = option(
        "auto",
        "micro-batches of --grad-accum that reduce gradients over the ranks: every | last | auto: every one where whole "
        "gradients would take over a quarter of the device",
        choices=("auto", *SYNC),
        group="training",
        needs=Condition("--grad-accum above 1", lambda options: options.grad_accum > 1),
    )
    steps: int = option(200, "steps of the whole run, those before a resume included", least=1)
    lr: float = option(3e-3, "peak learning rate of AdamW", least=0)
    warmup_steps: int | None = option(
        None, "steps of linear warm-up (default: 20, or all of fewer --steps)", int, least=0
    )
    lr_floor: float = option(
        0.1,
        "learning rate at the last step, as a share of the peak",
        least=0,
        needs=Condition("another --schedule", lambda options: options.schedule != "constant"),
    )
    weight_decay: float = option(0.1, "AdamW's weight decay, on parameters with two dims or more", least=0)
    beta1: float = option(0.9, "AdamW's first decay rate", least=0, below=1)
    beta2: float = option(0.95, "AdamW's second decay rate", least=0, below=1)
    eval_every: int = option(50, "steps between evaluations on held-out samples; 0: only after the last step", least=0)
    json: str | None = option(None, "write a summary of the run to this file")
    checkpoint_dir: str | None = option(None, "folder for checkpoints, on storage that all nodes share")
    sync_save: bool = option(
        False, "write checkpoints before training goes on, rather than during training", needs=WITH_CHECKPOINTS
    )

    job_name = "pretrain"
    purpose = JOBS["pretrain"]
    examples = (
        "--steps 200",
        "--model llama-small --data corpus.txt --ac selective --checkpoint-dir run --resume=auto",
        "--model llama3-8b --init sharded --precision bfloat16 --tp 2 --ac 40GiB",
    )
    # Options without which a checkpoint's weights or place in the data would mean nothing: a resumed run has them.
    fixed: ClassVar[tuple[str, ...]] = ("seq_len", "global_batch", "seed", "tokenizer", "vocab_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        for is_wrong, problem in (
            (
                self.lr_floor > 1,
                f"--lr-floor is {self.lr_floor!r}; it is a share of the peak rate, and must be from 0 to 1.",
            ),
            (
                self.warmup > self.steps,
                f"--warmup-steps is {self.warmup_steps}, and the run has {self.steps} steps: it would end before the "
                "warm-up does. Give fewer, or more --steps.",
            ),
            (
                self.global_batch % self.grad_accum,
                f"--grad-accum is {self.grad_accum}, which does not divide --global-batch {self.global_batch}; "
                "a step's micro-batches must be of equal size.",
            ),
            (
                self.resume != "no" and self.checkpoint_dir is None,
                "--resume needs --checkpoint-dir: the folder that an earlier run wrote to.",
            ),
        ):
            if is_wrong:
                raise ValueError(problem)
        if self.precision not in FLOAT8 and check_dtype_word("--precision", self.precision, FLOAT8) in (
            "float16",
            "fp16",
        ):
            raise ValueError(
                f"--precision is {self.precision!r}: its small range needs the loss to be scaled, which this job does not "
                "do. Use bfloat16."
            )
        try:
            parse_ac(self.ac)
        except ValueError as error:
            raise ValueError(f"--ac: {error}") from error
        if self.pp > 1:
            self._check_pipeline()
        check_writable("--json", self.json)
        if self.export is not None:
            check_new_folder("--export", self.export)

    def _check_pipeline(self) -> None:
        alone = [(name, FLAGS[name].default) for name in flags_on("pretrain") if not FLAGS[name].stages]
        for name, off in (("init", "host"), *alone):
            if getattr(self, name) != off:
                raise ValueError(
                    f"{flag(name)} is {getattr(self, name)!r} with --pp {self.pp}, which it cannot be yet."
                )
        if self.strategy != "fsdp2":
            raise ValueError(f"--strategy is {self.strategy!r} with --pp {self.pp}; a pipeline's stages take 'fsdp2'.")
        try:
            self.job()
        except ValueError as error:
            raise ValueError(f"--pp, --pp-schedule and --grad-accum: {error}") from error

    # --- facts that follow from them ----------------------------------------------------------------------------------

    def on(self, device_type: str) -> Self:
        """Return the options of a run on such a device: on an accelerator AdamW is fused, unless another form is named.

        A fused step reads and writes each tensor once and has no temporaries; torch's own choice there, ``foreach``, takes
        as many bytes again as the largest group of gradients and about four times as long.
        """
        fused = device_type != "cpu" and self.optimizer == ADAMW[0]
        return replace(self, optimizer="adamw-fused") if fused else self

    @property
    def warmup(self) -> int:
        """Steps of warm-up."""
        return min(20, self.steps) if self.warmup_steps is None else self.warmup_steps

    @property
    def passes(self) -> int:
        """Return how often a rank runs forward and backward in a step; a pipeline cuts its one batch by itself."""
        return 1 if self.pp > 1 else self.grad_accum

    def rows(self, data_ranks: int) -> int:
        """Samples of one forward of a rank, where so many ranks read different ones."""
        return self.global_batch // (self.passes * data_ranks)

    def job(self, **fields: object) -> Job:
        """The job that `parallelize`, the planner and the search are asked; `fields`: more of it."""
        from nemo_like.recipes.loss import planned_loss

        settings = {name: getattr(self, name) for name in FLAGS if hasattr(self, name)} | {"drop_output": True}
        settings["sync"] = self.sync if self.sync in SYNC else "last"
        settings["sequence_parallel"] = bool(self.sequence_parallel)
        job = job_of(settings, **fields)
        return replace(job, step=replace(job.step, loss_fn=planned_loss if self.loss == "model" else None))

    def planned_input(self, rows: int) -> Any:
        """The shapes of a micro-batch of so many rows, as the model is called with it."""
        import torch

        ids = torch.zeros(rows, self.seq_len, dtype=torch.int64)
        if self.pp > 1:
            return {"input_ids": ids, "labels": ids}  # the last stage computes the loss
        return ids if self.loss == "model" else {"input_ids": ids, "labels": ids, "shift_labels": ids}


# --- fine-tuning ------------------------------------------------------------------------------------------------------

_ADAPTERS = Condition("--lora", lambda options: options.lora or options.qlora)


@with_flags("finetune")
class FinetuneOptions(SharedOptions):
    """Options of fine-tuning."""

    model: str = option("", "folder of a Hugging Face model, or its name on the Hub")
    data: str = option(
        "",
        "JSON lines or Parquet, a folder of such files, or one that datasets saved; samples have messages, or prompt and "
        "completion, or text",
    )
    output: str = option("finetuned", "folder for the result, checkpoints and logs", trainer="output_dir")
    eval_data: str | None = option(None, "held-out samples (default: --eval-samples of --data, at most a tenth)")
    train_on: str = option(
        "assistant", "of messages: the assistant's turns, or all of them", choices=("assistant", "all")
    )
    trust_remote_code: bool = option(
        False, "run Python code that is in the model's folder", trainer="trust_remote_code"
    )
    lora: bool = option(False, "train adapters on frozen weights (peft)")
    qlora: bool = option(False, "--lora on frozen weights of 4 bits (bitsandbytes)")
    lora_rank: int = option(16, "rank of the adapters", least=1, needs=_ADAPTERS)
    lora_alpha: float = option(32.0, "the adapters' output is scaled by this over the rank", least=0, needs=_ADAPTERS)
    lora_dropout: float = option(0.0, "dropout before the adapters", least=0, below=1, needs=_ADAPTERS)
    lora_targets: str = option(
        "all-linear",
        "which linears get adapters: all-linear (but the head), or names' ends with commas",
        needs=_ADAPTERS,
    )
    merge: bool = option(False, "also write the whole model with the adapters added to its weights", needs=_ADAPTERS)
    scope: str = job_option("scope", trainer="ac_scope")
    offload: str = job_option("offload", trainer="offload")
    fit: bool = option(
        False,
        "first choose the fastest --ac, --batch-size and --grad-accum that fit, by prediction, for as many samples",
    )
    fit_memory: str | None = option(
        None,
        "bytes of each device that --fit may use (default: as plan)",
        needs=Condition("--fit", lambda options: options.fit),
    )
    check_memory: bool | None = option(
        None,
        "run forward and backward of the largest batch before the first step (default: on a GPU)",
        action=argparse.BooleanOptionalAction,
        trainer="check_memory",
    )
    precision: str = option(
        "bfloat16", "dtype to compute in: bfloat16 | float32", choices=("bfloat16", "float32"), group="training"
    )
    seq_len: int = option(
        1024, "longest sample, in tokens; longer ones are cut at their end", tokens, least=1, trainer="max_length"
    )
    pack: bool = option(
        False,
        "fill rows of --seq-len tokens with several samples, apart from each other in attention",
        trainer="packing",
    )
    batch_size: int = option(8, "samples of a rank and micro-batch", least=1, trainer="per_device_train_batch_size")
    steps: int = option(0, "steps of the whole run; 0: as many as --epochs take", least=0)
    epochs: float = option(1.0, "passes over the data, where --steps is 0", least=0, trainer="num_train_epochs")
    optimizer: str = job_option(
        "optimizer", "adamw-fused", choices=("adamw", "adamw-fused", "adamw-8bit", "sgd"), trainer="optim"
    )
    lr: float = option(
        2e-4, "peak learning rate; a tenth of it is usual without --lora", least=0, trainer="learning_rate"
    )
    warmup_steps: int = option(10, "steps of linear warm-up", least=0)
    weight_decay: float = option(0.0, "of the optimizer", least=0, trainer="weight_decay")
    eval_every: int = option(50, "steps between evaluations on held-out samples", least=1, trainer="eval_steps")
    tensorboard: bool = option(False, "log for TensorBoard, too")
    wandb: str | None = option(None, "log to this project of Weights & Biases, too")

    job_name = "finetune"
    purpose = JOBS["finetune"]
    examples = (
        "--model my-model --data samples.jsonl --lora",
        "--model my-model --data samples.jsonl --qlora --pack --seq-len 2048",
        "--model my-model --data samples.jsonl --lr 2e-5 --ac 40GiB --output tuned --resume=auto",
    )

    def __post_init__(self) -> None:
        for name in ("model", "data"):
            if not getattr(self, name):
                raise ValueError(f"{flag(name)} is needed: --model DIR --data FILE.jsonl.")
        super().__post_init__()
        if self.steps == 0 and self.epochs == 0:
            raise ValueError("--steps and --epochs are both 0: nothing would be trained.")
        if self.qlora:
            object.__setattr__(self, "lora", True)
        if self.fit_memory is not None:
            parse_bytes(self.fit_memory, "--fit-memory")
