"""Everything that the training job can be told, once: name, default, meaning. The command line is made from it."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_like.distributed.launch import BACKENDS
from nemo_like.options import (
    COMPILE_BACKENDS,
    LOSSES,
    STRATEGIES,
    PipelineParallel,
    did_you_mean,
    normalise,
    parse_ac,
    parse_dtype,
)
from nemo_like.options import SCHEDULES as PIPELINE_SCHEDULES
from nemo_like.recipes.schedule import SCHEDULES

COMPILERS = ("none", *COMPILE_BACKENDS)
RESUME = ("no", "must", "auto")
OFFLOADS = ("none", "boundary", "saved", "all")
INITS = ("host", "sharded")
DEVICES = ("auto", *reversed(BACKENDS))


def _option(default: Any, help: str, kind: Callable[[str], Any] = str, **argument: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "kind": kind, "argument": argument})


@dataclass(frozen=True)
class Options:
    """The job's options. Each is a command-line option of the same name, ``_`` written as ``-``.

    Raises:
        ValueError: a value is wrong; the message has the option, the value, the reason and what is accepted.
    """

    model: str = _option("llama-tiny", "a preset, the path of a config.json, or module:function that returns a model")
    data: str | None = _option(
        None, "text to train on, a file or a folder, read as bytes (default: this Python's standard library)"
    )
    strategy: str = _option("fsdp2", f"{' | '.join(STRATEGIES)}; on one rank all of them are 'single'")
    ac: str = _option(
        "selective",
        "activation checkpointing: none | full | selective | submodule | sequential, or a budget like 40GiB",
    )
    scope: str = _option("all", "layers to checkpoint: all | language | vision | audio; several with commas")
    loss: str = _option(
        "model", f"{' | '.join(LOSSES)}: head and loss of a few tokens at a time, never the whole logits"
    )
    compile: str = _option("none", f"compile each layer: {' | '.join(COMPILERS)}")
    dtype: str = _option("float32", "dtype to compute in: float32 | bfloat16; weights and gradient sums stay float32")
    device: str = _option("auto", f"{' | '.join(DEVICES)}; auto is cuda where there is one")
    init: str = _option(
        "host", "host: each rank builds all weights on the CPU | sharded: each rank makes only its shard (large models)"
    )
    offload: str = _option("none", f"activations that wait in host memory: {' | '.join(OFFLOADS)}")
    cpu_offload: bool = _option(False, "keep weights, gradients and optimizer state in host memory (fsdp2)", bool)
    dp_replicate: int = _option(1, "replicas of the sharded model (HSDP); must divide the number of ranks", int)
    tp: int = _option(1, "ranks that share a layer's matmuls (tensor parallel); must divide the number of ranks", int)
    cp: int = _option(1, "ranks that share each sequence (context parallel); must divide the number of ranks", int)
    ep: int = _option(1, "ranks that share a layer's experts (expert parallel); must divide the number of experts", int)
    pp: int = _option(
        1, "ranks that the layers are dealt out to (pipeline); its microbatches: --grad-accum, else twice as many", int
    )
    pp_schedule: str = _option("1f1b", f"order of the pipeline's microbatches: {' | '.join(PIPELINE_SCHEDULES)}")
    seq_len: int = _option(256, "tokens per sample", int)
    pack: bool = _option(
        False,
        "the files of the text are documents: packed into samples, apart from each other in attention and loss",
        bool,
    )
    batch_size: int = _option(8, "samples per step over all ranks and microbatches", int)
    grad_accum: int = _option(1, "microbatches per step; gradients are summed over ranks once, in the last", int)
    steps: int = _option(200, "steps of the whole run, those before a resume included", int)
    lr: float = _option(3e-3, "peak learning rate of AdamW", float)
    schedule: str = _option("cosine", f"learning rate after the warm-up: {' | '.join(SCHEDULES)}")
    warmup_steps: int = _option(20, "steps of linear warm-up", int)
    lr_floor: float = _option(0.1, "learning rate at the last step, as a share of the peak", float)
    weight_decay: float = _option(0.1, "AdamW's weight decay, on parameters with two dims or more", float)
    beta1: float = _option(0.9, "AdamW's first decay rate", float)
    beta2: float = _option(0.95, "AdamW's second decay rate", float)
    clip: float = _option(1.0, "clip the gradient to this norm; 0 clips nothing", float)
    seed: int = _option(0, "seed of weights, data order and dropout", int)
    eval_every: int = _option(50, "steps between evaluations on held-out text; 0: only after the last step", int)
    eval_samples: int = _option(64, "held-out samples per evaluation; 0 evaluates nothing", int)
    log_every: int = _option(10, "steps between reports of the loss", int)
    json: str | None = _option(None, "write a summary of the run to this file")
    checkpoint_dir: str | None = _option(None, "folder for checkpoints, on storage that all hosts share")
    save_every: int = _option(100, "steps between checkpoints (with --checkpoint-dir); the last step has one too", int)
    keep: int = _option(2, "complete checkpoints to keep; older ones are deleted", int)
    resume: str = _option(
        "no",
        "go on from the last complete checkpoint: --resume needs one, --resume=auto starts anew where there is none",
        nargs="?",
        const="must",
    )
    sync_save: bool = _option(False, "write checkpoints before training goes on, rather than beside it", bool)
    plain: bool = _option(False, "print lines instead of a progress bar", bool)

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            self._normalise_choice(name, known)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not math.isfinite(value) or value < least:
                raise ValueError(f"{_flag(name)} is {value!r}; it must be a finite number >= {least}.")
        for name, limit in (("beta1", 1.0), ("beta2", 1.0)):
            if getattr(self, name) >= limit:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)!r}; it must be less than {limit}.")
        if self.batch_size % self.grad_accum:
            raise ValueError(
                f"--grad-accum is {self.grad_accum}, which does not divide --batch-size {self.batch_size}; "
                "a step's microbatches must be of equal size."
            )
        if self.pp > 1:
            self._check_pipeline()
        if self.resume != "no" and self.checkpoint_dir is None:
            raise ValueError("--resume needs --checkpoint-dir: the folder that an earlier run wrote to.")
        if parse_dtype("--dtype", self.dtype) is torch.float16:
            raise ValueError(
                f"--dtype is {self.dtype!r}: its small range needs the loss to be scaled, which this job does not do. Use "
                "bfloat16."
            )
        try:
            parse_ac(self.ac)
        except ValueError as error:
            raise ValueError(f"--ac: {error}") from error
        if self.json is not None:
            _check_writable("--json", Path(self.json).absolute().parent)

    def _check_pipeline(self) -> None:
        for name, off in (("pack", False), ("cp", 1), ("init", "host"), ("cpu_offload", False)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"{_flag(name)} is {getattr(self, name)!r} beside --pp {self.pp}, which it cannot be yet."
                )
        if self.strategy != "fsdp2":
            raise ValueError(
                f"--strategy is {self.strategy!r} beside --pp {self.pp}; a pipeline's stages take 'fsdp2'."
            )
        try:
            self.pipeline  # noqa: B018 - it checks itself
        except ValueError as error:
            raise ValueError(f"--pp, --pp-schedule and --grad-accum: {error}") from error

    @property
    def pipeline(self) -> PipelineParallel:
        """What ``pp=`` of `parallelize` is given."""
        microbatches = self.grad_accum if self.grad_accum > 1 else None
        return PipelineParallel(self.pp, self.pp_schedule, microbatches)

    @property
    def passes(self) -> int:
        """How often a rank runs forward and backward in a step; a pipeline cuts its one batch by itself."""
        return 1 if self.pp > 1 else self.grad_accum

    @property
    def scopes(self) -> str | list[str]:
        """`scope` as `parallelize` takes it."""
        return self.scope.split(",") if "," in self.scope else self.scope

    def _normalise_choice(self, name: str, known: Sequence[str]) -> None:
        value = getattr(self, name)
        word = normalise(value) if isinstance(value, str) else value
        if word not in known:
            raise ValueError(
                f"{_flag(name)} is {value!r}; it must be one of {', '.join(known)}." + did_you_mean(str(word), known)
            )
        object.__setattr__(self, name, word)


_CHOICES: Mapping[str, Sequence[str]] = {
    "strategy": STRATEGIES,
    "loss": LOSSES,
    "compile": COMPILERS,
    "device": DEVICES,
    "schedule": SCHEDULES,
    "pp_schedule": PIPELINE_SCHEDULES,
    "resume": RESUME,
    "init": INITS,
    "offload": OFFLOADS,
}
_LEAST: Mapping[str, float] = {
    **dict.fromkeys(
        ("dp_replicate", "tp", "cp", "ep", "pp", "seq_len", "batch_size", "grad_accum", "steps", "log_every"), 1
    ),
    **dict.fromkeys(("save_every", "keep"), 1),
    **dict.fromkeys(("warmup_steps", "eval_every", "eval_samples", "seed", "lr", "lr_floor", "weight_decay"), 0),
    **dict.fromkeys(("beta1", "beta2", "clip"), 0),
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_writable(flag: str, folder: Path) -> None:
    # Asked before training: a summary that cannot be written would only be noticed at the end.
    if not folder.is_dir():
        raise ValueError(f"{flag} names a file in {str(folder)!r}, which is not an existing folder; create it.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{flag} names a file in {str(folder)!r}, where this user may not write.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add each option to `parser`; what is not given on the command line is left out of the namespace."""
    for field in dataclasses.fields(Options):
        kind, text = field.metadata["kind"], field.metadata["help"]
        if field.default is not None and kind is not bool:
            text += f" (default: {field.default})"
        text = text.replace("%", "%%")
        if kind is bool:
            parser.add_argument(_flag(field.name), action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(
                _flag(field.name), type=kind, default=argparse.SUPPRESS, help=text, **field.metadata["argument"]
            )


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """The options on the command line; a wrong one ends the process with code 2 and one line that says why.

    >>> parse_options(["--steps", "3"]).steps
    3
    """
    parser = argparse.ArgumentParser(
        prog="python -m nemo_like.recipes.pretrain",
        description="Train a decoder on text, byte by byte: on one device, or on many with torchrun.",
    )
    add_arguments(parser)
    given = vars(parser.parse_args(arguments))
    try:
        return Options(**given)
    except (ValueError, TypeError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
