"""Options of the training jobs, each written once: a dataclass's field is a flag, a key of a YAML file, checks and help."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from nemo_like._util.console import check_new_folder, check_writable, flag
from nemo_like.flags import FLAGS, check_flag, job_of
from nemo_like.options import ADAMW, FLOAT8, MemoryBudget, did_you_mean, normalise, parse_ac, parse_bytes, parse_dtype
from nemo_like.options import SCHEDULES as PIPELINE_SCHEDULES
from nemo_like.options.parallel import BACKENDS
from nemo_like.options.step import SYNC

if TYPE_CHECKING:  # the help of a job needs no torch
    from torch import nn

    from nemo_like.job import Job

DEVICES = ("auto", *reversed(BACKENDS))
RATES = ("cosine", "linear", "constant")

_READ_WITH: dict[str, Callable[[Any], bool]] = {
    "--fit": lambda options: bool(options.free),
    "--grad-accum above 1": lambda options: options.accumulates,
    "--checkpoint-dir": lambda options: options.checkpoint_dir is not None,
    "another --schedule": lambda options: options.schedule != "constant",
    "--strategy fsdp2": lambda options: options.strategy == "fsdp2",
    "--tokenizer bpe": lambda options: options.tokenizer == "bpe",
    "--pp above 1": lambda options: options.pp > 1,
    "--tp above 1": lambda options: options.tp > 1,
    "--cp above 1": lambda options: options.cp > 1,
    "--eval-samples above 0": lambda options: options.eval_samples > 0,
}
"""Conditions under which an option with ``needs`` is read at all, by what has to be on the command line."""


def option(
    default: Any,
    help: str,
    kind: Callable[[str], Any] | None = None,
    *,
    least: float | None = None,
    below: float = math.inf,
    choices: Sequence[str] = (),
    needs: str = "",
    **argument: object,
) -> Any:
    """A field of an options class.

    Args:
        default: the value where it is not given.
        help: what it does, for the command line.
        kind: makes its value of a word. None: the type of `default`, or str where that is None.
        least, below: the smallest number that it may be, and one that is too large.
        choices: the words that it may be; none: any.
        needs: a key of `_READ_WITH`, without which the option is refused.
        argument: more for argparse.
    """
    kind = kind or (str if default is None else type(default))
    facts: dict[str, Any] = {
        "help": help,
        "kind": kind,
        "least": least,
        "below": below,
        "choices": choices,
        "needs": needs,
    }
    return dataclasses.field(default=default, metadata=facts | {"argument": argument})


def job_option(
    name: str, default: object = None, *, choices: Sequence[str] = (), needs: str = "", **argument: Any
) -> Any:
    """An `option` that is a field of the job: what `FLAGS` has for it; `default`, `choices`: others than there."""
    known = FLAGS[name]
    text = known.help.replace("%%", "%")
    value = known.default if default is None else default
    return option(value, text, known.kind, choices=choices or known.choices, needs=needs, **argument)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that training jobs share. Each field is a command-line option of the same name, ``_`` written as ``-``.

    Raises:
        ValueError: a value is wrong; the message has the option, the value, the reason and what is accepted.
    """

    strategy: str = job_option("strategy")
    ac: str = job_option("ac")
    scope: str = job_option("scope")
    loss: str = job_option("loss")
    compile: str = job_option("compile")
    precision: str = job_option("precision", alias="--dtype")
    device: str = option("auto", f"{' | '.join(DEVICES)}; auto is cuda where there is one", choices=DEVICES)
    offload: str = job_option("offload")
    optimizer: str = job_option("optimizer", choices=ADAMW)
    cpu_offload: bool = job_option(
        "cpu_offload", needs="--strategy fsdp2", action=argparse.BooleanOptionalAction
    )  # without it --fit chooses
    reshard_after_forward: str = job_option("reshard_after_forward", needs="--strategy fsdp2")
    fit: str = option(
        "no",
        "at the start, choose the fastest configuration that fits this device, by prediction, under --batch-size: all that "
        "is not given; or --fit=NAMES (with commas): these options",
        nargs="?",
        const="all",
    )
    fit_memory: str | None = option(
        None,
        "bytes of each device that --fit may use (default: all but 5 % and what is outside of torch's allocator)",
        needs="--fit",
    )
    fit_host_memory: str | None = option(
        None,
        "bytes of host memory that --fit may use for each rank (default: an equal share of all but a tenth)",
        needs="--fit",
    )
    dp_replicate: int = job_option("dp_replicate")
    seq_len: int = option(256, "tokens per sample", least=1)
    pack: bool = option(False, "fill rows with several documents, apart from each other in attention and loss")
    batch_size: int = option(8, "samples per step over all ranks and micro-batches", least=1)
    grad_accum: int = job_option("grad_accum")
    sync: str = option(
        "auto",
        "micro-batches of --grad-accum that reduce gradients over the ranks: every | last | auto: every one where whole "
        "gradients would take over a quarter of the device",
        choices=("auto", *SYNC),
        needs="--grad-accum above 1",
    )
    steps: int = option(200, "steps of the whole run, those before a resume included", least=1)
    lr: float = option(3e-3, "peak learning rate of AdamW", least=0)
    schedule: str = option("cosine", f"learning rate after the warm-up: {' | '.join(RATES)}", choices=RATES)
    warmup_steps: int | None = option(
        None, "steps of linear warm-up (default: 20, or all of fewer --steps)", int, least=0
    )
    lr_floor: float = option(
        0.1, "learning rate at the last step, as a share of the peak", least=0, needs="another --schedule"
    )
    weight_decay: float = option(0.1, "AdamW's weight decay, on parameters with two dims or more", least=0)
    beta1: float = option(0.9, "AdamW's first decay rate", least=0, below=1)
    beta2: float = option(0.95, "AdamW's second decay rate", least=0, below=1)
    clip: float = option(1.0, "clip the gradient to this norm; 0 clips nothing", least=0)
    seed: int = option(0, "seed of weights, data order and dropout", least=0)
    eval_every: int = option(50, "steps between evaluations on held-out samples; 0: only after the last step", least=0)
    eval_samples: int = option(64, "held-out samples per evaluation; 0 evaluates nothing", least=0)
    log_every: int = option(10, "steps between reports of the loss", least=1)
    json: str | None = option(None, "write a summary of the run to this file")
    checkpoint_dir: str | None = option(None, "folder for checkpoints, on storage that all hosts share")
    save_every: int = option(
        100,
        "steps between checkpoints (with --checkpoint-dir); the last step has one too",
        least=1,
        needs="--checkpoint-dir",
    )
    keep: int = option(2, "complete checkpoints to keep; older ones are deleted", least=1, needs="--checkpoint-dir")
    resume: str = option(
        "no",
        "go on from the last complete checkpoint: --resume needs one, --resume=auto starts anew where there is none",
        choices=("no", "must", "auto"),
        nargs="?",
        const="must",
    )
    sync_save: bool = option(
        False, "write checkpoints before training goes on, rather than during training", needs="--checkpoint-dir"
    )

    searched: ClassVar[tuple[str, ...]] = (
        "dp_replicate",
        "grad_accum",
        "ac",
        "loss",
        "offload",
        "reshard_after_forward",
        "cpu_offload",
    )
    """Options that ``--fit`` can choose."""
    fixed: ClassVar[tuple[str, ...]] = ("seq_len", "batch_size", "seed", "pack")
    """Options without which a checkpoint's weights or place in the data would mean nothing: a resumed run has them."""
    usual_warmup: ClassVar[int] = 20
    """Steps of warm-up where it is not set."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_field(field.name, field.metadata)
        for name in self._of_job:
            check_flag(name, getattr(self, name))
        if self.lr_floor > 1:
            raise ValueError(
                f"--lr-floor is {self.lr_floor!r}; it is a share of the peak rate, and must be from 0 to 1."
            )
        if self.steps and self.warmup > self.steps:
            raise ValueError(
                f"--warmup-steps is {self.warmup_steps}, and the run has {self.steps} steps: it would end before the "
                "warm-up does. Give fewer, or more --steps."
            )
        if self.batch_size % self.grad_accum:
            raise ValueError(
                f"--grad-accum is {self.grad_accum}, which does not divide --batch-size {self.batch_size}; "
                "a step's micro-batches must be of equal size."
            )
        if self.resume != "no" and self.checkpoint_dir is None:
            raise ValueError("--resume needs --checkpoint-dir: the folder that an earlier run wrote to.")
        self._check_precision()
        try:
            parse_ac(self.ac)
        except ValueError as error:
            raise ValueError(f"--ac: {error}") from error
        self._check_fit()
        for field in dataclasses.fields(self):
            needs, value = field.metadata["needs"], getattr(self, field.name)
            if needs and value != field.default and not _READ_WITH[needs](self):
                raise ValueError(
                    f"{flag(field.name)} is {value!r}, and without {needs} nothing reads it. Add that, or leave "
                    f"{flag(field.name)} out."
                )
        check_writable("--json", self.json)

    def _check_field(self, name: str, facts: Mapping[str, Any]) -> None:
        value, known, least, below = getattr(self, name), facts["choices"], facts["least"], facts["below"]
        if known:
            spelled = {normalise(each): each for each in known}
            word = spelled.get(normalise(value)) if isinstance(value, str) else value
            if word not in known:
                raise ValueError(
                    f"{flag(name)} is {value!r}; it must be one of {', '.join(known)}."
                    + did_you_mean(str(value), known)
                )
            object.__setattr__(self, name, word)
        if least is not None and value is not None:
            if isinstance(value, bool) or not math.isfinite(value) or value < least:
                raise ValueError(f"{flag(name)} is {value!r}; it must be a finite number >= {least}.")
            if value >= below:
                raise ValueError(f"{flag(name)} is {value!r}; it must be less than {below}.")

    def _check_fit(self) -> None:
        unknown = [name for name in self.free if name not in self.searched]
        if unknown:
            raise ValueError(
                f"--fit is {self.fit!r}, and {unknown[0]!r} is nothing that it chooses; that is all, or some of "
                f"{', '.join(self.searched)}." + did_you_mean(unknown[0], self.searched)
            )
        if not self.free:
            return
        for name, only in (("strategy", "fsdp2"), ("scope", "all")):
            if getattr(self, name) != only:
                raise ValueError(
                    f"{flag(name)} is {getattr(self, name)!r}, with which --fit predicts nothing. Leave one of the two out."
                )
        for name in ("fit_memory", "fit_host_memory"):
            if (size := getattr(self, name)) is not None:
                parse_bytes(size, flag(name))
        budget = parse_ac(self.ac)
        if "ac" not in self.free and (
            budget.fraction is not None
            if isinstance(budget, MemoryBudget)
            else normalise(self.ac) not in ("none", "full", "selective")
        ):
            raise ValueError(
                f"--ac is {self.ac!r}, with which --fit predicts nothing: it knows none, full, selective and budgets in "
                "bytes. Leave --ac to it, or leave --fit out."
            )

    def _check_precision(self) -> None:
        import torch

        if parse_dtype("--precision", self.precision) is torch.float16:
            raise ValueError(
                f"--precision is {self.precision!r}: its small range needs the loss to be scaled, which this job does not "
                "do. Use bfloat16."
            )

    # --- what follows from them ---------------------------------------------------------------------------------------

    def on(self, device_type: str) -> Self:
        """Return the options of a run on such a device: on an accelerator AdamW is fused, unless another form is named.

        A fused step reads and writes each tensor once and has no temporaries; torch's own choice there, ``foreach``, takes
        as many bytes again as the largest group of gradients and about four times as long.
        """
        fused = device_type != "cpu" and self.optimizer == ADAMW[0]
        return replace(self, optimizer="adamw-fused") if fused else self

    @property
    def _of_job(self) -> tuple[str, ...]:
        """The options that are the job's, by name."""
        return tuple(name for name in FLAGS if hasattr(self, name) and name != "schedule")

    @property
    def free(self) -> tuple[str, ...]:
        """Options that ``--fit`` chooses; empty where it was left out."""
        if self.fit in ("no", "all"):
            return self.searched if self.fit == "all" else ()
        return tuple(word.strip().replace("-", "_") for word in self.fit.split(",") if word.strip())

    @property
    def accumulates(self) -> bool:
        """Return whether a step has several micro-batches, or may get them by ``--fit``."""
        return self.grad_accum > 1 or "grad_accum" in self.free

    @property
    def warmup(self) -> int:
        """Steps of warm-up."""
        return min(self.usual_warmup, self.steps) if self.warmup_steps is None else self.warmup_steps

    @property
    def axes(self) -> Mapping[str, int]:
        """Ranks that read the same samples, by the option that sets it; their product must divide the ranks."""
        return {axis: getattr(self, axis, 1) for axis in ("tp", "cp", "pp")}

    @property
    def passes(self) -> int:
        """Return how often a rank runs forward and backward in a step; a pipeline cuts its one batch by itself."""
        return 1 if self.axes["pp"] > 1 else self.grad_accum

    def rows(self, data_ranks: int) -> int:
        """Samples of one forward of a rank, where so many ranks read different ones."""
        return self.batch_size // (self.passes * data_ranks)

    @property
    def compute(self) -> str:
        """The dtype to compute in, but for matmuls in float8."""
        return self.precision

    @property
    def elsewhere(self) -> str:
        """The option that gives a run other checkpoints."""
        return "--checkpoint-dir"

    def in_full(self) -> dict[str, Any]:
        """Every option by name, with None where the value follows from others."""
        return dataclasses.asdict(self)

    def job(self, **fields: object) -> Job:
        """The job that `parallelize`, the planner and the search are asked; `fields`: more of it."""
        from nemo_like.recipes.loss import planned_loss

        settings = {name: getattr(self, name) for name in self._of_job} | {"drop_output": True}
        settings["sync"] = self.sync if self.sync in SYNC else "last"
        settings["sequence_parallel"] = bool(settings.get("sequence_parallel"))
        job = job_of(settings, **fields)
        return replace(job, step=replace(job.step, loss_fn=planned_loss if self.loss == "model" else None))

    def check_model_loss(self, model: nn.Module, loss: str) -> None:
        """Raise ValueError where this job cannot train `model` with that ``--loss``."""
        from nemo_like.recipes.loss import check_own_loss

        if self.axes["pp"] > 1:
            check_own_loss(model, f"--pp is {self.axes['pp']}", "Train without --pp.")
        elif loss == "chunked":
            check_own_loss(model, "--loss is 'chunked'", "Use --loss model.")

    def planned_input(self, rows: int, width: int) -> Any:
        """The shapes of a micro-batch of so many rows of so many tokens, as the model is called with it.

        Of packed rows each has two documents: the mask that keeps them apart is stored as well.
        """
        import torch

        ids = torch.zeros(rows, width, dtype=torch.int64)
        inputs = {"input_ids": ids}
        if self.axes["pp"] > 1:
            return inputs | {"labels": ids}  # the last stage computes the loss
        if self.loss != "model":
            inputs |= {"labels": ids, "shift_labels": ids}
        if self.pack:
            positions = torch.arange(width) % -(-width // 2)
            inputs["position_ids"] = positions.expand(rows, width).contiguous()
        return inputs if len(inputs) > 1 else ids


# --- the options of each job --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(RunOptions):
    """Options of pretraining. Each is a command-line option of the same name, ``_`` written as ``-``.

    Raises:
        ValueError: a value is wrong; the message has the option, the value, the reason and what is accepted.
    """

    model: str = option("llama-tiny", "a preset, the path of a config.json, or module:function that returns a model")
    data: str | None = option(
        None, "text to train on, a file or a folder, read as bytes (default: this Python's standard library)"
    )
    tokenizer: str = option(
        "bytes",
        "what a token is: bytes | bpe, byte pairs learned from the text (tokenizers)",
        choices=("bytes", "bpe"),
    )
    vocab_size: int = option(
        1024, "tokens of --tokenizer bpe, which the model then has, too", least=1, needs="--tokenizer bpe"
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
    tp: int = job_option("tp")
    sequence_parallel: bool | None = option(
        None,
        "norms and residuals are split along the sequence, over the ranks of --tp (default: where the model's plan and "
        "--seq-len allow it)",
        needs="--tp above 1",
        action=argparse.BooleanOptionalAction,
    )
    cp: int = job_option("cp")
    cp_method: str = job_option("cp_method", needs="--cp above 1")
    ep: int = job_option("ep")
    pp: int = job_option("pp")
    pp_schedule: str = job_option("pp_schedule", choices=PIPELINE_SCHEDULES, needs="--pp above 1")
    stages_per_rank: int | None = job_option("stages_per_rank", needs="--pp above 1")
    pack: bool = option(
        False,
        "the files of the text are documents: packed into samples, apart from each other in attention and loss",
    )

    searched = (*RunOptions.searched, "tp", "cp", "ep", "pp_schedule")
    fixed = (*RunOptions.fixed, "tokenizer", "vocab_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pp > 1:
            self._check_pipeline()
        if self.export is not None:
            check_new_folder("--export", self.export)

    def _check_pipeline(self) -> None:
        for name, off in (("pack", False), ("init", "host"), ("cpu_offload", False)):
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


KINDS: dict[str, type[RunOptions]] = {"pretrain": PretrainOptions}
"""The options of each of `JOBS`."""
EXAMPLES = {
    "pretrain": (
        "--steps 200",
        "--model llama-small --data corpus.txt --ac selective --checkpoint-dir run --resume=auto",
        "--model llama3-8b --init sharded --precision bfloat16 --tp 2 --ac 40GiB --fit",
    ),
}
