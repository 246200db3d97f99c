"""Options of a job from the command line and from a YAML file, and in full as such a file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from nemo_like._util.console import examples, flag
from nemo_like._util.extras import require
from nemo_like._util.words import a_or_an
from nemo_like.options import did_you_mean
from nemo_like.recipes.run_options import RunOptions


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


def read_options(kind_of_options: type[AnyOptions], found: argparse.Namespace) -> AnyOptions:
    """The options of a YAML file (``--config FILE``) and of the command line that `found` has, which wins over the file.

    Raises:
        ValueError, MissingExtraError: a wrong one, or a file that cannot be read.
    """
    fields = {field.name for field in dataclasses.fields(kind_of_options)}
    given = {name: value for name, value in vars(found).items() if name in fields}
    given = (read_config(found.config, kind_of_options) if found.config else {}) | given
    options = kind_of_options(**given)
    if options.fit == "all":  # of several options given, --fit leaves them alone
        free = [name for name in options.searched if name not in given]
        options = dataclasses.replace(options, fit=",".join(free) or "no")
    return options


def parse_command_line(
    kind_of_options: type[AnyOptions], program: str, description: str, lines: Sequence[str],
    arguments: Sequence[str] | None = None,
) -> AnyOptions:  # fmt: skip
    """`read_options` of a program's own command line; `lines`: examples of it.

    A wrong option ends the process with code 2 and one line that says why.
    """
    parser = argparse.ArgumentParser(
        prog=program, description=description, epilog=examples(program, lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser, kind_of_options)
    try:
        return read_options(kind_of_options, parser.parse_args(arguments))
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
        raise ValueError(f"--config {path} must have one 'option: value' a line; it is {a_or_an(loaded)}.")
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

    >>> config_text(RunOptions(lr=0.5)).splitlines()[18]
    'lr: 0.5'
    """
    return "".join(f"{name}: {_scalar(value)}\n" for name, value in options.as_said().items())


def _scalar(value: Any) -> str:
    """YAML is a superset of JSON, and its words for nothing, true and false are JSON's."""
    return json.dumps(value, ensure_ascii=False)
