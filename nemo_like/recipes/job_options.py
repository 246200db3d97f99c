"""Options of the pretraining job in addition to those of every job."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nemo_like._util.console import as_flag, check_new_folder, flag
from nemo_like._util.extras import require
from nemo_like._util.help_parser import HelpParser
from nemo_like._util.words import a_or_an
from nemo_like.options import SCHEDULES as PIPELINE_SCHEDULES
from nemo_like.options import did_you_mean
from nemo_like.recipes import JOBS
from nemo_like.recipes.run_options import RunOptions, job_option, option

EXAMPLES = (
    "--steps 200",
    "--model llama-small --data corpus.txt --ac selective --checkpoint-dir run --resume=auto",
    "--model llama3-8b --init sharded --precision bfloat16 --tp 2 --ac 40GiB --fit",
)
INITS = ("host", "sharded")
TOKENIZERS = ("bytes", "bpe")


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The job's options. Each is a command-line option of the same name, ``_`` written as ``-``.

    Raises:
        ValueError: a value is wrong; the message has the option, the value, the reason and what is accepted.
    """

    model: str = option("llama-tiny", "a preset, the path of a config.json, or module:function that returns a model")
    data: str | None = option(
        None, "text to train on, a file or a folder, read as bytes (default: this Python's standard library)"
    )
    tokenizer: str = option("bytes", "what a token is: bytes | bpe, byte pairs learned from the text (tokenizers)")
    vocab_size: int = option(1024, "tokens of --tokenizer bpe, which the model then has, too", int)
    export: str | None = option(
        None,
        "at the end, write a folder here that transformers' from_pretrained opens, with --tokenizer bpe's tokenizer",
    )
    init: str = option(
        "host", "host: each rank builds all weights on the CPU | sharded: each rank makes only its shard (large models)"
    )
    tp: int = job_option("tp")
    cp: int = job_option("cp")
    ep: int = job_option("ep")
    pp: int = job_option("pp")
    pp_schedule: str = job_option("pp_schedule")
    pack: bool = option(
        False,
        "the files of the text are documents: packed into samples, apart from each other in attention and loss",
        bool,
    )

    @property
    def fixed(self) -> tuple[str, ...]:
        return (*super().fixed, "tokenizer", "vocab_size")

    @property
    def searched(self) -> tuple[str, ...]:
        return (*super().searched, "tp", "cp", "ep", "pp_schedule")

    @property
    def read_beside(self) -> Iterable[tuple[bool, str, tuple[str, ...]]]:
        return (
            *super().read_beside,
            (self.tokenizer == "bpe", "--tokenizer bpe", ("vocab_size",)),
            (self.pp > 1, "--pp above 1", ("pp_schedule",)),
        )

    def planned_input(self, rows: int, width: int) -> Any:
        if self.pp == 1:
            inputs = super().planned_input(rows, width)
            return self.packed_input(inputs, rows, width) if self.pack else inputs
        import torch

        ids = torch.zeros(rows, width, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}  # the last stage computes the loss

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        return {**super().choices, "init": INITS, "tokenizer": TOKENIZERS, "pp_schedule": PIPELINE_SCHEDULES}

    @property
    def least(self) -> Mapping[str, float]:
        return {**super().least, "vocab_size": 1}

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

    @property
    def passes(self) -> int:
        """Return how often a rank runs forward and backward in a step; a pipeline cuts its one batch by itself."""
        return 1 if self.pp > 1 else self.grad_accum

    @property
    def axes(self) -> Mapping[str, int]:
        return {"tp": self.tp, "cp": self.cp, "pp": self.pp}


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """The options on the command line; a wrong one ends the process with code 2 and one line that states why.

    >>> parse_options(["--steps", "3"]).steps
    3
    """
    return parse_command_line(
        Options,
        "python -m nemo_like.recipes.pretrain",
        JOBS["pretrain"],
        EXAMPLES,
        arguments,
    )


# Options of a job from the command line and from a YAML file, and in full as such a file.


def add_arguments(parser: argparse.ArgumentParser, kind_of_options: type[RunOptions]) -> None:
    """Add ``--config`` and each option to `parser`; an option that is not given is left out of the namespace."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same options, by name; both spellings")
    for field in dataclasses.fields(kind_of_options):
        kind, text = field.metadata["kind"], field.metadata["help"]
        argument = dict(field.metadata["argument"])
        names = [flag(field.name), *([argument.pop("alias")] if "alias" in argument else [])]
        if field.default is not None and kind is not bool:
            text += f" (default: {field.default})"
        text = text.replace("%", "%%")
        common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            parser.add_argument(*names, action=argument.pop("action", "store_true"), **common, **argument)
        else:
            parser.add_argument(*names, type=kind, **common, **argument)


AnyOptions = TypeVar("AnyOptions", bound=RunOptions)


def read_options(kind_of_options: type[AnyOptions], namespace: argparse.Namespace) -> AnyOptions:
    """The options of a YAML file (``--config FILE``) and of the command line that `found` has, which wins over the file.

    Raises:
        ValueError, MissingExtraError: a wrong one, or a file that cannot be read.
    """
    fields = {field.name for field in dataclasses.fields(kind_of_options)}
    values = {name: value for name, value in vars(namespace).items() if name in fields}
    values = (read_config(namespace.config, kind_of_options) if namespace.config else {}) | values
    options = kind_of_options(**values)
    if options.fit == "all":  # of several options given, --fit leaves them alone
        free = [name for name in options.searched if name not in values]
        options = dataclasses.replace(options, fit=",".join(free) or "no")
    return options


def parse_command_line(
    kind_of_options: type[AnyOptions],
    program: str,
    description: str,
    lines: Sequence[str],
    arguments: Sequence[str] | None = None,
) -> AnyOptions:
    """`read_options` of a program's own command line; `lines`: examples of it.

    A wrong option ends the process with code 2 and one line that states why.
    """
    parser = HelpParser(prog=program, purpose=description, lines=lines)
    add_arguments(parser, kind_of_options)
    try:
        return read_options(kind_of_options, parser.parse_args(arguments))
    except (ValueError, TypeError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def read_config(path: str, kind_of_options: type[RunOptions]) -> dict[str, Any]:
    """The options in a YAML file, by field name.

    Raises:
        ValueError: it cannot be read, is not a mapping, or has a key or a type that no option has.
    """
    yaml = require("yaml", "yaml", "to read --config")
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"--config {path} must have one 'option: value' a line; it is {a_or_an(loaded)}.")
    fields = {field.name: field for field in dataclasses.fields(kind_of_options)}
    hints = typing.get_type_hints(kind_of_options)
    settings: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ValueError(
                f"--config {path} has {key!r}, which is not an option." + did_you_mean(name, tuple(fields))
            )
        settings[name] = _of_kind(
            path, name, fields[name].metadata["kind"], value, type(None) in typing.get_args(hints[name])
        )
    return settings


def _of_kind(path: str, name: str, kind: Any, value: object, may_be_none: bool) -> Any:
    """The YAML `value` as the option's type: YAML reads 1e-4 as a string, and 1 where 1.0 is meant."""
    if value is None and may_be_none:
        return None
    fits = isinstance(value, bool) if kind is bool else isinstance(value, (str, int, float)) and value is not None
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"--config {path}: {name} is {value!r}; it must be of type {kind.__name__}.")
    try:
        converted = kind(value)
    except ValueError as error:
        raise ValueError(f"--config {path}: {name} is {value!r}; it must be of type {kind.__name__}.") from error
    if kind is int and isinstance(value, float) and converted != value:
        raise ValueError(f"--config {path}: {name} is {value!r}; it must be a whole number.")
    return converted


def config_text(options: RunOptions) -> str:
    """`options` in full as YAML that ``--config`` reads: one a line, in the order of the command line's help.

    >>> config_text(RunOptions(lr=0.5)).splitlines()[18]
    'lr: 0.5'
    """
    return "".join(f"{name}: {_scalar(value)}\n" for name, value in options.as_said().items())


def changed_options(options: RunOptions) -> str:
    """Return the options of `options` that differ from the defaults, as on a command line.

    >>> changed_options(RunOptions(lr=0.5, plain=True))
    '--lr 0.5 --plain'
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    changed = {name: value for name, value in options.as_said().items() if value != defaults[name]}
    return " ".join(
        as_flag(name, value if isinstance(value, bool) else shlex.quote(str(value))) for name, value in changed.items()
    )


def _scalar(value: object) -> str:
    """YAML is a superset of JSON, and its words for nothing, true and false are JSON's."""
    return json.dumps(value, ensure_ascii=False)
