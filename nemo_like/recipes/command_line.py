"""Options of a job from a command line and a YAML file, and in full as such a file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nemo_like._util.console import as_flag, flag
from nemo_like._util.extras import require
from nemo_like._util.help_parser import HelpParser
from nemo_like._util.words import a_or_an
from nemo_like.options import did_you_mean
from nemo_like.recipes import JOBS
from nemo_like.recipes.options import EXAMPLES, KINDS, RunOptions

AnyOptions = TypeVar("AnyOptions", bound=RunOptions)


def add_arguments(parser: argparse.ArgumentParser, kind_of_options: type[RunOptions]) -> None:
    """Add ``--config`` and each option to `parser`; an option that is not given is left out of the namespace."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same options, by name; both spellings")
    for field in dataclasses.fields(kind_of_options):
        kind, text, argument = field.metadata["kind"], field.metadata["help"], dict(field.metadata["argument"])
        names = [flag(field.name), *([argument.pop("alias")] if "alias" in argument else [])]
        if field.default not in (None, "") and kind is not bool:
            text += f" (default: {field.default})"
        argument |= {"dest": field.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if kind is bool:
            parser.add_argument(*names, **{"action": "store_true", **argument})
        else:
            parser.add_argument(*names, type=kind, **argument)


def read_options(kind_of_options: type[AnyOptions], namespace: argparse.Namespace) -> AnyOptions:
    """The options of a YAML file (``--config FILE``) and of the command line, which wins over the file.

    Raises:
        ValueError, MissingExtraError: a wrong one, or a file that cannot be read.
    """
    fields = {field.name for field in dataclasses.fields(kind_of_options)}
    values = {name: value for name, value in vars(namespace).items() if name in fields}
    values = (read_config(namespace.config, kind_of_options) if namespace.config else {}) | values
    options = kind_of_options(**values)
    if options.fit == "all":  # of several options given, --fit leaves them alone
        free = [name for name in options.searched if name not in values]
        options = replace(options, fit=",".join(free) or "no")
    return options


def parse_options(job: str, arguments: Sequence[str] | None = None) -> Any:
    """The options of one of `JOBS` on its own command line.

    A wrong option ends the process with code 2 and one line that tells why.

    >>> parse_options("pretrain", ["--steps", "3"]).steps
    3
    """
    parser = HelpParser(prog=f"python -m nemo_like.recipes.{job}", purpose=JOBS[job], lines=EXAMPLES[job])
    add_arguments(parser, KINDS[job])
    try:
        return read_options(KINDS[job], parser.parse_args(arguments))
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
        if value is None and type(None) in typing.get_args(hints[name]):
            settings[name] = None
            continue
        try:
            settings[name] = _of_kind(fields[name].metadata["kind"], value)
        except ValueError as error:
            raise ValueError(f"--config {path}: {name} is {value!r}; it must be {error}.") from error
    return settings


def _of_kind(kind: Any, value: object) -> Any:
    """The YAML `value` as the option's type: YAML reads 1e-4 as a string, and 1 where 1.0 is meant."""
    wrong = ValueError(f"of type {kind.__name__}")
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, bool | str | int | float):
        raise wrong
    try:
        converted = kind(value)
    except ValueError:
        raise wrong from None
    if kind is int and isinstance(value, float) and converted != value:
        raise ValueError("a whole number")
    return converted


def config_text(options: RunOptions) -> str:
    """`options` in full as YAML that ``--config`` reads: one a line, in the order of the command line's help.

    >>> "lr: 0.5" in config_text(RunOptions(lr=0.5)).splitlines()
    True
    """
    # YAML is a superset of JSON, and its words for nothing, true and false are JSON's.
    return "".join(f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in options.in_full().items())


def changed_options(options: RunOptions) -> str:
    """Return the options of `options` that differ from the defaults, as on a command line.

    >>> changed_options(RunOptions(lr=0.5, seed=3))
    '--lr 0.5 --seed 3'
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    changed = {name: value for name, value in options.in_full().items() if value != defaults[name]}
    return " ".join(
        as_flag(name, value if isinstance(value, bool) else shlex.quote(str(value))) for name, value in changed.items()
    )
