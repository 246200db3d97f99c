"""The options ``--from`` and ``--to``: settings files of other frameworks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nemo_like._util.console import as_flag
from nemo_like._util.table import paragraph, screen_width
from nemo_like.flags import FLAGS, flags_of

if TYPE_CHECKING:
    from nemo_like.job import Job

# Names that some commands have for these values.
_OTHER_NAMES = {"world_size": "gpus", "batch_size": "micro_batch"}
_AXES = {"--gpus", "--dp-replicate", "--dp-shard", "--tp", "--cp", "--pp"}

# Axes whose options need more than one rank, which the command line may set to one.
_SPLITS = ("tp", "pp", "cp")


OPTIONS: dict[str, dict[str, Any]] = {
    "--from": {
        "dest": "settings_file",
        "metavar": "FILE",
        "help": "settings of accelerate, axolotl, torchtitan, NeMo Automodel or a Trainer, which options given here "
        "override",
    },
    "--to": {
        "dest": "settings_to",
        "metavar": "FILE",
        "help": "write settings here: .toml for torchtitan, .yaml or .yml for accelerate, .json for a Trainer",
    },
}


def take_settings(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Make the settings in the file of ``--from`` in `argv` defaults of `parser`, and lines on them its `from_words`.

    Raises:
        ValueError, OSError, ImportError: as `nemo_like.settings.read_settings`.
    """
    actions = {action.dest: action for action in parser._actions}
    if "settings_file" not in actions:
        return
    only = argparse.ArgumentParser(add_help=False)
    only.add_argument("--from", dest="path", nargs="?")
    for axis in _SPLITS:
        only.add_argument(f"--{axis}", nargs="?")
    known = only.parse_known_args(argv)[0]
    parser.set_defaults(from_words="")
    if known.path is None:
        return
    from nemo_like.settings import read_settings

    settings = read_settings(known.path)
    values = dict(settings.values)
    if "dp_shard" not in actions or _AXES & {word.partition("=")[0] for word in argv}:
        values.pop("dp_shard", None)  # the number of ranks and the other axes decide it
    for axis in _SPLITS:
        if str(getattr(known, axis) or values.get(axis, 1)) == "1":
            for name in flags_of(axis):
                values.pop(name, None)
    read, unused = [], []
    for name, value in values.items():
        action = actions.get(name) or actions.get(_OTHER_NAMES.get(name, ""))
        if action is not None:
            several = action.nargs == "+" or isinstance(action.default, list)
            parser.set_defaults(**{action.dest: [value] if several else value})
            action.required = False
            read.append(as_flag(action.option_strings[0].removeprefix("--"), value))
        elif name == "ac" or name not in FLAGS or value != FLAGS[name].default:
            unused.append(as_flag(name, value))
    lines = [f"{known.path}, of {settings.framework}: {' '.join(read) or 'nothing that is read'}"]
    lines += [f"No option here: {' '.join(unused)}"] if unused else []
    lines += [f"Not understood: {'; '.join(settings.not_understood)}"] if settings.not_understood else []
    parser.set_defaults(from_words="".join(f"{paragraph(line, screen_width())}\n" for line in lines))


def write_to(args: argparse.Namespace, job: Job, **values: Any) -> None:
    """Write the file of ``--to``, if there is one, and name on standard error the options it cannot have."""
    if args.settings_to is None:
        return
    from nemo_like._util.words import dtype_word, parse_dtype
    from nemo_like.settings import write_settings

    values = {name: getattr(args, name, None) for name in ("model", "seq_len", "lora", "four_bit")} | values
    left = write_settings(args.settings_to, job, **values, dtype=dtype_word(parse_dtype("--dtype", args.dtype)))
    if left:
        print(paragraph(f"{args.settings_to} does not have: {'; '.join(left)}", screen_width()), file=sys.stderr)
