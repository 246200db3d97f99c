"""What every training job can be told, once: name, default, meaning. Command line and YAML file are made from it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from nemo_like.distributed.launch import BACKENDS
from nemo_like.extras import require
from nemo_like.options import COMPILE_BACKENDS, LOSSES, STRATEGIES, did_you_mean, normalise, parse_ac, parse_dtype
from nemo_like.recipes.schedule import SCHEDULES

COMPILERS = ("none", *COMPILE_BACKENDS)
RESUME = ("no", "must", "auto")
OFFLOADS = ("none", "boundary", "saved", "all")
DEVICES = ("auto", *reversed(BACKENDS))


def option(default: Any, help: str, kind: Callable[[str], Any] = str, **argument: Any) -> Any:
    """A field of an options class that is a command-line option, too; `argument`: more for argparse."""
    return dataclasses.field(default=default, metadata={"help": help, "kind": kind, "argument": argument})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What training jobs share. Each field is a command-line option of the same name, ``_`` written as ``-``.

    Raises:
        ValueError: a value is wrong; the message has the option, the value, the reason and what is accepted.
    """

    strategy: str = option("fsdp2", f"{' | '.join(STRATEGIES)}; on one rank all of them are 'single'")
    ac: str = option(
        "selective",
        "activation checkpointing: none | full | selective | submodule | sequential, or a budget like 40GiB",
    )
    scope: str = option("all", "layers to checkpoint: all | language | vision | audio; several with commas")
    loss: str = option(
        "model", f"{' | '.join(LOSSES)}: head and loss of a few tokens at a time, never the whole logits"
    )
    compile: str = option("none", f"compile each layer: {' | '.join(COMPILERS)}")
    precision: str = option(
        "float32",
        "dtype to compute in: float32 | bfloat16; what trains, and gradient sums, stay float32",
        alias="--dtype",
    )
    device: str = option("auto", f"{' | '.join(DEVICES)}; auto is cuda where there is one")
    offload: str = option("none", f"activations that wait in host memory: {' | '.join(OFFLOADS)}")
    cpu_offload: bool = option(False, "keep weights, gradients and optimizer state in host memory (fsdp2)", bool)
    dp_replicate: int = option(1, "replicas of the sharded model (HSDP); must divide the number of ranks", int)
    seq_len: int = option(256, "tokens per sample", int)
    batch_size: int = option(8, "samples per step over all ranks and microbatches", int)
    grad_accum: int = option(1, "microbatches per step; gradients are summed over ranks once, in the last", int)
    steps: int = option(200, "steps of the whole run, those before a resume included", int)
    lr: float = option(3e-3, "peak learning rate of AdamW", float)
    schedule: str = option("cosine", f"learning rate after the warm-up: {' | '.join(SCHEDULES)}")
    warmup_steps: int = option(20, "steps of linear warm-up", int)
    lr_floor: float = option(0.1, "learning rate at the last step, as a share of the peak", float)
    weight_decay: float = option(0.1, "AdamW's weight decay, on parameters with two dims or more", float)
    beta1: float = option(0.9, "AdamW's first decay rate", float)
    beta2: float = option(0.95, "AdamW's second decay rate", float)
    clip: float = option(1.0, "clip the gradient to this norm; 0 clips nothing", float)
    seed: int = option(0, "seed of weights, data order and dropout", int)
    eval_every: int = option(50, "steps between evaluations on held-out samples; 0: only after the last step", int)
    eval_samples: int = option(64, "held-out samples per evaluation; 0 evaluates nothing", int)
    log_every: int = option(10, "steps between reports of the loss", int)
    json: str | None = option(None, "write a summary of the run to this file")
    checkpoint_dir: str | None = option(None, "folder for checkpoints, on storage that all hosts share")
    save_every: int = option(100, "steps between checkpoints (with --checkpoint-dir); the last step has one too", int)
    keep: int = option(2, "complete checkpoints to keep; older ones are deleted", int)
    resume: str = option(
        "no",
        "go on from the last complete checkpoint: --resume needs one, --resume=auto starts anew where there is none",
        nargs="?",
        const="must",
    )
    sync_save: bool = option(False, "write checkpoints before training goes on, rather than beside it", bool)
    plain: bool = option(False, "print lines instead of a progress bar", bool)

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        """The words that an option may be, by its name."""
        return {
            "strategy": STRATEGIES,
            "loss": LOSSES,
            "compile": COMPILERS,
            "device": DEVICES,
            "schedule": SCHEDULES,
            "resume": RESUME,
            "offload": OFFLOADS,
        }

    @property
    def least(self) -> Mapping[str, float]:
        """The smallest number that an option may be, by its name."""
        at_least_1 = ("dp_replicate", "seq_len", "batch_size", "grad_accum", "steps", "log_every", "save_every", "keep")
        at_least_0 = ("warmup_steps", "eval_every", "eval_samples", "seed", "lr", "lr_floor", "weight_decay")
        return dict.fromkeys(at_least_1, 1) | dict.fromkeys((*at_least_0, "beta1", "beta2", "clip"), 0)

    def __post_init__(self) -> None:
        for name, known in self.choices.items():
            self._normalise_choice(name, known)
        for name, least in self.least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not math.isfinite(value) or value < least:
                raise ValueError(f"{flag(name)} is {value!r}; it must be a finite number >= {least}.")
        for name, limit in (("beta1", 1.0), ("beta2", 1.0)):
            if getattr(self, name) >= limit:
                raise ValueError(f"{flag(name)} is {getattr(self, name)!r}; it must be less than {limit}.")
        if self.batch_size % self.grad_accum:
            raise ValueError(
                f"--grad-accum is {self.grad_accum}, which does not divide --batch-size {self.batch_size}; "
                "a step's microbatches must be of equal size."
            )
        if self.resume != "no" and self.checkpoint_dir is None:
            raise ValueError("--resume needs --checkpoint-dir: the folder that an earlier run wrote to.")
        self._check_precision()
        try:
            parse_ac(self.ac)
        except ValueError as error:
            raise ValueError(f"--ac: {error}") from error
        if self.json is not None:
            check_writable("--json", Path(self.json).absolute().parent)

    def _check_precision(self) -> None:
        if parse_dtype("--precision", self.precision) is torch.float16:
            raise ValueError(
                f"--precision is {self.precision!r}: its small range needs the loss to be scaled, which this job does not "
                "do. Use bfloat16."
            )

    @property
    def passes(self) -> int:
        """How often a rank runs forward and backward in a step."""
        return self.grad_accum

    @property
    def axes(self) -> Mapping[str, int]:
        """Ranks that read the same samples, by the option that says so; their product must divide the ranks."""
        return {}

    @property
    def scopes(self) -> str | list[str]:
        """`scope` as `parallelize` takes it."""
        return self.scope.split(",") if "," in self.scope else self.scope

    def _normalise_choice(self, name: str, known: Sequence[str]) -> None:
        value = getattr(self, name)
        word = normalise(value) if isinstance(value, str) else value
        if word not in known:
            raise ValueError(
                f"{flag(name)} is {value!r}; it must be one of {', '.join(known)}." + did_you_mean(str(word), known)
            )
        object.__setattr__(self, name, word)


def flag(name: str) -> str:
    """The command-line option of a field."""
    return "--" + name.replace("_", "-")


def check_writable(name: str, folder: Path) -> None:
    """Raise ValueError where `folder`, of the option `name`, is none or may not be written to."""
    # Asked before training: a file that cannot be written would only be noticed at the end.
    if not folder.is_dir():
        raise ValueError(f"{name} names a file in {str(folder)!r}, which is not an existing folder; create it.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{name} names a file in {str(folder)!r}, where this user may not write.")


def add_arguments(parser: argparse.ArgumentParser, kind_of_options: type[RunOptions]) -> None:
    """Add each option to `parser`; what is not given on the command line is left out of the namespace."""
    for field in dataclasses.fields(kind_of_options):
        kind, text = field.metadata["kind"], field.metadata["help"]
        argument = dict(field.metadata["argument"])
        names = [flag(field.name), *([argument.pop("alias")] if "alias" in argument else [])]
        if field.default is not None and kind is not bool:
            text += f" (default: {field.default})"
        text = text.replace("%", "%%")
        common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            parser.add_argument(*names, action="store_true", **common)
        else:
            parser.add_argument(*names, type=kind, **common, **argument)


AnyOptions = TypeVar("AnyOptions", bound=RunOptions)


def parse_command_line(
    kind_of_options: type[AnyOptions], prog: str, description: str, arguments: Sequence[str] | None = None
) -> AnyOptions:
    """The options of a YAML file (``--config FILE``) and of the command line, which wins over the file.

    A wrong one ends the process with code 2 and one line that says why.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same options, by name; both spellings")
    add_arguments(parser, kind_of_options)
    given = vars(parser.parse_args(arguments))
    path = given.pop("config")
    try:
        return kind_of_options(**((read_config(path, kind_of_options) if path else {}) | given))
    except (ValueError, TypeError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def read_config(path: str, kind_of_options: type[RunOptions]) -> dict[str, Any]:
    """The options in a YAML file, by field name.

    Raises:
        ValueError: it cannot be read, is no mapping, or has a key or a type that no option has.
    """
    yaml = require("yaml", "yaml", "to read --config")
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"--config {path} must have one 'option: value' a line; it is a {type(loaded).__name__}.")
    fields = {field.name: field for field in dataclasses.fields(kind_of_options)}
    hints = typing.get_type_hints(kind_of_options)
    found: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ValueError(f"--config {path} has {key!r}, which is no option." + did_you_mean(name, tuple(fields)))
        found[name] = _of_kind(
            path, name, fields[name].metadata["kind"], value, type(None) in typing.get_args(hints[name])
        )
    return found


def _of_kind(path: str, name: str, kind: Any, value: Any, may_be_none: bool) -> Any:
    """The YAML `value` as the option's type: YAML reads 1e-4 as a string, and 1 where 1.0 is meant."""
    if value is None and may_be_none:
        return None
    fits = isinstance(value, bool) if kind is bool else isinstance(value, (str, int, float)) and value is not None
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"--config {path}: {name} is {value!r}; it must be of type {kind.__name__}.")
    try:
        made = kind(value)
    except ValueError as error:
        raise ValueError(f"--config {path}: {name} is {value!r}; it must be of type {kind.__name__}.") from error
    if kind is int and isinstance(value, float) and made != value:
        raise ValueError(f"--config {path}: {name} is {value!r}; it must be a whole number.")
    return made


def config_text(options: RunOptions) -> str:
    """`options` in full as YAML that ``--config`` reads: one a line, in the order of the command line's help.

    >>> config_text(RunOptions(lr=0.5)).splitlines()[14]
    'lr: 0.5'
    """
    return "".join(f"{name}: {_scalar(value)}\n" for name, value in dataclasses.asdict(options).items())


def _scalar(value: Any) -> str:
    """YAML is a superset of JSON, and its words for nothing, true and false are JSON's."""
    return json.dumps(value, ensure_ascii=False)
