"""Options of the fine-tuning job in addition to those of every job."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nemo_like._util.console import flag
from nemo_like.options import FLOAT8, parse_dtype
from nemo_like.recipes import JOBS
from nemo_like.recipes.job_options import parse_command_line
from nemo_like.recipes.run_options import RunOptions, job_option, option

EXAMPLES = (
    "--model my-model --data samples.jsonl --lora",
    "--model my-model --data samples.jsonl --qlora --pack --seq-len 2048 --sample 'What is 1 and 2?'",
    "--model my-model --data samples.jsonl --lr 2e-5 --ac 40GiB --output tuned --resume=auto",
)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(RunOptions):
    """The job's options. Each is a command-line option of the same name, ``_`` written as ``-``.

    Raises:
        ValueError: a value is wrong; the message has the option, the value, the reason and what is accepted.
    """

    model: str = option("", "folder of a Hugging Face model: config.json, safetensors and a tokenizer")
    data: str = option(
        "",
        "JSONL file, or folder of them, whose lines have messages, or prompt and completion, or text; Parquet, or a "
        "folder that datasets saved, with the extra 'finetune'",
    )
    output: str = option("finetuned", "folder for the result, the log and, without --checkpoint-dir, checkpoints")
    tokenizer: str | None = option(None, "folder of the tokenizer (default: the model's)")
    trust_remote_code: bool = option(False, "run Python code that is in the model's folder", bool)
    skip_bad: bool = option(False, "leave out lines that cannot be used, and print how many", bool)
    pack: bool = option(
        False,
        "fill each row of --seq-len tokens with several samples, apart from each other in attention and loss",
        bool,
    )
    eval_data: str | None = option(
        None, "held-out samples (default: up to --eval-samples, and at most a tenth, of --data)"
    )
    export: str = option("last", "which weights are the result: last | best (of the evaluations)")
    lora: bool = option(False, "train adapters on frozen weights (peft)", bool)
    qlora: bool = option(False, "--lora on frozen weights of 4 bits (bitsandbytes)", bool)
    lora_rank: int = option(16, "rank of the adapters", int)
    lora_alpha: float = option(32.0, "the adapters' output is scaled by this over the rank", float)
    lora_dropout: float = option(0.0, "dropout before the adapters", float)
    lora_targets: str = option(
        "all-linear", "which linears get adapters: all-linear (but the head), or names' ends with commas"
    )
    train: str | None = option(
        None, "train the parameters whose names match this glob (several with commas), and freeze the others"
    )
    merge: bool = option(False, "with --lora: write the whole model with the adapters added to its weights, too", bool)
    epochs: float = option(1.0, "passes over the data, where --steps is 0", float)

    sample: str | None = option(None, "a prompt to continue every --sample-every steps, printed and logged")
    sample_every: int = option(50, "steps between samples; 0: only after the last step", int)
    sample_tokens: int = option(48, "most tokens of a sample", int)
    tensorboard: bool = option(False, "log for TensorBoard, too, in --output", bool)
    wandb: str | None = option(None, "log to this project of Weights & Biases, too")
    plot: bool = option(False, "draw loss and memory at the end, to plot.png in --output", bool)

    # Other defaults than pretraining's.
    steps: int = option(0, "steps of the whole run, those before a resume included; 0: as many as --epochs take", int)
    precision: str = job_option("precision", "bfloat16", alias="--dtype")
    loss: str = job_option("loss", "chunked")
    seq_len: int = option(1024, "longest sample, in tokens; what is longer is cut at its end", int)
    lr: float = option(2e-4, "peak learning rate of AdamW; a tenth of it is usual without --lora", float)
    warmup_steps: int | None = option(None, "steps of linear warm-up (default: 10, or all of fewer --steps)", int)
    weight_decay: float = option(0.0, "AdamW's weight decay, on parameters with two dims or more", float)

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        return {**super().choices, "export": ("last", "best")}

    @property
    def least(self) -> Mapping[str, float]:
        at_least_0 = ("steps", "epochs", "sample_every", "lora_dropout")
        return {**super().least, **dict.fromkeys(at_least_0, 0), **dict.fromkeys(("lora_rank", "sample_tokens"), 1)}

    def __post_init__(self) -> None:
        for name in ("model", "data"):
            if not getattr(self, name):
                raise ValueError(f"{flag(name)} is needed: --model DIR --data FILE.jsonl.")
        if self.checkpoint_dir is None:
            object.__setattr__(self, "checkpoint_dir", self._own_checkpoints())
        super().__post_init__()
        if self.steps == 0 and self.epochs == 0:
            raise ValueError("--steps and --epochs are both 0: nothing would be trained.")
        if self.qlora:
            object.__setattr__(self, "lora", True)
        if self.lora and self.train is not None:
            raise ValueError(
                "--train names parameters of the model, and --lora freezes all of them. Give one of the two."
            )
        if self.merge and not self.lora:
            raise ValueError("--merge adds adapters to the weights, and without --lora there are none.")
        if not 0 < self.lora_alpha < math.inf:
            raise ValueError(f"--lora-alpha is {self.lora_alpha}; it scales what the adapters give, and must be > 0.")
        if self.lora_dropout >= 1:
            raise ValueError(f"--lora-dropout is {self.lora_dropout}; it must be less than 1.")
        if self.export == "best" and self.eval_samples == 0:
            raise ValueError("--export best takes the best of the evaluations, and --eval-samples 0 makes none.")
        if self.float8 and self.lora:
            raise ValueError(
                f"--precision is {self.precision!r} with adapters, whose frozen weights stay bfloat16. Use bf16."
            )

    usual_warmup: ClassVar[int] = 10

    @property
    def read_beside(self) -> Iterable[tuple[bool, str, tuple[str, ...]]]:
        return (
            *super().read_beside,
            (self.lora or self.qlora, "--lora", ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")),
            (self.sample is not None, "--sample", ("sample_every", "sample_tokens")),
            (self.eval_samples > 0, "--eval-samples above 0", ("eval_data",)),
        )

    @property
    def fixed(self) -> tuple[str, ...]:
        return (*super().fixed, "lora", "qlora", "lora_rank", "lora_alpha", "lora_targets", "train")

    @property
    def elsewhere(self) -> str:
        return "--output" if self._has_own_checkpoints else super().elsewhere

    def planned_input(self, rows: int, width: int) -> Any:
        inputs = super().planned_input(rows, width)
        return self.packed_input(inputs, rows, width) if self.pack else inputs

    def _own_checkpoints(self) -> str:
        return str(Path(self.output) / "checkpoints")

    @property
    def _has_own_checkpoints(self) -> bool:
        return self.checkpoint_dir == self._own_checkpoints()

    def as_said(self) -> dict[str, Any]:
        # Else a run from another's file would write into its checkpoints, whatever --output is.
        return super().as_said() | ({"checkpoint_dir": None} if self._has_own_checkpoints else {})

    def _check_precision(self) -> None:
        if not self.float8:
            parse_dtype("--precision", self.precision, FLOAT8)
            super()._check_precision()

    @property
    def float8(self) -> bool:
        """Return whether matmuls of the layers run in float8."""
        return self.precision in FLOAT8

    @property
    def compute(self) -> str:
        return "bfloat16" if self.float8 else self.precision

    @property
    def trains_less(self) -> Mapping[str, dict[str, Any]]:
        return {} if self.lora or self.float8 else {"--lora": {"lora": True, "train": None}}


def parse_finetune_options(arguments: Sequence[str] | None = None) -> FinetuneOptions:
    """The options on the command line; a wrong one ends the process with code 2 and one line that states why."""
    return parse_command_line(
        FinetuneOptions,
        "python -m nemo_like.recipes.finetune",
        JOBS["finetune"],
        EXAMPLES,
        arguments,
    )
