"""Options of a job, each written once: a dataclass's field is a flag, a key of a YAML file, checks and help."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from nemo_like._util.console import as_flag, flag
from nemo_like._util.extras import require
from nemo_like._util.help_parser import HelpParser
from nemo_like._util.words import a_or_an, check_fields, did_you_mean, setting

AnyOptions = TypeVar("AnyOptions", bound="Options")


@dataclass(frozen=True)
class Condition:
    """A condition under which an option is read at all."""

    words: str  # Options that have to be on the command line.
    holds: Callable[[Any], bool]


def option(
    default: Any,
    help: str,
    kind: Callable[[str], Any] | None = None,
    *,
    least: float | None = None,
    below: float = math.inf,
    choices: Sequence[str] = (),
    needs: Condition | None = None,
    trainer: str = "",
    **argument: object,
) -> Any:
    """A field of an options class.

    Args:
        default: the value where it is not given.
        help: its description, for the command line.
        kind: makes its value of a word. None: the type of `default`, or str where that is None.
        least, below: the smallest number that it may be, and one that is too large.
        choices: the words that it may be; none: any.
        needs: the condition without which the option is refused.
        trainer: the argument of `transformers.TrainingArguments`, or of TRL's, that has its value.
        argument: more for argparse.
    """
    kind = kind or (str if default is None else type(default))
    return setting(
        default,
        help=help,
        kind=kind,
        least=least,
        below=below,
        unit="finite number",
        choices=choices,
        needs=needs,
        trainer=trainer,
        argument=argument,
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a job. Each field is a command-line option of the same name, ``_`` written as ``-``.

    Raises:
        ValueError: a value is wrong; the message has the option, the value, the reason and the accepted values.
    """

    job_name: ClassVar[str]  # Module of `nemo_like.recipes` with the job, and its command.
    purpose: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]  # Lines of options, for the help.

    def __post_init__(self) -> None:
        check_fields(self, flag)
        for field in dataclasses.fields(self):
            need, value = field.metadata["needs"], getattr(self, field.name)
            if need is not None and value != field.default and not need.holds(self):
                raise ValueError(
                    f"{flag(field.name)} is {value!r}, and without {need.words} nothing reads it. Add that, or leave "
                    f"{flag(field.name)} out."
                )


# --- from a command line or a file ------------------------------------------------------------------------------------


def arguments_of(kind_of_options: type[Options]) -> dict[str, dict[str, Any]]:
    """Return ``--config`` and each option for a `HelpParser`; one that is not given is left out of the namespace."""
    help_ = "YAML file with the same options, by name; both spellings"
    options: dict[str, dict[str, Any]] = {"--config": {"action": _FromFile, "metavar": "FILE", "help": help_}}
    for field in dataclasses.fields(kind_of_options):
        kind, text = field.metadata["kind"], field.metadata["help"]
        if field.default not in (None, "") and kind is not bool:
            text += f" (default: {field.default})"
        options[flag(field.name)] = {
            **({"action": "store_true"} if kind is bool else {"type": kind}),
            **field.metadata["argument"],
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": text.replace("%", "%%"),
        }
    return options


def read_options(kind_of_options: type[AnyOptions], namespace: argparse.Namespace) -> AnyOptions:
    """The options that a parser with the arguments of `arguments_of` has read.

    Raises:
        ValueError: a wrong one.
    """
    fields = {field.name for field in dataclasses.fields(kind_of_options)}
    values = {name: value for name, value in vars(namespace).items() if name in fields}
    return kind_of_options(**values)


def parse_options(kind_of_options: type[AnyOptions], arguments: Sequence[str] | None = None) -> AnyOptions:
    """The options of a job on its own command line.

    A wrong option ends the process with code 2 and one line that tells why.
    """
    program = f"python -m nemo_like.recipes.{kind_of_options.job_name}"
    parser = HelpParser(prog=program, purpose=kind_of_options.purpose, lines=kind_of_options.examples)
    parser.add_options(arguments_of(kind_of_options))
    try:
        return read_options(kind_of_options, parser.parse_args(arguments))
    except (ValueError, TypeError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


class _FromFile(argparse.Action):
    """Options in a YAML file. The command line wins over the file."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        yaml = require("yaml", "yaml", "to read --config")
        try:
            loaded = yaml.safe_load(Path(values).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"--config {values}: {' '.join(str(error).split())}") from error
        if not isinstance(loaded, dict):
            raise ValueError(f"--config {values} must have one 'option: value' a line; it is {a_or_an(loaded)}.")
        before, option_names = dict(vars(namespace)), parser.option_names()
        words = []
        for key, value in loaded.items():
            name = str(key).replace("-", "_")
            if name not in option_names:
                raise ValueError(
                    f"--config {values} has {key!r}, which is not an option.{did_you_mean(name, option_names)}"
                )
            off = value is None or (value is False and f"no_{name}" not in option_names)
            words += [] if off else [as_flag(name, value) if isinstance(value, bool) else f"{flag(name)}={value}"]
        parser.parse_args(words, namespace)
        vars(namespace).update(before)
